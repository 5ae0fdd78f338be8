"""Arrays to QArrays and back: quantize, dequantize, validate, pack."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._how import HowToQuantize as HowToQuantize
from fewbit._how import get_scale_shape as get_scale_shape
from fewbit._how import get_tile_shape as get_tile_shape
from fewbit._qarray_checks import check_floats, check_qarray
from fewbit._qarray_losses import tell_losses
from fewbit._qarray_panels import PanelArray as PanelArray
from fewbit._qarray_type import QArray as QArray
from fewbit._qarray_type import WithAux as WithAux
from fewbit._scales import compute_scales, split_two_levels, units, values
from fewbit.calibration import calibrate as calibrate
from fewbit.calibration import compute_scale_zero_point as compute_scale_zero_point
from fewbit.calibration import parse_method
from fewbit.numerics import QType, convert_to, dtype_bits, format_of, should_quantize, wider
from fewbit.packing import pack_bits
from fewbit.tiling import infer_tile_shape, uneven_tiles

_WHERE = "The array given to fewbit.quantize"
_FINITE = "Replace it first, with jnp.nan_to_num(array) for example"
_LEAF = "Check the checkpoint or the training run, or leave this array out with an earlier rule"


def quantize(
    array: jax.Array,
    qtype: QType,
    *,
    channelwise_axes: Collection[int] = (),
    tiled_axes: Mapping[int, int | float] | None = None,
    calibration_method: str = "absmax",
    scale_dtype: Any = None,
) -> QArray:
    """Quantize an array; `dequantize` gives it back in `scale_dtype` (by default the array's).

    NaN and infinity are an error, and numbers that are too small or too large for their scale a
    warning; under `jit` and other transformations the values cannot be looked at.

    >>> q = quantize(jnp.array([[1.0, 2.0], [-8.0, 4.0]]), 'int8', channelwise_axes=(0,))
    >>> q.scale.shape, dequantize(q)[1, 0]
    ((2, 1), Array(-7.968628, dtype=float32))
    """
    check_floats(array, qtype)
    how = HowToQuantize(
        qtype=qtype,
        channelwise_axes=channelwise_axes,
        tiled_axes=tiled_axes or {},
        calibration_method=calibration_method,
        scale_dtype=scale_dtype,
    )
    array = jnp.asarray(array)
    check_finite(array, _WHERE, _FINITE)
    q = quantize_with(array, how)
    tell_losses(array, q.scale, how, _WHERE, stacklevel=3)
    return q if scale_dtype is None else q.with_dtype(scale_dtype)


def quantize_with(array: jax.Array, how: HowToQuantize) -> QArray:
    """Quantize an array as `how` says; the result stands for the array's own dtype.

    >>> how = HowToQuantize(qtype='int4', tiled_axes={0: 32}, scale_dtype='float16')
    >>> quantize_with(jnp.ones((64, 8)), how)
    QArray(qvalue=int4[64,8], scale=float16[2,1], qtype=int4, dtype=float32)
    """
    # One fused program: the steps one by one would each write an array of the weight's size. A
    # noise function may hold arrays, so it cannot be a static argument.
    run = _quantize_with if how.noise_fn is not None else _jit_quantize_with
    return run(jnp.asarray(array), how)


def abstract_quantized(array: jax.ShapeDtypeStruct, how: HowToQuantize) -> QArray:
    """The QArray that an array will be stored as, in shapes alone, however its scales are found.

    >>> how = HowToQuantize(qtype='int2', tiled_axes={0: 32}, calibration_method='learned')
    >>> abstract_quantized(jax.ShapeDtypeStruct((64, 8), 'float32'), how).scale.shape
    (2, 1)
    """
    if parse_method(how.calibration_method).learned:
        how = how.replace(calibration_method="absmax")
    return jax.eval_shape(lambda x: quantize_with(x, how), array)


def _quantize_with(array: jax.Array, how: HowToQuantize) -> QArray:
    calibration = calibrate(array, how)
    scale, zero_point, tensor_scale = compute_scales(calibration, how.qtype, how.scale_dtype)
    tile_shape = get_tile_shape(array.shape, how)
    codes = units(array, scale, zero_point, tensor_scale, tile_shape)
    q = QArray(
        convert_to(codes, how.qtype, how.noise_fn),
        scale,
        zero_point,
        how.qtype,
        tensor_scale=tensor_scale,
        tiles=uneven_tiles(array.shape, scale.shape, tile_shape),
    )
    return q.with_dtype(array.dtype)


_jit_quantize_with = jax.jit(_quantize_with, static_argnames="how")


def quantize_with_scale_zero_point(
    array: jax.Array,
    qtype: QType,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
    *,
    tiles: Sequence[tuple[int, int]] = (),
    noise_fn: Any = None,
) -> QArray:
    """Quantize an array with scales that are known already.

    `tiles` holds (axis, tile) for the axes whose last tile is shorter than the others; formats
    that fix their tile do not need it.

    >>> q = quantize_with_scale_zero_point(jnp.array([0.5, 3.0]), 'int8', jnp.array([0.5]))
    >>> q.qvalue
    Array([1, 6], dtype=int8)
    """
    array = jnp.asarray(array)
    if not should_quantize(array.dtype):
        raise ValueError(f"Refuse to quantize: {array.dtype}. Only floats are quantized.")
    row = format_of(qtype)
    tensor_scale = None
    if row.scale_dtype is not None and scale.dtype != jnp.dtype(row.scale_dtype):
        if row.name == "nvfp4":
            scale, tensor_scale = split_two_levels(scale)
        else:
            scale = scale.astype(row.scale_dtype)
    _check_rank("Scale", scale.shape, array.shape)
    known = {axis % array.ndim - array.ndim: tile for axis, tile in tiles}
    for axis, (dim, count) in enumerate(zip(array.shape, scale.shape, strict=True)):
        if row.tile is not None and count > 1 and dim % count:
            known.setdefault(axis - array.ndim, row.tile)
    pairs = tuple(known.items())
    _check_divides("Scale", scale.shape, array.shape, pairs)
    tile_shape = infer_tile_shape(array.shape, scale.shape, pairs)
    codes = units(array, scale, zero_point, tensor_scale, tile_shape)
    q = QArray(
        convert_to(codes, row, noise_fn),
        scale,
        zero_point,
        qtype,
        tensor_scale=tensor_scale,
        tiles=uneven_tiles(array.shape, scale.shape, tile_shape),
    )
    return q.with_dtype(array.dtype)


def dequantize(q: QArray | WithAux, dtype: Any = None) -> jax.Array:
    """The float array that a QArray stands for, in its own dtype unless told.

    >>> dequantize(QArray(jnp.array([2, -4], jnp.int8), jnp.array([0.5])))
    Array([ 1., -2.], dtype=float32)
    """
    if isinstance(q, WithAux):
        return dequantize(q.array, dtype)
    check_qarray("dequantize", q)
    if not isinstance(q, PanelArray):  # which is made only from valid ones
        validate_qarray(q)
    return _dequantize(q, q.dtype if dtype is None else jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(q: QArray, dtype: np.dtype) -> jax.Array:
    q = unpack(q)
    compute = dtype
    if q.scale.dtype != dtype:
        own = q.scale.dtype if dtype_bits(q.scale.dtype) >= 16 else jnp.float32
        compute = wider(own, dtype)
    if q.qvalue.dtype == jnp.int16 or compute == jnp.float16:  # what 16-bit floats cannot hold
        compute = wider(compute, jnp.float32)
    result = values(q.qvalue, q.qtype, q.scale, q.zero_point, q.tensor_scale, q.tile_shape, compute)
    if dtype == jnp.float16:  # a code may stand for more than what it was
        largest = float(jnp.finfo(dtype).max)
        result = jnp.where(jnp.isfinite(result), jnp.clip(result, -largest, largest), result)
    return result.astype(dtype)


def validate_qarray(q: QArray) -> None:
    """Raise if the parts do not belong together; parts that are not arrays are not judged.

    >>> validate_qarray(QArray(jnp.zeros((4, 8), jnp.int8), jnp.ones((1, 8))))
    """
    parts = [part for part in (q.data, q.scale, q.zero_point) if part is not None]
    if not all(hasattr(p, "shape") and hasattr(p, "dtype") for p in parts):
        return
    if q.layout == "plain":
        dtype = q.data.dtype
        if q.qtype is None:
            raise ValueError(
                f"{dtype} is not a valid type for qvalue. Codes are stored in at most 8 bits or "
                "int16; pass an array of codes, or its qtype."
            )
        if dtype != format_of(q.qtype).storage:
            raise ValueError(
                f"{dtype} is not a valid type for qvalue. {format_of(q.qtype).name} is stored as "
                f"{format_of(q.qtype).storage}."
            )
    own = format_of(q.qtype).scale_dtype
    if not should_quantize(q.scale.dtype) and q.scale.dtype.name != own:
        raise ValueError(
            f"{q.scale.dtype} is not a valid type for scale. Use bfloat16, float16, float32 or "
            f"float64{f', or {own} for {format_of(q.qtype).name}' if own else ''}."
        )
    for name, part in (("Scale", q.scale), ("Zero point", q.zero_point)):
        if part is not None:
            _check_rank(name, part.shape, q.shape)
            _check_divides(name, part.shape, q.shape, q.tiles)
    if q.zero_point is not None and q.zero_point.dtype != format_of(q.qtype).storage:
        raise ValueError(
            f"{q.zero_point.dtype} is not a valid type for zero point. It has the dtype of the "
            f"codes, {format_of(q.qtype).storage}."
        )


def check_finite(array: Any, where: str, cure: str = _LEAF) -> None:
    """Raise if a concrete array holds NaN or infinity; a traced one cannot be looked at.

    >>> check_finite(jnp.array([1.0, jnp.nan]), 'layers/0/kernel')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: layers/0/kernel holds 1 value that is NaN or infinite, the first at index (1,): ...
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, (jax.Array, np.ndarray)):
        return
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    # A finite sum has finite terms, and needs no array of answers. It may overflow.
    wide = wider(array.dtype, jnp.float32)
    with jax.ensure_compile_time_eval():  # a constant inside a trace
        if bool(jnp.isfinite(jnp.sum(array, dtype=wide))) or bool(jnp.isfinite(array).all()):
            return
        bad = np.argwhere(~np.asarray(jnp.isfinite(array)))
    first = tuple(int(i) for i in bad[0])
    count = f"{len(bad)} value{'s' if len(bad) > 1 else ''} that {'are' if len(bad) > 1 else 'is'}"
    raise ValueError(
        f"{where} holds {count} NaN or infinite, the first at index {first}: "
        f"{float(array[first])}. One such value spoils every code that shares its scale. {cure}."
    )


