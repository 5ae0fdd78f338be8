"""Numbers that are too small or too large for their scale: found after quantizing, and told.

Inside `jit` nobody can be told: there a float16 scale is held within its type, and a range so small
that its scale would be below the root of the smallest float counts as nothing.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._how import HowToQuantize, get_tile_shape
from fewbit._scales import SMALLEST_E4M3
from fewbit.numerics import NF4, Format, format_of, wider
from fewbit.tiling import reduce_tiles

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
