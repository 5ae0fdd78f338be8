"""Arrays to QArrays and back: quantize, dequantize, validate, pack."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import describe, is_array_like
from fewbit.numerics import (
    NF4,
    Format,
    QType,
    convert_to,
    dtype_bits,
    format_of,
    pack_bits,
    should_quantize,
    wider,
)
from fewbit.qarray._how import HowToQuantize as HowToQuantize
from fewbit.qarray._how import get_scale_shape as get_scale_shape
from fewbit.qarray._how import get_tile_shape as get_tile_shape
from fewbit.qarray._how import parse_method
from fewbit.qarray._panels import PanelArray as PanelArray
from fewbit.qarray._ranges import (
    SMALLEST_E4M3,
    compute_scale_zero_point,
    compute_scales,
    scale_type,
    split_two_levels,
    units,
    values,
)
from fewbit.qarray._ranges import calibrate as calibrate
from fewbit.qarray._tiles import infer_tile_shape, reduce_tiles, uneven_tiles
from fewbit.qarray._type import QArray as QArray
from fewbit.qarray._type import WithAux as WithAux
from fewbit.qarray._type import part_values

# --- What quantize, dequantize, pack and unpack say to values of another kind ---------------------

_MSG_FLOATS = "fewbit.quantize(array, qtype) takes an array of floats, got {found}. {fix}"
_MSG_QARRAY = "fewbit.{name} takes {wanted}, got {found}. {fix}{tree}"
_MSG_TREE = (
    "fewbit.{name} takes parameters (a QArray or a tree of arrays), got {found}. Write "
    "fewbit.{name}(params)."
)
_DEQUANTIZE_TREE = (
    "For a tree: is_q = lambda x: isinstance(x, fewbit.QArray | fewbit.WithAux), then "
    "jax.tree.map(lambda x: fewbit.dequantize(x) if is_q(x) else x, tree, is_leaf=is_q)."
)


def check_floats(array: Any, qtype: Any) -> None:
    """Raise if `array` is no array, nor anything that becomes one.

    >>> check_floats([1.0, 2.0], 'int8')
    """
    if isinstance(array, QArray | WithAux):
        fix = "It is quantized already; for another type call fewbit.dequantize on it first."
    elif isinstance(array, str) and is_array_like(qtype):
        fix = f"The array comes first: fewbit.quantize(array, {array!r})."
    elif isinstance(array, Mapping):
        fix = (
            "A tree is quantized by fewbit.quantize_params(params, plan), or leaf by leaf: "
            "jax.tree.map(lambda x: fewbit.quantize(x, qtype), tree)."
        )
    elif array is None or isinstance(array, str) or (callable(array) and not is_array_like(array)):
        fix = "Write fewbit.quantize(jnp.asarray(numbers), 'int8')."
    else:
        return
    raise TypeError(_MSG_FLOATS.format(found=describe(array), fix=fix))


def check_qarray(name: str, value: Any) -> None:
    """Raise if `value` is not a QArray.

    >>> import jax.numpy as jnp
    >>> check_qarray('qarray.pack', jnp.ones(3))
    Traceback (most recent call last):
        ...
    TypeError: fewbit.qarray.pack takes a QArray, got a float32[3] array. It is not quantized, so it
    can be used as it is. For a tree: fewbit.pack(tree).
    """
    if isinstance(value, QArray):
        return
    fix = "It is not quantized, so it can be used as it is. " if is_array_like(value) else ""
    if isinstance(value, WithAux):
        fix = "Take what is in it: .array. "
    wanted, tree = "a QArray", f"For a tree: fewbit.{name.rpartition('.')[2]}(tree)."
    if name == "dequantize":
        wanted, tree = "a QArray or a WithAux of one", _DEQUANTIZE_TREE
    raise TypeError(
        _MSG_QARRAY.format(name=name, wanted=wanted, found=describe(value), fix=fix, tree=tree)
    )


def check_tree(name: str, tree: Any) -> None:
    """Raise if `tree` holds leaves, and none of them is an array.

    >>> check_tree('pack', {})
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QArray))
    if tree is None or (leaves and not any(map(_is_parameter, leaves))):
        raise TypeError(_MSG_TREE.format(name=name, found=describe(tree)))


