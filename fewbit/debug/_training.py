"""How training with few bits is doing: numbers of one step, of many steps, and a page of curves.

The model and its float twin run as functions of weights and of what is added at Sites. Nothing is
added: zeros, whose gradients are the cotangents at the Sites' results.
"""

import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import describe
from fewbit.debug._mixed import clipped_count
from fewbit.debug.page._charts import (
    Cell,
    Markup,
    join,
    line_chart,
    line_color,
    section,
    sortable,
    tag,
)
from fewbit.debug.page._page import document, write_page
from fewbit.interpreter import (
    Interpreter,
    Readings,
    SiteRunner,
    StaticScales,
    Taps,
    Traced,
    TrainedWeight,
    is_weight,
    plain,
)
from fewbit.models import TrainedRun, trained_run
from fewbit.numerics import should_quantize
from fewbit.planning import (
    Decision,
    Request,
    activation_how,
    storage,
    weight_operand,
)
from fewbit.qarray import quantize_static, quantize_with
from fewbit.tracing import Origin, TracedSite, jaxprs
from fewbit.training import trained_values

_ADDED = " added"  # no scale's name has spaces


@dataclass
class AddingSites(SiteRunner):
    """At a Site: its product, and what is to be added to it."""

    def __call__(self, ts: TracedSite, ins: Sequence[Any], *finish: Any) -> Any:
        return added_to(self.static, ts, super().__call__(ts, ins, *finish))

    def finishes(self, ts: TracedSite) -> bool:
        return False


def added_to(static: StaticScales, ts: TracedSite, out: Any) -> Any:
    """A Site's result plus what is given for it, of the layer that is being run."""
    more = static.of_layer(ts, ts.site.id + _ADDED)
    return out if more is None else out + more.astype(out.dtype)


@dataclass
class ClippingTap:
    """Reads at each Site how many numbers are clipped, and the scales of its weight."""

    sites: SiteRunner
    wanted: frozenset[str]

    def wants(self, site: TracedSite) -> bool:
        return site.site.id in self.wanted

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any:
        rule = self.sites.decisions[site.site.id].rule
        given = [v.array if is_weight(v) else v for v in operands[:2]]
        static = self.sites.scales(site, rule, given)
        seen: dict[str, Any] = {}
        for side, operand in enumerate(operands[:2]):
            if isinstance(operand, TrainedWeight):
                seen["weight"] = clipped_count(operand.twin, operand.array)
                seen["scale"] = operand.array.scale.astype(jnp.float32)
                continue
            if is_weight(operand) or not should_quantize(operand.dtype):
                continue
            how = activation_how(site, side, rule)  # type: ignore[arg-type]
            if how is None:
                continue
            q = (
                quantize_static(operand, how, *static[side])
                if side in static
                else quantize_with(operand, how)
            )
            count = clipped_count(operand, q)
            seen["act"] = seen["act"] + count if "act" in seen else count
        return seen

    def combine(self, site_id: str, first: Any, second: Any) -> Any:
        return {
            name: second[name] if name == "scale" else first[name] + second[name] for name in first
        }


