"""How to quantize an array: type, granularity and calibration method, as values one can compare.

A method is a word with numbers: 'absmax', 'minmax,0.9', 'fixed,-6,6', 'learned', and so on.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._util import nearest
from fewbit.numerics import (
    Format,
    NoiseFn,
    QType,
    canonical_qtype,
    format_of,
    get_asymmetric_bound,
    get_symmetric_bound,
)
from fewbit.qarray._tiles import scale_dims

LSQ = "lsq"  # a start of learned scales: twice the mean magnitude over the root of the largest code
_COUNTS = {"mse": (50, "number of steps of the search"), "delayed": (1024, "length of the history")}

_SPELLINGS = {
    "absmax": "'absmax' or 'absmax,<factor>'",
    "minmax": "'minmax' or 'minmax,<factor>'",
    "rms": "'rms,<factor>', for example 'rms,7'",
    "fixed": "'fixed,<max>' or 'fixed,<min>,<max>', for example 'fixed,-6,6'",
    "percentile": "'percentile,<p>' with p in (0, 100], for example 'percentile,99.9'",
    "mse": "'mse' or 'mse,<steps>'",
    "learned": "'learned' or 'learned,<start>', for example 'learned,mse' or 'learned,lsq'",
    "delayed": "'delayed' or 'delayed,<history length>', in a QtRule",
}

_MSG_START = (
    "Unsupported calibration: {method}. A learned scale is one number that grows in both "
    "directions from zero, which {start!r} does not give. Start it with 'absmax', 'mse', 'rms,7', "
    "'percentile,99.9' or 'lsq': write 'learned,mse'."
)
_MSG_FORMAT = (
    "Format {name} cannot have learned scales: {why}. Learn them for int2 to int16, fp8 or fp4, or "
    "write calibration_method='absmax'."
)


_MSG_OWN_TILE = (
    "Format {name} requires a tile size of {own}, but axis {axis} got {got}. Pass "
    "tiled_axes={{{axis}: {own}}}."
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A parsed calibration method: how an array becomes a range.

    `args` is complete: a factor left out is 1, a step count left out is the default, and a fixed
    range is always (low, high). `start` is where a learned scale begins, '' for the default.
    """

    name: str
    args: tuple[float, ...] = ()
    start: str = dataclasses.field(default="", repr=False)

    @property
    def asymmetric(self) -> bool:
        """Whether the range has two ends, so that codes carry a zero point."""
        return self.name == "minmax" or (self.name == "fixed" and self.args[0] != -self.args[1])

    @property
    def per_tensor(self) -> bool:
        """Whether one range serves the whole array whatever the granularity asked for."""
        return self.name in ("fixed", "delayed")

    @property
    def clips(self) -> bool:
        """Whether values of the array itself may lie outside the range."""
        return self.name not in ("absmax", "minmax") or self.args[0] < 1

    @property
    def learned(self) -> bool:
        """Whether the scale is a parameter that training fits, and no function of the array."""
        return self.name == "learned"


@functools.cache
def parse_method(method: str) -> Method:
    """Read a calibration method; a mistake is answered with the nearest spelling.

    >>> parse_method('AbsMax,0.9'), parse_method('fixed,3')
    (Method(name='absmax', args=(0.9,)), Method(name='fixed', args=(-3.0, 3.0)))
    """
    if not isinstance(method, str):
        raise ValueError(f"Unsupported calibration: {method!r}. Pass a string: {_spellings()}.")
    name, *words = (word.strip() for word in method.lower().split(","))
    if name not in _SPELLINGS:
        hint = nearest(name, _SPELLINGS, cutoff=0.4, show=_SPELLINGS.__getitem__)
        raise ValueError(f"Unsupported calibration: {method}.{hint} Methods: {_spellings()}.")
    if name == "learned":
        return _learned(method, ",".join(words))
    try:
        args = tuple(float(word) for word in words)
    except ValueError:
        raise ValueError(
            f"Unsupported calibration: {method}. What follows the name must be numbers: write "
            f"{_SPELLINGS[name]}."
        ) from None
    if not all(map(math.isfinite, args)):
        raise ValueError(f"Unsupported calibration: {method}. Its numbers must be finite.")
    if len(args) > (2 if name == "fixed" else 1):
        raise ValueError(
            f"Unsupported calibration: {method}. It has {len(args)} numbers after the name; write "
            f"{_SPELLINGS[name]}."
        )
    readers = {"fixed": _fixed, "percentile": _percentile, "mse": _counted, "delayed": _counted}
    return Method(name, readers.get(name, _factor)(method, name, args))


