"""What an adapter adds to the result of each op: `(alpha / rank) * x A B`, in the op's own way."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fewbit.adapter_run import SiteAdapter
from fewbit.qarray import QArray, dequantize


def add_to_product(
    adapter: SiteAdapter,
    letters: str,
    operands: Sequence[Any],
    out: Any,
    precision: Any,
    out_sharding: Any = None,
) -> Any:
    """`out + scale * x A B` for a product written as an einsum of its two operands."""
    (lhs, rhs), result = letters.partition("->")[0].split(","), letters.partition("->")[2]
    words = (lhs, rhs)
    w, x_word = words[adapter.side], words[1 - adapter.side]
    x = adapter.dropped(as_float(operands[1 - adapter.side]))
    sizes = dict(zip(w, operands[adapter.side].shape, strict=True))
    options = dict(precision=precision, preferred_element_type=out.dtype, out_sharding=out_sharding)
    if not adapter.fits:
        update = adapter.update(x.dtype)
        pair = (x, update) if adapter.side == 1 else (update, x)
        return out + adapter.scaled(jnp.einsum(letters, *pair, **options))
    a, b = adapter.factors(x.dtype)
    shared = [c for c in w if c in x_word]
    batch = [c for c in shared if c in result] if adapter.plan.batch else []
    inner = [c for c in shared if c not in batch]
    outer = [c for c in w if c not in x_word]
    r = next(c for c in "rstuvwxyzRSTUVWXYZ" + letters.upper() if c not in letters)
    many = lambda word: [sizes[c] for c in word]  # noqa: E731
    rank = adapter.plan.rank
    a = a.reshape(*many(batch), *many(inner), rank)
    b = b.reshape(*many(batch), rank, *many(outer))
    kept = "".join(c for c in x_word if c in result) + r
    low_spec = f"{x_word},{''.join([*batch, *inner])}{r}->{kept}"
    low = jnp.einsum(low_spec, x, a, precision=precision, out_sharding=_kept_axes(x, x_word, kept))
    spec = f"{kept},{''.join(batch)}{r}{''.join(outer)}->{result}"
    return out + adapter.scaled(jnp.einsum(spec, low, b, **options))


def _kept_axes(x: Any, word: str, kept: str) -> Any:
    """On an explicit mesh a sum over a split axis has to say how its result lies: as `x` does."""
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.axis_names or not sharding.mesh.are_all_axes_explicit:
        return None
    axes = dict(
        zip(word, (*sharding.spec, *[None] * (len(word) - len(sharding.spec))), strict=True)
    )
    spec = PartitionSpec(*(axes.get(letter) for letter in kept))
    return NamedSharding(sharding.mesh, spec)


def add_to_conv(
    adapter: SiteAdapter, x: Any, out: Any, numbers: Any, settings: Mapping[str, Any]
) -> Any:
    """`out + scale * conv(x, A) B`; a grouped convolution meets A B itself."""
    x = adapter.dropped(as_float(x))
    a, b = adapter.factors(x.dtype)
    rank, n = adapter.plan.rank, len(numbers.rhs_spec)
    grouped = settings["feature_group_count"] != 1 or settings["batch_group_count"] != 1
    if grouped or not adapter.fits:
        kernel = adapter.update(x.dtype)
        update = lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **settings)
        return out + adapter.scaled(update.astype(out.dtype))
    axes = (n - 1, n - 2, *range(n - 2))  # A is (*spatial, in, rank)
    low_numbers = lax.ConvDimensionNumbers(numbers.lhs_spec, axes, numbers.out_spec)
    low = lax.conv_general_dilated(x, a, dimension_numbers=low_numbers, **settings)
    feature = numbers.out_spec[1]
    update = lax.dot_general(
        low.astype(x.dtype),
        b.reshape(rank, -1),
        (((feature,), (0,)), ((), ())),
        preferred_element_type=out.dtype,
    )
    return out + adapter.scaled(jnp.moveaxis(update, -1, feature))


def add_to_ragged(
    adapter: SiteAdapter, x: Any, out: Any, group_sizes: Any, settings: Mapping[str, Any]
) -> Any:
    """`out + scale * x A B`, each group of rows with its own factors."""
    x = adapter.dropped(as_float(x))
    a, b = adapter.factors(x.dtype)
    if not adapter.fits:
        update = lax.ragged_dot(x, adapter.update(x.dtype), group_sizes, **settings)
        return out + adapter.scaled(update.astype(out.dtype))
    low = lax.ragged_dot(x, a, group_sizes, **settings)
    update = lax.ragged_dot(low.astype(x.dtype), b, group_sizes, **settings)
    return out + adapter.scaled(update.astype(out.dtype))


def add_to_rows(adapter: SiteAdapter, eqn: Any, indices: Any, out: Any) -> Any:
    """Looked-up rows of a table plus the same rows of its update, which is not made as a whole."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    (axis,) = numbers.collapsed_slice_dims
    ids = indices[..., 0]
    plan, here = adapter.plan, adapter.here
    a, b = adapter.factors(jnp.promote_types(out.dtype, jnp.float32))
    # Out of bounds, the base's row says it (NaN, or the last one): the update adds nothing to NaN.
    clip = mode == lax.GatherScatterMode.CLIP
    take: dict[str, Any] = dict(mode="clip" if clip else "fill", fill_value=None if clip else 0)
    rows = here.axes[axis]
    left, right = [g for g in plan.inner if g != rows], [g for g in plan.outer if g != rows]
    flat = ids.reshape(-1)
    names = "abcdefghijklmopqs"  # 'n' rows, 'r' rank
    lw, rw = names[: len(left)], names[len(left) : len(left) + len(right)]
    if not plan.batch and rows in plan.inner:
        low = jnp.moveaxis(
            jnp.take(a, flat, plan.inner.index(rows), **take), plan.inner.index(rows), 0
        )
        found = jnp.einsum(f"n{lw}r,r{rw}->n{lw}{rw}", low, b)
    elif not plan.batch and rows in plan.outer:
        place = 1 + plan.outer.index(rows)
        high = jnp.moveaxis(jnp.take(b, flat, place, **take), place, 0)
        found = jnp.einsum(f"{lw}r,nr{rw}->n{lw}{rw}", a, high)
    else:
        table = adapter.update(a.dtype)
        found = jnp.moveaxis(jnp.take(table, flat, axis, **take), axis, 0)
        left, right = [g for k, g in enumerate(here.axes) if k != axis], []
    atoms = [i for group in (*left, *right) for i in group]
    seen = [i for k, group in enumerate(here.axes) if k != axis for i in group]
    found = found.reshape(flat.shape[0], *(plan.split[i] for i in atoms))
    found = found.transpose(0, *(1 + atoms.index(i) for i in seen))
    others = [n for k, n in enumerate(here.shape) if k != axis]
    found = found.reshape(*ids.shape, *others)
    places = list(range(ids.ndim, found.ndim))
    found = jnp.moveaxis(found, places, numbers.offset_dims)
    return out + adapter.scaled(found).astype(out.dtype)


def as_float(operand: Any) -> Any:
    """An operand as a float array."""
    return dequantize(operand, operand.dtype) if isinstance(operand, QArray) else operand