@dataclass
class TrainingRun:
    """One call of a model that trains, taken apart."""

    run: TrainedRun
    traced: Traced
    decisions: dict[str, Decision]
    requests: Mapping[str, Request]
    sites: tuple[TracedSite, ...]  # the quantized products

    @staticmethod
    def of(run: TrainedRun) -> "TrainingRun":
        traced, decisions = run.runner.ready(run.tree)
        requests = storage([traced.program], [decisions], lambda message: None)
        sites = tuple(
            ts
            for ts in traced.program.sites
            if decisions[ts.site.id].rule is not None and ts.site.op != "take"
        )
        return TrainingRun(run, traced, decisions, requests, sites)

    @property
    def weights(self) -> dict[str, Any]:
        """The float weights that are quantized, by path."""
        return {
            leaf.path: value
            for leaf, value in zip(self.traced.leaves, self.traced.values, strict=True)
            if leaf is not None and leaf.path in self.requests
        }

    def nothing(self) -> dict[str, Any]:
        """Zeros to add at each Site; where a derivative was written by hand none would come out."""
        avals = {ts.site.id: (ts, ts.eqn.outvars[0].aval) for ts in self.sites if not ts.in_rule}
        return {
            name + _ADDED: jnp.zeros((*ts.layers, *aval.shape), aval.dtype)
            for name, (ts, aval) in avals.items()
        }

    def quantized(self, weights: Mapping[str, Any], added: Mapping[str, Any]) -> Any:
        """The output of the model as it trains."""
        values = self._with(weights)
        values = trained_values(values, self.traced.leaves, self.requests, self.traced.learned)
        sites = AddingSites(
            self.run.runner.provider,
            self.decisions,
            static=StaticScales({**self.traced.scales, **added}),
        )
        return self._output(self._interpreter(sites).run(self.traced.program.root, values))

    def plain(self, weights: Mapping[str, Any], added: Mapping[str, Any]) -> Any:
        """The output of the float model."""
        static = StaticScales({**self.traced.scales, **added})

        def product(ts: TracedSite, ins: Sequence[Any]) -> Any:
            return added_to(static, ts, jaxprs.bind(ts.eqn, [plain(v) for v in ins])[0])

        names = {ts.site.id for ts in self.sites}
        interpreter = Interpreter(product, lambda ts: ts.site.id in names, static=static)
        values = self._with(weights)
        return self._output(interpreter.run(self.traced.program.root, values))

    def readings(self) -> Readings:
        """What is clipped at each Site, and the scales of its weight."""
        made = trained_values(
            self.traced.values, self.traced.leaves, self.requests, self.traced.learned
        )
        values = [  # to be held against their codes, weights stay what they were
            TrainedWeight(new.array, new.leaf, new.rule, old) if is_weight(new) else new
            for new, old in zip(made, self.traced.values, strict=True)
        ]
        static = StaticScales(dict(self.traced.scales))
        sites = AddingSites(self.run.runner.provider, self.decisions, static=static)
        interpreter = self._interpreter(sites)
        interpreter.taps = Taps(ClippingTap(sites, frozenset(ts.site.id for ts in self.sites)))
        return interpreter.run_tapped(self.traced.program.root, values)[1]

    def _interpreter(self, sites: AddingSites) -> Interpreter:
        return Interpreter(
            sites, lambda ts: self.decisions[ts.site.id].rule is not None, static=sites.static
        )

    def _with(self, weights: Mapping[str, Any]) -> list[Any]:
        return [
            weights.get(leaf.path, value) if leaf is not None else value
            for leaf, value in zip(self.traced.leaves, self.traced.values, strict=True)
        ]

    def _output(self, outs: list[Any]) -> Any:
        return self.run.output(self.traced, [plain(out) for out in outs])


Gradients = tuple[dict[str, Any], dict[str, Any]]  # of weights by path, of what Sites add


def gradients(
    run: TrainingRun, output: Callable[..., Any], loss: Callable[[Any], Any]
) -> Gradients:
    """The loss's gradients, through the model as it trains or through the float one."""
    by_path, added = jax.grad(lambda w, e: loss(output(w, e)), (0, 1))(run.weights, run.nothing())
    return by_path, {name.removesuffix(_ADDED): g for name, g in added.items()}


# --- How training with fewer bits is doing, per Site and layer, as numbers that loggers take ------

MOST_DB = 200.0  # of gradients that are equal
METRICS = {
    "weight_clipped": "share of the weight's numbers outside the range of their scale",
    "act_clipped": "share of the activation's numbers outside the range of their scale",
    "scale_drift": "relative change of the weight's scales since the previous look",
    "cotangent_snr_db": "gradient at the product's result against the float model's, in dB",
    "weight_grad_snr_db": "gradient of the weight against the float model's, in dB",
}

