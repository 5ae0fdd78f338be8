"""What products are given: arrays that are still to be quantized, and floats beside their codes.

Here are also the steps that every product on codes is made of (codes, tile splitting, scales,
placement), and values that have the derivative of another function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fewbit.kernels import quantize_natively
from fewbit.numerics import format_of, get_symmetric_bound, wider
from fewbit.ops._arithmetic import tile_on, unwrap
from fewbit.qarray import (
    HowToQuantize,
    PanelArray,
    QArray,
    calibrate,
    compute_scale_zero_point,
    dequantize,
    get_tile_shape,
    map_tiles,
    parse_method,
    quantize_static,
    quantize_with,
    quantize_with_scale_zero_point,
    uneven_tiles,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Deferred:
    """A float array and how to quantize it, as an operand of `dot_general` or `einsum`.

    With a `scale` (and a `zero_point`, if the method has one) it is not measured: these were stored
    when the model was calibrated.

    >>> import jax.numpy as jnp
    >>> Deferred(jnp.ones((2, 4)), HowToQuantize(qtype='int8')).quantized().qtype
    dtype('int8')
    """

    array: jax.Array
    how: HowToQuantize = field(metadata=dict(static=True))
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def quantized(self) -> QArray:
        """The QArray it stands for."""
        if self.scale is not None:
            return quantize_static(self.array, self.how, self.scale, self.zero_point)
        native = quantize_natively(self.array, self.how)
        return quantize_with(self.array, self.how) if native is None else native


# --- The steps that every product on codes is made of: codes, tile splitting, scales, placement ---


def operand(value: Any) -> QArray | jax.Array:
    """What an op was given, as a QArray with one code per element or a jax array."""
    value = unwrap(value)
    if isinstance(value, Deferred):
        return value.quantized()
    if isinstance(value, PanelArray):
        return value.plain()
    return value if isinstance(value, QArray) else jnp.asarray(value)


def held(value: Any) -> Any:
    """What an op was given, with panels and activations still to quantize left as they are."""
    value = unwrap(value)
    return value if isinstance(value, PanelArray | Deferred) else operand(value)


def promote(*dtypes: Any) -> Any:
    """The common dtype under the usual lattice, whatever promotion mode the caller runs under."""
    wide = []
    for dtype in map(jnp.dtype, dtypes):
        tiny_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
        wide.append(jnp.dtype(jnp.bfloat16) if tiny_float else dtype)
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, wide)


def result_dtype(operands: Sequence[Any], preferred_element_type: Any) -> Any:
    """preferred_element_type, or the promotion of the operands' logical dtypes."""
    if preferred_element_type is not None:
        return jax.dtypes.canonicalize_dtype(preferred_element_type)
    return promote(*(value.dtype for value in operands))


def plain_types(operands: Sequence[Any], preferred_element_type: Any) -> tuple[Any, Any]:
    """What a product of plain arrays sums in, and what its result has; None leaves it to JAX.

    JAX would sum int8 in int8, which wraps, and float8 in float8. Sums of whole numbers of up to a
    byte are int32, as with codes, those of one-byte floats bfloat16.
    """
    dtypes = [jnp.dtype(value.dtype) for value in operands]
    if any(dtype.itemsize > 1 for dtype in dtypes):
        return preferred_element_type, None
    if all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        return jnp.dtype(jnp.int32), jnp.dtype(preferred_element_type or jnp.int32)
    if preferred_element_type is None and all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
        return jnp.dtype(jnp.bfloat16), None
    return preferred_element_type, None


def plain_product(
    function: Callable[..., jax.Array], operands: Sequence[Any], preferred: Any, **settings: Any
) -> jax.Array:
    """The product of arrays that `function` makes, summed as `plain_types` says."""
    wide, result = plain_types(operands, preferred)
    # XLA:CPU cannot lower a product of two sub-byte types.
    whole = [_whole_bytes(x) for x in operands]
    out = function(*whole, preferred_element_type=wide, **settings)
    return out if result is None else out.astype(result)


def _whole_bytes(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8)
    return x


def as_floats(*operands: Any) -> list[jax.Array]:
    """Every operand dequantized and cast to one common float dtype."""
    dtype = promote(*(value.dtype for value in operands))
    return [as_float(value, dtype) for value in operands]


def as_float(value: Any, dtype: Any = None) -> jax.Array:
    """The operand dequantized, in its logical dtype unless told."""
    value = value.quantized() if isinstance(value, Deferred) else value
    array = dequantize(value) if isinstance(value, QArray) else jnp.asarray(value)
    return array if dtype is None else array.astype(dtype)


