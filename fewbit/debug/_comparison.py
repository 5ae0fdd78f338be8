"""What `compare` found, as a value: rows per Site worst first, a table, JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fewbit._util import describe, natural_width, nearest, table, terminal_width, wrap
from fewbit.debug._metrics import (
    OUTLIER_RATIO,
    Difference,
    Distribution,
    Outlier,
    decibels,
    far_out,
    level,
)

FORMAT = "fewbit comparison"
VERSION = 1

_MSG_NOT_JSON = "This is no JSON document: {error}. Comparison.from_json reads what to_json wrote."
_MSG_FOREIGN = (
    "This JSON document is no comparison of fewbit: {found}. Comparison.from_json reads what "
    "comparison.to_json() wrote."
)
_MSG_NEWER = (
    "This comparison was written in version {found} of its format; this fewbit reads up to "
    "{known}. Read it with the fewbit that wrote it, or a newer one."
)
_MSG_FIELD = "The comparison is damaged: {error}. Write it again with comparison.to_json()."

_NOT_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

_HEADER = ("site", "layer", "types", "weight", "local", "accum.", "clipped", "only", "restored")
_ALIGN = "mrlrrrrrr"
# Narrow terminals lose these first; the line below the table says so.
_DROP_ORDER = ("types", "clipped", "weight", "accum.")
_SITE_COMFORT = 30
_LEGEND = (
    "All in dB (signal to quantization noise; 6 dB are one bit): weight, the stored weight; "
    "local, the Site's result on float operands; accum., its result in the quantized model; only "
    "and restored, the model's output with only this Site quantized, and with only this one float."
)
_LEGEND_LAYER = " layer is the worst of those that a scan runs the Site for."
_MOST_OUTLIERS = 4


@dataclass(frozen=True)
class LayerError:
    """One layer of a Site that a scan runs several times."""

    layer: tuple[int, ...]
    local: Difference | None
    accumulated: Difference | None
    weight: Difference | None = None
    clipped: float | None = None


@dataclass(frozen=True)
class SiteError:
    """What quantization does at one Site.

    `local` is the error of the quantized op on the float model's own operands, `accumulated` that
    of its result as it happens in the quantized model. `only` and `restored` are the SQNR of the
    model's output with nothing but this Site quantized, and with nothing but this Site float.
    `clipped` is the share of activation values outside their scale's range, `not_finite` the number
    of results that are NaN or infinite in the quantized model. None stands for what there is not:
    a Site that did not run, an activation that is float.
    """

    site: str
    types: str
    weight_path: str | None
    macs: int
    local: Difference | None
    accumulated: Difference | None
    weight: Difference | None = None
    clipped: float | None = None
    only: float | None = None
    restored: float | None = None
    not_finite: int = 0
    layers: tuple[LayerError, ...] = ()

    @property
    def ran(self) -> bool:
        return self.local is not None

    @property
    def worst_layer(self) -> LayerError | None:
        """The layer with the largest local error; None outside a scan over layers."""
        ran = [layer for layer in self.layers if layer.local is not None]
        return min(ran, key=lambda layer: _level(layer.local), default=None)


@dataclass(frozen=True)
class OutputError:
    """The quantized model's output against the float one's; `agreement` is of its argmax."""

    sqnr: float
    cosine: float
    relative: float
    agreement: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A float model and its quantized twin on one batch, Site by Site, worst first.

    Prints as a table. `first_not_finite` names the Site and, in a scan, the layer where NaN or
    infinity first appears in the quantized model's run.
    """

    sites: tuple[SiteError, ...]
    output: OutputError
    kind: str = "function"
    first_not_finite: str | None = None
    notes: tuple[str, ...] = ()
    channels: tuple[Outlier, ...] = ()
    distributions: tuple[Distribution, ...] = ()

    def site(self, site_id: str) -> SiteError:
        """The row of one Site."""
        for row in self.sites:
            if row.site == site_id:
                return row
        known = [row.site for row in self.sites]
        near = nearest(site_id, known, " The nearest are {}.", 3, 0.3, show=str)
        raise KeyError(f"The comparison has no Site {site_id!r}.{near}")

    def worst(self, n: int = 5) -> tuple[SiteError, ...]:
        """The `n` Sites that cost the output most."""
        return self.sites[:n]

    def outliers(self, ratio: float = OUTLIER_RATIO) -> tuple[Outlier, ...]:
        """Channels at least `ratio` times above the median channel of their Site, farthest first.

        Those below 2 are not kept.
        """
        return far_out(self.channels, ratio)

    def to_json(self) -> str:
        """A JSON document that `Comparison.from_json` reads back to an equal Comparison."""
        body = _encode(dataclasses.asdict(self))  # strictly JSON, so that a browser reads it too
        return json.dumps({"format": FORMAT, "version": VERSION, **body}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """The Comparison that `to_json` wrote."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(_MSG_NOT_JSON.format(error=error)) from error
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise ValueError(_MSG_FOREIGN.format(found=describe(body)))
        version = body.pop("version", None)
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(_MSG_NEWER.format(found=version, known=VERSION))
        try:
            found = _comparison(body)
            _check_types(found)
            return found
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(_MSG_FIELD.format(error=error)) from error

    def table(self, *, width: int | None = None) -> str:
        """As text of the terminal's width."""
        return _rendered(self, terminal_width() if width is None else width)

    def __str__(self) -> str:
        return self.table()


def badness(row: SiteError) -> tuple[float, float, float]:
    """Sorts rows worst first: not finite, then the effect on the output, then the Site's own."""
    if not row.ran:
        return (2.0, 0.0, 0.0)
    own = _level(row.local)
    effect = own if row.only is None else _number(row.only)
    return (0.0 if row.not_finite else 1.0, effect, own)


def _level(difference: Difference | None) -> float:
    return math.inf if difference is None else _number(difference.sqnr)


def _number(value: float) -> float:
    return -math.inf if math.isnan(value) else value


# --- As JSON and back. Numbers that JSON has no word for are written as strings -------------------


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _as_number(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_NUMBERS[value]
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{value!r} stands where a number is expected")
    return value


def _numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _as_number(value) for key, value in entry.items()}


def _comparison(body: Mapping[str, Any]) -> Comparison:
    return Comparison(
        **{
            **body,
            "sites": tuple(_site(row) for row in body["sites"]),
            "output": OutputError(**_numbers(body["output"])),
            "notes": tuple(map(str, body["notes"])),
            "channels": tuple(
                Outlier(**{**entry, "layer": tuple(entry["layer"])}) for entry in body["channels"]
            ),
            "distributions": tuple(
                Distribution(**{k: _tuples(v) for k, v in entry.items()})
                for entry in body["distributions"]
            ),
        }
    )


def _check_types(value: Any) -> None:
    """Raise if a field of a row holds something else than its class says."""
    for field, kind in typing.get_type_hints(type(value), {**globals()}).items():
        inner = getattr(value, field)
        if not _fits(inner, kind):
            raise TypeError(f"{field} is {describe(inner)}")
        for item in inner if isinstance(inner, tuple) else (inner,):
            if dataclasses.is_dataclass(item):
                _check_types(item)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return type(value) is int
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(v, typing.get_args(kind)[0]) for v in value)
    if isinstance(kind, type):
        return isinstance(value, kind)
    return any(_fits(value, one) for one in typing.get_args(kind))