def pack(q: QArray) -> QArray:
    """The same array with its codes at their true width; 8- and 16-bit codes have it already.

    >>> q = quantize(jnp.linspace(-1.0, 1.0, 64), 'int3')
    >>> q.nbytes, pack(q).nbytes
    (36, 28)
    """
    check_qarray("qarray.pack", q)
    row = format_of(q.qtype)
    if q.layout != "plain" or row.bits >= 8 or q.ndim == 0:
        return q
    length = q.shape[-1]
    if not isinstance(q.data, (jax.Array, np.ndarray)):
        data = jax.eval_shape(lambda codes: pack_bits(codes, row.bits), q.data)
        return q.replace(qvalue=data, layout="bits", last_dim=length)
    codes = jnp.asarray(q.data)
    if row.kind == "sign":
        codes = (codes < 0).astype(jnp.uint8)
    return q.replace(qvalue=pack_bits(codes, row.bits), layout="bits", last_dim=length)


def unpack(q: QArray) -> QArray:
    """The same array with one element of its storage dtype per code.

    >>> unpack(pack(quantize(jnp.ones(8), 'int3'))).layout
    'plain'
    """
    check_qarray("qarray.unpack", q)
    if q.layout == "plain":
        return q
    if isinstance(q, PanelArray):
        return q.plain()
    return q.replace(qvalue=q.qvalue, layout="plain", last_dim=None)


def _check_rank(name: str, part: Sequence[int], shape: Sequence[int]) -> None:
    if len(part) != len(shape):
        raise ValueError(
            f"{name} {tuple(part)} should have the same rank as qvalue {tuple(shape)}. Give it an "
            "axis of 1 where a number is shared."
        )


def _check_divides(
    name: str, part: Sequence[int], shape: Sequence[int], tiles: Sequence[tuple[int, int]]
) -> None:
    known = {axis + len(shape): tile for axis, tile in tiles}
    for axis, (count, dim) in enumerate(zip(part, shape, strict=True)):
        uneven = axis in known and -(-dim // known[axis]) == count
        if count != 1 and count != dim and not uneven and (count == 0 or dim % count):
            raise ValueError(
                f"{name} {tuple(part)} should be broadcastable to qvalue {tuple(shape)}. On axis "
                f"{axis}, {count} does not divide {dim}; if the last tile is shorter than the "
                f"others, pass tiles=(({axis - len(shape)}, <tile>),)."
            )