def check_method(method: str, qtype: QType) -> None:
    """Raise when the type cannot express the method's range.

    >>> check_method('minmax', 'int8')
    """
    parsed = parse_method(method)
    row = format_of(qtype)
    if parsed.learned:
        _check_learned_format(row)
    if row.kind == "sign" and parsed.name == "delayed":
        raise ValueError(
            f"Format {row.name} has the mean magnitude for its scale, but 'delayed' keeps the "
            "largest. Use 'absmax'."
        )
    if row.kind == "sign" and not parsed.asymmetric:
        return
    if parsed.asymmetric:
        get_asymmetric_bound(row)
    else:
        get_symmetric_bound(row)
    if parsed.per_tensor and row.tile is not None:
        raise ValueError(
            f"Format {row.name} needs a scale for each tile of {row.tile}, but {parsed.name!r} "
            "gives one range for the whole array. Use 'absmax'."
        )


def start_method(method: str, qtype: QType) -> str:
    """The method that a learned scale starts from: mse where codes are few, else absmax.

    >>> start_method('learned', 'int2'), start_method('learned', 'int8')
    ('mse', 'absmax')
    """
    return parse_method(method).start or ("mse" if format_of(qtype).bits <= 4 else "absmax")


def _check_learned_format(row: Format) -> None:
    why = None
    if row.scale_dtype is not None:
        why = f"its scales are {row.scale_dtype}, too coarse to follow a gradient"
    elif row.kind in ("table", "sign"):
        why = "its codes are no multiples of the scale"
    elif row.bound is None:
        why = "its codes are not symmetric around zero"
    if why is not None:
        raise ValueError(_MSG_FORMAT.format(name=row.name, why=why))


def _learned(method: str, start: str) -> Method:
    if start not in ("", LSQ):
        inner = parse_method(start)
        if inner.asymmetric or inner.per_tensor or inner.learned:
            raise ValueError(_MSG_START.format(method=method, start=start))
    return Method("learned", start=start)


def _spellings() -> str:
    return "; ".join(_SPELLINGS.values())


def _factor(method: str, name: str, args: tuple[float, ...]) -> tuple[float, ...]:
    if name == "rms" and not args:
        raise ValueError(
            f"A scale factor is required for RMS calibration. Write {_SPELLINGS['rms']}: the range "
            "is the factor times the root mean square."
        )
    if args and args[0] <= 0:
        raise ValueError(f"Unsupported calibration: {method}. The factor must be positive.")
    return args or (1.0,)


def _fixed(method: str, name: str, args: tuple[float, ...]) -> tuple[float, ...]:
    if not args:
        raise ValueError(
            f"A fixed range is required for fixed calibration. Write {_SPELLINGS['fixed']}."
        )
    low, high = (-args[0], args[0]) if len(args) == 1 else args
    if not low <= 0 <= high or low == high:
        raise ValueError(
            f"The range must contain 0 and be non-empty. {method!r} means [{low:g}, {high:g}]; "
            f"write {_SPELLINGS['fixed']}."
        )
    return low, high


def _percentile(method: str, name: str, args: tuple[float, ...]) -> tuple[float, ...]:
    if not args or not 0 < args[0] <= 100:
        raise ValueError(
            "A percentile in (0, 100] is required for percentile calibration. Write "
            f"{_SPELLINGS['percentile']}: that many percent of the magnitudes fit the range."
        )
    return args


def _counted(method: str, name: str, args: tuple[float, ...]) -> tuple[float, ...]:
    default, what = _COUNTS[name]
    count = args[0] if args else default
    if count < 1 or count != int(count):
        raise ValueError(
            f"Unsupported calibration: {method}. The {what} must be a whole number, at least 1."
        )
    return (count,)


def history_length(method: str | None) -> int | None:
    """How many steps a delayed method remembers; None for any other method.

    >>> history_length('delayed,16'), history_length('delayed'), history_length('absmax')
    (16, 1024, None)
    """
    if method is None:
        return None
    parsed = parse_method(method)
    return int(parsed.args[0]) if parsed.name == "delayed" else None


