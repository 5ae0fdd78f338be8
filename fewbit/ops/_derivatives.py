"""One training product: quantized forward, straight-through or quantized gradients.

The forward is the product that serving runs. With float gradients the derivative is that of the
float product on the original operands (of a convolution on the rounded ones), as a custom_jvp, so
that every transformation applies. With quantized gradients it is a custom_vjp, whose residuals are
the forward's codes where those serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fewbit.kernels import quantize_natively
from fewbit.numerics import format_of, should_quantize, wider
from fewbit.ops._operand import (
    Deferred,
    Paired,
    as_float,
    held,
    operand,
    pair,
    with_derivative,
)
from fewbit.qarray import (
    HowToQuantize,
    PanelArray,
    QArray,
    calibrate,
    get_tile_shape,
    parse_method,
    quantize_with_absmax,
)
from fewbit.rules import DotGeneralQtConfig, GradientSettings

# --- Derivatives that exist once, in reverse mode, and say so where others are asked for ----------

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


# --- One training product: quantized forward, straight-through or quantized gradients -------------

_MSG_SECOND_ORDER = (
    "{op} with quantized gradients cannot be differentiated twice: rounding a gradient has no "
    "useful derivative. Leave dlhs_grad_qtype and drhs_grad_qtype None (bwd_qtype=None in a rule) "
    "where second derivatives are taken; float gradients have them."
)
_MSG_FORWARD_MODE = (
    "{op} with quantized gradients has no forward-mode derivative (jax.jvp, jax.linearize, "
    "jax.jacfwd, jax.hessian): its gradients are rounded in the backward pass, which forward mode "
    "has not. Use reverse mode (jax.grad, jax.vjp, jax.jacrev), or leave dlhs_grad_qtype and "
    "drhs_grad_qtype None (bwd_qtype=None in a rule): float gradients have every derivative."
)


class Product(Protocol):
    """What the core asks of an op; side 0 is lhs, side 1 is rhs."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def differentiates_rounded(self) -> bool:
        """Whether float gradients are products of the rounded operands, or of the arrays."""

    def forward(self, lhs: Any, rhs: Any, *rest: Any) -> jax.Array:
        """The op on arrays, QArrays or Deferred ones."""

    def reuse(self, side: int, q: QArray) -> str | None:
        """How the gradient of the other side can use the codes of `side`: 'shift', 'as is'."""

    def shift(self, side: int, g: jax.Array, q: QArray, *rest: Any) -> jax.Array:
        """The scales of operand `side`, whose codes remain, as a factor of the gradient."""

    def joined(self, side: int, g: Any, residual: Any) -> tuple[Any, Any, Any]:
        """The same gradient product with its contraction as one axis: (product, g, residual)."""

    def gradient_how(
        self, side: int, settings: GradientSettings, noise: Any, shape: Any
    ) -> HowToQuantize:
        """How the incoming gradient is quantized for the gradient of `side`."""

    def residual_how(self, side: int, settings: GradientSettings, shape: Any) -> HowToQuantize:
        """How the other operand is quantized for the gradient of `side`."""

    def gradient(self, side: int, g: Any, residual: Any, like: Any, *rest: Any) -> jax.Array:
        """The gradient of `side`, with the type of `like`."""


def run(
    product: Product,
    operands: tuple[Any, Any],
    hows: tuple[HowToQuantize | None, HowToQuantize | None],
    config: DotGeneralQtConfig,
    rest: tuple[Any, ...] = (),
) -> jax.Array:
    """The product with its derivative; an operand that is a `Paired` is used as it is."""
    pairs = _pairs(operands, hows, config)
    arrays = tuple(jnp.asarray(p.array) for p in pairs)
    quantized = tuple(p.quantized for p in pairs)
    if config.quantizes_gradients:
        return _with_quantized_gradients(product, arrays, quantized, config, rest)
    if all(q is None for q in quantized):
        return product.forward(*arrays, *rest)
    return _straight_through(product, arrays, quantized, rest)


def _pairs(operands: Any, hows: Any, config: DotGeneralQtConfig) -> list[Paired]:
    clip = not config.disable_gradient_clipping
    result: list[Paired] = []
    for side, (x, how) in enumerate(zip(operands, hows, strict=True)):
        if isinstance(x, Paired):
            q = None if x.quantized is None else held(x.quantized)
            result.append(Paired(x.array, q))
            continue
        x = jnp.asarray(x)
        if how is None or not should_quantize(x.dtype):
            result.append(Paired(x))
        elif _kernel_quantizes(operands[1 - side], how, config, side):
            result.append(Paired(x, Deferred(jax.lax.stop_gradient(x), how)))
        else:
            result.append(pair(x, how, clip=clip, collect=config.collect(side)))
    return result


def _kernel_quantizes(other: Any, how: HowToQuantize, config: Any, side: int) -> bool:
    """A kernel that reads panels quantizes rows itself; nothing else needs the codes then."""
    if config.quantizes_gradients or config.collect(side) is not None:
        return False
    if parse_method(how.calibration_method).clips and not config.disable_gradient_clipping:
        return False
    return isinstance(other, Paired) and isinstance(
        getattr(other.quantized, "array", other.quantized), PanelArray
    )


