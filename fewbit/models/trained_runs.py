"""A model that trains, ready to run on one batch: what tools that look at training begin with."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fewbit._errors import describe
from fewbit.calls import given_back
from fewbit.engine import Runner, Traced
from fewbit.models import front_end, is_keras
from fewbit.models.function import call_runner

_MSG_NOT_TRAINED = (
    "{who} looks at a model while it trains: one that quantize_model(model, QtProvider(rules)) "
    "made, got {found}.{fix}"
)
_FIX_STORED = (
    " Its parameters are stored quantized and have no gradients; fewbit.debug.compare holds such a "
    "model against its float twin."
)
_MSG_NO_PARAMS = "{who} needs the parameters: {who}(model, params, *inputs)."
_MSG_PARAMS = (
    "An NNX model holds its parameters: write {who}(model, None, *inputs), the second argument "
    "being for functions and Linen."
)


@dataclass(frozen=True)
class TrainedRun:
    """A runner, the leaves to call it with, and how its results become the model's output."""

    runner: Runner
    tree: Any
    output: Callable[[Traced, list[Any]], Any]


def trained_run(
    who: str,
    model: Any,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    method: Any = None,
    rngs: Any = None,
    quant_stats: Any = None,
) -> TrainedRun:
    """One call of a model of `QtProvider`; `who` asks for it.

    `quant_stats` are a function's; Linen variables and NNX models hold theirs.
    """
    kind = None if is_keras(model) else front_end(model)
    trained = None if kind is None else kind.trained(model)
    if trained is None or kind is None:
        provider = getattr(model, "provider", getattr(type(model), "_fewbit_provider", None))
        fix = _FIX_STORED if getattr(provider, "quantizes_params", False) else ""
        raise TypeError(_MSG_NOT_TRAINED.format(who=who, found=describe(model), fix=fix))
    provider, source = trained
    name = kind.__name__.rpartition(".")[2]
    if (params is None) != (name == "nnx"):
        raise TypeError((_MSG_NO_PARAMS if params is None else _MSG_PARAMS).format(who=who))
    if name != "linen" and rngs is not None:  # an argument of the model's own
        kwargs = {**kwargs, "rngs": rngs}
    _, args, kwargs = provider.process_model_inputs(model, args, kwargs)
    if name == "function":
        kwargs, keys = model.keys(kwargs)
        return TrainedRun(*call_runner(model, params, args, kwargs, keys, quant_stats), _whole)
    if name == "linen":
        whole = isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)
        variables = params if whole else {"params": params}
        options = kind.Options.of(method, kind.ALL_BUT_PARAMS)
        runner, tree = kind.make_run(source, provider, variables, rngs, args, kwargs, options)
        return TrainedRun(runner, tree, lambda traced, outs: _whole(traced, outs)[0])
    calls = importlib.import_module("fewbit.models.nnx_calls")
    noise = calls.noise_key(model, provider)
    ready = calls.prepare(model, provider, method or "__call__", args, kwargs, noise)
    return TrainedRun(ready.runner, ready.dynamic, calls.result_of)


def _whole(traced: Traced, outs: list[Any]) -> Any:
    return given_back(jax.tree.unflatten(traced.out_tree, outs))