def _site(row: Mapping[str, Any]) -> SiteError:
    return SiteError(
        **{
            **row,
            **_differences(row),
            **{key: _as_number(row[key]) for key in ("only", "restored", "clipped")},
            "layers": tuple(_layer(entry) for entry in row["layers"]),
        }
    )


def _layer(entry: Mapping[str, Any]) -> LayerError:
    layer, clipped = tuple(entry["layer"]), _as_number(entry["clipped"])
    return LayerError(layer=layer, clipped=clipped, **_differences(entry))


def _differences(entry: Mapping[str, Any]) -> dict[str, Difference | None]:
    found = {key: entry[key] for key in ("local", "accumulated", "weight")}
    return {k: None if v is None else Difference(**_numbers(v)) for k, v in found.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# --- For human eyes, in the terminal's width ------------------------------------------------------


def _rendered(comparison: Comparison, width: int) -> str:
    """The table, what it means, and what else was found."""
    out = comparison.output
    title = (
        f"Output of the quantized model: {decibels(out.sqnr)} dB, cosine {out.cosine:.5f}, "
        f"relative error {out.relative:.2%}"
    )
    if out.agreement is not None:
        title += f", argmax agrees on {out.agreement:.1%}"
    legend = _LEGEND + _LEGEND_LAYER * any(row.layers for row in comparison.sites)
    blocks = [wrap(title, width, "  ", ""), _rows(comparison, width), wrap(legend, width)]
    if comparison.first_not_finite is not None:
        text = f"NaN or infinity first appears at {comparison.first_not_finite}"
        blocks.insert(1, wrap(text, width, "  ", ""))
    found = comparison.outliers()
    outliers = [str(outlier) for outlier in found[:_MOST_OUTLIERS]]
    if len(found) > _MOST_OUTLIERS:
        outliers.append(f"{len(found) - _MOST_OUTLIERS} more: comparison.outliers()")
    for heading, items in (("outlier channels", outliers), ("notes", comparison.notes)):
        if items:
            lines = [line for item in items for line in wrap(item, width, "    ", "  ")]
            blocks.append([heading, *lines])
    return "\n\n".join("\n".join(block) for block in blocks)


def _rows(comparison: Comparison, width: int) -> list[str]:
    cells = [_cells(row) for row in comparison.sites]
    kept = list(range(len(_HEADER)))

    def pick(line):
        return [line[i] for i in kept]

    empty = [i for i in kept[1:] if all(line[i] == "-" for line in cells)]
    kept = [i for i in kept if i not in empty]  # a column of nothing tells nothing
    longest = max((len(line[0]) for line in cells), default=0)
    hidden = []
    for name in _DROP_ORDER:
        others = natural_width([pick(line)[1:] for line in (_HEADER, *cells)])
        if width - others - 2 >= min(longest, _SITE_COMFORT):
            break
        number = _HEADER.index(name)
        if number in kept:
            kept.remove(number)
            hidden.append(name)
    text = table(list(map(pick, cells)), pick(_HEADER), "".join(pick(_ALIGN)), width)
    lines = text.split("\n")
    if hidden:
        lines += wrap(f"no room here for: {', '.join(hidden)}", width, "     ", "…    ")
    return lines


def _cells(row: SiteError) -> tuple[str, ...]:
    worst = row.worst_layer
    if not row.ran:
        return (row.site, "-", row.types, "-", "not run", *("-",) * 4)
    return (
        row.site,
        "-" if worst is None else ",".join(map(str, worst.layer)),
        row.types,
        level(row.weight),
        level(row.local),
        level(row.accumulated) if not row.not_finite else "NaN",
        "-" if row.clipped is None else f"{row.clipped:.2%}",
        decibels(row.only),
        decibels(row.restored),
    )