def _seen(array: Any, quantized: Any) -> Any:
    return array if quantized is None else quantized


def _multiplied(product: Product, arrays: Any, quantized: Any) -> tuple[jax.Array, ...]:
    """What a float gradient multiplies: the arrays, or what they were rounded to.

    A rounded one has the derivative of its array, so that there is a second derivative.
    """
    if not product.differentiates_rounded:
        return tuple(arrays)
    return tuple(
        x if q is None else with_derivative(as_float(operand(q), x.dtype), _itself, x)
        for x, q in zip(arrays, quantized, strict=True)
    )


def _itself(x: jax.Array) -> jax.Array:
    return x


def _straight_through(product: Product, arrays: Any, quantized: Any, rest: Any) -> jax.Array:
    @jax.custom_jvp
    def straight(arrays: Any, quantized: Any, rest: Any) -> jax.Array:
        value = product.forward(*map(_seen, arrays, quantized), *rest)
        return with_derivative(
            value, product.forward, *_multiplied(product, arrays, quantized), *rest
        )

    def derivative(primals: Any, tangents: Any) -> Any:
        arrays, quantized, rest = primals
        moving = [k for k, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]

        def float_product(*values: Any) -> jax.Array:
            filled = list(arrays)
            for k, value in zip(moving, values, strict=True):
                filled[k] = value
            return product.forward(*filled, *rest)

        value = straight(*primals)
        if not moving:
            return value, jnp.zeros_like(value)
        arrays = _multiplied(product, arrays, quantized)
        at = tuple(arrays[k] for k in moving)
        _, tangent = jax.jvp(float_product, at, tuple(tangents[0][k] for k in moving))
        return value, tangent.astype(value.dtype)  # of bfloat16 and float16 codes make float32

    straight.defjvp(derivative, symbolic_zeros=True)
    return straight(arrays, quantized, rest)


def _with_quantized_gradients(
    product: Product, arrays: Any, quantized: Any, config: DotGeneralQtConfig, rest: Any
) -> jax.Array:
    likes = tuple(jax.typeof(x) for x in arrays)
    settings = (config.gradient(0), config.gradient(1))
    noises = tuple(_noise_operand(s.noise_fn) for s in settings)
    kept = [_residual_kind(product, config, side, arrays, quantized) for side in (0, 1)]

    @jax.custom_vjp
    def quantized_training(
        arrays: Any, quantized: Any, rest: Any, noises: Any, delayed: Any
    ) -> jax.Array:
        return product.forward(*map(_seen, arrays, quantized), *rest)

    def forward(arrays: Any, quantized: Any, rest: Any, noises: Any, delayed: Any) -> Any:
        out = quantized_training(arrays, quantized, rest, noises, delayed)
        # What the gradient of `side` needs of the other operand: its codes or its numbers.
        floats = {"float": arrays}
        if "rounded" in kept:
            floats["rounded"] = _multiplied(product, arrays, quantized)
        residuals = [
            floats[kept[side]][1 - side] if kept[side] in floats else operand(quantized[1 - side])
            for side in (0, 1)
        ]
        # Nothing, but it carries the operands' tangents to where they are refused.
        traces = [tangent_only(x) for x in arrays]
        return out, (residuals, traces, rest, noises, delayed)

    def backward(saved: Any, g: jax.Array) -> Any:
        residuals, traces, rest, noises, delayed = saved
        again = _MSG_SECOND_ORDER.format(op=product.name)
        g = differentiable_once(g, (residuals, traces), again)
        absmax = told = None
        if delayed is not None:
            amax = _largest(g)
            absmax, told = delayed_absmax(amax, delayed[0]), range_cotangent(amax)
        gradients = tuple(
            _gradient(
                product,
                side,
                g,
                residuals[side],
                kept[side],
                settings[side],
                settings[side].noise_fn if noises[side] is None else noises[side],
                likes[side],
                rest,
                absmax,
            )
            for side in (0, 1)
        )
        return gradients, None, None, None, told

    quantized_training.defvjp(forward, backward)
    operands = arrays, quantized, rest, noises, config.grad_delayed_range
    return quantized_training(*reverse_only(operands, _MSG_FORWARD_MODE.format(op=product.name)))


def _noise_operand(noise_fn: Any) -> Any:
    """A noise function that holds its key as a pytree is an operand; any other is a constant."""
    leaves = jax.tree.leaves(noise_fn)
    return noise_fn if all(isinstance(leaf, jax.Array) for leaf in leaves) else None


def _residual_kind(
    product: Product, config: DotGeneralQtConfig, side: int, arrays: Any, quantized: Any
) -> str:
    """What the gradient of `side` multiplies with: 'shift', 'as is', 'float' or 'rounded'."""
    q, settings = quantized[1 - side], config.gradient(side)
    anew = settings.qtype is not None and settings.residual_qtype is not None
    own = "rounded" if product.differentiates_rounded and not anew else "float"
    if config.use_original_residuals:
        return "float"
    if settings.qtype is None:
        return own
    if not isinstance(q, QArray):  # no codes: the float array itself, or sums of codes
        return own
    row = format_of(q.qtype)
    if row.kind == "table" or row.tile is not None or q.zero_point is not None:
        return own
    if settings.delayed and q.scale.size == 1:
        return "as is"  # one scale commutes with the product: the gradient keeps its own range
    return product.reuse(1 - side, q) or own


