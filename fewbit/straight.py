"""A value with a derivative of another function, which it keeps wherever a program is taken apart.

`jax.custom_jvp` alone does not: the backward pass of a scan is made from the function's body, and a
second derivative then is that of the body. So the body ends in a primitive with the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

with_derivative_p = Primitive("fewbit_with_derivative")
"""From a value and the arguments of `function`: the value, with the derivative of `function`."""


def with_derivative(value: jax.Array, function: Callable[..., Any], *arguments: Any) -> jax.Array:
    """The value, which has the derivatives that `function(*arguments)` has.

    Arguments are trees; `function` closes over nothing that is traced. A function with a derivative
    of its own may end so in itself. The value's own derivative is not taken.

    >>> import jax
    >>> f = lambda x: with_derivative(jax.numpy.round(x), lambda x: x**2, x)
    >>> jax.value_and_grad(f)(jax.numpy.float32(1.5))
    (Array(2., dtype=float32), Array(3., dtype=float32))
    """
    leaves, tree = jax.tree.flatten(arguments)

    def flat(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    return with_derivative_p.bind(jax.lax.stop_gradient(value), *leaves, function=flat)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Any) -> Any:
    arguments = primals[1:]
    moving = [
        k
        for k, (x, t) in enumerate(zip(arguments, tangents[1:], strict=True))
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact) and not isinstance(t, ad.Zero)
    ]
    out = with_derivative_p.bind(*primals, function=function)
    if not moving:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())

    def of_moving(*values: Any) -> Any:
        filled = list(arguments)
        for k, value in zip(moving, values, strict=True):
            filled[k] = value
        return function(*filled)

    at = tuple(arguments[k] for k in moving)
    _, tangent = jax.jvp(of_moving, at, tuple(tangents[1 + k] for k in moving))
    return out, tangent.astype(out.dtype)


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, function: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    value, *arguments = operands
    if dims[0] is None:
        value = jnp.broadcast_to(value, (size, *value.shape))
    else:
        value = jnp.moveaxis(value, dims[0], 0)
    if all(d is None for d in dims[1:]):
        mapped = jax.vmap(function, in_axes=None, axis_size=size)
    else:
        mapped = jax.vmap(function, in_axes=tuple(dims[1:]))
    return with_derivative_p.bind(value, *arguments, function=mapped), 0


with_derivative_p.def_impl(lambda value, *arguments, function: value)
with_derivative_p.def_abstract_eval(lambda value, *arguments, function: value)
mlir.register_lowering(with_derivative_p, lambda ctx, value, *arguments, function: [value])
ad.primitive_jvps[with_derivative_p] = _jvp
batching.primitive_batchers[with_derivative_p] = _batch
