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
from workers.kernels.act_and_mul import act_and_mul
from workers.kernels.paged_attention import paged_attention
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rotary import rotary
from workers.kernels.store_kv import store_kv
from workers.kv_cache import LayerCache
from workers.linear import PackedLinear
from workers.model_config import ModelRefused
from workers.parallel import TensorParallel
from workers.rope import Rope, rotary_table
from workers.weights import Checkpoint, Part


@dataclass(frozen=True)
class Parameter:
    """One tensor of a checkpoint as a layer wants it."""

    name: str
    shape: tuple[int, ...]  #: of the whole tensor, over all ranks
    part: Part = ()  #: what this rank holds of it, one slice for each leading dimension; (): every rank holds it all


class Embedding:
    """Token ids [T] to hidden states [T, hidden]. A rank has the rows of some ids and adds nothing for those of others."""

    def __init__(self, weight: Tensor, vocab_size: int, parallel: TensorParallel, scale: float = 1.0) -> None:
        self.weight = weight
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))  # rounded as its family rounds it
        self._first_id, self._is_whole = parallel.vocabulary_share(vocab_size).start, len(weight) == vocab_size
        self._parallel = parallel

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self._look_up(token_ids)
        return rows if self._scale == 1.0 else rows * self._scale

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._is_whole:
            return torch.nn.functional.embedding(token_ids, self.weight)
        indices = token_ids - self._first_id
        elsewhere = (indices < 0) | (indices >= len(self.weight))
        rows = torch.nn.functional.embedding(indices.masked_fill(elsewhere, 0), self.weight)
        return self._parallel.reduce(rows.masked_fill(elsewhere[:, None], 0))


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
    """down(activation(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, gate_up: PackedLinear, down: RowParallelLinear, activation: str) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(act_and_mul(self._gate_up(hidden), self._activation))


class Attention:
    """Causal self-attention over the paged pool; query, key and value as one matrix."""

    def __init__(
        self,
        qkv: PackedLinear,
        output: RowParallelLinear,
        table: Tensor,
        heads: tuple[int, int, int],
        *,
        scale: float,
        norms: tuple[RmsNorm, RmsNorm] | None = None,
    ) -> None:
        """`heads` are this rank's (query heads, KV heads, head size); `norms` those over each query and each key."""
        num_heads, num_kv_heads, self._head_dim = heads
        self._qkv, self._output, self._table = qkv, output, table
        self._scale, self._norms = scale, norms
        self._key_from, self._value_from = num_heads, num_heads + num_kv_heads

    def __call__(self, hidden: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        heads = self._qkv(hidden).view(len(hidden), -1, self._head_dim)  # [T, Hq + 2 Hkv, D]
        query, key, value = heads[:, : self._key_from], heads[:, self._key_from : self._value_from], heads[:, self._value_from :]
        if self._norms is not None:
            query, key = (norm(x.reshape(-1, self._head_dim)).view(x.shape) for norm, x in zip(self._norms, (query, key), strict=True))
        rotary(query, key, inputs.positions, self._table)
        where = inputs.groups[cache.group]
        store_kv(key, value, cache, where.slot_mapping)
        mixed = paged_attention(query, cache, inputs.query_start, inputs.context_lens, where.block_tables, self._scale, cache.window)
        return self._output(mixed.reshape(len(hidden), -1))


class LmHead:
    """Hidden states [N, hidden] to logits in float32: those of this rank's share of the vocabulary, which begins at `first_id`."""

    def __init__(self, linear: PackedLinear, vocab_size: int, parallel: TensorParallel, soft_cap: float | None = None) -> None:
        self.first_id = parallel.vocabulary_share(vocab_size).start
        self._linear, self._vocab_size, self._parallel, self._soft_cap = linear, vocab_size, parallel, soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._linear(hidden).float()
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap

    def gather(self, logits: Tensor) -> Tensor:
        """Every rank's share of the logits of the same rows: [N, vocabulary]."""
        return self._parallel.gather(logits, self._vocab_size)


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
        self._rotary_tables: dict[tuple[Rope, int, int], Tensor] = {}

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> Embedding:
        return Embedding(self._keep(self._vocabulary(name, vocab_size, hidden_size)), vocab_size, self._parallel, scale)

    def norm(self, name: str, hidden_size: int, eps: float) -> RmsNorm:
        return RmsNorm(self._keep(Parameter(f"{name}.weight", (hidden_size,))), eps)

    def unit_norm(self, name: str, hidden_size: int, eps: float) -> RmsNorm:
        """A norm whose checkpoint holds what its weight is more than one. The sum stays in float32: near one, half precision would lose it."""
        weight = self._read(Parameter(f"{name}.weight", (hidden_size,)), torch.float32) + 1.0
        self.weight_bytes += weight.nbytes
        return RmsNorm(weight, eps)

    def merged_linear(self, prefix: str, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool) -> PackedLinear:
        """Several matrices over the same input as one; `parts` are (name, outputs). Ranks divide the outputs of each evenly."""
        return self._merged(prefix, [(name, width, self._parallel.share(width)) for name, width in parts], in_features, bias=bias)

    def row_linear(self, name: str, out_features: int, in_features: int, *, bias: bool) -> RowParallelLinear:
        """A matrix behind a merged one. Ranks divide the inputs; the first adds the bias."""
        columns = (slice(None), self._parallel.share(in_features))
        weight = self._read(Parameter(f"{name}.weight", (out_features, in_features), columns))
        offset = self._read(Parameter(f"{name}.bias", (out_features,))) if bias else None
        return RowParallelLinear(self._pack(name, weight, offset if self._parallel.rank == 0 else None), self._parallel)

    def attention(
        self,
        prefix: str,
        parts: Sequence[str],
        hidden_size: int,
        heads: tuple[int, int, int],
        table: Tensor,
        *,
        scale: float,
        norms: tuple[RmsNorm, RmsNorm] | None = None,
        bias: bool,
    ) -> Attention:
        """`parts` name the query, key and value matrices; `heads` are (query heads, KV heads, head size). Ranks divide the heads."""
        num_heads, num_kv_heads, head_dim = heads
        own, own_kv = self._parallel.share(num_heads), self._parallel.kv_share(num_kv_heads)
        held = [
            (name, number * head_dim, slice(share.start * head_dim, share.stop * head_dim))
            for name, number, share in zip(parts, (num_heads, num_kv_heads, num_kv_heads), (own, own_kv, own_kv), strict=True)
        ]
        qkv = self._merged(prefix, held, hidden_size, bias=bias)
        output = self.row_linear(f"{prefix}.o_proj", hidden_size, num_heads * head_dim, bias=bias)
        return Attention(qkv, output, table, (own.stop - own.start, own_kv.stop - own_kv.start, head_dim), scale=scale, norms=norms)

    def gated_mlp(self, prefix: str, parts: Sequence[str], hidden_size: int, intermediate_size: int, activation: str, *, bias: bool) -> GatedMlp:
        """`parts` name the gate and up matrices, in this order."""
        gate_up = self.merged_linear(prefix, [(part, intermediate_size) for part in parts], hidden_size, bias=bias)
        return GatedMlp(gate_up, self.row_linear(f"{prefix}.down_proj", hidden_size, intermediate_size, bias=bias), activation)

    def lm_head(self, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None, *, soft_cap: float | None = None) -> LmHead:
        """`tied`: the embedding whose weight it shares. Packed anew even so, for the two are read in different ways."""
        weight = tied.weight if tied else self._read(self._vocabulary(name, vocab_size, hidden_size))
        return LmHead(self._pack(name, weight, None), vocab_size, self._parallel, soft_cap)

    def rotary_table(self, rope: Rope, head_dim: int, num_positions: int) -> Tensor:
        """Shared by the layers whose settings are equal."""
        key = (rope, head_dim, num_positions)
        if key not in self._rotary_tables:
            self._rotary_tables[key] = rotary_table(rope, head_dim, num_positions).to(self._device)
        return self._rotary_tables[key]

    def _vocabulary(self, name: str, vocab_size: int, hidden_size: int) -> Parameter:
        return Parameter(f"{name}.weight", (vocab_size, hidden_size), (self._parallel.vocabulary_share(vocab_size),))

    def _merged(self, prefix: str, parts: Sequence[tuple[str, int, slice]], in_features: int, *, bias: bool) -> PackedLinear:
        """`parts` are (name, outputs, those of this rank)."""
        weights = [self._read(Parameter(f"{prefix}.{name}.weight", (width, in_features), (held,))) for name, width, held in parts]
        biases = [self._read(Parameter(f"{prefix}.{name}.bias", (width,), (held,))) for name, width, held in parts] if bias else []
        merged = torch.cat(weights)
        weights.clear()  # or three copies of the weight would be alive while it is packed
        return self._pack(f"{prefix}.{'+'.join(name for name, _, _ in parts)}", merged, torch.cat(biases) if bias else None)

    def _pack(self, name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        linear = PackedLinear(weight, bias, self._deterministic)
        self.linears.append((name, linear))
        self.weight_bytes += linear.weight_bytes
        return linear

    def _keep(self, parameter: Parameter) -> Tensor:
        weight = self._read(parameter)
        self.weight_bytes += weight.nbytes
        return weight

    def _read(self, parameter: Parameter, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's share of one tensor, as a copy on the device in `dtype`, or that of the computation."""
        if parameter.name not in self._names:
            raise ModelRefused(f"the checkpoint lacks the tensor {parameter.name}")
        shape = self._checkpoint.shape(parameter.name)
        if shape != parameter.shape:
            raise ModelRefused(f"the tensor {parameter.name} has shape {list(shape)}, the config asks for {list(parameter.shape)}")
        held = self._checkpoint.read(parameter.name, parameter.part)
        self._on_read(held.nbytes)
        return held.to(self._device, dtype or self._dtype, copy=True)
