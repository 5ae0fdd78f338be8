"""Which arithmetic runs a product: one decision, shared by the ops and the plan.

The decision looks at shapes, dtypes and formats only, so it is the same for arrays, tracers and
abstract values. Codes are multiplied directly when that is exact and the scales can be taken out of
the sum; everything else is dequantized first, and the reason is kept in words.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from fewbit.numerics import format_of, qtype_name
from fewbit.qarray import QArray, WithAux, part_values

# Below this a tile's own dot is too short to pay for scaling it; the reference semantics agree.
SMALLEST_TILE = 128

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a product runs: `arithmetic` is 'float', 'dequantize', 'int8' or 'fp8'.

    `tiles` has one entry per contracting pair: the tile size, or None for an untiled pair.
    """

    arithmetic: str
    reason: str
    tiles: tuple[int | None, ...] = ()

    def describe(self, op: str) -> str:
        return {
            "float": f"float {op}",
            "dequantize": f"dequantize + float {op}",
            "int8": f"int8 {op}",
            "fp8": f"fp8 {op}",
        }[self.arithmetic]

    @property
    def on_codes(self) -> bool:
        return self.arithmetic in ("int8", "fp8")


def unwrap(operand: Any) -> Any:
    """The array or QArray inside a parameter wrapper; anything else as it is."""
    operand = operand.array if isinstance(operand, WithAux) else operand
    return part_values(operand) if isinstance(operand, QArray) else operand


def from_formats(lhs: Any, rhs: Any) -> Decision:
    """The part of the decision that depends on the formats alone."""
    quantized = [isinstance(operand, QArray) for operand in (lhs, rhs)]
    if not any(quantized):
        return Decision("float", "neither operand is quantized")
    if not all(quantized):
        side, plain = ("rhs", rhs) if quantized[0] else ("lhs", lhs)
        return Decision("dequantize", f"{side} is a plain {jnp.dtype(plain.dtype).name} array")
    if 0 in lhs.shape or 0 in rhs.shape:
        return Decision("dequantize", "an operand is empty")
    families = []
    for operand in (lhs, rhs):
        form = format_of(operand.qtype)
        name = qtype_name(operand.qtype)
        if form.kind == "table":
            return Decision("dequantize", f"{name} codes are table indices, not numbers")
        if form.tile is not None:
            return Decision("dequantize", f"{name} has a scale for every {form.tile} values")
        storage = jnp.dtype(form.storage)
        bits = storage.itemsize * 8
        if jnp.issubdtype(storage, jnp.unsignedinteger) and operand.zero_point is None:
            return Decision("dequantize", f"{name} codes without a zero point")
        if form.kind in ("int", "sign") and bits <= 8:
            families.append("int8")
        elif name.startswith("float8"):
            families.append("fp8")
        else:
            return Decision("dequantize", f"there is no product on {name} codes")
    if families[0] != families[1]:
        names = " and ".join(qtype_name(operand.qtype) for operand in (lhs, rhs))
        return Decision("dequantize", f"{names} codes have no common product")
    return Decision(families[0], "both operands hold plain codes")


def tile_on(q: QArray, part: Any, axis: int) -> int:
    """Values per entry of `part` (the scale or the zero point) along `axis`."""
    count = part.shape[axis]
    if count == 1:
        return q.shape[axis]
    if count == q.scale.shape[axis]:
        return q.tile_shape[axis]
    return -(-q.shape[axis] // count)


def parts(q: QArray) -> list[Any]:
    """The arrays that say what a code means: scale, and zero point when there is one."""
    return [q.scale] if q.zero_point is None else [q.scale, q.zero_point]


def is_tiled(q: QArray, axis: int) -> bool:
    """More than one scale along the axis, but fewer than one per value."""
    return any(part.shape[axis] not in (1, q.shape[axis]) for part in parts(q))


def is_constant(q: QArray, axis: int) -> bool:
    """One scale (and zero point) serves the whole axis."""
    return all(part.shape[axis] == 1 for part in parts(q))


def code_reach(q: QArray) -> int:
    """The largest |code - zero point| the storage allows."""
    info = jnp.iinfo(format_of(q.qtype).storage)
    lowest, highest = int(info.min), int(info.max)
    return highest - lowest if q.zero_point is not None else max(-lowest, highest)


def may_overflow(lhs: QArray, rhs: QArray, terms: int) -> bool:
    """Could a sum of this many products leave int32?"""
    return terms * code_reach(lhs) * code_reach(rhs) > INT32_MAX


def _axis_tiles(q: QArray, axis: int) -> set[int]:
    return {tile_on(q, part, axis) for part in parts(q) if part.shape[axis] != 1}


def decide_dot(lhs: Any, rhs: Any, dimension_numbers: Any) -> Decision:
    """The decision for a dot_general; shared by the op and by `describe_dot`."""
    found = from_formats(lhs, rhs)
    if not found.on_codes:
        return found
    (lhs_contracting, rhs_contracting), _ = dimension_numbers
    pairs = list(zip(lhs_contracting, rhs_contracting, strict=True))
    per_pair = [(_axis_tiles(lhs, a), _axis_tiles(rhs, b)) for a, b in pairs]
    for (a, b), sizes in zip(pairs, per_pair, strict=True):
        smallest = min(sizes[0] | sizes[1], default=SMALLEST_TILE)
        if smallest < SMALLEST_TILE:
            return Decision(
                "dequantize",
                f"contracting axes {a} and {b} have a scale for every {smallest} values, "
                f"fewer than {SMALLEST_TILE}",
            )
        if max(len(sizes[0]), len(sizes[1])) > 1:
            return Decision("dequantize", "scale and zero point are tiled differently")
    for (a, b), (lhs_sizes, rhs_sizes) in zip(pairs, per_pair, strict=True):
        if len(lhs_sizes | rhs_sizes) > 1:
            raise ValueError(
                "Contracting axes must be tiled with the same tile size. "
                f"Axis {a} of lhs has tiles of {lhs_sizes.pop()}, axis {b} of rhs tiles of "
                f"{rhs_sizes.pop()}. Quantize both with one tile_size, or dequantize() one of them."
            )
    tiles = tuple(next(iter(left | right), None) for left, right in per_pair)
    if found.arithmetic == "int8":
        terms = math.prod(t or lhs.shape[a] for t, (a, _) in zip(tiles, pairs, strict=True))
        if may_overflow(lhs, rhs, terms):
            return Decision("dequantize", f"a sum of {terms} products could leave int32")
        refuse_two_zero_points(lhs, rhs)
    return dataclasses.replace(found, tiles=tiles)


def refuse_two_zero_points(lhs: QArray, rhs: QArray) -> None:
    """Raise when both operands carry a zero point."""
    if lhs.zero_point is not None and rhs.zero_point is not None:
        raise ValueError(
            "Only one operand can be asymmetric. Both operands carry a zero point; quantize one of "
            "them with calibration_method='absmax' (a weight beside asymmetric activations; two "
            "activations by a rule of their own, before the general one), or dequantize() it."
        )