_MSG_LOSS = (
    "loss= takes a function of the model's output, such as loss=lambda out: jnp.mean((out - y) ** "
    "2), and it must return one number; got {found}."
)
_MSG_PREVIOUS = (
    "previous= takes what an earlier training_stats of this model returned, got {found}.{fix}"
)
_FIX_DICT = " Keep the result itself: dict(stats) is for loggers and has no scales to compare with."
_FIX_SITES = " It has no scales of {site}: the two looks must be at one model."


@jax.tree_util.register_pytree_node_class
class TrainingStats(Mapping[str, Any]):
    """Numbers by name, `'<site>/<metric>'`, or `'<site>/layer<i>/<metric>'` in a scan over layers.

    `dict(stats)` is for loggers. A pytree: it goes into and out of `jit`, and as `previous=` into
    the next look, for which it keeps the scales.
    """

    def __init__(self, values: Mapping[str, Any], scales: Mapping[str, Any]):
        self._values, self.scales = dict(values), dict(scales)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"TrainingStats({self._values!r})"

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self._values, self.scales), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "TrainingStats":
        new = cls.__new__(cls)
        new._values, new.scales = children
        return new


def training_stats(
    model: Any,
    params: Any = None,
    *inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    previous: TrainingStats | None = None,
    method: Any = None,
    rngs: Any = None,
    quant_stats: Any = None,
    **kwargs: Any,
) -> TrainingStats:
    """Clipping, drift of scales and signal-to-noise of gradients at every quantized product.

    `model` is one of `QtProvider`; for NNX `params` is None. `loss(output)` closes over the
    targets; without it there are no gradients to look at. Gradients are those of the whole model as
    it trains, against those of the float model with the same weights: 20 dB is noise of a tenth.
    `previous` is the last result, for `scale_drift` (0 without it). `method` and `rngs` are those
    of Linen's `apply`, or the model's own, `quant_stats` what a function's `collecting` returned.
    Works inside `jit`, where a training loop wants it: outside, each call compiles anew.

    >>> import fewbit
    >>> rules = [fewbit.QtRule(weight_qtype='int4', act_qtype='int8', bwd_qtype='int8')]
    >>> f = fewbit.quantize_model(lambda p, x: x @ p['w'], fewbit.QtProvider(rules))
    >>> params, x = {'w': jnp.linspace(-1, 1, 12).reshape(4, 3)}, jnp.ones((2, 4))
    >>> stats = training_stats(f, params, x, loss=lambda out: jnp.sum(out ** 2))
    >>> sorted(name.rpartition('/')[2] for name in stats)
    ['act_clipped', 'cotangent_snr_db', 'scale_drift', 'weight_clipped', 'weight_grad_snr_db']
    >>> float(stats['w:dot_general0/weight_clipped'])
    0.0
    """
    if loss is not None and not callable(loss):
        raise TypeError(_MSG_LOSS.format(found=describe(loss)))
    _check_previous(previous)
    beside = dict(method=method, rngs=rngs, quant_stats=quant_stats)
    found = trained_run("training_stats", model, params, inputs, kwargs, **beside)
    run = TrainingRun.of(found)

    def look(tree: Any, previous: Any) -> TrainingStats:
        now = TrainingRun.of(type(found)(found.runner, tree, found.output))
        return _looked(now, loss, previous)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(run.traced.values)):
        return _looked(run, loss, previous)
    return jax.jit(look)(found.tree, previous)


def _check_previous(previous: Any) -> None:
    if previous is None or isinstance(previous, TrainingStats):
        return
    fix = _FIX_DICT if isinstance(previous, Mapping) else ""
    raise TypeError(_MSG_PREVIOUS.format(found=describe(previous), fix=fix))


