"""Attention of new tokens over a cache, which they enter, in one native call.

XLA copies and transposes every cache of a model for every token, and reads what is masked too. The
call writes the new keys and values where the cache lies and reads what may be looked at, once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from fewbit.kernels._library import native_available
from fewbit.kernels._partition import lower_alone, push_forward, run_eagerly

Attended = tuple[jax.Array, jax.Array, jax.Array]


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    start: Any,
    mask: jax.Array,
    enters: jax.Array | None = None,
    *,
    factor: float,
    soft_cap: float | None = None,
) -> Attended:
    """What new tokens see in a cache, and the cache with them in it.

    Native for float32 on one CPU device, the same through XLA elsewhere.

    Args:
      query: [batch, new, heads, dim].
      key: [batch, new, key heads, dim]; each key head serves heads // key heads of the query.
      value: the same.
      keys: the cache, [batch, length, key heads, dim].
      values: the same.
      start: where the first of the new tokens stands.
      mask: bool [batch, new, length], what each of them may look at; all False gives zeros.
      enters: bool [batch, new], which of them enter the cache; None: all.
      factor: of the scores, 1 / sqrt(dim) as a rule.
      soft_cap: scores become cap * tanh(score / cap).

    >>> one = jnp.ones((1, 1, 1, 2))
    >>> cache, mask = jnp.zeros((1, 3, 1, 2)), jnp.array([[[True, True, False]]])
    >>> out, keys, _ = cached_attention(one, one, one, cache, cache, 1, mask, factor=0.0)
    >>> out[0, 0, 0].tolist(), keys[0, :, 0, 0].tolist()
    ([0.5, 0.5], [0.0, 1.0, 0.0])
    """
    start = jnp.asarray(start, jnp.int32)
    if enters is None:
        enters = jnp.ones(query.shape[:2], bool)
    operands = query, key, value, keys, values, start, enters.astype(bool), mask.astype(bool)
    numbers: dict[str, Any] = dict(factor=float(factor), soft_cap=float(soft_cap or 0.0))
    floats = {x.dtype.name for x in operands[:5]}
    placed = any(entry is not None for x in operands for entry in jax.typeof(x).sharding.spec)
    if floats != {"float32"} or placed or not native_available():
        return _reference(*operands, **numbers)
    return tuple(cached_attention_p.bind(*operands, **numbers))


def _reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    start: jax.Array,
    enters: jax.Array,
    mask: jax.Array,
    *,
    factor: float,
    soft_cap: float,
) -> Attended:
    batch, new, heads, dim = query.shape

    def entered(cache: jax.Array, fresh: jax.Array) -> jax.Array:
        place = (0, start, 0, 0)
        there = jax.lax.dynamic_slice(cache, place, fresh.shape)
        fresh = jnp.where(enters[..., None, None], fresh.astype(cache.dtype), there)
        return jax.lax.dynamic_update_slice(cache, fresh, place)

    keys, values = entered(keys, key), entered(values, value)
    grouped = query.reshape(batch, new, keys.shape[2], -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys) * factor
    if soft_cap:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    seen = mask[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    weights = jnp.where(jnp.any(seen, axis=-1, keepdims=True), weights, 0)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(values.dtype), values)
    return out.reshape(query.shape).astype(query.dtype), keys, values


cached_attention_p = Primitive("fewbit_cached_attention")
cached_attention_p.multiple_results = True
run_eagerly(cached_attention_p, cached_attention_p.bind)


@cached_attention_p.def_abstract_eval
def _shapes(query: Any, key: Any, value: Any, keys: Any, values: Any, *rest: Any, **_: Any) -> Any:
    return query, keys, values


def _call(*operands: jax.Array, factor: float, soft_cap: float) -> Any:
    results = [jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in (0, 3, 4)]
    # The caches are the call's own to write to: XLA copies them before it if others need them.
    aliases = {3: 1, 4: 2}
    call = jax.ffi.ffi_call("fewbit_cached_attention", results, input_output_aliases=aliases)
    return call(*operands, factor=np.float32(factor), soft_cap=np.float32(soft_cap))


lower_alone(cached_attention_p, _call, _reference)


def _jvp(primals: Any, tangents: Any, **numbers: Any) -> Any:
    """A native call has no derivative of its own; the reference's is the definition."""
    return push_forward(functools.partial(_reference, **numbers), primals, tangents)


def _batch(args: Any, dims: Any, **numbers: Any) -> Any:
    return jax.vmap(functools.partial(_reference, **numbers), tuple(dims))(*args), [0, 0, 0]


ad.primitive_jvps[cached_attention_p] = _jvp
batching.primitive_batchers[cached_attention_p] = _batch