def codes_for_product(q: QArray) -> tuple[jax.Array, jax.Array | None]:
    """Codes and zero point in a type every backend multiplies: int8, or the fp8 type itself."""
    codes, zero_point = jnp.asarray(q.qvalue), q.zero_point
    if jnp.issubdtype(codes.dtype, jnp.floating):
        return codes, None
    # XLA:CPU cannot lower a product of two sub-byte types, so int4 is widened. Moving uint8 codes
    # and their zero point down together by 128 leaves every difference as it was.
    shift = 128 if codes.dtype == jnp.uint8 else 0

    def to_int8(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.int16) - shift).astype(jnp.int8) if shift else x.astype(jnp.int8)

    return to_int8(codes), None if zero_point is None else to_int8(jnp.asarray(zero_point))


def scale_in(q: QArray, dtype: Any) -> jax.Array:
    """The whole scale of a QArray, second level included, in a dtype fit for the final product."""
    scale = jnp.asarray(q.scale).astype(dtype)
    if q.tensor_scale is not None:
        scale = scale * jnp.asarray(q.tensor_scale).astype(dtype).reshape((1,) * q.ndim)
    return scale


def scale_dtype_for(result: Any, *qarrays: QArray) -> Any:
    """At least float32; wider when the scales or the result are."""
    floats = [jnp.float32] + [q.scale.dtype for q in qarrays]
    if jnp.issubdtype(result, jnp.floating):
        floats.append(result)
    return promote(*floats)


def widen(part: jax.Array, q: QArray, axes: Sequence[int]) -> jax.Array:
    """Repeat tiled entries along axes that reach the output, so that each is 1-wide or full."""
    for axis in axes:
        if part.shape[axis] not in (1, q.shape[axis]):
            repeated = jnp.repeat(part, tile_on(q, part, axis), axis=axis)
            part = lax.slice_in_dim(repeated, 0, q.shape[axis], axis=axis)
    return part


