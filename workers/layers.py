"""The layers that decoder models are wired from, and the builder that fills them from a checkpoint.

A layer is a plain callable that owns packed weights. `LayerBuilder` reads one tensor at a time, keeps this
rank's share, packs it and drops the original, so loading needs little more memory than the model. How a
weight is shared among ranks stands on its `Parameter`; models and checkpoints do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.inputs import StepInputs
from workers.kernels.paged_attention import paged_attention
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rotary import rotary
from workers.kernels.silu_and_mul import silu_and_mul
from workers.kernels.store_kv import store_kv
from workers.kv_cache import LayerCache
from workers.linear import PackedLinear
from workers.model_config import ModelRefused
from workers.parallel import TensorParallel
from workers.rope import Rope, rotary_table
from workers.weights import Checkpoint


@dataclass(frozen=True)
class Parameter:
    """One tensor of a checkpoint as a layer wants it."""

    name: str
    shape: tuple[int, ...]  #: of the whole tensor, over all ranks
    shared_dim: int | None = None  #: the dimension that ranks divide among them; None: every rank holds it all


class Embedding:
    """Token ids [T] to hidden states [T, hidden]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(token_ids, self.weight)


class RmsNorm:
    """Root mean square norm over the hidden dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)

    def add(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Adds `hidden` to `residual` in place and returns the norm of the sum."""
        return add_rms_norm(hidden, residual, self.weight, self.eps)


class RowParallelLinear:
    """A linear layer whose inputs are divided among ranks: partial sums are added up."""

    def __init__(self, linear: PackedLinear, parallel: TensorParallel) -> None:
        self._linear, self._parallel = linear, parallel

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._parallel.reduce(self._linear(hidden))


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, gate_up: PackedLinear, down: RowParallelLinear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(silu_and_mul(self._gate_up(hidden)))


