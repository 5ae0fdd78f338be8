"""Learned scales (LSQ, Esser et al. 2020): the scale of a weight is a parameter with a gradient.

The parameter is stored as it is trained. What is used is its magnitude, at least the smallest
number that a scale may be, rounded to the dtype of stored scales: positive whatever an optimizer
does, and the same number in training as in the file that is served.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from fewbit._util import nearest
from fewbit.numerics import Format, convert_from, format_of, wider
from fewbit.ops import CHECKPOINT_NAME, Paired, with_derivative
from fewbit.planning import Leaf, Request, owner_of, put_beside, split_beside
from fewbit.qarray import (
    LSQ,
    HowToQuantize,
    QArray,
    calibrate,
    compute_scale_zero_point,
    get_scale_shape,
    get_tile_shape,
    kept_names,
    map_tiles,
    parse_method,
    quantize_with_scale_zero_point,
    reduce_tiles,
    scale_type,
    shards_of,
    start_method,
    uneven_tiles,
    units,
    values,
)
from fewbit.tracing import Program, unread

QSCALE = "_qscale"
"""What the name of a learned scale adds to its weight's."""


def code_range(row: Format) -> tuple[float, float]:
    """The smallest and the largest code of a format, in units of the scale.

    >>> code_range(format_of('int2')), code_range(format_of('fp8'))
    ((-2.0, 1.0), (-448.0, 448.0))
    """
    if row.kind == "int" and row.asymmetric is not None:
        low, high = row.asymmetric
        return float(low), float(high)
    largest = float(jnp.finfo(row.storage).max)
    return -largest, largest


def parameter_dtype(dtype: Any) -> Any:
    """The dtype of a learned scale: 16 bits are too few for the steps of an optimizer.

    >>> parameter_dtype('bfloat16')
    dtype('float32')
    """
    return jnp.dtype(wider(jnp.dtype(dtype), jnp.float32))


def start_scale(array: jax.Array, how: HowToQuantize) -> jax.Array:
    """Where the learned scales of a weight begin, as `how` says: 'learned,<start>'.

    >>> how = HowToQuantize(qtype='int2', channelwise_axes=(1,), calibration_method='learned,lsq')
    >>> start_scale(jnp.array([[0.5, 1.0], [-1.5, 3.0]]), how)
    Array([[2., 4.]], dtype=float32)
    """
    return _start_scale(array, how.replace(rule=None))


@functools.partial(jax.jit, static_argnums=1)
def _start_scale(array: jax.Array, how: HowToQuantize) -> jax.Array:
    start = start_method(how.calibration_method, how.qtype)
    wide = array.astype(parameter_dtype(array.dtype))
    if start != LSQ:
        plain = how.replace(calibration_method=start, scale_dtype=None)
        scale, _ = compute_scale_zero_point(calibrate(wide, plain), how.qtype)
        return scale
    tiles = get_tile_shape(array.shape, how)
    mean = reduce_tiles(lambda x, axes: jnp.mean(x, axes, keepdims=True), jnp.abs(wide), tiles)
    scale = 2 * mean / np.sqrt(code_range(format_of(how.qtype))[1]).astype(wide.dtype)
    return jnp.where(mean > 0, scale, jnp.ones_like(scale))


def used_scale(parameter: jax.Array, how: HowToQuantize, dtype: Any) -> jax.Array:
    """The scale that a learned parameter stands for, in the dtype that is stored with the codes.

    >>> how = HowToQuantize(qtype='int4', scale_dtype='float16')
    >>> used_scale(jnp.array([-0.5, 0.0]), how, 'float32').tolist()
    [0.5, 6.103515625e-05]
    """
    stored = scale_type(dtype, how.scale_dtype)
    info = jnp.finfo(stored)
    low = float(info.tiny) if stored == jnp.float16 else float(np.sqrt(float(info.tiny)))
    return jnp.clip(jnp.abs(parameter), low, float(info.max)).astype(stored)


def quantize_learned(array: jax.Array, parameter: jax.Array, how: HowToQuantize) -> QArray:
    """The codes of a weight under its learned scales: in training, and what is stored after it.

    >>> how = HowToQuantize(qtype='int2', calibration_method='learned')
    >>> quantize_learned(jnp.array([0.6, -2.0, 0.1]), jnp.array([0.5]), how).qvalue
    Array([1, -2, 0], dtype=int4)
    """
    return _quantize_learned(array, parameter, how.replace(rule=None, roles=None))


@functools.partial(jax.jit, static_argnums=2)
def _quantize_learned(array: jax.Array, parameter: jax.Array, how: HowToQuantize) -> QArray:
    # The barrier keeps XLA from merging what made the scale into the division.
    scale = lax.optimization_barrier(used_scale(parameter, how, array.dtype))
    tiles = uneven_tiles(array.shape, scale.shape, get_tile_shape(array.shape, how))
    return quantize_with_scale_zero_point(array, how.qtype, scale, tiles=tiles)


