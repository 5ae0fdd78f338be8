"""Which leaves are adapters: for gradients, optimizers, and for exchanging them over one base."""

import importlib
from collections.abc import Mapping
from typing import Any

import jax

from fewbit._errors import describe
from fewbit.adapter_params import LoraParams
from fewbit.adapter_trees import (
    adapter_names,
    leaves_by_path,
    map_leaves,
    put_adapters,
    split_adapters,
    weight_of,
)
from fewbit.engine import is_stored
from fewbit.models import is_nnx
from fewbit.static_scales import QuantizedParams

_MSG_NONE = (
    "fewbit.lora.{name} found no adapters in {found}. They are entries '<w>_lora_a' and "
    "'<w>_lora_b' beside a weight; make them with fewbit.lora.init(plan, params, key)."
)
_MSG_NAMES = (
    "'{name}' is no adapter's name. with_adapters takes what fewbit.lora.adapters(params) gives: "
    "a mapping from '<w>_lora_a' and '<w>_lora_b' to arrays."
)
_MSG_NO_WEIGHT = (
    "'{name}' is the adapter of '{leaf}', which these parameters do not have. Give adapters of the "
    "same model."
)
_MSG_NNX = (
    "An NNX model keeps its parameters itself. Take the gradient of its adapters alone with the "
    "filter nnx.LoRAParam: nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)), "
    "nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)."
)


def _nnx() -> Any:
    return importlib.import_module("fewbit.models.nnx_adapters")


def adapters(params: Any) -> dict[str, Any]:
    """The adapters of a parameter tree or an NNX model, by their full names.

    >>> adapters({'up': {'w': 1, 'w_lora_a': 2, 'w_lora_b': 3}})
    {'up/w_lora_a': 2, 'up/w_lora_b': 3}
    """
    return _nnx().adapters(params) if is_nnx(params) else split_adapters(params)[1]


def with_adapters(params: Any, new: Mapping[str, Any]) -> Any:
    """The same base with other adapters: several over one base share its arrays.

    An NNX model is cloned; the clone shares the base's arrays.

    >>> base = {'w': 1}
    >>> with_adapters(base, {'w_lora_a': 2, 'w_lora_b': 3})
    {'w': 1, 'w_lora_a': 2, 'w_lora_b': 3}
    """
    for name in new:
        if weight_of(name) is None:
            raise ValueError(_MSG_NAMES.format(name=name))
    if is_nnx(params):
        return _nnx().with_adapters(params, new)
    there = leaves_by_path(params)
    for name in new:
        if weight_of(name) not in there:
            raise ValueError(_MSG_NO_WEIGHT.format(name=name, leaf=weight_of(name)))
    return put_adapters(params, new)


def without_adapters(params: Any) -> Any:
    """The parameters of the base alone.

    >>> without_adapters({'w': 1, 'w_lora_a': 2, 'w_lora_b': 3})
    {'w': 1}
    """
    return split_adapters(params)[0]


def mask(params: Any) -> Any:
    """A tree of bools, True for adapters: the mask for `optax.masked`.

    >>> mask({'w': 1.0, 'w_lora_a': 2.0, 'w_lora_b': 3.0, 'bias': 4.0})
    {'bias': False, 'w': False, 'w_lora_a': True, 'w_lora_b': True}
    """
    if is_nnx(params):
        raise TypeError(_MSG_NNX)
    mine = adapter_names(leaves_by_path(params))
    beside = params.adapters if isinstance(params, LoraParams) else {}
    if not mine and not beside:
        raise ValueError(_MSG_NONE.format(name="mask", found=describe(params)))
    made = map_leaves(lambda path, value: path in mine, params)
    made = _without_scales(made)
    return LoraParams(made.params, {name: True for name in beside}) if beside else made


def _without_scales(made: Any) -> Any:
    """Static scales are no adapters."""
    if isinstance(made, LoraParams):
        return LoraParams(_without_scales(made.params), made.adapters)
    if isinstance(made, QuantizedParams):
        scales = jax.tree.map(lambda _: False, dict(made.act_scales), is_leaf=is_stored)
        return QuantizedParams(made.params, scales)
    return made


def split(params: Any) -> tuple[Any, Any]:
    """The adapters and the frozen rest: two trees like `params`, None where the other has a leaf.

    `fewbit.merge_trainable(trained, frozen)` puts them together again inside the loss.

    >>> split({'w': 1.0, 'w_lora_a': 2.0, 'w_lora_b': 3.0})[0]
    {'w': None, 'w_lora_a': 2.0, 'w_lora_b': 3.0}
    """
    chosen = mask(params)
    pick = lambda want: jax.tree.map(  # noqa: E731
        lambda mine, value: value if mine is want else None,
        chosen,
        params,
        is_leaf=is_stored,
    )
    return pick(True), pick(False)
