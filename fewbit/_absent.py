"""Familiar names that are not there yet, or never will be, and what to do instead.

Code that moves to fewbit imports them without trouble; using one says what it is and what to use in
its place. `fewbit.__getattr__` comes here for every name that `fewbit` itself does not have.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fewbit._util import homes, nearest, refusal
from fewbit.providers._provider import QuantizationProvider

_MSG_LATER = "fewbit.{name} is not there yet. It will {what}. Until then, {until}."
_MSG_NEVER = "fewbit has no {name}, and needs none: {why}."


@dataclass(frozen=True)
class Later:
    """What a name will do, and what to use until then."""

    what: str
    until: str


_TRAINING = (
    "train with QtProvider([QtRule(...)]), whose forward pass is the one that serves, and convert "
    "with fewbit.to_ptq; the export itself is not there"
)
_ROUND_TO_NEAREST = (
    "use quantize_params with a smaller tile_size or weight_calibration_method='mse', which lower "
    "the error without data"
)

LATER = {
    "OdmlQatProvider": Later("train a model for export to LiteRT", _TRAINING),
    "OdmlConversionProvider": Later(
        "convert a model for export to LiteRT", "export the float model and quantize it there"
    ),
    "SparsityRule": Later(
        "prune weights in N:M patterns", "prune the float weights before quantize_params"
    ),
    "gptq": Later("quantize weights with second-order information (GPTQ)", _ROUND_TO_NEAREST),
    "awq": Later("scale weights by activation statistics (AWQ)", _ROUND_TO_NEAREST),
    "smooth_quant": Later("move activation outliers into the weights", _ROUND_TO_NEAREST),
    "qep": Later("propagate quantization errors from layer to layer (QEP)", _ROUND_TO_NEAREST),
    "hadamard_rot": Later("rotate outliers away with Hadamard matrices", _ROUND_TO_NEAREST),
    "sparsity": Later("prune weights in N:M patterns", "prune the float weights first"),
    "hijax": Later("make quantized arrays values of JAX itself", "use QArray, an ordinary pytree"),
    "padded_ptq": Later(
        "quantize shapes that tiles do not divide", "use PtqProvider, which takes uneven tiles"
    ),
}

_NOTHING_PATCHED = (
    "no function of JAX or Flax is replaced while a quantized model runs, so there is nothing to "
    "intercept, suspend or disable. Call your function as it is; a kernel learns its rule from "
    "fewbit.get_current_rule(op_name)"
)
NEVER = {
    "disable_interceptions": _NOTHING_PATCHED,
    "get_intercept_map": _NOTHING_PATCHED,
    "get_interceptors": _NOTHING_PATCHED,
    "wrap_func_intercepted": _NOTHING_PATCHED,
    "interception_manager": _NOTHING_PATCHED,
    "Interceptor": _NOTHING_PATCHED,
    "PRIMITIVE_BIND_KEY": _NOTHING_PATCHED,
    "quantize_act": (
        "the interpreter quantizes activations where the plan says so. For an array of your own "
        "call fewbit.quantize(array, qtype, channelwise_axes=...)"
    ),
    "create_quantized_param": (
        "parameters are quantized outside the model, by fewbit.quantize_params(params, plan). For "
        "one leaf write fewbit.WithAux(fewbit.qarray.quantize_with(value, how), how)"
    ),
    "_fast_dot_general": (
        "fewbit.dot_general multiplies integers whenever the operands allow it; "
        "fewbit.ops.describe_dot(lhs, rhs, dimension_numbers) says what will run"
    ),
}
MODULES = ("gptq", "awq", "smooth_quant", "qep", "hadamard_rot", "sparsity", "hijax", "padded_ptq")


def message(name: str) -> str:
    """The sentence about a name that is not there.

    >>> message('hijax')
    'fewbit.hijax is not there yet. It will make quantized arrays values of JAX itself. Until then,
    use QArray, an ordinary pytree.'
    """
    if name in NEVER:
        return _MSG_NEVER.format(name=name, why=NEVER[name])
    return _MSG_LATER.format(name=name, what=LATER[name].what, until=LATER[name].until)


class _NotYet:
    """A class that can be imported, named and derived from, but not made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in LATER)
        raise NotImplementedError(message(name))


class OdmlQatProvider(_NotYet, QuantizationProvider):
    """Training for LiteRT."""


class OdmlConversionProvider(OdmlQatProvider):
    """Conversion for LiteRT."""


class SparsityRule(_NotYet):
    """N:M pruning."""


_CLASSES = (
    *(OdmlQatProvider, OdmlConversionProvider),
    SparsityRule,
)


class LaterModule(ModuleType):
    """A module that can be imported; taking anything out of it says what it will be."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself and its tools ask for these
            raise AttributeError(name)
        raise NotImplementedError(message(self.__name__.rpartition(".")[2]))


_STANDINS: dict[str, Any] = {
    **{name: refusal(f"fewbit.{name}", message(name)) for name in (*LATER, *NEVER)},
    **{name: LaterModule(f"fewbit.contrib.{name}", message(name)) for name in MODULES},
    **{cls.__name__: cls for cls in _CLASSES},
}


def stand_in(name: str) -> Any:
    """What takes the place of a name in `LATER` or `NEVER`."""
    return _STANDINS[name]


def resolve(name: str) -> Any:
    """What `fewbit.<name>` is, for names that `fewbit` does not hold itself.

    >>> import fewbit
    >>> fewbit.quantise_model
    Traceback (most recent call last):
        ...
    AttributeError: fewbit has no 'quantise_model'. Did you mean 'quantize_model'?
    """
    if name in _STANDINS:
        return stand_in(name)
    own = [word for word in vars(sys.modules["fewbit"]) if not word.startswith("_")]
    known = [*own, *homes("fewbit"), *_STANDINS]
    hint = nearest(name, known, cutoff=0.6) or " dir(fewbit) lists what there is."
    # obj: else Python adds a suggestion of its own behind ours.
    raise AttributeError(f"fewbit has no {name!r}.{hint}", name=name, obj=None)