def _is_parameter(leaf: Any) -> bool:
    # Shardings of a tree of parameters may be moved along with it.
    return is_array_like(leaf) or isinstance(leaf, QArray | jax.sharding.Sharding)


# --- Numbers that are too small or too large for their scale: found after quantizing, and told ----

_MSG_FLOAT16 = (
    "{where}: {lost} of {all} scales do not fit float16 and were clamped, which costs accuracy. "
    "Use scale_dtype='bfloat16' or 'float32'{place}."
)
_MSG_ZEROS = (
    "{where}: the numbers of {lost} of {all} scales became zeros, because a range as small as "
    "theirs (at most {largest:.2g}) counts as nothing beside {dtype} scales. Multiply the array "
    "by a power of two first, or leave it float{place}."
)
_MSG_FAR_BELOW = (
    "{where}: {lost} of {all} tiles are so much smaller than the largest one that nvfp4's scales, "
    "which span the whole array, do not reach them; their numbers lose accuracy or become zeros. "
    "Use 'mxfp4', whose tiles have scales of any size{place}."
)
_MSG_INFINITE = (
    "{where}: {lost} of {all} scales are not finite, because calibration_method={method!r} leaves "
    "the range of {dtype} for numbers as large as these (up to {largest:.2g}). Use 'absmax'{place}."
)
IN_A_RULE = " in the rule for it"


def tell_losses(
    array: Any, scale: Any, how: HowToQuantize, where: str, place: str = "", stacklevel: int = 2
) -> None:
    """Warn of numbers that their scale cannot serve, raise if a scale is not finite.

    Nothing is said of traced or abstract arrays. `scale` is the stored one, and `place` is where
    its settings are found.

    >>> import warnings
    >>> from fewbit.qarray import quantize_with
    >>> how, x = HowToQuantize(qtype='int8'), jnp.array([1e-25, 2e-25])
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter('always')
    ...     tell_losses(x, quantize_with(x, how).scale, how, 'w')
    >>> str(told[0].message)[:50]
    'w: the numbers of 1 of 1 scales became zeros, beca'
    """
    concrete = (jax.Array, np.ndarray)
    if any(isinstance(each, jax.core.Tracer) for each in (array, scale)):
        return
    if not isinstance(array, concrete) or not isinstance(scale, concrete) or not array.size:
        return
    with jax.ensure_compile_time_eval():
        if not bool(_suspicious(scale, format_of(how.qtype))):
            return
        plain = how.replace(rule=None, noise_fn=None, roles=None)
        lost, infinite, largest = (
            part.item() for part in _losses(jnp.asarray(array), jnp.asarray(scale), plain)
        )
    said = dict(where=where, all=scale.size, place=place, largest=largest)
    if infinite:
        dtype = wider(array.dtype, jnp.float32)
        method = how.calibration_method
        raise ValueError(_MSG_INFINITE.format(lost=infinite, method=method, dtype=dtype, **said))
    tell_lost(int(lost), scale.dtype, stacklevel=stacklevel + 1, **said)


def tell_lost(lost: int, dtype: Any, *, stacklevel: int = 2, **said: Any) -> None:
    """Warn of so many scales of this dtype that do not serve their numbers.

    >>> tell_lost(0, jnp.float32, where='w', all=3, place='', largest=0.0)
    """
    if not lost:
        return
    kinds = {"float16": _MSG_FLOAT16, "float8_e4m3fn": _MSG_FAR_BELOW}
    text = kinds.get(jnp.dtype(dtype).name, _MSG_ZEROS)
    warnings.warn(text.format(lost=lost, dtype=jnp.dtype(dtype), **said), stacklevel=stacklevel + 1)


def lost_groups(array: jax.Array, scale: jax.Array, how: HowToQuantize) -> tuple[jax.Array, ...]:
    """How many scales do not serve their numbers, how many are not finite, and the largest number
    of the former.

    >>> x = jnp.array([[2.0**-80, 0.0], [1.0, 2.0]])
    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(0,))
    >>> [float(part) for part in lost_groups(x, jnp.array([[1.0], [2 / 127.5]]), how)]
    [1.0, 0.0, 8.271806125530277e-25]
    """
    row, wide = format_of(how.qtype), wider(array.dtype, jnp.float32)
    tiles = get_tile_shape(array.shape, how)
    largest = reduce_tiles(
        lambda x, axes: jnp.max(jnp.abs(x), axes, keepdims=True, initial=0), array, tiles
    ).astype(wide)
    infinite = ~jnp.isfinite(scale.astype(wide))
    lost = _unserved(scale.astype(wide), largest, row, scale.dtype) & (largest > 0)
    most = jnp.max(jnp.where(lost | infinite, largest, jnp.zeros_like(largest)))
    return jnp.sum(lost), jnp.sum(infinite), most


