"""Delayed scaling: the range of a step comes from the largest values of the steps before.

A history holds the largest magnitude of each past step, the latest first. Its derivative is the
history after the step: it comes out of `jax.grad` beside the gradients, and takes the place of the
old one. Inside a step a history is a *range*, two numbers: the largest value it remembers (0 if it
is empty), and a second one whose cotangent says that the step was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fewbit.ops import (
    CHECKPOINT_NAME,
    Paired,
    clip_gradient,
    delayed_absmax,
    differentiable_once,
    range_cotangent,
    reverse_only,
    tangent_only,
)
from fewbit.planning import SIDES
from fewbit.qarray import HowToQuantize, QArray, calibrate, quantize_with_absmax

SUFFIX = "_amax_history"

_MSG_ONCE = (
    "Delayed scaling has first derivatives, in reverse mode: the history after a step comes out of "
    "jax.grad (or vjp, jacrev) beside the gradients, and would be lost in forward mode and in "
    "second derivatives (jax.jvp, linearize, jacfwd, hessian, grad of grad). Use 'absmax' in place "
    "of 'delayed' where these are taken."
)


def empty_history(length: int, layers: tuple[int, ...] = ()) -> jax.Array:
    """A history of no steps: all zero.

    >>> empty_history(4)
    Array([0., 0., 0., 0.], dtype=float32)
    """
    return jnp.zeros((*layers, length), jnp.float32)


def delayed_range(history: jax.Array) -> jax.Array:
    """(largest value remembered, 0) of each history; its derivative is the history one step later.

    >>> history = jnp.array([1.0, 3.0, 2.0])
    >>> delayed_range(history)
    Array([3., 0.], dtype=float32)
    >>> step = lambda history: seen(0.0, delayed_range(history), jnp.float32(5))
    >>> jax.grad(step)(history)
    Array([5., 1., 3.], dtype=float32)
    """
    return _range(reverse_only(history, _MSG_ONCE))


@jax.custom_vjp
def _range(history: jax.Array) -> jax.Array:
    largest = jnp.max(history, axis=-1)
    return jnp.stack([largest, jnp.zeros_like(largest)], axis=-1)


def _range_backward(history: jax.Array, cotangent: jax.Array) -> Any:
    amax, ran = cotangent[..., :1], cotangent[..., 1:]
    later = jnp.concatenate([amax.astype(history.dtype), history[..., :-1]], axis=-1)
    return (jnp.where(ran > 0, later, history),)  # what did not run remembers what it knew


_range.defvjp(lambda history: (_range(history), history), _range_backward)


def seen(value: Any, ranges: Any, amax: Any) -> Any:
    """`value`; its derivative tells the ranges what the largest value of this step was.

    `ranges` and `amax` are trees of one form. Infinity and NaN are not remembered.

    >>> float(seen(1.0, jnp.zeros((2,)), jnp.float32(5)))
    1.0
    """
    return _seen(*reverse_only((value, ranges, amax), _MSG_ONCE))


@jax.custom_vjp
def _seen(value: Any, ranges: Any, amax: Any) -> Any:
    return value


def _seen_forward(value: Any, ranges: Any, amax: Any) -> Any:
    named = jax.tree.map(lambda a: checkpoint_name(a, CHECKPOINT_NAME), amax)
    return value, (named, jax.tree.map(tangent_only, value))


def _seen_backward(saved: Any, cotangent: Any) -> Any:
    amax, traces = saved
    cotangent = differentiable_once(cotangent, traces, _MSG_ONCE)
    return cotangent, jax.tree.map(range_cotangent, amax), jax.tree.map(jnp.zeros_like, amax)


_seen.defvjp(_seen_forward, _seen_backward)


def two_uses(history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A history for two products; what each of them makes of it is merged by maximum, not added.

    >>> use = lambda history, amax: seen(0.0, delayed_range(history), jnp.float32(amax))
    >>> def step(history):
    ...     first, second = two_uses(history)
    ...     return use(first, 5) + use(second, 7)
    >>> jax.grad(step)(jnp.array([1.0, 3.0, 2.0]))
    Array([7., 1., 3.], dtype=float32)
    """
    return _two_uses(reverse_only(history, _MSG_ONCE))


@jax.custom_vjp
def _two_uses(history: jax.Array) -> tuple[jax.Array, jax.Array]:
    return history, history


_two_uses.defvjp(
    lambda history: ((history, history), None),
    lambda _, cotangents: (jnp.maximum(*cotangents),),
)


def anchored(value: Any, ranges: Any) -> Any:
    """`value`, which every range is now part of: whoever differentiates it reaches them all.

    A history that no gradient reaches would come back as zeros, and so be forgotten.
    """
    return _anchored(*reverse_only((value, ranges), _MSG_ONCE))


@jax.custom_vjp
def _anchored(value: Any, ranges: Any) -> Any:
    return value


_anchored.defvjp(
    lambda value, ranges: (value, ranges),
    lambda ranges, cotangent: (cotangent, jax.tree.map(jnp.zeros_like, ranges)),
)


def quantize_delayed(
    array: jax.Array, delayed: jax.Array, how: HowToQuantize
) -> tuple[QArray, jax.Array]:
    """An array quantized with the scale of the steps before, and its largest value of this one.

    `how` has no axes but those of layers, for each of which there is one range.

    >>> how = HowToQuantize(qtype='int8')
    >>> q, amax = quantize_delayed(jnp.array([1.0, 4.0]), jnp.array([255.0, 0]), how)
    >>> q.qvalue, amax
    (Array([0, 2], dtype=int8), Array(4., dtype=float32))
    """
    array, delayed = jax.lax.stop_gradient((array, delayed))
    amax = calibrate(array, how)["absmax"].astype(jnp.float32)
    absmax = delayed_absmax(amax, delayed[..., 0].reshape(amax.shape))
    q = quantize_with_absmax(array, absmax, how)
    q = jax.tree.map(lambda part: checkpoint_name(part, CHECKPOINT_NAME), q)
    return q, amax.reshape(delayed.shape[:-1])


class Prepared(NamedTuple):
    """The operands of a product as delayed scales make them, and what the step tells histories."""

    operands: list[Any]
    ranges: Mapping[str, Any] = {}
    amax: Mapping[str, Any] = {}

    def told(self, out: jax.Array) -> jax.Array:
        """The product, through whose gradient the histories learn of the step."""
        return seen(out, dict(self.ranges), dict(self.amax)) if self.ranges else out


def prepared(
    operands: Sequence[Any], ranges: Mapping[str, Any], hows: Sequence[Any], clip: bool
) -> Prepared:
    """Both operands, each that has a range, and is quantized at all, with the codes it scales.

    `hows` has the fields of `HowToQuantize` for each operand that is quantized, None for others.
    """
    made, used, amax = list(operands), {}, {}
    for k, side in enumerate(SIDES):
        if side in ranges and hows[k] is not None:
            used[side] = ranges[side]
            q, amax[side] = quantize_delayed(made[k], used[side], HowToQuantize(**hows[k]))
            made[k] = Paired(clip_gradient(made[k], q) if clip else made[k], q)
    return Prepared(made, used, amax)


# --- Gradients with amax histories among them: added up, clipped, applied -------------------------

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
