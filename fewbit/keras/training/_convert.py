"""From a Keras model that was trained quantized to the model that serves, with the same scales."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import keras

from fewbit.interpreter import histories_of
from fewbit.keras._planning import LayerPlan, float_variables, layers_of
from fewbit.keras._quantize import (
    as_it_was_on_failure,
    check_calibration,
    convert_all,
    forget_compiled,
    needs_calibration,
    plan_model,
    quantize_planned,
)
from fewbit.keras.layers._calls import Examples
from fewbit.keras.layers._classes import is_quantized
from fewbit.keras.layers._program import LayerState
from fewbit.keras.layers._variables import unlocked
from fewbit.keras.training._qat import SEED
from fewbit.keras.training._remembered import has_seen
from fewbit.training import GRADIENT, HistoryPlan, remembered_ranges, serving_rule

_MSG_NOT_TRAINED = (
    "to_ptq takes a Keras model that fewbit.quantize_model(model, QtProvider(rules)) made, and "
    "'{model}' has no layer that trains quantized. A float model is quantized by "
    "fewbit.keras.quantize_model(model, config)."
)
_MSG_NO_STEP = (
    "No training step has reached '{path}', so there is no range for its static scale. Train the "
    "model first: fit, or calls with training=True whose updates of variables are kept (the call() "
    "of a Model of your own must take `training`, or Keras does not tell its layers). Or measure "
    "ranges now: fewbit.to_ptq(model, calib_function)."
)


@dataclass(frozen=True)
class Trained:
    """What training knows of ranges: of static scales by name, of delayed weights by path."""

    entries: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)

    def statistic(self, name: str) -> Any:
        return self.entries[name]


@dataclass(frozen=True)
class _Layer:
    """One layer that trained: its path now, and what it was."""

    path: str
    layer: Any
    cls: Any
    state: LayerState
    plans: Mapping[str, HistoryPlan]  # by the names of now, as are its histories
    histories: Mapping[str, Any]

    def is_empty(self, name: str) -> bool:
        """Whether no step has written this history."""
        return bool(jnp.any(jnp.max(self.histories[name], axis=-1) <= 0))


def to_ptq(
    model: keras.Layer,
    calib_function: Callable[[Any], Any] | Iterable[Any] | None = None,
    *,
    rules: Iterable[Any] | None = None,
    pack: bool = False,
    progress: bool = True,
) -> Any:
    """The model that serves what was trained, in place: weights as training rounded them.

    Static scales are those that training ended with. `calib_function`, that of `quantize_model`,
    measures them anew; `rules` replace those of training, for instance to make activations static
    that were not, and need it then. With the rules and ranges of training the forward pass is that
    of training, bit for bit. `pack=True` stores the weights as this machine's kernels read them:
    faster, and where floats are summed (groups, fp8) in another order.

    >>> import fewbit, keras, numpy as np
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> rules = [fewbit.QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')]
    >>> model = fewbit.quantize_model(model, fewbit.QtProvider(rules))
    >>> model.compile('sgd', 'mse')
    >>> x, y = np.ones((4, 8), 'float32'), np.zeros((4, 4), 'float32')
    >>> history = model.fit(x, y, verbose=0)
    >>> trained = model.predict(x, verbose=0)
    >>> served = fewbit.to_ptq(model).predict(x, verbose=0)
    >>> type(model.layers[0]).__name__, bool((served == trained).all())
    ('QDynamicDense', True)
    """
    examples = Examples(model)
    layers = [
        _read(path, layer, examples)
        for path, layer in layers_of(model).items()
        if is_quantized(layer) and layer._fewbit.kind == "training"
    ]
    if not layers:
        raise ValueError(_MSG_NOT_TRAINED.format(model=model.name))
    measured = rules is not None or calib_function is not None
    if not measured:
        for each in layers:
            _check_reached(each)
    # By the paths of now: a model that was loaded may have others than the one that was saved.
    own = [
        serving_rule(each.state.rule).replace(module_path=re.escape(each.path)) for each in layers
    ]
    chosen = own if rules is None else list(rules)
    with as_it_was_on_failure(model) as before:
        for each in layers:
            _make_float(each)
        planned, plan = plan_model(model, chosen)
        planned = [replace(each, choice=replace(each.choice, packed=pack)) for each in planned]
        if measured and needs_calibration(planned):
            check_calibration(calib_function)
        trained = _trained(layers, planned) if rules is None else Trained()
        for each in layers:
            _forget(each)
        forget_compiled(model)
        if measured:
            quantize_planned(
                model, planned, plan, calib_function, before, trained.weights, progress=progress
            )
        else:
            convert_all(model, planned, before, trained, trained.weights, progress=progress)
    return model


def _read(path: str, layer: Any, examples: Examples) -> _Layer:
    state: LayerState = layer._fewbit
    kept = state.remembered

    def now(name: str) -> str:
        return path + name.removeprefix(state.path)

    plans: dict[str, HistoryPlan] = {}
    if kept.histories:
        own, beside = float_variables(layer), list(kept.variables.values())

        def histories_on(calls: Any) -> list[Any]:
            return list(map(histories_of, state.program.runs(calls, own, beside=beside)))

        known = state.program.calls
        for found in examples.first(layer, state.rule, histories_on, known=known):
            for name, plan in found.items():
                leaf = None if plan.leaf is None else now(plan.leaf)
                plans[now(name)] = replace(plan, name=now(name), leaf=leaf)
    histories = {f"{path}/{name}": variable.value for name, variable in kept.histories.items()}
    return _Layer(path, layer, type(layer), state, plans, histories)


def _check_reached(each: _Layer) -> None:
    """Raise where a layer needs a range that no step has given it."""
    statistics = each.state.remembered.statistics
    ranges = [name for name, plan in each.plans.items() if _is_activation(plan)]
    unseen = statistics and not any(map(has_seen, statistics.values()))
    if unseen or (ranges and all(map(each.is_empty, ranges))):
        raise ValueError(_MSG_NO_STEP.format(path=each.path))


def _is_activation(plan: HistoryPlan) -> bool:
    return plan.leaf is None and plan.side != GRADIENT


def _trained(layers: Sequence[_Layer], planned: Sequence[LayerPlan]) -> Trained:
    """What training knows, for these plans of serving.

    Of a way of calling a layer that training did not take nothing is known.
    """
    known = Trained()
    plans = {each.path: each.plan for each in planned}
    for each in layers:
        if each.path not in plans:
            continue
        made = plans[each.path]
        for name, statistic in each.state.remembered.statistics.items():
            if has_seen(statistic):
                known.entries[f"{each.path}/{name}"] = statistic
        seen = {
            name: plan
            for name, plan in each.plans.items()
            if not (_is_activation(plan) and each.is_empty(name))
        }
        if seen:
            found = remembered_ranges(seen, made, each.histories)
            known.weights.update(found.weights)
            by_site = found.statistics(None, made, by_site=True) or {}
            known.entries.update(
                (scale.name, by_site[scale.site][scale.side])
                for scale in made.scales
                if scale.side in by_site.get(scale.site, {})
            )
    return known


def _make_float(each: _Layer) -> None:
    del each.layer._fewbit
    each.layer.__class__ = each.cls._fewbit_original


def _forget(each: _Layer) -> None:
    """Drop what only training needs."""
    each.state.remembered.drop(each.layer)
    if getattr(each.layer, SEED, None) is not None:
        with unlocked(each.layer):
            delattr(each.layer, SEED)