def learned_pair(
    array: jax.Array, parameter: jax.Array, how: HowToQuantize, *, clip: bool = True
) -> Paired:
    """A weight and its codes under learned scales, with LSQ's gradients for both.

    With v the weight in units of its scale and q its code: the weight's gradient passes where v is
    among the codes and is zero outside; the scale's is the sum over its group of g * (q - v) inside
    and g * q outside, over the root of the group's size times the largest code, so that scales and
    weights move at the same pace. With `clip=False` the weight's gradient passes everywhere. The
    value of `array` is the rounded weight, which gradients of the other operand are made with.

    >>> how = HowToQuantize(qtype='int2', calibration_method='learned')
    >>> w, s = jnp.array([0.6, -2.0, 0.1]), jnp.array([0.5])
    >>> jax.grad(lambda w, s: learned_pair(w, s, how).array.sum(), (0, 1))(w, s)
    (Array([0., 0., 1.], dtype=float32), Array([-0.6928203], dtype=float32))
    """
    q = quantize_learned(lax.stop_gradient(array), lax.stop_gradient(parameter), how)
    q = jax.tree.map(lambda part: checkpoint_name(part, CHECKPOINT_NAME), q)
    return Paired(_rounded(clip, array, parameter, q), q)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rounded(clip: bool, array: jax.Array, parameter: jax.Array, q: QArray) -> jax.Array:
    wide = wider(array.dtype, jnp.float32)
    floats = values(q.qvalue, q.qtype, q.scale, None, None, q.tile_shape, wide)
    value = _placed_like(floats, array).astype(array.dtype)
    return with_derivative(value, functools.partial(_rounded, clip), array, parameter, q)


def _placed_like(result: jax.Array, array: jax.Array) -> jax.Array:
    """Where the array lies: on an explicit mesh, tiles that were cut open have been gathered."""
    wanted = jax.typeof(array).sharding
    if wanted.mesh.are_all_axes_explicit and jax.typeof(result).sharding != wanted:
        return jax.sharding.reshard(result, wanted)
    return result


@_rounded.defjvp
def _lsq_tangent(clip: bool, primals: Any, tangents: Any) -> Any:
    (array, parameter, q), (d_array, d_parameter, _) = primals, tangents
    low, high = code_range(format_of(q.qtype))
    wide = parameter_dtype(array.dtype)
    sign = jnp.where(parameter < 0, -jnp.ones_like(parameter), jnp.ones_like(parameter))
    step = (d_parameter * sign).astype(wide) * gradient_factor(array.shape, q, wide)
    v = units(array.astype(wide), q.scale.astype(wide), None, None, q.tile_shape)
    spread = map_tiles(lambda v, s: jnp.ones_like(v) * s, v, step, tile_shape=q.tile_shape)
    number, d = convert_from(q.qvalue, q.qtype, wide), d_array.astype(wide)
    v, spread, number = (_placed_like(part, array) for part in (v, spread, number))
    inside = (v >= low) & (v <= high)
    moved = jnp.where(inside, d, jnp.zeros_like(d)) if clip else d
    moved = moved + jnp.where(inside, number - v, number) * spread
    return _rounded(clip, array, parameter, q), moved.astype(array.dtype)


def gradient_factor(shape: Sequence[int], q: QArray, dtype: Any) -> Any:
    """1 / sqrt(elements * largest code) of each scale's group; an uneven last group is smaller.

    >>> from fewbit.qarray import quantize
    >>> q = quantize(jnp.ones((5, 2)), 'int2', tiled_axes={0: 4}, channelwise_axes=(1,))
    >>> gradient_factor((5, 2), q, 'float32')
    array([[0.5, 0.5],
           [1. , 1. ]], dtype=float32)
    """
    counts = np.ones((1,) * len(shape))
    for axis, (size, tile) in enumerate(zip(shape, q.tile_shape, strict=True)):
        own = [min(tile, size - begin) for begin in range(0, size, max(tile, 1))] or [1]
        counts = counts * np.reshape(own, [-1 if a == axis else 1 for a in range(len(shape))])
    high = code_range(format_of(q.qtype))[1]
    return (1 / np.sqrt(np.maximum(counts, 1) * high)).astype(dtype)


# --- Learned scales in parameter trees: `<w>_qscale` beside the weight `<w>` ----------------------

_MSG_MISSING = (
    "Parameter '{leaf}' has a learned scale by {rule!r}, and there is no '{name}' beside it{more}. "
    "Add scales that start from the weights: params = fewbit.add_learned_scales(model, params, "
    "*inputs) (a Linen model's own init and an NNX model's quantize_model make them too).{near}"
)
_MSG_SHAPE = (
    "The learned scale '{name}' has shape {found}, but '{leaf}' {shape} needs {wanted}: {rule!r}. "
    "Scales that were learned under other groups do not fit: use the rule they were made for, or "
    "start anew with fewbit.add_learned_scales(model, params, *inputs)."
)
_MSG_UNUSED = (
    "The parameters hold the learned scale '{name}', but no rule learns the scales of '{leaf}', so "
    "it would not be used. Write weight_calibration_method='learned' in the rule for it, take it "
    "out, or make the provider with strict=False."
)
_MSG_UNTRAINED = (
    "'{leaf}' is to be stored with learned scales, and the parameters have no '{name}'. A learned "
    "scale is found by training: train with QtProvider(rules) and convert with "
    "fewbit.to_ptq(model, params), or write weight_calibration_method='mse' for weights that were "
    "not trained quantized."
)