def _gradient(
    product: Product,
    side: int,
    g: jax.Array,
    residual: Any,
    kind: str,
    settings: GradientSettings,
    noise: Any,
    like: Any,
    rest: Any,
    absmax: Any = None,
) -> Any:
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return None
    if settings.qtype is None:
        return _float_gradient(product, side, g, residual, like, rest)
    # Gradients are quantized from float32: a bfloat16 quotient is too coarse for 8 bits.
    g = g.astype(wider(g.dtype, jnp.float32))
    factor = None
    if kind == "shift":
        # The residual's scales differ along axes that this product sums, so they cannot come after
        # it. The gradient has these axes too and takes them over; the codes stay as they are.
        factor = product.shift(1 - side, g, residual, *rest)
        if absmax is not None:  # no more than the largest scale times what it was before
            absmax = absmax * jnp.max(jnp.abs(residual.scale)).astype(absmax.dtype)
        residual = residual.replace(scale=jnp.ones((1,) * residual.ndim, jnp.float32), tiles=())
    # Else the quantization multiplies with it; a tile or a remembered range is of the product.
    if factor is not None and (settings.tile_size is not None or settings.delayed):
        g, factor = g * factor, None
    if settings.tile_size is not None and not isinstance(settings.tile_size, Mapping):
        # Several summed axes become one, which alone has tiles.
        product, g, residual = product.joined(side, g, residual)
    if kind == "float" and settings.residual_qtype is not None:
        residual = _quantize(residual, product.residual_how(side, settings, residual.shape))
    how = product.gradient_how(side, settings, noise, g.shape)
    if settings.delayed:
        q = quantize_with_absmax(g, jnp.reshape(absmax, (1,) * g.ndim), how)
    else:
        q = _quantize(g, how, factor)
    return product.gradient(side, q, residual, like, *rest)


def _largest(g: jax.Array) -> jax.Array:
    how = HowToQuantize(qtype="float8_e5m2")  # any type: only the range is asked for
    return calibrate(g, how)["absmax"].astype(jnp.float32).reshape(())


def _quantize(array: jax.Array, how: HowToQuantize, factor: Any = None) -> QArray:
    """The array, times the factor, quantized.

    Even tiles are made an axis of their own, as native code wants them.
    """
    if factor is not None:
        shifted = quantize_natively(array, how, factor)
        return _quantize(array * factor, how) if shifted is None else shifted
    tiled = list(how.tiled_axes)
    axis = tiled[0] if len(tiled) == 1 else 0
    tile = get_tile_shape(array.shape, how)[axis] if len(tiled) == 1 else 1
    if tile == 1 or array.shape[axis] % tile or format_of(how.qtype).tile is not None:
        return Deferred(array, how).quantized()
    own = [a + (a > axis) for a in how.channelwise_axes]
    split = how.replace(channelwise_axes=[*own, axis], tiled_axes={})
    shape = array.shape
    cut = array.reshape(*shape[:axis], shape[axis] // tile, tile, *shape[axis + 1 :])
    q = quantize_natively(cut, split)
    if q is None:
        return Deferred(array, how).quantized()
    scale = jnp.squeeze(q.scale, axis + 1)
    return QArray(q.qvalue.reshape(shape), scale, None, how.qtype).with_dtype(array.dtype)


def _float_gradient(
    product: Product, side: int, g: jax.Array, other: jax.Array, like: Any, rest: Any
) -> jax.Array:
    def linear(x: jax.Array) -> jax.Array:
        return product.forward(*((x, other) if side == 0 else (other, x)), *rest)

    (gradient,) = jax.linear_transpose(
        linear, jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=explicit_sharding(like))
    )(g)
    return gradient


def explicit_sharding(aval: Any) -> Any:
    """The placement that is part of the type, on an explicit mesh; None elsewhere."""
    sharding = aval.sharding
    return sharding if any(entry is not None for entry in sharding.spec) else None


def delayed_absmax(amax: jax.Array, largest: jax.Array) -> jax.Array:
    """What the scale of a step covers: what is remembered, of nothing what is there now.

    An array that is not finite has no range; its codes must not pass for numbers.

    >>> now = jnp.float32(5)
    >>> delayed_absmax(now, jnp.float32(3)), delayed_absmax(now, jnp.zeros(()))
    (Array(3., dtype=float32), Array(5., dtype=float32))
    """
    known = jnp.where(largest > 0, largest, amax)
    return jnp.where(jnp.isfinite(amax), known, jnp.array(jnp.nan, known.dtype))


def range_cotangent(amax: jax.Array) -> jax.Array:
    """What tells a range that a step had this largest value."""
    amax = jnp.where(jnp.isfinite(amax), amax, jnp.zeros_like(amax))
    return jnp.stack([amax, jnp.ones_like(amax)], axis=-1)
