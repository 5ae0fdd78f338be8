"""Statistics: what calibration saw at each operand, as a value to print, save, merge and use.

As a mapping it is what `quantize_params` takes: for Linen and NNX nested like the parameters, with
`<op_id>_lhs` beside the weight; for a plain function `{'<site id>': {'lhs': {...}}}`.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from fewbit import _text
from fewbit._methods import parse_method
from fewbit._plan import Plan, ScalePlan
from fewbit.observers import Observer, observer_named
from fewbit.tails import TAIL, far_ranges
from fewbit.taps import Reading, combine_readings, over_layers

_MSG_OTHER_MODEL = (
    "These are statistics of another model: {first} was made from parameters {a}, {second} from "
    "{b}. Calibrate the model that is quantized, with the rules that it is quantized by."
)
_MSG_OTHER_SHAPE = (
    "Statistics of {name} have different forms: {key} is {a} here and {b} there. They were "
    "collected with other rules, or on inputs that differ in more than act_batch_axes."
)
_MSG_OTHER_OBSERVERS = (
    "{name} was observed by {a} here and by {b} there. Merge statistics that the same observers "
    "collected with the same rules."
)
_MSG_OTHER_METHOD = (
    "The statistics of {name} were collected for {found}, and the plan asks for {method!r}. "
    "Calibrate with the rules that the model is quantized by."
)
_MSG_TWO_METHODS = (
    "The statistics of {name} were collected for act_calibration_method={a!r} here and {b!r} "
    "there. Merge statistics that were collected with the same rules."
)
_MSG_MERGE = "merge takes Statistics of the same model, got {found}."


@dataclass(frozen=True)
class Entry:
    """One operand: whose it is, how often its Site ran, and the state of each observer.

    `count` and the states are numpy arrays with the layers of scans in front. `method` is the
    calibration method that ranges of batches were taken by; None is not known.
    """

    site: str
    side: str
    count: np.ndarray
    states: Mapping[str, Mapping[str, np.ndarray]]
    method: str | None = None

    @property
    def reading(self) -> Reading:
        return Reading(self.count, {k: dict(state) for k, state in self.states.items()})


@dataclass(frozen=True, eq=False)
class Statistics(Mapping[str, Any]):
    """What calibration saw, by operand, in the layout that `quantize_params` takes.

    >>> import fewbit, jax.numpy as jnp
    >>> rule = fewbit.QuantizationRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
    >>> f, params = lambda params, x: x @ params['w'], {'w': jnp.eye(3)}
    >>> parts = [fewbit.calibrate(f, [rule], params, [jnp.full((2, 3), v)]) for v in (1.0, 3.0)]
    >>> stats = parts[0].merge(parts[1])
    >>> print(stats)
    operand               runs  range
    ─────────────────────────────────
    w/dot_general0 (lhs)  2     ±3
    <BLANKLINE>
    1 operand, 2 batches
    >>> stats['w:dot_general0']['lhs']['max_of_absmax']
    array([[3.]], dtype=float32)
    """

    kind: str
    model: str  # a digest of the parameters' paths and shapes
    batches: int
    entries: Mapping[str, Entry]  # by '<module>/<op_id>_lhs'
    own_observers: Mapping[str, Observer] = field(default_factory=dict, repr=False)

    # --- the mapping ------------------------------------------------------------------------------

    @functools.cached_property
    def tree(self) -> dict[str, Any]:
        """The statistics as plain nested dicts of arrays."""
        result: dict[str, Any] = {}
        for name, entry in self.entries.items():
            path = (entry.site, entry.side) if self.kind == "function" else name.split("/")
            node = result
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self.statistic(name)
        return result

    def statistic(self, name: str) -> dict[str, Any]:
        """`count` and what the observers make of their states, for '<module>/<op_id>_lhs'."""
        entry = self.entries[name]
        result: dict[str, Any] = {"count": entry.count}
        for observer, state in entry.states.items():
            finalize = over_layers(self._observer(observer).finalize, entry.count.ndim)
            result |= jax.tree.map(np.asarray, dict(finalize(dict(state))))
        return result

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def _observer(self, name: str) -> Observer:
        return self.own_observers.get(name) or observer_named(name)

    # --- merging ----------------------------------------------------------------------------------

    def merge(self, other: "Statistics") -> "Statistics":
        """Statistics of both runs together, as if one had seen all batches.

        Operands that only one of them has are kept: statistics of several methods come together.
        """
        if not isinstance(other, Statistics):
            raise TypeError(_MSG_MERGE.format(found=type(other).__name__))
        if (self.kind, self.model) != (other.kind, other.model):
            both = dict(a=f"{self.kind} {self.model[:12]}", b=f"{other.kind} {other.model[:12]}")
            raise ValueError(_MSG_OTHER_MODEL.format(first="one", second="the other", **both))
        entries = dict(self.entries)
        for name, entry in other.entries.items():
            entries[name] = self._merged(name, entry) if name in entries else entry
        own = {**self.own_observers, **other.own_observers}
        batches = self.batches + other.batches
        return replace(self, batches=batches, entries=entries, own_observers=own)

    def _merged(self, name: str, other: Entry) -> Entry:
        mine = self.entries[name]
        if (TAIL in mine.states) != (TAIL in other.states):  # older files have none
            mine, other = _without_tail(mine), _without_tail(other)
        if list(mine.states) != list(other.states):
            sides = dict(a=", ".join(mine.states), b=", ".join(other.states))
            raise ValueError(_MSG_OTHER_OBSERVERS.format(name=name, **sides))
        shapes = [
            {("count",): e.count.shape}
            | {(o, k): x.shape for o in e.states for k, x in e.states[o].items()}
            for e in (mine, other)
        ]
        for key in shapes[0].keys() | shapes[1].keys():
            a, b = (found.get(key, "missing") for found in shapes)
            if a != b:
                raise ValueError(_MSG_OTHER_SHAPE.format(name=name, key=".".join(key), a=a, b=b))

        if None not in (mine.method, other.method) and mine.method != other.method:
            text = _MSG_TWO_METHODS.format(name=name, a=mine.method, b=other.method)
            raise ValueError(text)

        def combine(a: Any, b: Any) -> Any:
            return {o: self._observer(o).merge(a[o], b[o]) for o in a}

        both = combine_readings(combine, mine.reading, other.reading)
        count, states = jax.tree.map(np.asarray, tuple(both))
        return replace(mine, count=count, states=states)

    def check_model(self, plan: Plan) -> None:
        """Raise if the plan is of a model with other parameters."""
        found = (plan.kind, model_digest(plan))
        if found != (self.kind, self.model):
            a, b = (f"{kind} {digest[:12]}" for kind, digest in ((self.kind, self.model), found))
            names = dict(first="the statistics", second="the plan")
            raise ValueError(_MSG_OTHER_MODEL.format(a=a, b=b, **names))

    def check_methods(self, scales: Iterable[ScalePlan]) -> None:
        """Raise if a scale is to be made by a method that other rules' statistics cannot tell."""
        for scale in scales:
            entry, text = self.entries.get(scale.name), scale.how.calibration_method
            method = parse_method(text)
            if entry is None or entry.method is None or method.name == "fixed":
                continue
            averaged = scale.rule is not None and scale.rule.act_static_reduction == "mean"
            if method.name in ("percentile", "mse") and not averaged:
                fits, found = "histogram" in entry.states, f"{entry.method!r}, without a histogram"
            else:
                fits, found = parse_method(entry.method) == method, repr(entry.method)
            if not fits:
                raise ValueError(
                    _MSG_OTHER_METHOD.format(name=scale.name, found=found, method=text)
                )

    # --- files ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all: arrays and a readable manifest, nothing pickled."""
        from fewbit._observed_file import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Statistics":
        """What `save` wrote."""
        from fewbit._observed_file import load

        return load(path)

    # --- text -------------------------------------------------------------------------------------

    def table(self, *, width: int | None = None) -> str:
        """Operands, how often each Site ran, and the range seen."""
        width = _text.terminal_width() if width is None else width
        header = ["operand", "runs", "range"]
        rows = [
            [_label(name), _runs(e), _range(self.statistic(name))]
            for name, e in self.entries.items()
        ]
        lines = _text.table(rows, header, "mll", width).split("\n") if rows else []
        far = [f"far beyond most values: {text}" for text in map(str, far_ranges(self.entries))]
        return "\n".join([*lines, *[""] * bool(rows), self.summary, *far])

    @property
    def summary(self) -> str:
        """What there is, in a line."""
        operands = "1 operand" if len(self.entries) == 1 else f"{len(self.entries)} operands"
        return (
            f"{operands}, 1 batch" if self.batches == 1 else f"{operands}, {self.batches} batches"
        )

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Statistics({self.kind}, {self.summary})"


def model_digest(plan: Plan) -> str:
    """A digest of the parameters' paths and shapes: what makes models the same to statistics."""
    lines = sorted(f"{leaf.path} {list(leaf.shape)}" for leaf in plan.leaves)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _without_tail(entry: Entry) -> Entry:
    return replace(entry, states={o: state for o, state in entry.states.items() if o != TAIL})


def _label(name: str) -> str:
    return f"{name[:-4]} ({name[-3:]})"


def _runs(entry: Entry) -> str:
    low, high = (int(f(entry.count)) if entry.count.size else 0 for f in (np.min, np.max))
    return str(low) if low == high else f"{low} to {high}"


def _range(statistic: Mapping[str, Any]) -> str:
    if "max_of_absmax" in statistic:
        return f"±{_span(statistic['max_of_absmax'])}"
    if "min_of_min" in statistic:
        low, high = statistic["min_of_min"].min(), statistic["max_of_max"].max()
        return f"{low:.4g} to {high:.4g}"
    return ", ".join(key for key in statistic if key != "count")


def _span(array: np.ndarray) -> str:
    low, high = (float(f(array)) if array.size else 0.0 for f in (np.min, np.max))
    return f"{high:.4g}" if low == high else f"{low:.4g} to ±{high:.4g}"
