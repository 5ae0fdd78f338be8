"""Names of Qwix's inner modules that have another form here: the same thing under its arguments.

`_table.py` names them; nothing else uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fewbit import qarray
from fewbit.calibration import SimpleMovingAverage
from fewbit.interpreter import current
from fewbit.models import quantize_model
from fewbit.numerics import convert_from, format_of, get_nf4_buckets
from fewbit.ops import dot_general, ragged_dot_general
from fewbit.qarray import HowToQuantize, QArray

_MSG_STATIC = (
    "quantize_act in fewbit measures the array it is given: the rule asks for a stored scale "
    "(act_static_scale=True), and stored scales belong to Sites of the plan. Let the interpreter "
    "quantize this activation, or give fewbit.qarray.quantize_static(array, how, scale, "
    "zero_point) the scale."
)
_MSG_MODULE = (
    "flax_util.get_current_module() has no answer in fewbit: a provider's method runs where the "
    "traced program has a product, and no module is being called then, so nothing can be attached "
    "to one ({place}). What a product remembers from step to step is planned: "
    "QtRule(act_calibration_method='delayed,1024', ...) keeps histories of ranges beside the "
    "parameters, which is fp8 training with delayed scaling; types and ranges of the batch itself "
    "need no memory at all, QtRule(weight_qtype='float8_e4m3fn', ...)."
)
_MSG_NO_MODULE = "Current module is not known. No quantized model is being traced or run."


# --- Arrays ---------------------------------------------------------------------------------------


def reshaped(array: QArray, *new_shape: Any) -> QArray:
    """`qarray.reshape(array, *new_shape)`."""
    return array.reshape(*new_shape)


def taken(array: QArray, idx: Any) -> QArray:
    """`qarray.rewriting_take(array, idx)`."""
    return array[idx]


def tiled_axes(array: QArray) -> dict[int, int]:
    """`qarray.get_tiled_axes(array)`: the axes with some scales, but not one for each element."""
    counts = zip(array.shape, array.scale.shape, array.tile_shape, strict=True)
    return {a: tile for a, (dim, n, tile) in enumerate(counts) if n not in (1, dim)}


def split_axes(array: jax.Array, tiled_axes: Mapping[int, int | float]) -> jax.Array:
    """`qarray.split_axis(array, tiled_axes)`: each of these axes as (tiles, tile)."""
    shape: list[int] = []
    for axis, dim in enumerate(array.shape):
        tile = tiled_axes.get(axis)
        if isinstance(tile, float):
            tile = round(dim * tile)
        if tile is not None and (tile <= 0 or dim % tile):
            raise ValueError(f"{array.shape} cannot be tiled as {dict(tiled_axes)}.")
        shape += [dim] if tile is None else [dim // tile, tile]
    return array.reshape(shape)


def axes_ordered(array: jax.Array, transpose: Sequence[int | None]) -> jax.Array:
    """`qarray.transpose_array`: axes in this order; None is a new one, of 1 are dropped."""
    left_out = [a for a in range(array.ndim) if a not in transpose]
    if any(array.shape[a] != 1 for a in left_out):
        raise ValueError(f"Cannot transpose {array.shape} as {transpose}.")
    kept = [a for a in range(array.ndim) if a not in left_out]
    order = [kept.index(a) for a in transpose if a is not None]
    moved = array.squeeze(left_out).transpose(order)
    return moved.reshape([1 if a is None else array.shape[a] for a in transpose])


def by_tiles(op: Callable[[Any, Any], jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """`qarray.call_with_generic_broadcast`: where axes differ, the shorter one is one per tile."""
    if x.ndim != y.ndim:
        raise ValueError(f"Cannot broadcast between {x.shape} {y.shape}.")
    views: tuple[list[int], list[int]] = [], []
    for sizes in zip(x.shape, y.shape, strict=True):
        tiles = min(sizes)
        if max(sizes) % max(tiles, 1):
            raise ValueError(f"Cannot broadcast between {x.shape} {y.shape}.")
        for view, size in zip(views, sizes, strict=True):
            view += [tiles, size // max(tiles, 1)]
    whole = [max(sizes) for sizes in zip(x.shape, y.shape, strict=True)]
    return op(x.reshape(views[0]), y.reshape(views[1])).reshape(whole)


def with_scale_zero_point(
    array: jax.Array, qtype: Any, scale: Any, zero_point: Any, noise_fn: Any = None
) -> QArray:
    """`qarray.quantize_with_scale_zero_point`, whose noise is its last argument."""
    return qarray.quantize_with_scale_zero_point(array, qtype, scale, zero_point, noise_fn=noise_fn)


def numbers_of(x: jax.Array, qtype: Any) -> jax.Array:
    """`numerics.convert_from(x, qtype)`: codes that are numbers stay what they are."""
    return convert_from(x, qtype) if format_of(qtype).kind == "table" else x


def nf4_numbers(array: jax.Array) -> jax.Array:
    """`numerics.nf4_to_fp(array)`."""
    return get_nf4_buckets()[array.astype("int32")]


def has_linear_codes(qtype: Any) -> bool:
    """`numerics.can_dequant_on_output(qtype)`: whether products of codes can be scaled after."""
    return format_of(qtype).kind != "table"


def quantize_activation(array: jax.Array, how: HowToQuantize, rule: Any, act_name: str) -> QArray:
    """`ptq.quantize_act(array, how, rule, act_name)` with the range of the array itself."""
    if rule is not None and rule.act_static_scale:
        raise NotImplementedError(_MSG_STATIC)
    return qarray.quantize_with(array, how)


class MovingAverage(SimpleMovingAverage):
    """`averaging.SimpleMovingAverage`: what is given back without a step has another name."""

    def get_calibration(
        self, stat: Any, default: Any = None, *, default_calibration: Any = None, **how: Any
    ) -> Any:
        given = default if default_calibration is None else default_calibration
        return super().get_calibration(stat, given, **how)


def mx_product(
    lhs: Any, rhs: Any, dimension_numbers: Any, preferred_element_type: Any = None, **kwargs: Any
) -> jax.Array:
    """`mxfp_dot.mxfp_dot_general`, whose fourth argument is the type of the result."""
    kwargs["preferred_element_type"] = preferred_element_type
    return dot_general(lhs, rhs, dimension_numbers, **kwargs)


def ragged_general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
) -> jax.Array:
    """`ragged_dot_general`: the name of its fourth argument is another one in JAX, and here."""
    return ragged_dot_general(
        *(lhs, rhs, group_sizes, dimension_numbers),
        precision=precision,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
    )


# --- Models ---------------------------------------------------------------------------------------


def linen_model(model: Any, provider: Any, methods: Sequence[str]) -> Any:
    """`model.quantize_linen_model(model, provider, methods)`."""
    return quantize_model(model, provider, methods=tuple(methods))


def nnx_model(
    model: Any, provider: Any, *model_inputs: Any, call_method: str = "__call__", **kwargs: Any
) -> Any:
    """`model.quantize_nnx_model(model, provider, *inputs, call_method=...)`."""
    return quantize_model(model, provider, *model_inputs, methods=(call_method,), **kwargs)


def not_intercepted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`interception.disable_interceptions(fn)`: what `fn` computes stays as it is.

    No function is replaced that could be put back; the products of `fn` are marked instead, and no
    rule matches them. `get_current_rule` is None inside.
    """

    @functools.wraps(fn)
    def unquantized(*args: Any, **kwargs: Any) -> Any:
        with current.left_float():
            return fn(*args, **kwargs)

    return unquantized


def current_path() -> tuple[str, ...]:
    """`flax_util.get_current_module_path()`: the module that is traced, or whose product runs."""
    path = current.module_path()
    if path is None:
        raise ValueError(_MSG_NO_MODULE)
    return tuple(path.split("/")) if path else ()


def current_module() -> Any:
    """`flax_util.get_current_module()`: refused, as there is none."""
    path = current.module_path()
    place = "outside of a quantized model" if path is None else f"in module '{path}'"
    raise NotImplementedError(_MSG_MODULE.format(place=place))


def value_at(obj: Any, path: Sequence[str | int]) -> Any:
    """`flax_util.get_value_from_path(obj, path)`: what lies there, or None."""
    for key in path:
        if obj is None:
            return None
        if isinstance(obj, Mapping):
            obj = obj.get(key)
        elif isinstance(key, int):
            obj = obj[key] if 0 <= key < len(obj) else None
        else:
            obj = getattr(obj, key, None)
    return obj
