"""Vector operations for compiled CPU kernels: what numba's own types cannot say.

A kernel is a Python function that numba compiles with LLVM (which its wheel carries: no compiler is
needed on the user's machine). It works on raw addresses (int64) and on one vector type of `LANES`
float32, which LLVM maps to the registers at hand: two on AVX2, one on AVX-512, four on NEON. Loads widen
float32, bfloat16 and float16 memory to float32; stores round to nearest even.

`define` makes an operation that kernels can call, and `emit_...` the instructions that operations are made of. Nothing
here may reorder arithmetic: determinism rests on it.
"""
# Numba's extension API is untyped.
# mypy: disable-error-code="no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic, models, register_model

LANES = 16
#: Bytes of `LANES` float32.
VECTOR_BYTES = 4 * LANES
#: Element kinds as kernels know them: constants at compile time.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

_I16, _I32, _I64, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_MEMORY = {FLOAT32: _F32, BFLOAT16: _I16, FLOAT16: _F16}


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VECTOR)


class Constant:
    """Stands for a parameter that must be a constant in the kernel; the emitter receives it as an int."""


def define(result: Any, *parameters: Any) -> Callable[[Callable[..., ir.Value]], Any]:
    """Makes an operation for kernels of a function `emit(builder, *values)` that emits its instructions."""

    def decorate(emit: Callable[..., ir.Value]) -> Any:
        def typing(context: Any, *arguments: Any) -> Any:
            literals = [a if p is Constant else None for a, p in zip(arguments, parameters, strict=True)]
            if not all(a is None or isinstance(a, types.IntegerLiteral) for a in literals):
                raise TypingError(f"{emit.__name__}: an element kind must be a constant")
            accepted = [p if a is None else a for a, p in zip(literals, parameters, strict=True)]

            def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
                out = emit(builder, *(v if a is None else a.literal_value for v, a in zip(values, literals, strict=True)))
                return context.get_dummy_value() if result is types.void else out

            return result(*accepted), generate

        # Numba binds arguments by the signature of the typing function.
        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        typing.__name__ = emit.__name__
        return intrinsic(prefer_literal=True)(typing)

    return decorate


# --- instructions ----------------------------------------------------------------------------------------


def emit_constant(value: float, kind: ir.VectorType = _VECTOR) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def emit_call(builder: ir.IRBuilder, name: str, *operands: ir.Value, result: ir.Type = _VECTOR) -> ir.Value:
    kind = ir.FunctionType(result, [x.type for x in operands])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), operands)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return emit_call(builder, f"llvm.fma.v{LANES}f32", a, b, c)


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, _I32(0)), undefined, emit_constant(0, _INTS))


def emit_peek(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, align: int) -> ir.Value:
    return builder.load(builder.inttoptr(address, element.as_pointer()), align=align)


def emit_load(builder: ir.IRBuilder, address: ir.Value, kind: int) -> ir.Value:
    raw = emit_peek(builder, address, ir.VectorType(_MEMORY[kind], LANES), align=4 if kind == FLOAT32 else 2)
    if kind == FLOAT32:
        return raw
    if kind == FLOAT16:
        return builder.fpext(raw, _VECTOR)
    return builder.bitcast(builder.shl(builder.zext(raw, _INTS), emit_constant(16, _INTS)), _VECTOR)


def _round(builder: ir.IRBuilder, value: ir.Value, kind: int) -> ir.Value:
    if kind == FLOAT32:
        return value
    if kind == FLOAT16:
        return builder.fptrunc(value, ir.VectorType(_F16, LANES))
    bits, sixteen = builder.bitcast(value, _INTS), emit_constant(16, _INTS)
    odd = builder.and_(builder.lshr(bits, sixteen), emit_constant(1, _INTS))
    nearest = builder.lshr(builder.add(bits, builder.add(odd, emit_constant(0x7FFF, _INTS))), sixteen)
    quiet_nan = builder.or_(builder.lshr(bits, sixteen), emit_constant(0x40, _INTS))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet_nan, nearest)
    return builder.trunc(chosen, ir.VectorType(_I16, LANES))


def emit_store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, kind: int) -> None:
    rounded = _round(builder, value, kind)
    builder.store(rounded, builder.inttoptr(address, rounded.type.as_pointer()), align=4 if kind == FLOAT32 else 2)


@contextmanager
def emit_loop(builder: ir.IRBuilder, count: ir.Value, carried: Sequence[ir.Value]) -> Iterator[tuple[ir.Value, list[ir.Value], list[ir.Value]]]:
    """A loop of `count` turns; yields (index, values carried in, list to fill with values carried out).

    After the `with` the list of values carried in holds their final values.
    """
    before = builder.block
    head, body, done = (builder.append_basic_block(name) for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    inside = [builder.phi(x.type) for x in carried]
    for phi, value in zip((index, *inside), (_I64(0), *carried), strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, count), body, done)
    builder.position_at_end(body)
    outside: list[ir.Value] = []
    yield index, inside, outside
    for phi, value in zip((index, *inside), (builder.add(index, _I64(1)), *outside), strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)


# --- operations: scalars in memory -----------------------------------------------------------------------


@define(types.int64, types.int64)
def read_int64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return emit_peek(builder, address, _I64, align=8)


@define(types.int64, types.int64)
def read_int32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.sext(emit_peek(builder, address, _I32, align=4), _I64)


@define(types.float32, types.int64)
def read_float32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return emit_peek(builder, address, _F32, align=4)


@define(types.float64, types.int64)
def read_float64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return emit_peek(builder, address, ir.DoubleType(), align=8)


