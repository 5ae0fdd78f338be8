"""One training product: quantized forward, straight-through or quantized gradients.

The forward is the product that serving runs. With float gradients the derivative is that of the
float product on the original operands, as a custom_jvp, so that every transformation applies. With
quantized gradients it is a custom_vjp, whose residuals are the forward's codes where those serve.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fewbit import ops
from fewbit._qarray_panels import PanelArray
from fewbit.calibration import calibrate, parse_method
from fewbit.kernels import quantize_natively
from fewbit.numerics import format_of, should_quantize, wider
from fewbit.ops.scaling import held, operand
from fewbit.qarray import HowToQuantize, QArray, get_tile_shape
from fewbit.straight import with_derivative
from fewbit.training.configs import DotGeneralQtConfig, GradientSettings
from fewbit.training.delayed import delayed_absmax, quantize_with_absmax, range_cotangent
from fewbit.training.paired import Paired, pair
from fewbit.training.reverse_only import differentiable_once, reverse_only, tangent_only

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
            result.append(Paired(x, ops.Deferred(jax.lax.stop_gradient(x), how)))
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


def _straight_through(product: Product, arrays: Any, quantized: Any, rest: Any) -> jax.Array:
    @jax.custom_jvp
    def straight(arrays: Any, quantized: Any, rest: Any) -> jax.Array:
        value = product.forward(*map(_seen, arrays, quantized), *rest)
        return with_derivative(value, product.forward, *arrays, *rest)

    def derivative(primals: Any, tangents: Any) -> Any:
        arrays, _, rest = primals
        moving = [k for k, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]

        def float_product(*values: Any) -> jax.Array:
            filled = list(arrays)
            for k, value in zip(moving, values, strict=True):
                filled[k] = value
            return product.forward(*filled, *rest)

        value = straight(*primals)
        if not moving:
            return value, jnp.zeros_like(value)
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
        residuals = [
            arrays[1 - side] if kept[side] == "float" else operand(quantized[1 - side])
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
    """What the gradient of `side` multiplies with: 'shift', 'as is' or 'float'."""
    q = quantized[1 - side]
    if config.gradient(side).qtype is None or config.use_original_residuals:
        return "float"
    if not isinstance(q, QArray):  # no codes: the float array itself, or sums of codes
        return "float"
    row = format_of(q.qtype)
    if row.kind == "table" or row.tile is not None or q.zero_point is not None:
        return "float"
    if config.gradient(side).delayed and q.scale.size == 1:
        return "as is"  # one scale commutes with the product: the gradient keeps its own range
    return product.reuse(1 - side, q) or "float"


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
        factor = product.shift(1 - side, g, residual, *rest)
        if absmax is not None:  # no more than the largest scale times what it was before
            absmax = absmax * jnp.max(jnp.abs(residual.scale)).astype(absmax.dtype)
        residual = residual.replace(scale=jnp.ones((1,) * residual.ndim, jnp.float32), tiles=())
    if factor is not None and (settings.tile_size is not None or settings.delayed):
        g, factor = g * factor, None
    if settings.tile_size is not None:
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
    if tile == 1 or array.shape[axis] % tile:
        return ops.Deferred(array, how).quantized()
    own = [a + (a > axis) for a in how.channelwise_axes]
    split = how.replace(channelwise_axes=[*own, axis], tiled_axes={})
    shape = array.shape
    cut = array.reshape(*shape[:axis], shape[axis] // tile, tile, *shape[axis + 1 :])
    q = quantize_natively(cut, split)
    if q is None:
        return ops.Deferred(array, how).quantized()
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