def is_learned(how: HowToQuantize | None) -> bool:
    """Whether a weight is stored with a scale that training found."""
    return how is not None and parse_method(how.calibration_method).learned


def split_learned(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A tree without learned scales, and these by full name.

    >>> split_learned({'up': {'w': 1, 'w_qscale': 2}})
    ({'up': {'w': 1}}, {'up/w_qscale': 2})
    """
    return split_beside(tree, (QSCALE,))


def put_learned(tree: Any, scales: Mapping[str, Any]) -> Any:
    """A tree with these scales beside their weights, in the place of those of the same names.

    >>> put_learned({'up': {'w': 1}}, {'up/w_qscale': 2})
    {'up': {'w': 1, 'w_qscale': 2}}
    """
    return put_beside(tree, scales, (QSCALE,))


def learned_leaves(
    leaves: Sequence[Leaf | None], requests: Mapping[str, Request]
) -> dict[str, tuple[Leaf, Request]]:
    """Every parameter whose scale is learned, by the name of the scale."""
    return {
        leaf.path + QSCALE: (leaf, requests[leaf.path])
        for leaf in leaves
        if leaf is not None and leaf.path in requests and is_learned(requests[leaf.path].how)
    }


def abstract_learned(
    leaves: Sequence[Leaf | None], requests: Mapping[str, Request]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every learned scale, by name, as an abstract array."""
    return {
        name: jax.ShapeDtypeStruct(
            get_scale_shape(leaf.shape, request.how), parameter_dtype(leaf.dtype)
        )
        for name, (leaf, request) in learned_leaves(leaves, requests).items()
    }


def check_learned(
    leaves: Sequence[Leaf | None],
    requests: Mapping[str, Request],
    values: Mapping[str, Any],
    strict: bool,
) -> None:
    """Every learned scale is there, in its shape; strictly, none is there without a rule."""
    wanted = learned_leaves(leaves, requests)
    missing = [name for name in wanted if name not in values]
    extra = [name for name in values if name not in wanted]
    if missing:
        leaf, request = wanted[missing[0]]
        raise ValueError(
            _MSG_MISSING.format(
                leaf=leaf.path,
                rule=request.rule,
                name=missing[0],
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                near=nearest(missing[0], extra, " There is {}, which no rule learns.", cutoff=0.6),
            )
        )
    for name, (leaf, request) in wanted.items():
        check_scale_shape(name, leaf.shape, request.how, values[name], request.rule)
    for name in extra if strict else ():
        raise ValueError(_MSG_UNUSED.format(name=name, leaf=name.removesuffix(QSCALE)))


def check_leftovers(program: Program, leaves: Sequence[Leaf | None]) -> None:
    """No parameter is a learned scale that neither a rule nor the model itself reads."""
    paths = {leaf.path for leaf in leaves if leaf is not None}
    found = {
        k: leaf.path
        for k, leaf in enumerate(leaves)
        if leaf is not None and owner_of(leaf.path, (QSCALE,)) in paths
    }
    idle = unread(program.root.jaxpr) if found else ()
    for k, name in found.items():
        if idle[k]:
            raise ValueError(_MSG_UNUSED.format(name=name, leaf=name.removesuffix(QSCALE)))


def check_scale_shape(
    name: str, shape: Sequence[int], how: HowToQuantize, scale: Any, rule: Any
) -> None:
    """A learned scale has the shape that its weight's granularity asks for."""
    wanted, found = get_scale_shape(tuple(shape), how), tuple(scale.shape)
    if found != wanted:
        text = dict(name=name, leaf=name.removesuffix(QSCALE), shape=tuple(shape), rule=rule)
        raise ValueError(_MSG_SHAPE.format(**text, found=found, wanted=wanted))


def trained_scale(path: str, shape: Sequence[int], how: HowToQuantize, scales: Any) -> Any:
    """The scale that was learned for a parameter that is to be stored."""
    name = path + QSCALE
    if name not in scales:
        raise ValueError(_MSG_UNTRAINED.format(leaf=path, name=name))
    check_scale_shape(name, shape, how, scales[name], how.rule)
    return scales[name]


def started(value: Any, how: HowToQuantize) -> Any:
    """Where the learned scale of a parameter begins, on the devices that the parameter is on."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: start_scale(x, how), value)
    scale = start_scale(value, how)
    sharding = getattr(value, "sharding", None)
    if isinstance(value, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return scale
    spec = [*sharding.spec, *[None] * (value.ndim - len(sharding.spec))]
    kept = kept_names(spec, scale.shape, value.shape)
    if any(size % shards_of(sharding.mesh, n) for size, n in zip(scale.shape, kept, strict=True)):
        kept = ()
    return jax.device_put(scale, NamedSharding(sharding.mesh, PartitionSpec(*kept)))
