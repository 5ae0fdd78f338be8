"""What the primitives over a packed weight share: its plain form, derivatives, `vmap` over it.

Their operands are x, act_scale, and then `data`, `scale`, `zero`, `tensor_scale` and `layer` of the
weight; their one parameter is `spec`, with `qtype`, `k`, `n`, `tile` and `act` among its fields.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from fewbit._qarray_atoms import whole_axes
from fewbit._qarray_panels import PanelArray, Panels
from fewbit.kernels._partition import zero_with_devices


def entry_of(
    spec: Any, data: Any, scale: Any, zero: Any, tensor_scale: Any, layer: Any
) -> PanelArray:
    """One entry of the stack as an array [k, n]."""
    dims, groups = (spec.k, spec.n), 1 if spec.tile == 0 else -(-spec.k // spec.tile)
    view = Panels("kn", dims, (groups, spec.n), spec.tile, whole_axes(dims), 1)
    tensor_scale = tensor_scale if spec.qtype == "nvfp4" else None
    parts = data, scale, zero if zero.size else None, tensor_scale
    return PanelArray(*parts, layer, static=(spec.qtype, "float32", (), "panels", view))


def binding(primitive: Primitive) -> Callable[..., jax.Array]:
    """How to bind it, with what its lowering needs around it; gives it its eager form too."""

    def bind(*args: jax.Array, spec: Any) -> jax.Array:
        return primitive.bind(*args[:-1], args[-1] + zero_with_devices(), spec=spec)

    @functools.lru_cache(maxsize=1024)
    def compiled(spec: Any) -> Any:
        return jax.jit(functools.partial(bind, spec=spec))

    @primitive.def_impl
    def run(*args: jax.Array, spec: Any) -> jax.Array:
        with jax.disable_jit(False):  # else this would call itself for ever
            return compiled(spec)(*args)

    return bind


def jvp_in_x(
    what: str, bind: Callable[..., jax.Array], reference: Callable[..., jax.Array]
) -> Callable[..., tuple[jax.Array, Any]]:
    """The derivative of what is linear in a float x.

    Straight-through rules for a quantized x are the caller's: this knows codes, not their gradient.
    """

    def jvp(primals: Any, tangents: Any, *, spec: Any) -> tuple[jax.Array, Any]:
        out = bind(*primals, spec=spec)
        if spec.act != "none":
            raise NotImplementedError(
                f"A {what} has no derivative of its own: differentiate the quantized model, whose "
                "rules pass gradients straight through."
            )
        if not all(isinstance(t, ad.Zero) for t in tangents[1:]):  # scales that are being trained
            whole = [ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for t in tangents]
            function = functools.partial(reference, spec=spec)
            return out, jax.jvp(function, tuple(primals), tuple(whole))[1]
        if isinstance(tangents[0], ad.Zero):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, bind(tangents[0], *primals[1:], spec=spec)

    return jvp


def one_by_one(
    bind: Callable[..., jax.Array], args: Any, dims: Any, spec: Any
) -> tuple[jax.Array, int]:
    """`vmap` where the weight is mapped over too: one call after the other."""
    moving = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None]

    def one(entries: Any) -> jax.Array:
        rest = iter(entries)
        each = [a if d is None else next(rest) for a, d in zip(args, dims, strict=True)]
        return bind(*each, spec=spec)

    return jax.lax.map(one, moving), 0


def leading(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    """`a` with its mapped axis in front, as often as needed if it is not mapped."""
    return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)