class Attention:
    """Causal self-attention over the paged pool; query, key and value as one matrix."""

    def __init__(self, qkv: PackedLinear, output: RowParallelLinear, table: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._qkv, self._output, self._table = qkv, output, table
        self._head_dim, self._scale = head_dim, head_dim**-0.5
        self._key_from, self._value_from = num_heads, num_heads + num_kv_heads

    def __call__(self, hidden: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        heads = self._qkv(hidden).view(len(hidden), -1, self._head_dim)  # [T, Hq + 2 Hkv, D]
        query, key, value = heads[:, : self._key_from], heads[:, self._key_from : self._value_from], heads[:, self._value_from :]
        rotary(query, key, inputs.positions, self._table)
        store_kv(key, value, cache, inputs.slot_mapping)
        mixed = paged_attention(query, cache, inputs.query_start, inputs.context_lens, inputs.block_tables, self._scale)
        return self._output(mixed.reshape(len(hidden), -1))


class LmHead:
    """Hidden states [N, hidden] to logits [N, vocabulary] in float32."""

    def __init__(self, linear: PackedLinear, parallel: TensorParallel) -> None:
        self._linear, self._parallel = linear, parallel

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._parallel.gather(self._linear(hidden)).float()


class LayerBuilder:
    """Makes layers from a checkpoint. Missing tensors and wrong shapes are refused by name."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        parallel: TensorParallel,
        on_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.linears: list[tuple[str, PackedLinear]] = []  #: every packed matrix by name, for the start-up check
        self.weight_bytes = 0  #: held on the device
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self._dtype, self._device, self._deterministic, self._parallel = dtype, device, deterministic, parallel
        self._on_read = on_read

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        return Embedding(self._keep(Parameter(f"{name}.weight", (vocab_size, hidden_size))))

    def norm(self, name: str, hidden_size: int, eps: float) -> RmsNorm:
        return RmsNorm(self._keep(Parameter(f"{name}.weight", (hidden_size,))), eps)

    def merged_linear(self, prefix: str, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool) -> PackedLinear:
        """Several matrices over the same input as one; `parts` are (name, outputs). Ranks divide the outputs."""
        weights = [self._read(Parameter(f"{prefix}.{name}.weight", (width, in_features), shared_dim=0)) for name, width in parts]
        biases = [self._read(Parameter(f"{prefix}.{name}.bias", (width,), shared_dim=0)) for name, width in parts] if bias else []
        merged = torch.cat(weights)
        weights.clear()  # or three copies of the weight would be alive while it is packed
        return self._pack(f"{prefix}.{'+'.join(name for name, _ in parts)}", merged, torch.cat(biases) if bias else None)

    def row_linear(self, name: str, out_features: int, in_features: int, *, bias: bool) -> RowParallelLinear:
        """A matrix behind a merged one. Ranks divide the inputs; the first adds the bias."""
        weight = self._read(Parameter(f"{name}.weight", (out_features, in_features), shared_dim=1))
        offset = self._read(Parameter(f"{name}.bias", (out_features,))) if bias else None
        return RowParallelLinear(self._pack(name, weight, offset if self._parallel.rank == 0 else None), self._parallel)

    def attention(self, prefix: str, parts: Sequence[str], hidden_size: int, heads: tuple[int, int, int], table: Tensor, *, bias: bool) -> Attention:
        """`parts` name the query, key and value matrices; `heads` are (query heads, KV heads, head size)."""
        num_heads, num_kv_heads, head_dim = heads
        widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        qkv = self.merged_linear(prefix, list(zip(parts, widths, strict=True)), hidden_size, bias=bias)
        output = self.row_linear(f"{prefix}.o_proj", hidden_size, num_heads * head_dim, bias=bias)
        size = self._parallel.size
        return Attention(qkv, output, table, num_heads // size, num_kv_heads // size, head_dim)

    def gated_mlp(self, prefix: str, parts: Sequence[str], hidden_size: int, intermediate_size: int, *, bias: bool) -> GatedMlp:
        """`parts` name the gate and up matrices, in this order."""
        gate_up = self.merged_linear(prefix, [(part, intermediate_size) for part in parts], hidden_size, bias=bias)
        return GatedMlp(gate_up, self.row_linear(f"{prefix}.down_proj", hidden_size, intermediate_size, bias=bias))

    def lm_head(self, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None) -> LmHead:
        """`tied`: the embedding whose weight it shares. Packed anew even so, for the two are read in different ways."""
        weight = tied.weight if tied else self._read(Parameter(f"{name}.weight", (vocab_size, hidden_size), shared_dim=0))
        return LmHead(self._pack(name, weight, None), self._parallel)

    def rotary_table(self, rope: Rope, head_dim: int, num_positions: int) -> Tensor:
        """Shared by all layers of a model."""
        return rotary_table(rope, head_dim, num_positions).to(self._device)

    def _pack(self, name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        linear = PackedLinear(weight, bias, self._deterministic)
        self.linears.append((name, linear))
        self.weight_bytes += linear.weight_bytes
        return linear

    def _keep(self, parameter: Parameter) -> Tensor:
        weight = self._read(parameter)
        self.weight_bytes += weight.nbytes
        return weight

    def _read(self, parameter: Parameter) -> Tensor:
        """This rank's share of one tensor, as a copy on the device in the dtype of the computation."""
        if parameter.name not in self._names:
            raise ModelRefused(f"the checkpoint lacks the tensor {parameter.name}")
        whole = self._checkpoint.read(parameter.name)
        if tuple(whole.shape) != parameter.shape:
            raise ModelRefused(f"the tensor {parameter.name} has shape {list(whole.shape)}, the config asks for {list(parameter.shape)}")
        self._on_read(whole.nbytes)
        if parameter.shared_dim is not None:
            share = self._parallel.share(parameter.shape[parameter.shared_dim])
            whole = whole.narrow(parameter.shared_dim, share.start, share.stop - share.start)
        return whole.to(self._device, self._dtype, copy=True)