def split_axis(codes: jax.Array, axis: int, tile: int) -> jax.Array:
    """Split an axis into (tiles, tile). A short last tile is filled with zeros.

    Zero is the right filler even beside a zero point: at most one operand has one, and the other
    operand's zeros cancel the filled places in the product and in the correction alike.
    """
    length = codes.shape[axis]
    count = -(-length // tile)
    if count * tile != length:
        widths = [(0, 0)] * codes.ndim
        widths[axis] = (0, count * tile - length)
        codes = jnp.pad(codes, widths)
    return codes.reshape(*codes.shape[:axis], count, tile, *codes.shape[axis + 1 :])


def lay_out(part: jax.Array, order: Sequence[int], insert: Sequence[int]) -> jax.Array:
    """Put the axes in `order`, drop the rest (all 1-wide), then open 1-wide axes at `insert`."""
    dropped = [axis for axis in range(part.ndim) if axis not in order]
    part = lax.transpose(part, [*order, *dropped])
    part = lax.squeeze(part, range(len(order), part.ndim))
    return lax.expand_dims(part, insert)


def is_placed(x: Any) -> bool:
    """On an explicit mesh the kernels do not know how to stay on their devices."""
    array = x.qvalue if isinstance(x, QArray) else x.array if isinstance(x, Deferred) else x
    if isinstance(array, jax.ShapeDtypeStruct):
        return False
    return any(entry is not None for entry in jax.typeof(array).sharding.spec)


def placed_like(part: jax.Array, target: jax.Array) -> jax.Array:
    """On an explicit mesh, give `part` the target's placement on every axis it really has."""
    sharding = jax.typeof(target).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return part
    spec = [s if n != 1 else None for s, n in zip(sharding.spec, part.shape, strict=True)]
    if tuple(jax.typeof(part).sharding.spec) == tuple(spec):
        return part
    return jax.sharding.reshard(part, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def spec_of(out_sharding: Any, ndim: int) -> tuple[Any, list[Any]]:
    """Mesh (or None) and one entry per axis of an out_sharding given in either spelling."""
    mesh = out_sharding.mesh if isinstance(out_sharding, NamedSharding) else None
    spec = out_sharding.spec if mesh is not None else out_sharding
    entries = list(spec)
    return mesh, entries + [None] * (ndim - len(entries))


def make_spec(mesh: Any, entries: Sequence[Any]) -> Any:
    """The reverse of `spec_of`."""
    spec = PartitionSpec(*entries)
    return spec if mesh is None else NamedSharding(mesh, spec)


# --- A value that has the derivative of another function ------------------------------------------

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


# --- A float array beside its codes: the product sees these, the gradient goes to it --------------

CHECKPOINT_NAME = "fewbit_quantized"
"""The name that remat policies know quantized operands by."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paired:
    """An operand of a training product.

    `array` gets the gradient; `quantized` is what the product sees (codes, or numbers made of
    codes), or None where it sees the array itself. The array's gradient is not clipped by the
    product: whoever makes a pair with scales that clip gives `clip_gradient(array, quantized)`, as
    `pair` does.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> w = jnp.ones((4, 2))
    >>> Paired(w, quantize(w, 'int8', channelwise_axes=(1,))).shape
    (4, 2)
    """

    array: Any
    quantized: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return len(self.array.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def pair(array: jax.Array, how: HowToQuantize, *, clip: bool = True, collect: Any = None) -> Paired:
    """The array and its quantized form, which remat policies know as 'fewbit_quantized'.

    The gradient is zero where the calibration method clipped the array, unless `clip` is False.
    `collect` is given the calibration and returns the one to use, which may come from elsewhere.

    >>> import jax.numpy as jnp
    >>> how = HowToQuantize(qtype='int8', calibration_method='fixed,1')
    >>> pair(jnp.array([0.5, 3.0]), how).quantized.qvalue
    Array([ 64, 127], dtype=int8)
    """
    source = lax.stop_gradient(array)
    q = _quantized(source, how) if collect is None else _collected(source, how, collect)
    q = jax.tree.map(lambda part: checkpoint_name(part, CHECKPOINT_NAME), q)
    clips = parse_method(how.calibration_method).clips or collect is not None
    return Paired(clip_gradient(array, q) if clip and clips else array, q)


def _quantized(array: jax.Array, how: HowToQuantize) -> QArray:
    native = quantize_natively(array, how)
    return quantize_with(array, how) if native is None else native


def _collected(array: jax.Array, how: HowToQuantize, collect: Any) -> QArray:
    calibration = collect(calibrate(array, how))
    scale, zero_point = compute_scale_zero_point(calibration, how.qtype, how.scale_dtype)
    tiles = uneven_tiles(array.shape, scale.shape, get_tile_shape(array.shape, how))
    return quantize_with_scale_zero_point(array, how.qtype, scale, zero_point, tiles=tiles)


def clip_gradient(array: jax.Array, qarray: QArray) -> jax.Array:
    """The array itself; its gradient is zero where it lies outside the range of the scales.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> x = jnp.array([0.5, 3.0, -3.0])
    >>> q = quantize(x, 'int8', calibration_method='fixed,1')
    >>> jax.grad(lambda x: clip_gradient(x, q).sum())(x)
    Array([1., 0., 0.], dtype=float32)
    """
    return _clip_gradient(array, lax.stop_gradient(operand(qarray)))


@jax.custom_jvp
def _clip_gradient(array: jax.Array, q: QArray) -> jax.Array:
    return with_derivative(array, _clip_gradient, array, q)


@_clip_gradient.defjvp
def _clip_tangent(primals: Any, tangents: Any) -> Any:
    (array, q), (tangent, _) = primals, tangents
    kept = inside_range(array, q)
    return array, jnp.where(kept, tangent, jnp.zeros_like(tangent))


def inside_range(array: jax.Array, q: QArray) -> jax.Array:
    """Where the array lies within the range that the scales cover, as booleans.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> x = jnp.array([0.5, 3.0])
    >>> inside_range(x, quantize(x, 'int8', calibration_method='fixed,1')).tolist()
    [True, False]
    """
    row = format_of(q.qtype)
    wide = wider(array.dtype, jnp.float32)
    scale = scale_in(q, wide)
    # The edge itself is inside; the scale was rounded after the range had been divided.
    slack = 1 + 2 * float(jnp.finfo(q.scale.dtype).eps if q.scale.dtype.itemsize > 1 else 0)

    if q.zero_point is None:
        bound = get_symmetric_bound(row) * slack
        return map_tiles(
            lambda x, s: jnp.abs(x.astype(wide)) <= s * bound, array, scale, tile_shape=q.tile_shape
        )
    low, high = row.asymmetric or (0, 0)

    def within(x: jax.Array, s: jax.Array, z: jax.Array) -> jax.Array:
        units = x.astype(wide) / s + z.astype(wide)
        return (units >= low - 0.5) & (units <= high + 0.5)

    return map_tiles(within, array, scale, q.zero_point, tile_shape=q.tile_shape)
