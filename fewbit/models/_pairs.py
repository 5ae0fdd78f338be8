"""A float model and its quantized twin on one batch, each as a runner and the leaves to run it on.

What tools that hold the two against each other begin with; the front ends' own parts are in
`linen/_quantized.py` and `nnx/_model.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fewbit._util import describe
from fewbit.interpreter import Runner, Traced, given_back
from fewbit.models._front_ends import front_end, is_keras
from fewbit.models.function import QuantizedFunction, call_runner

_MSG_NOT_QUANTIZED = (
    "The second argument, {found}, is not quantized. Pass the float model first and what "
    "fewbit.quantize_model(model, provider, ...) made of it second."
)
_MSG_SWAPPED = (
    "The first argument, {found}, is quantized already. The float model comes first: "
    "(model, quantized, batch)."
)
_MSG_KINDS = (
    "The two models are of different kinds: {first} and {second}. Pass a model and what "
    "fewbit.quantize_model made of it."
)
_MSG_TREES = (
    "{kind} keeps its parameters outside the model: pass the float tree as params= and the "
    "quantized one as qparams=.{missing}"
)
_MSG_NO_TREES = (
    "{kind} holds its parameters; params= and qparams= are for functions and Linen. Leave them out."
)

_MSG_ADAPTERS = (
    "This model has adapters (LoRA), which are no error of quantization. Merge them first and hold "
    "the merged model against the quantized one: floats, _ = fewbit.merge_lora(params, plan, "
    "requantize=False), then quantize floats with PtqProvider(fewbit.lora.base_rules(rules))."
)

_HOLDS_PARAMS = {"nnx": "An NNX model", "keras": "A Keras model"}


@dataclass(frozen=True)
class Pair:
    """Two runners of one model. `outputs(traced)` is how many of its results are the model's."""

    kind: str
    runner: Runner
    tree: Any
    float_runner: Runner
    float_tree: Any
    outputs: Callable[[Traced], int] = lambda traced: len(traced.forwarded)
    notes: tuple[str, ...] = ()


def pair(
    model: Any,
    quantized: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    params: Any = None,
    qparams: Any = None,
    method: Any = None,
    rngs: Any = None,
) -> Pair:
    """The two models ready to run on a batch."""
    kind, other = (front_end(m).__name__.rpartition(".")[2] for m in (model, quantized))
    if kind != other:
        raise TypeError(_MSG_KINDS.format(first=describe(model), second=describe(quantized)))
    if _provider(kind, model) is not None:
        raise TypeError(_MSG_SWAPPED.format(found=describe(model)))
    provider = _provider(kind, quantized)
    if provider is None:
        raise TypeError(_MSG_NOT_QUANTIZED.format(found=describe(quantized)))
    if getattr(provider, "adapts", False):
        raise TypeError(_MSG_ADAPTERS)
    given = {"params": params, "qparams": qparams}
    if kind in _HOLDS_PARAMS:
        if params is not None or qparams is not None:
            raise TypeError(_MSG_NO_TREES.format(kind=_HOLDS_PARAMS[kind]))
    else:
        missing = [name for name, tree in given.items() if tree is None]
        if missing:
            name = {"function": "A function", "linen": "A Linen module"}[kind]
            text = f" {' and '.join(missing)} is missing."
            raise TypeError(_MSG_TREES.format(kind=name, missing=text))
    if kind == "keras":
        return front_end(quantized).pair(model, quantized, args, kwargs)
    if kind != "linen" and rngs is not None:  # an argument of the model's own
        kwargs = {**kwargs, "rngs": rngs}
    _, args, kwargs = provider.process_model_inputs(quantized, args, kwargs)
    if kind == "function":
        runner, tree = call_runner(quantized, qparams, args, kwargs)
        plain = QuantizedFunction(model, provider)
        return Pair(kind, runner, tree, *call_runner(plain, params, args, kwargs))
    home = front_end(quantized)
    if kind == "linen":
        trees = {name: _variables(tree) for name, tree in given.items()}
        return home.pair(model, quantized, provider, args, kwargs, method, rngs, **trees)
    return home.pair(model, quantized, provider, args, kwargs, method or "__call__")


def _provider(kind: str, model: Any) -> Any:
    """The provider of a quantized model; None for a float one."""
    if kind == "function":
        return model.provider if isinstance(model, QuantizedFunction) else None
    if kind == "keras":
        return front_end(model).reading.quantized_layers(model) or None
    return getattr(type(model), "_fewbit_provider", None)


def _variables(tree: Any) -> Any:
    """Linen variables: as given, or parameters alone."""
    whole = isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)
    return tree if whole else {"params": tree}


# --- A model that trains, ready to run on one batch: what tools that look at training begin with --

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
    noise = kind.noise_key(model, provider)
    ready = kind.prepare(model, provider, method or "__call__", args, kwargs, noise)
    return TrainedRun(ready.runner, ready.dynamic, kind.result_of)


def _whole(traced: Traced, outs: list[Any]) -> Any:
    return given_back(jax.tree.unflatten(traced.out_tree, outs))
