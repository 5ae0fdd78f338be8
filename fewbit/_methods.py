"""The language of calibration methods: 'absmax', 'minmax,0.9', 'fixed,-6,6', 'learned', ..."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math

from fewbit._formats import Format
from fewbit.numerics import QType, format_of, get_asymmetric_bound, get_symmetric_bound

MSE_STEPS = 50
LSQ = "lsq"  # a start of learned scales: twice the mean magnitude over the root of the largest code
HISTORY_LENGTH = 1024

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
        close = difflib.get_close_matches(name, _SPELLINGS, n=1, cutoff=0.4)
        hint = f" Did you mean {_SPELLINGS[close[0]]}?" if close else ""
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
    return _READERS[name](method, args)


def check_method(method: str | Method, qtype: QType) -> None:
    """Raise when the type cannot express the method's range.

    >>> check_method('minmax', 'int8')
    """
    method = parse_method(method) if isinstance(method, str) else method
    row = format_of(qtype)
    if method.learned:
        _check_learned_format(row)
    if row.kind == "sign" and method.name == "delayed":
        raise ValueError(
            f"Format {row.name} has the mean magnitude for its scale, but 'delayed' keeps the "
            "largest. Use 'absmax'."
        )
    if row.kind == "sign" and not method.asymmetric:
        return
    if method.asymmetric:
        get_asymmetric_bound(row)
    else:
        get_symmetric_bound(row)
    if method.per_tensor and row.tile is not None:
        raise ValueError(
            f"Format {row.name} needs a scale for each tile of {row.tile}, but {method.name!r} "
            "gives one range for the whole array. Use 'absmax'."
        )


def start_method(method: str | Method, qtype: QType) -> str:
    """The method that a learned scale starts from: mse where codes are few, else absmax.

    >>> start_method('learned', 'int2'), start_method('learned', 'int8')
    ('mse', 'absmax')
    """
    method = parse_method(method) if isinstance(method, str) else method
    return method.start or ("mse" if format_of(qtype).bits <= 4 else "absmax")


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


def _at_most(method: str, args: tuple[float, ...], count: int) -> None:
    if len(args) > count:
        name = method.split(",")[0].strip().lower()
        raise ValueError(
            f"Unsupported calibration: {method}. It has {len(args)} numbers after the name; write "
            f"{_SPELLINGS[name]}."
        )


def _factor(method: str, args: tuple[float, ...]) -> Method:
    _at_most(method, args, 1)
    name = method.split(",")[0].strip().lower()
    if name == "rms" and not args:
        raise ValueError(
            f"A scale factor is required for RMS calibration. Write {_SPELLINGS['rms']}: the range "
            "is the factor times the root mean square."
        )
    if args and args[0] <= 0:
        raise ValueError(f"Unsupported calibration: {method}. The factor must be positive.")
    return Method(name, args or (1.0,))


def _fixed(method: str, args: tuple[float, ...]) -> Method:
    _at_most(method, args, 2)
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
    return Method("fixed", (low, high))


def _percentile(method: str, args: tuple[float, ...]) -> Method:
    _at_most(method, args, 1)
    if not args or not 0 < args[0] <= 100:
        raise ValueError(
            "A percentile in (0, 100] is required for percentile calibration. Write "
            f"{_SPELLINGS['percentile']}: that many percent of the magnitudes fit the range."
        )
    return Method("percentile", args)


def _mse(method: str, args: tuple[float, ...]) -> Method:
    _at_most(method, args, 1)
    steps = args[0] if args else MSE_STEPS
    if steps < 1 or steps != int(steps):
        raise ValueError(
            f"Unsupported calibration: {method}. The number of steps of the search must be a whole "
            "number, at least 1."
        )
    return Method("mse", (steps,))


def _delayed(method: str, args: tuple[float, ...]) -> Method:
    _at_most(method, args, 1)
    length = args[0] if args else HISTORY_LENGTH
    if length < 1 or length != int(length):
        raise ValueError(
            f"Unsupported calibration: {method}. The length of the history must be a whole number, "
            "at least 1."
        )
    return Method("delayed", (length,))


def history_length(method: str | None) -> int | None:
    """How many steps a delayed method remembers; None for any other method.

    >>> history_length('delayed,16'), history_length('delayed'), history_length('absmax')
    (16, 1024, None)
    """
    if method is None:
        return None
    parsed = parse_method(method)
    return int(parsed.args[0]) if parsed.name == "delayed" else None


_READERS = {
    "absmax": _factor,
    "minmax": _factor,
    "rms": _factor,
    "fixed": _fixed,
    "percentile": _percentile,
    "mse": _mse,
    "delayed": _delayed,
}
