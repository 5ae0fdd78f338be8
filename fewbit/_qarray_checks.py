"""What quantize, dequantize, pack and unpack say to values of another kind."""

from collections.abc import Mapping
from typing import Any

import jax

from fewbit._errors import describe, is_array_like
from fewbit._qarray_type import QArray, WithAux

_MSG_FLOATS = "fewbit.quantize(array, qtype) takes an array of floats, got {found}. {fix}"
_MSG_QARRAY = "fewbit.{name} takes {wanted}, got {found}. {fix}{tree}"
_MSG_TREE = (
    "fewbit.{name} takes parameters (a QArray or a tree of arrays), got {found}. Write "
    "fewbit.{name}(params)."
)
_DEQUANTIZE_TREE = (
    "For a tree: is_q = lambda x: isinstance(x, fewbit.QArray | fewbit.WithAux), then "
    "jax.tree.map(lambda x: fewbit.dequantize(x) if is_q(x) else x, tree, is_leaf=is_q)."
)


def check_floats(array: Any, qtype: Any) -> None:
    """Raise if `array` is no array, nor anything that becomes one.

    >>> check_floats([1.0, 2.0], 'int8')
    """
    if isinstance(array, QArray | WithAux):
        fix = "It is quantized already; for another type call fewbit.dequantize on it first."
    elif isinstance(array, str) and is_array_like(qtype):
        fix = f"The array comes first: fewbit.quantize(array, {array!r})."
    elif isinstance(array, Mapping):
        fix = (
            "A tree is quantized by fewbit.quantize_params(params, plan), or leaf by leaf: "
            "jax.tree.map(lambda x: fewbit.quantize(x, qtype), tree)."
        )
    elif array is None or isinstance(array, str) or (callable(array) and not is_array_like(array)):
        fix = "Write fewbit.quantize(jnp.asarray(numbers), 'int8')."
    else:
        return
    raise TypeError(_MSG_FLOATS.format(found=describe(array), fix=fix))


def check_qarray(name: str, value: Any) -> None:
    """Raise if `value` is not a QArray.

    >>> import jax.numpy as jnp
    >>> check_qarray('qarray.pack', jnp.ones(3))
    Traceback (most recent call last):
        ...
    TypeError: fewbit.qarray.pack takes a QArray, got a float32[3] array. It is not quantized, so it
    can be used as it is. For a tree: fewbit.pack(tree).
    """
    if isinstance(value, QArray):
        return
    fix = "It is not quantized, so it can be used as it is. " if is_array_like(value) else ""
    if isinstance(value, WithAux):
        fix = "Take what is in it: .array. "
    wanted, tree = "a QArray", f"For a tree: fewbit.{name.rpartition('.')[2]}(tree)."
    if name == "dequantize":
        wanted, tree = "a QArray or a WithAux of one", _DEQUANTIZE_TREE
    raise TypeError(
        _MSG_QARRAY.format(name=name, wanted=wanted, found=describe(value), fix=fix, tree=tree)
    )


def check_tree(name: str, tree: Any) -> None:
    """Raise if `tree` holds leaves, and none of them is an array.

    >>> check_tree('pack', {})
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QArray))
    if tree is None or (leaves and not any(map(_is_parameter, leaves))):
        raise TypeError(_MSG_TREE.format(name=name, found=describe(tree)))


def _is_parameter(leaf: Any) -> bool:
    # Shardings of a tree of parameters may be moved along with it.
    return is_array_like(leaf) or isinstance(leaf, QArray | jax.sharding.Sharding)
