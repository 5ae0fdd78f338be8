"""Derivatives that exist once, in reverse mode, and say so where others are asked for.

A `custom_vjp` has no forward mode, and JAX's own words for that know neither the product nor the
cure. So what goes into one is guarded: its tangents pass through a primitive that has a transpose
and nothing else. Reverse mode only ever transposes it; whoever runs it wanted forward mode.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fewbit.straight import with_derivative

reverse_only_p = Primitive("fewbit_reverse_only")
"""From a mark per primal, then the tangents, to the tangents; running it raises `message`."""
reverse_only_p.multiple_results = True

mark_p = Primitive("fewbit_mark")
"""An array without values that is mapped by `vmap` where its operand is."""


def reverse_only(values: Any, message: str) -> Any:
    """The values, a tree; forward mode through them raises NotImplementedError(message).

    >>> def f(x):
    ...     return (reverse_only(x, 'reverse mode only') ** 2).sum()
    >>> jax.grad(f)(jnp.ones((2,)))
    Array([2., 2.], dtype=float32)
    >>> try:
    ...     jax.jvp(f, (jnp.ones((2,)),), (jnp.ones((2,)),))
    ... except NotImplementedError as error:
    ...     print(error)
    reverse mode only
    """
    leaves, tree = jax.tree.flatten(values)
    moving = [k for k, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

    @jax.custom_jvp
    def guarded(*values: Any) -> Any:
        # Where only this body is left, in a scan that was differentiated, it refuses the second.
        return tuple(with_derivative(x, lambda x: _refuse(message=message), x) for x in values)

    def tangents_of(primals: Any, tangents: Any) -> Any:
        known = [k for k, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        # All in one, because one that happens to be known would run if it were alone.
        marks = [mark_p.bind(primals[k]) for k in known]
        passed = reverse_only_p.bind(*marks, *(tangents[k] for k in known), message=message)
        result = list(tangents)
        for k, tangent in zip(known, passed, strict=True):
            result[k] = tangent
        return guarded(*primals), tuple(result)

    guarded.defjvp(tangents_of, symbolic_zeros=True)
    for k, x in zip(moving, guarded(*(leaves[k] for k in moving)), strict=True):
        leaves[k] = x
    return jax.tree.unflatten(tree, leaves)


def _refuse(*operands: Any, message: str) -> NoReturn:
    raise NotImplementedError(message)


def _types(*operands: Any, message: str) -> list[Any]:
    return list(operands[len(operands) // 2 :])


def _transpose(cotangents: Any, *operands: Any, message: str) -> list[Any]:
    n = len(operands) // 2
    passed = zip(cotangents, operands[n:], strict=True)
    return [None] * n + [ct if ad.is_undefined_primal(t) else None for ct, t in passed]


def _batch(operands: Any, dims: Any, *, message: str) -> Any:
    n = len(operands) // 2
    mapped = [dim is not None for dim in dims]
    # Reverse mode over vmap maps both. Tangents alone are mapped by jacfwd and hessian.
    if any(tangent and not mark for mark, tangent in zip(mapped[:n], mapped[n:], strict=True)):
        raise NotImplementedError(message)
    return reverse_only_p.bind(*operands, message=message), list(dims[n:])


reverse_only_p.def_impl(_refuse)
reverse_only_p.def_abstract_eval(_types)
mlir.register_lowering(reverse_only_p, lambda ctx, *operands, message: _refuse(message=message))
ad.primitive_transposes[reverse_only_p] = _transpose
ad.primitive_jvps[reverse_only_p] = lambda primals, tangents, *, message: _refuse(message=message)
batching.primitive_batchers[reverse_only_p] = _batch


def _mark(x: Any) -> jax.Array:
    return jnp.zeros((0,), jnp.float32)


def _mark_mapped(operands: Any, dims: Any) -> Any:
    return jnp.zeros((operands[0].shape[dims[0]], 0), jnp.float32), 0


def _mark_jvp(primals: Any, tangents: Any) -> Any:
    mark = mark_p.bind(*primals)
    return mark, ad.Zero(jax.typeof(mark).to_tangent_aval())


mark_p.def_impl(_mark)
mark_p.def_abstract_eval(lambda x: jax.core.ShapedArray((0,), jnp.dtype("float32")))
mlir.register_lowering(mark_p, mlir.lower_fun(_mark, multiple_results=False))
ad.primitive_jvps[mark_p] = _mark_jvp
batching.primitive_batchers[mark_p] = _mark_mapped


def differentiable_once(value: Any, traces: Any, message: str) -> Any:
    """The value; differentiating it, or anything that `traces` come from, raises the message.

    Called in a backward pass it refuses second derivatives. `traces` are what the forward pass kept
    with `tangent_only`, for gradients that do not depend on the incoming one alone.
    """

    @jax.custom_jvp
    def passed(value: Any, traces: Any) -> Any:
        return value

    @passed.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(message)

    return passed(value, traces)


@jax.custom_jvp
def tangent_only(x: jax.Array) -> jax.Array:
    """An array without values that has a tangent where `x` has one."""
    return jnp.zeros((0,), jnp.float32)


@tangent_only.defjvp
def _tangent_of_nothing(primals: Any, tangents: Any) -> Any:
    # Made from the tangent, or JAX would see that it is zero.
    total = jnp.sum(tangents[0]).astype(jnp.float32).reshape(1)
    return tangent_only(*primals), jax.lax.slice_in_dim(total, 0, 0)