# --- Type, granularity and method together --------------------------------------------------------

Tile = int | float


class TiledAxes(Mapping[int, Tile]):
    """An immutable mapping from axis to tile.

    A tile of 1 (each element has a scale) and of 1.0 (one scale for the axis) are different, though
    Python finds 1 == 1.0; so types take part in comparison and hash, or `jit` would mix them up.
    """

    __slots__ = ("_items", "_key")

    def __init__(self, items: Mapping[int, Tile] = {}):
        self._items = {operator.index(a): _tile(a, items[a]) for a in sorted(items)}
        self._key = tuple((a, type(t).__name__, t) for a, t in self._items.items())

    def __getitem__(self, axis: int) -> Tile:
        return self._items[axis]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        try:
            return self._key == TiledAxes(other)._key
        except (TypeError, ValueError):
            return False

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._items)


def _tile(axis: Any, tile: Any) -> Tile:
    if isinstance(tile, (float, np.floating)):
        return float(tile)
    try:
        return operator.index(tile)
    except TypeError:
        raise ValueError(
            f"Axis {axis} cannot have the tile {tile!r}: give the tile's length (an int), or its "
            "share of the axis (a float such as 1/8)."
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowToQuantize:
    """Type, granularity and calibration of one array.

    Axes in `channelwise_axes` have a scale per index; `tiled_axes` maps an axis to its tile (an
    int, or a float for `round(dim * tile)`); all other axes share their scale. The scale is stored
    in `scale_dtype`, by default in the array's, and that of a float16 array in float32.

    Two are equal if all fields are, however types were spelled ('int8' or `jnp.int8`); a tile of 1
    (a scale per element) and of 1.0 (one for the axis) are not.

    >>> how = HowToQuantize(qtype='int4', channelwise_axes=[1], tiled_axes={0: 32})
    >>> how.tiled_axes[0], get_scale_shape((64, 8), how)
    (32, (2, 8))
    """

    qtype: QType
    channelwise_axes: Collection[int] = ()
    tiled_axes: Mapping[int, Tile] = TiledAxes()
    calibration_method: str = "absmax"
    noise_fn: NoiseFn | None = dataclasses.field(default=None, hash=False)
    scale_dtype: Any = None
    rule: Any = dataclasses.field(default=None, repr=False)  # the rule it came from, if any
    # What its product does with each axis, if kernels run it (`_panels.to_panels`).
    roles: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        fix("qtype", canonical_qtype(self.qtype))
        fix("channelwise_axes", tuple(sorted({operator.index(a) for a in self.channelwise_axes})))
        tiled = self.tiled_axes
        fix("tiled_axes", tiled if isinstance(tiled, TiledAxes) else TiledAxes(tiled or {}))
        if self.scale_dtype is not None:
            fix("scale_dtype", jnp.dtype(self.scale_dtype))
        check_method(self.calibration_method, self.qtype)
        # Spelled in one way, so that what means the same is equal: the key of compiled programs.
        fix("calibration_method", self.calibration_method.lower().replace(" ", ""))
        _refuse_overlap(self.channelwise_axes, self.tiled_axes)
        _check_own_tile(format_of(self.qtype), self.tiled_axes)

    def __hash__(self) -> int:
        # Kept: a model's structure has one for each weight, and every call looks it up.
        if "_hash" not in vars(self):
            fields = (f.name for f in dataclasses.fields(self) if f.hash is not False)
            object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in fields)))
        return vars(self)["_hash"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which is another in another process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def replace(self, **changes: Any) -> HowToQuantize:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def get_tile_shape(shape: Sequence[int], how: HowToQuantize) -> tuple[int, ...]:
    """The tile of each axis: 1 if channelwise, the whole axis if shared.

    >>> get_tile_shape((100, 8), HowToQuantize(qtype='int8', tiled_axes={0: 32}))
    (32, 8)
    """
    channelwise = {_axis(a, shape) for a in how.channelwise_axes}
    tiled = {_axis(a, shape): tile for a, tile in how.tiled_axes.items()}
    _refuse_overlap(channelwise, tiled)
    row = format_of(how.qtype)
    if parse_method(how.calibration_method).per_tensor:
        return tuple(shape)
    result = [1 if axis in channelwise else dim for axis, dim in enumerate(shape)]
    for axis, given in tiled.items():
        dim = shape[axis]
        tile = round(dim * given) if isinstance(given, float) else given
        if row.tile is not None and tile != row.tile:
            raise ValueError(_MSG_OWN_TILE.format(name=row.name, own=row.tile, axis=axis, got=tile))
        if row.tile is not None and 0 < dim < tile:
            tile = dim  # one block that is not full
        if not 0 < tile <= dim:
            raise ValueError(
                f"{tuple(shape)} cannot be tiled as {dict(how.tiled_axes)}. Axis {axis} has {dim} "
                f"elements, so its tile must be an int from 1 to {dim} or a float share of it, "
                f"such as {{{axis}: {_suggest(dim)}}}; {given!r} gives {tile}."
            )
        result[axis] = tile
    return tuple(result)


def _check_own_tile(row: Format, tiled: Mapping[int, Tile]) -> None:
    """A format that comes with a tile needs an axis for it. A share is told with the shape."""
    if row.tile is None:
        return
    if not tiled:
        raise ValueError(
            f"Format {row.name} requires `tiled_axes` to be specified. Pass "
            f"tiled_axes={{axis: {row.tile}}} with the axis that products sum over."
        )
    for axis, tile in tiled.items():
        if isinstance(tile, int) and tile != row.tile:
            raise ValueError(_MSG_OWN_TILE.format(name=row.name, own=row.tile, axis=axis, got=tile))


def with_tiles_within(how: HowToQuantize, shape: Sequence[int]) -> HowToQuantize:
    """The same, with tiles that are longer than their axis as long as it.

    >>> how = HowToQuantize(qtype='int8', tiled_axes={1: 32})
    >>> with_tiles_within(how, (4, 8)).tiled_axes, with_tiles_within(how, (4, 64)).tiled_axes
    ({1: 8}, {1: 32})
    """
    if format_of(how.qtype).tile is not None:  # a block has its length, full or not
        return how
    tiles = {
        axis: max(shape[axis], 1) if isinstance(tile, int) and tile > shape[axis] else tile
        for axis, tile in how.tiled_axes.items()
    }
    return how if tiles == how.tiled_axes else how.replace(tiled_axes=tiles)


def get_scale_shape(shape: Sequence[int], how: HowToQuantize) -> tuple[int, ...]:
    """The shape of the scale of an array quantized this way; an uneven last tile counts.

    >>> get_scale_shape((100, 8), HowToQuantize(qtype='int8', tiled_axes={0: 32}))
    (4, 1)
    """
    return scale_dims(shape, get_tile_shape(shape, how))


def slice_how(shape: Sequence[int], tiles: Sequence[int], how: HowToQuantize) -> HowToQuantize:
    """`how` for a slice of this shape: the same tiles, said in its own axes and sizes.

    >>> how = HowToQuantize(qtype='int4', channelwise_axes=(1,), tiled_axes={0: 1/4})
    >>> slice_how((64, 128), (32, 1), how).tiled_axes
    {0: 32}
    """
    own = format_of(how.qtype).tile or 0
    pairs = list(enumerate(zip(shape, tiles, strict=True)))
    return HowToQuantize(
        qtype=how.qtype,
        channelwise_axes=tuple(a for a, (_, tile) in pairs if tile == 1),
        tiled_axes={a: t if t < n else own for a, (n, t) in pairs if t > 1 and (t < n or n <= own)},
        calibration_method=how.calibration_method,
        scale_dtype=how.scale_dtype,
    )


def _suggest(dim: int) -> int:
    return next((t for t in (128, 64, 32, 16) if dim % t == 0), dim)


def _axis(axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"Axis {axis} is out of range for an array of shape {tuple(shape)}: its axes are 0 to "
            f"{len(shape) - 1}."
        )
    return axis % len(shape)


def _refuse_overlap(channelwise: Collection[int], tiled: Collection[int]) -> None:
    both = set(channelwise) & set(tiled)
    if both:
        raise ValueError(
            f"The same axis cannot be both channelwise and tiled. Axis {min(both)} is in "
            "channelwise_axes and in tiled_axes; keep one (channelwise is a tile of 1)."
        )