def _looked(run: TrainingRun, loss: Any, previous: TrainingStats | None) -> TrainingStats:
    readings = run.readings()
    by_site: dict[str, dict[str, Any]] = {}
    for ts in run.sites:
        by_site[ts.site.id] = _forward(ts, readings, previous)
    if loss is not None:
        checked = lambda out: _one_number(loss(out))  # noqa: E731
        exact, noisy = (gradients(run, o, checked) for o in (run.plain, run.quantized))
        for ts in run.sites:
            by_site[ts.site.id] |= _backward(ts, exact, noisy)
    values: dict[str, Any] = {}
    for ts in run.sites:
        for metric, value in by_site[ts.site.id].items():
            values |= dict(_per_layer(ts, metric, value))
    scales = {
        name: reading.value["scale"]
        for name, reading in readings.items()
        if "scale" in reading.value
    }
    return TrainingStats(values, scales)


def _one_number(value: Any) -> Any:
    if getattr(value, "shape", None) != ():
        raise TypeError(_MSG_LOSS.format(found=describe(value)))
    return value


def _forward(ts: TracedSite, readings: Readings, previous: TrainingStats | None) -> dict[str, Any]:
    seen, name = readings[ts.site.id].value, ts.site.id
    found = {
        f"{part}_clipped": seen[part][..., 0] / jnp.maximum(seen[part][..., 1], 1)
        for part in ("weight", "act")
        if part in seen
    }
    if "scale" not in seen:
        return found
    if previous is None:
        return found | {"scale_drift": jnp.zeros(ts.layers)}
    if name not in previous.scales or previous.scales[name].shape != seen["scale"].shape:
        fix = _FIX_SITES.format(site=name)
        raise ValueError(_MSG_PREVIOUS.format(found="one of another model", fix=fix))
    before, depth = previous.scales[name], len(ts.layers)
    change, size = _power(seen["scale"] - before, depth), _power(before, depth)
    drift = jnp.sqrt(change / jnp.maximum(size, jnp.finfo(jnp.float32).tiny))
    return found | {"scale_drift": drift}


def _backward(ts: TracedSite, exact: Any, noisy: Any) -> dict[str, Any]:
    name, depth, found = ts.site.id, len(ts.layers), {}
    if name in exact[1]:
        g, q = exact[1][name], noisy[1][name]
        found["cotangent_snr_db"] = decibels(_power(g, depth), _power(q - g, depth))
    side = weight_operand(ts)
    leaf = ts.sources[side].leaf if side is not None else None  # type: ignore[union-attr]
    if side is not None and leaf in exact[0]:
        signal, noise = (
            _of_layers(ts, ts.sources[side], part)  # type: ignore[arg-type]
            for part in (exact[0][leaf], noisy[0][leaf] - exact[0][leaf])
        )
        found["weight_grad_snr_db"] = decibels(signal, noise)
    return found


def _power(array: Any, depth: int) -> Any:
    """The sum of squares of each layer."""
    squares = jnp.square(array.astype(jnp.float32))
    return jnp.sum(squares, axis=tuple(range(depth, squares.ndim)))


def _of_layers(ts: TracedSite, origin: Origin, array: Any) -> Any:
    """The sum of squares of each layer of a parameter; of all of it where layers share it."""
    axes = {
        depth: atoms[0].axis or 0
        for depth, atoms in origin.picked
        if len(atoms) == 1 and atoms[0].size == origin.leaf_shape[atoms[0].axis or 0]
    }
    squares = jnp.square(array.astype(jnp.float32))
    kept = [axes[depth] for depth in sorted(axes)]
    rest = tuple(axis for axis in range(array.ndim) if axis not in kept)
    total = jnp.transpose(squares, (*kept, *rest)).sum(range(len(kept), array.ndim))
    sizes = [n if depth in axes else 1 for depth, n in enumerate(ts.layers)]
    return jnp.broadcast_to(total.reshape(sizes), ts.layers)