_losses = functools.partial(jax.jit, static_argnums=2)(lost_groups)


def _unserved(scale: jax.Array, largest: jax.Array, row: Format, stored: Any) -> jax.Array:
    if stored == jnp.float16:
        info = jnp.finfo(jnp.float16)
        return (scale <= float(info.tiny)) | (scale >= float(info.max))
    if row.name == "nvfp4":
        of_all = jnp.max(largest, keepdims=True)
        level = largest / jnp.where(of_all > 0, of_all, 1) * jnp.max(scale, keepdims=True)
        return level < SMALLEST_E4M3
    if row.kind == "sign":
        return scale == 0
    # The scale of nothing; whatever rounds to zero with it was taken for nothing.
    return (scale == 1) & (largest < smallest_magnitude(row) / 2)


def _suspicious(scale: Any, row: Format) -> Any:
    """Whether there may be a loss, by the scales alone, which are few."""
    part = np.asarray(scale) if getattr(scale, "is_fully_addressable", True) else scale
    part = part.astype(np.float64 if part.dtype == np.float64 else np.float32)
    if scale.dtype == jnp.float16:
        info = jnp.finfo(jnp.float16)
        doubtful = (part <= float(info.tiny)) | (part >= float(info.max))
    elif row.name == "nvfp4":
        doubtful = part <= SMALLEST_E4M3
    else:
        doubtful = part == (0 if row.kind == "sign" else 1)
    return (doubtful | ~(abs(part) < np.inf)).any()


def smallest_magnitude(row: Format) -> float:
    """The smallest magnitude that has a code other than zero's, doubled where it is rounded to."""
    if row.kind == "float":
        return float(jnp.finfo(row.storage).smallest_subnormal)
    if row.kind == "table":
        return min(abs(number) for number in NF4 if number)
    return 1.0


# --- Arrays to QArrays and back: quantize, dequantize, validate, pack -----------------------------

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
    q = cast(QArray, part_values(q))
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


def quantize_with_absmax(array: jax.Array, absmax: jax.Array, how: HowToQuantize) -> QArray:
    """An array quantized with a symmetric range that is known already."""
    dtype = scale_type(array.dtype, how.scale_dtype)
    scale, _ = compute_scale_zero_point({"absmax": absmax}, how.qtype, dtype)
    return quantize_with_scale_zero_point(array, how.qtype, scale, noise_fn=how.noise_fn)


# --- Activations as codes of a scale that was stored when the model was calibrated ----------------


def quantize_static(array: Any, how: HowToQuantize, scale: Any, zero_point: Any) -> QArray:
    """Quantize an activation with its stored scale; what lies outside its range clips.

    Integer codes have no NaN: a channel that holds one has a NaN for its scale, as if measured.

    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(0,))
    >>> quantize_static(jnp.array([[0.5, 90.0]]), how, jnp.array([[0.5]]), None).qvalue.tolist()
    [[1, 127]]
    """
    if not jnp.issubdtype(format_of(how.qtype).storage, jnp.inexact):
        kept = {axis % array.ndim for axis in how.channelwise_axes}
        others = tuple(axis for axis in range(array.ndim) if axis not in kept)
        lost = jnp.any(jnp.isnan(array), axis=others, keepdims=True)
        scale = jnp.where(lost, jnp.array(jnp.nan, scale.dtype), scale)
        if zero_point is not None:
            zero_point = jnp.broadcast_to(zero_point, scale.shape)
    tile_shape = get_tile_shape(array.shape, how)
    tiles = uneven_tiles(array.shape, scale.shape, tile_shape)
    tiles = tuple((axis, tile) for axis, tile in tiles if scale.shape[axis] != 1)
    return quantize_with_scale_zero_point(array, how.qtype, scale, zero_point, tiles=tiles)
