"""What `compare` found, as a value: rows per Site worst first, a table, JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbit.debug._channels import OUTLIER_RATIO, Outlier, far_out
from fewbit.debug._metrics import Difference

if TYPE_CHECKING:
    from fewbit.debug._distributions import Distribution


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
        from difflib import get_close_matches

        close = get_close_matches(site_id, [row.site for row in self.sites], 3, 0.3)
        near = f" The nearest are {', '.join(close)}." if close else ""
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
        from fewbit.debug._comparison_json import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """The Comparison that `to_json` wrote."""
        from fewbit.debug._comparison_json import from_json

        return from_json(text)

    def table(self, *, width: int | None = None) -> str:
        """As text of the terminal's width."""
        from fewbit.debug._comparison_table import render

        return render(self, width)

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