def decibels(signal: Any, noise: Any) -> Any:
    """A ratio of powers in dB, within 200 either way; no noise at all is 200, NaN stays NaN.

    >>> decibels(jnp.float32(100), jnp.float32(1)), decibels(jnp.float32(1), jnp.float32(0))
    (Array(20., dtype=float32), Array(200., dtype=float32))
    """
    tiny = jnp.finfo(jnp.float32).tiny
    ratio = jnp.log10(jnp.maximum(signal, tiny)) - jnp.log10(jnp.maximum(noise, tiny))
    found = jnp.where(noise == 0, MOST_DB, jnp.clip(10 * ratio, -MOST_DB, MOST_DB))
    return jnp.where(jnp.isfinite(signal) & jnp.isfinite(noise), found, jnp.nan)


def _per_layer(ts: TracedSite, metric: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not ts.layers:
        yield f"{ts.site.id}/{metric}", value
        return
    for index in np.ndindex(ts.layers):
        layer = ".".join(map(str, index))
        yield f"{ts.site.id}/layer{layer}/{metric}", value[index]


# --- Statistics over steps: kept as plain numbers, shown as one page of curves --------------------

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
        return {
            place: [numbers.get(f"{place}/{metric}", math.nan) for numbers in self.values]
            for place in places
        }

    def html(self, title: str = "Training") -> str:
        """The curves as one HTML page, which needs no network."""
        if not self.steps:
            raise ValueError(_MSG_EMPTY)
        return training_page(self, title)

    def plot(self, path: str | os.PathLike[str], title: str = "Training") -> pathlib.Path:
        """Write that page; the file is written whole or not at all."""
        return write_page(path, self.html(title))


# --- The page of a training run: a chart for each metric, a line for each Site and layer ----------

_TITLES = {
    "weight_clipped": "Clipped weights",
    "act_clipped": "Clipped activations",
    "scale_drift": "Drift of scales",
    "cotangent_snr_db": "Gradients at products",
    "weight_grad_snr_db": "Gradients of weights",
}


def training_page(history: "TrainingHistory", title: str) -> str:
    """A whole HTML document.

    >>> from fewbit.debug import TrainingHistory
    >>> history = TrainingHistory()
    >>> history.add(0, {'<up>:dot_general0/weight_clipped': 0.25})
    >>> page = training_page(history, 'A run')
    >>> '&lt;up&gt;:dot_general0' in page, '<up>' in page, page.count('<svg')
    (True, False, 1)
    """
    present = {metric: curves for metric in METRICS if (curves := history.curves(metric))}
    sections = [_section(metric, history.steps, curves) for metric, curves in present.items()]
    links = [tag("a", _TITLES[metric], href=f"#{metric}") for metric in present]
    steps = f"{len(history.steps)} looks, steps {min(history.steps)} to {max(history.steps)}"
    header = tag("header", tag("div", tag("h1", title), tag("p", steps, class_="soft")))
    nav = tag("nav", links, aria_label="Sections")
    return document(title, join(header, nav, tag("main", sections)))


def _section(metric: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Markup:
    columns = (
        ("site", "product", False),
        ("first", "first", True),
        ("last", "last", True),
        ("least", "least", True),
        ("most", "most", True),
    )
    rows = []
    for number, (place, numbers) in enumerate(curves.items()):
        color = line_color(number, len(curves))
        dot = tag("span", "● ", style=f"color:{color}", aria_hidden="true")
        known = [v for v in numbers if math.isfinite(v)] or [math.nan]
        ends = (numbers[0], numbers[-1], min(known), max(known))
        cells = [Cell(f"{v:.4g}", v if math.isfinite(v) else None) for v in ends]
        rows.append([join(dot, place), *cells])
    title = _TITLES[metric]
    chart = line_chart(f"{title} of {len(curves)} products over steps", metric, steps, curves)
    table = sortable(f"{metric}-table", title, columns, rows)
    return section(metric, title, f"{METRICS[metric].capitalize()}.", chart, table)
