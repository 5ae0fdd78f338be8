"""Statistics of training over steps: kept as plain numbers, shown as one page of curves."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fewbit._errors import describe

_MSG_STEP = "TrainingHistory.add(step, stats) takes the number of the step first, got {found}."
_MSG_STATS = (
    "TrainingHistory.add(step, stats) takes what fewbit.debug.training_stats returned, or a "
    "mapping from names to numbers; got {found}.{fix}"
)
_FIX_TRACED = " Inside jit its numbers are not known yet: return it from there, and add it outside."
_MSG_EMPTY = (
    "This history is empty: add(step, fewbit.debug.training_stats(...)) while training, then plot."
)


class TrainingHistory:
    """What `training_stats` said at each step.

    >>> history = TrainingHistory()
    >>> history.add(0, {'up:dot_general0/weight_clipped': 0.25})
    >>> history.add(10, {'up:dot_general0/weight_clipped': 0.125})
    >>> history.steps, history.curves('weight_clipped')
    ([0, 10], {'up:dot_general0': [0.25, 0.125]})
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[dict[str, float]] = []

    def add(self, step: int, stats: Mapping[str, Any]) -> None:
        """Keep the numbers of one step."""
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise TypeError(_MSG_STEP.format(found=describe(step)))
        if not isinstance(stats, Mapping):
            raise TypeError(_MSG_STATS.format(found=describe(stats), fix=""))
        try:
            numbers = {name: float(value) for name, value in stats.items()}
        except TypeError as error:  # JAX's own for a traced value is one too
            text = dict(found=describe(stats), fix=_FIX_TRACED)
            raise TypeError(_MSG_STATS.format(**text)) from error
        self.steps.append(int(step))
        self.values.append(numbers)

    def curves(self, metric: str) -> dict[str, list[float]]:
        """The numbers of one metric at each step, by Site (and layer); NaN where there was none."""
        places = dict.fromkeys(
            name.removesuffix("/" + metric)
            for numbers in self.values
            for name in numbers
            if name.endswith("/" + metric)
        )
        nan = float("nan")
        return {
            place: [numbers.get(f"{place}/{metric}", nan) for numbers in self.values]
            for place in places
        }

    def html(self, title: str = "Training") -> str:
        """The curves as one HTML page, which needs no network."""
        from fewbit.report_page._training_page import training_page

        if not self.steps:
            raise ValueError(_MSG_EMPTY)
        return training_page(self, title)

    def plot(self, path: str | os.PathLike[str], title: str = "Training") -> pathlib.Path:
        """Write that page; the file is written whole or not at all."""
        from fewbit.report_page import write_page

        return write_page(path, self.html(title))
