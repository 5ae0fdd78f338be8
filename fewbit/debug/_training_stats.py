"""How training with fewer bits is doing, per Site and layer, as numbers that loggers take."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._errors import describe
from fewbit.debug._training_run import TrainingRun, gradients
from fewbit.decisions import weight_operand
from fewbit.models.trained_runs import trained_run
from fewbit.provenance import Origin
from fewbit.taps import Readings
from fewbit.trace import TracedSite

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