@define(types.void, types.int64, types.int64)
def write_int64(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, _I64.as_pointer()), align=8)


@define(types.void, types.int64, types.float64)
def write_float64(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, ir.DoubleType().as_pointer()), align=8)


@define(types.int64, types.int64)
def leading_zeros(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Of the 64 bits; 64 for zero."""
    return builder.ctlz(value, ir.IntType(1)(0))


@define(types.float32, types.int64)
def float32_from_bits(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """How a caller passes a float among its integer arguments (see `native.float32_bits`)."""
    return builder.bitcast(builder.trunc(bits, _I32), _F32)


@define(types.void, types.int64, types.float32)
def write_float32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, _F32.as_pointer()), align=4)


@define(types.int64, types.int64)
def claim(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Takes the next number from a counter shared by all threads."""
    return builder.atomic_rmw("add", builder.inttoptr(address, _I64.as_pointer()), _I64(1), "monotonic")


@define(types.void, types.int64, types.int64, Constant)
def copy_element(builder: ir.IRBuilder, source: ir.Value, target: ir.Value, kind: int) -> None:
    """Copies one element of this kind, bit for bit."""
    element, align = (_I32, 4) if kind == FLOAT32 else (_I16, 2)
    builder.store(emit_peek(builder, source, element, align), builder.inttoptr(target, element.as_pointer()), align=align)


# --- operations: vectors ---------------------------------------------------------------------------------


@define(vector, types.int64, Constant)
def load(builder: ir.IRBuilder, address: ir.Value, kind: int) -> ir.Value:
    return emit_load(builder, address, kind)


@define(types.void, types.int64, vector, Constant)
def store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, kind: int) -> None:
    emit_store(builder, address, value, kind)


@define(types.void, types.int64, types.int64)
def stream(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    """Copies VECTOR_BYTES past the caches. Both addresses must be multiples of it; `publish` must follow the last one."""
    raw = emit_peek(builder, source, _INTS, align=VECTOR_BYTES)
    store = builder.store(raw, builder.inttoptr(target, _INTS.as_pointer()), align=VECTOR_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@define(types.void)
def publish(builder: ir.IRBuilder) -> None:
    """Nobody sees what this thread writes from here on before what it has written so far."""
    builder.fence("seq_cst")


@define(vector, types.float32)
def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    return emit_splat(builder, scalar)


@define(vector, vector, vector)
def add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fadd(a, b)


@define(vector, vector, vector)
def subtract(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fsub(a, b)


@define(vector, vector, vector)
def times(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fmul(a, b)


@define(vector, vector, vector)
def divide(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fdiv(a, b)


@define(vector, vector, vector, vector)
def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once."""
    return emit_fma(builder, a, b, c)


@define(vector, vector, vector)
def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger; b, if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@define(vector, vector, vector)
def minimum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The smaller; a, if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


@define(vector, vector)
def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2 ** x within 2 ulp for x below 127; exactly zero below -126; NaN stays NaN."""
    name = f"llvm.%s.v{LANES}f32"
    bounded = emit_call(builder, name % "maxnum", emit_call(builder, name % "minnum", x, emit_constant(127.0)), emit_constant(-126.0))
    whole = emit_call(builder, name % "nearbyint", bounded)
    fraction = builder.fsub(bounded, whole)
    power = emit_constant(math.log(2) ** 7 / math.factorial(7))
    for degree in range(6, -1, -1):
        power = emit_fma(builder, power, fraction, emit_constant(math.log(2) ** degree / math.factorial(degree)))
    exponent = builder.shl(builder.fptosi(whole, _INTS), emit_constant(23, _INTS))
    scaled = builder.bitcast(builder.add(builder.bitcast(power, _INTS), exponent), _VECTOR)
    powers = builder.select(builder.fcmp_ordered("<", x, emit_constant(-126.0)), emit_constant(0.0), scaled)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, powers)


@define(vector, vector, types.int64, types.float32)
def keep_first(builder: ir.IRBuilder, value: ir.Value, count: ir.Value, fill: ir.Value) -> ir.Value:
    """The first `count` lanes of value, `fill` in the others."""
    return builder.select(_is_among_first(builder, count), value, emit_splat(builder, fill))


@define(vector, vector, types.int64, types.float32)
def drop_first(builder: ir.IRBuilder, value: ir.Value, count: ir.Value, fill: ir.Value) -> ir.Value:
    """`fill` in the first `count` lanes, value in the others."""
    return builder.select(_is_among_first(builder, count), emit_splat(builder, fill), value)


def _is_among_first(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """For each lane whether it is one of the first `count`."""
    narrow = builder.trunc(count, _I32)
    undefined = ir.Constant(_INTS, ir.Undefined)
    limit = builder.shuffle_vector(builder.insert_element(undefined, narrow, _I32(0)), undefined, emit_constant(0, _INTS))
    return builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), limit)


def _fold(builder: ir.IRBuilder, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combines all lanes in a fixed tree: halves with halves."""
    width = LANES
    while width > 1:
        width //= 2
        half = ir.VectorType(_I32, width)
        low, high = (ir.Constant(half, list(range(start, start + width))) for start in (0, width))
        undefined = ir.Constant(value.type, ir.Undefined)
        value = combine(builder.shuffle_vector(value, undefined, low), builder.shuffle_vector(value, undefined, high))
    return builder.extract_element(value, _I32(0))


@define(types.float32, vector)
def sum_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return _fold(builder, value, builder.fadd)


@define(types.float32, vector)
def max_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return _fold(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
