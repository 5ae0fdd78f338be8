"""Gradients with amax histories among them: added up, clipped, applied.

A history in a tree of gradients is not a gradient but the history after the step. It is merged by
maximum where gradients are added, and replaces the old one where gradients are applied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fewbit.training.delayed import SUFFIX

COLLECTION = "_overwrite_with_gradient"  # where Flax keeps what its gradient replaces

_MSG_OPTIMIZER = (
    "overwrite_with_gradient takes an optax optimizer, such as optax.adam(1e-3), got {found}."
)
_MSG_TREES = (
    "accumulate takes two trees of gradients of one form, got {first} and {second}. Start with "
    "jax.tree.map(jnp.zeros_like, params) of the same params that are differentiated."
)


def is_history(path: tuple[Any, ...]) -> bool:
    """Whether the leaf at this path of a tree (a key path of JAX) is an amax history.

    >>> key = jax.tree_util.DictKey
    >>> is_history((key('up'), key('dot_general0_lhs_amax_history'))), is_history((key('up'),))
    (True, False)
    """
    names = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
    return any(name == COLLECTION or name.endswith(SUFFIX) for name in names)


def accumulate(total: Any, new: Any, weight: float | jax.Array = 1.0) -> Any:
    """`total` with the gradients of one more microbatch: added, times `weight`; histories by max.

    All microbatches of a step start from the same histories, so the largest of what they become is
    the history of the whole batch. For a mean over n microbatches give `weight=1/n`.

    >>> total = {'w': jnp.array([1.0]), 'dot_general0_lhs_amax_history': jnp.array([3.0, 1.0])}
    >>> new = {'w': jnp.array([2.0]), 'dot_general0_lhs_amax_history': jnp.array([2.0, 1.0])}
    >>> accumulate(total, new, weight=0.5)
    {'dot_general0_lhs_amax_history': Array([3., 1.], dtype=float32),
    'w': Array([2.], dtype=float32)}
    """
    first: Any = jax.tree.structure(total)
    second: Any = jax.tree.structure(new)
    if first != second:
        raise ValueError(_MSG_TREES.format(first=first, second=second))

    def merged(path: Any, a: Any, b: Any) -> Any:
        if is_history(path):
            return jnp.maximum(a, b)
        return a + (b * jnp.asarray(weight, b.dtype)).astype(jnp.asarray(a).dtype)

    return jax.tree_util.tree_map_with_path(merged, total, new)


def split_histories(tree: Any) -> tuple[Any, Any]:
    """A tree without its histories, and the histories alone: None stands for what is left out.

    >>> split_histories({'w': 1.0, 'dot_general0_lhs_amax_history': 2.0})
    ({'dot_general0_lhs_amax_history': None, 'w': 1.0},
    {'dot_general0_lhs_amax_history': 2.0, 'w': None})
    """
    by_path = jax.tree_util.tree_map_with_path
    rest = by_path(lambda path, leaf: None if is_history(path) else leaf, tree)
    return rest, by_path(lambda path, leaf: leaf if is_history(path) else None, tree)


def merge_histories(rest: Any, histories: Any) -> Any:
    """The inverse of `split_histories`.

    >>> merge_histories(*split_histories({'w': 1.0, 'dot_general0_lhs_amax_history': 2.0}))
    {'dot_general0_lhs_amax_history': 2.0, 'w': 1.0}
    """
    return jax.tree.map(
        lambda a, b: b if a is None else a, rest, histories, is_leaf=lambda leaf: leaf is None
    )


@jax.tree_util.register_pytree_node_class
class Overwrite:
    """An update that is no difference: what it is added to becomes its value, to the bit.

    >>> jnp.float32(100) + Overwrite(jnp.float32(1e-8))
    Array(1.e-08, dtype=float32)
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    __array_ufunc__ = None  # a numpy array leaves the addition to __radd__

    def __radd__(self, old: Any) -> Any:
        return self.value

    @property
    def dtype(self) -> Any:
        """The value's: an optimizer around ours may ask every update for it."""
        return self.value.dtype

    def __repr__(self) -> str:
        return f"Overwrite({self.value!r})"

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, static: None, children: Any) -> Overwrite:
        return cls(*children)


def overwrite_with_gradient(optimizer: Any) -> Any:
    """The optax optimizer for trees that hold histories beside parameters.

    Histories are taken out before the optimizer (and the clipping that is chained with it) sees the
    gradients, have no state in it, and are set by `optax.apply_updates` as they are. It goes around
    everything else: `overwrite_with_gradient(optax.chain(optax.clip_by_global_norm(1), ...))`.

    >>> import optax
    >>> tx = overwrite_with_gradient(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    >>> params = {'w': jnp.array([3.0]), 'dot_general0_lhs_amax_history': jnp.array([7.0])}
    >>> grads = {'w': jnp.array([50.0]), 'dot_general0_lhs_amax_history': jnp.array([9.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> optax.apply_updates(params, updates)
    {'dot_general0_lhs_amax_history': Array([9.], dtype=float32),
    'w': Array([2.], dtype=float32)}
    """
    if not callable(getattr(optimizer, "init", None)) or not hasattr(optimizer, "_replace"):
        raise TypeError(_MSG_OPTIMIZER.format(found=type(optimizer).__name__))

    def init(params: Any) -> Any:
        return optimizer.init(split_histories(params)[0])

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        rest, histories = split_histories(grads)
        own = None if params is None else split_histories(params)[0]
        updates, state = optimizer.update(rest, state, own, **extra)
        return merge_histories(updates, jax.tree.map(Overwrite, histories)), state

    return optimizer._replace(init=init, update=update)
