"""Packed linears: right for every shape and type, exact about what they hold, independent of the batch."""

from __future__ import annotations

import pytest
import torch

from workers.linear import PackedLinear, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 40])
@pytest.mark.parametrize(("out_features", "in_features"), [(16, 16), (80, 33), (7, 5), (100, 64), (48, 300)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_agrees_with_float64(dtype: torch.dtype, rows: int, out_features: int, in_features: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((out_features, in_features), (out_features,), (rows, in_features)))
    y = PackedLinear(weight, bias if with_bias else None, deterministic=True)(x)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert torch.allclose(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


def test_values_of_a_bfloat16_checkpoint_take_two_bytes_under_float32() -> None:
    weight = torch.randn(64, 32).bfloat16().float()
    held = PackedLinear(weight, None, deterministic=True)
    assert held.weight_bytes == weight.nbytes // 2
    x = torch.randn(3, 32)
    assert torch.equal(held(x), PackedLinear(weight + 0, None, deterministic=True)(x))


def test_values_that_need_float32_keep_it() -> None:
    weight = torch.full((16, 4), 1 / 3)
    assert pack(weight).dtype == torch.float32
    assert pack(torch.full((16, 4), 1 + 2**-10)).dtype == torch.float16
    assert pack(torch.full((16, 4), 1e38).bfloat16().float()).dtype == torch.bfloat16


def test_narrow_and_wide_storage_give_equal_bits() -> None:
    weight, x = torch.randn(32, 48).bfloat16().float(), torch.randn(5, 48)
    widened = weight.clone()
    widened[-1, -1] = 1 / 3  # forces float32 for all, changes one column
    narrow, wide = (PackedLinear(w, None, deterministic=True) for w in (weight, widened))
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    assert torch.equal(narrow(x)[:, :-1], wide(x)[:, :-1])


def test_rows_do_not_know_their_batch() -> None:
    held = PackedLinear(torch.randn(200, 75), None, deterministic=True)
    x = torch.randn(50, 75)
    together = held(x)
    for row in range(50):
        assert torch.equal(held(x[row : row + 1])[0], together[row])


def test_strided_input_is_read_right() -> None:
    held, x = PackedLinear(torch.eye(16), None, deterministic=True), torch.randn(4, 32)
    assert torch.equal(held(x[:, ::2]), x[:, ::2])


def test_what_a_sum_loses_does_not_grow_as_one_chain_of_additions_would() -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.rand((64, 4096), generator=draw), torch.rand((32, 4096), generator=draw).bfloat16().float()
    exact = x.double() @ weight.double().T
    one_chain = torch.zeros(64, 32)
    for i in range(4096):
        one_chain = torch.addcmul(one_chain, x[:, i : i + 1], weight[:, i])
    error, error_of_chain = ((sums - exact).abs().mean() for sums in (PackedLinear(weight, None, deterministic=True)(x), one_chain))
    assert error < error_of_chain / 5
