"""Loops that hand out what a tap reads in them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fewbit.taps import Readings, Taps
from fewbit.trace import Node


def tapped_scan(
    taps: Taps, node: Node, step: Callable[..., Any], carry: list[Any], xs: Any, p: Any
) -> tuple[Any, Readings]:
    """A scan and its readings: one for each layer, or one for all steps together."""
    body = taps.collected(step)
    over_time = not node.per_layer and taps.inside(node)
    start: Readings = {}
    if over_time:
        first = jax.tree.map(lambda x: x[0], xs) if p.length else _first_abstract(xs)
        start = taps.empty(body, carry, first)

    def with_readings(carried, x):
        moving, seen = carried
        (moving, ys), new = body(moving, x)
        if over_time:
            return (moving, taps.combine(seen, new)), (ys, {})
        return (moving, seen), (ys, new)

    (moving, total), (ys, stacked) = lax.scan(
        with_readings, (carry, start), xs, length=p.length, reverse=p.reverse, unroll=p.unroll
    )
    return (moving, ys), total if over_time else stacked


def _first_abstract(xs: Any) -> Any:
    """One step's slice of a scan that has no steps."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)


def tapped_while(
    taps: Taps,
    keep_going: Callable[..., Any],
    step: Callable[..., Any],
    carry: list[Any],
) -> list[Any]:
    """A while loop that carries its readings; its condition is asked in the body, to be read."""

    @taps.collected
    def ask(moving):
        return keep_going(moving)

    @taps.collected
    def advance(moving):
        moving = step(moving)
        return moving, keep_going(moving)

    def body(carried):
        moving, _, seen = carried
        (moving, go), new = advance(moving)
        return moving, go, taps.combine(seen, new)

    go, asked = ask(carry)
    start = taps.empty(advance, carry) | asked
    moving, _, readings = lax.while_loop(lambda carried: carried[1], body, (carry, go, start))
    taps.add(readings)
    return moving


def no_tangent(reading: Any) -> Any:
    """The tangent of a reading: none, whatever the derivative of the model is."""
    floating = jnp.issubdtype(reading.dtype, jnp.inexact)
    return jnp.zeros_like(reading) if floating else np.zeros(reading.shape, jax.dtypes.float0)
