"""Which leaves of a parameter tree gradients reach, and how to give `jax.grad` only those.

`jax.grad` looks at the leaves before any function runs: on a tree with quantized leaves it says
"grad requires real- or complex-valued inputs ... but got int8". So the tree is split before, and
merged inside.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fewbit._errors import describe, is_array_like
from fewbit.qarray import QArray, WithAux

_MSG_NO_PARAMS = (
    "fewbit.{name} takes parameters (a tree of arrays), got {found}. Write fewbit.{name}(params)."
)
_MSG_PARTS = (
    "The two parts do not fit together at {path}: {what}. merge_trainable takes the two trees that "
    "one call of split_trainable returned; each leaf is None in exactly one of them."
)


def _is_stored(value: Any) -> bool:
    return isinstance(value, WithAux | QArray)


def trainable(params: Any) -> Any:
    """A tree of bools: True where a leaf can be differentiated (float, not quantized).

    The mask for `optax.masked`. Where `jax.grad` says that it got int8, `split_trainable` gives it
    the float leaves alone; for NNX write
    `nnx.grad(loss, argnums=nnx.DiffState(0, fewbit.float_params()))`.

    >>> import fewbit, jax.numpy as jnp
    >>> q = fewbit.quantize(jnp.ones((2, 2)), 'int8')
    >>> trainable({'w': q, 'b': jnp.zeros(2), 'step': jnp.array(0)})
    {'b': True, 'step': False, 'w': False}
    """

    return _mask("trainable", params)


def _mask(name: str, params: Any) -> Any:
    def is_number(value):
        return _is_stored(value) or is_array_like(value) or isinstance(value, bool | int | float)

    def can(value):
        # Equinox modules and the like have functions and strings among their leaves.
        if _is_stored(value) or not is_number(value):
            return False
        return bool(jnp.issubdtype(jnp.result_type(value), jnp.floating))

    leaves = jax.tree.leaves(params, is_leaf=_is_stored)
    if params is None or (leaves and not any(map(is_number, leaves))):
        raise TypeError(_MSG_NO_PARAMS.format(name=name, found=describe(params)))
    return jax.tree.map(can, params, is_leaf=_is_stored)


def split_trainable(params: Any) -> tuple[Any, Any]:
    """The float leaves and the rest: two trees like `params`, None where the other has a leaf.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8')]
    >>> def f(params, x):
    ...     return x @ params['w'] + params['b']
    >>> params, x = {'w': jnp.eye(2), 'b': jnp.zeros((1, 2))}, jnp.ones((3, 2))
    >>> params = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    >>> qf = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
    >>> floats, rest = split_trainable(params)
    >>> def loss(floats, rest, x):
    ...     return qf(merge_trainable(floats, rest), x).sum()
    >>> jax.grad(loss)(floats, rest, x)
    {'b': Array([[3., 3.]], dtype=float32), 'w': None}
    """
    mask = _mask("split_trainable", params)
    floats = jax.tree.map(lambda m, v: v if m else None, mask, params)
    rest = jax.tree.map(lambda m, v: None if m else v, mask, params)
    return floats, rest


def merge_trainable(floats: Any, rest: Any) -> Any:
    """The tree that `split_trainable` took apart.

    >>> merge_trainable({'a': 1.0, 'b': None}, {'a': None, 'b': 2})
    {'a': 1.0, 'b': 2}
    """

    def one(keypath, a, b):
        if a is None or b is None:
            return b if a is None else a
        path = jax.tree_util.keystr(keypath)
        raise ValueError(_MSG_PARTS.format(path=path, what="both have a leaf there"))

    is_leaf = lambda x: x is None or _is_stored(x)  # noqa: E731
    try:
        return jax.tree_util.tree_map_with_path(one, floats, rest, is_leaf=is_leaf)
    except ValueError as error:
        if "do not fit together" in str(error):
            raise
        path, what = _first_difference(floats, rest)
        raise ValueError(_MSG_PARTS.format(path=path, what=what)) from error


def _first_difference(floats: Any, rest: Any) -> tuple[str, str]:
    """Where two trees part, in words: JAX's own sentence may print whole arrays."""
    is_leaf = lambda x: x is None or _is_stored(x)  # noqa: E731
    kinds = f"the first is {describe(floats)}, the second {describe(rest)}"
    if type(floats) is not type(rest):
        return "the top", kinds
    flat = [jax.tree_util.tree_flatten_with_path(t, is_leaf=is_leaf)[0] for t in (floats, rest)]
    paths = [[jax.tree_util.keystr(key) for key, _ in leaves] for leaves in flat]
    for here, there, which in ((*paths, "first"), (*paths[::-1], "second")):
        only = [path for path in here if path not in set(there)]
        if only:
            return only[0], f"only the {which} has it"
    return "the top", kinds
