"""`multiply`, the register-blocked heart of every matrix product in compiled CPU kernels.

Each element of its result is made of chains of fused multiply-adds in the order of the depth, whatever the tile it was
computed in: equal rows give equal bits wherever they sit, which is what determinism rests on. One chain over a long depth
rounds as often as it is long, and the error grows with it; so a caller may say after how many products a new one begins,
and chains are added up in order. Must not know what is multiplied: packed weights, queries and keys, or weights and values.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import binding, ir
from numba import types

from workers.simd import (
    FLOAT32,
    VECTOR_BYTES,
    Constant,
    define,
    emit_constant,
    emit_fma,
    emit_load,
    emit_loop,
    emit_peek,
    emit_splat,
    emit_store,
)

#: How many accumulators of `LANES` floats fit into the registers beside their operands.
_ACCUMULATORS = 16 if binding.get_host_cpu_features().get("avx512f") else 6
#: The tallest tile of `multiply`.
TILE_ROWS = 8 if _ACCUMULATORS > 8 else 6
#: The widest tile, in panels of `LANES` columns, for each number of rows.
_TILE_PANELS = {rows: max(1, min(4, _ACCUMULATORS // rows)) for rows in range(1, TILE_ROWS + 1)}
#: As the length of chains: there is but one, whatever the depth.
UNBROKEN = 0

_I64, _F32 = ir.IntType(64), ir.FloatType()


@define(types.void, Constant, Constant, *[types.int64] * 11)
def multiply(
    builder: ir.IRBuilder,
    kind: int,
    chain: int,
    rows: ir.Value,
    panels: ir.Value,
    depth: ir.Value,
    a: ir.Value,
    a_row: ir.Value,
    b: ir.Value,
    b_panel: ir.Value,
    b_depth: ir.Value,
    c: ir.Value,
    c_row: ir.Value,
    accumulate: ir.Value,
) -> None:
    """C (+)= A B for 1 to `TILE_ROWS` rows and any number of panels of `LANES` columns.

    A and C are float32 with contiguous columns, B has element kind `kind`; element (d, j) of panel p lies
    at b + p * b_panel + d * b_depth + j * element size. All strides are in bytes. A chain is `chain` products
    long, or `UNBROKEN`. With `accumulate` the sums start from what is in C,
    else from zero.
    """
    integers = (rows, panels, depth, a, a_row, b, b_panel, b_depth, c, c_row, accumulate)
    builder.call(_multiply_function(builder.module, kind, chain), integers)


def _multiply_function(module: ir.Module, kind: int, chain: int) -> ir.Function:
    """The function behind `multiply`, emitted once per module: it is large, and its registers are its own."""
    name = f"multiply_kind{kind}_chain{chain}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 11), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    rows, panels, depth, a, a_row, b, b_panel, b_depth, c, c_row, accumulate = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    done = builder.append_basic_block("done")
    choice = builder.switch(rows, done)
    for height, width in _TILE_PANELS.items():
        case = builder.append_basic_block(f"rows{height}")
        choice.add_case(_I64(height), case)
        builder.position_at_end(case)
        first, left = _I64(0), panels
        for columns in (width, 1) if width > 1 else (1,):
            count = builder.sdiv(left, _I64(columns))
            with emit_loop(builder, count, []) as (turn, _, _):
                panel = builder.add(first, builder.mul(turn, _I64(columns)))
                b_tile = builder.add(b, builder.mul(panel, b_panel))
                c_tile = builder.add(c, builder.mul(panel, _I64(VECTOR_BYTES)))
                _tile(builder, (kind, chain), (height, columns), depth, (a, a_row), (b_tile, b_panel, b_depth), (c_tile, c_row), accumulate)
            first = builder.mul(count, _I64(columns))
            left = builder.sub(left, first)
        builder.branch(done)
    builder.position_at_end(done)
    builder.ret_void()
    return function


def _tile(
    builder: ir.IRBuilder,
    constants: tuple[int, int],
    shape: tuple[int, int],
    depth: ir.Value,
    a: tuple[ir.Value, ir.Value],
    b: tuple[ir.Value, ir.Value, ir.Value],
    c: tuple[ir.Value, ir.Value],
    accumulate: ir.Value,
) -> None:
    """One tile of `multiply`, held in registers from its first multiplication to its last. `constants` are kind and chain."""
    kind, chain = constants
    rows, panels = shape
    a_rows = [builder.add(a[0], builder.mul(a[1], _I64(row))) for row in range(rows)]
    b_panels = [builder.add(b[0], builder.mul(b[1], _I64(panel))) for panel in range(panels)]
    c_rows = [builder.add(c[0], builder.mul(c[1], _I64(row))) for row in range(rows)]
    places = [builder.add(row, _I64(VECTOR_BYTES * panel)) for row in c_rows for panel in range(panels)]
    goes_on = builder.icmp_signed("!=", accumulate, _I64(0))
    totals = [builder.select(goes_on, emit_load(builder, place, FLOAT32), emit_constant(0.0)) for place in places]
    if chain == UNBROKEN:
        totals = _chain(builder, kind, _I64(0), depth, a_rows, (b_panels, b[2]), totals)
    else:
        num_chains = builder.sdiv(builder.add(depth, _I64(chain - 1)), _I64(chain))
        with emit_loop(builder, num_chains, totals) as (index, totals, next_totals):
            first = builder.mul(index, _I64(chain))
            left = builder.sub(depth, first)
            length = builder.select(builder.icmp_signed("<", left, _I64(chain)), left, _I64(chain))
            sums = _chain(builder, kind, first, length, a_rows, (b_panels, b[2]), [emit_constant(0.0)] * len(places))
            next_totals += [builder.fadd(total, each) for total, each in zip(totals, sums, strict=True)]
    for place, total in zip(places, totals, strict=True):
        emit_store(builder, place, total, FLOAT32)


def _chain(
    builder: ir.IRBuilder,
    kind: int,
    first: ir.Value,
    length: ir.Value,
    a_rows: Sequence[ir.Value],
    b: tuple[Sequence[ir.Value], ir.Value],
    start: Sequence[ir.Value],
) -> list[ir.Value]:
    """What becomes of `start` when `length` products are added one after another, those from `first` on. `b` are panels and their depth stride."""
    b_panels, b_depth = b
    with emit_loop(builder, length, start) as (turn, sums, next_sums):
        index = builder.add(first, turn)
        columns = [emit_load(builder, builder.add(panel, builder.mul(index, b_depth)), kind) for panel in b_panels]
        for row, a_row in enumerate(a_rows):
            factor = emit_splat(builder, emit_peek(builder, builder.add(a_row, builder.mul(index, _I64(4))), _F32, align=4))
            next_sums += [emit_fma(builder, factor, column, sums[row * len(columns) + i]) for i, column in enumerate(columns)]
    return sums
