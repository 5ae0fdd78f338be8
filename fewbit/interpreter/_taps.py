"""Taps: what a handler reads at Sites leaves the interpreter as explicit results.

A tap sees every Site it wants as (traced Site, operands, result) and returns a pytree of arrays.
Bodies hand these readings out as results of their own: stacked under a scan over layers, combined
under other loops and over the shards of a `shard_map`, empty for a branch that was not taken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from fewbit.tracing import Node, TracedSite, varying_axes


class Reading(NamedTuple):
    """What a tap read at a Site, and how often the Site ran.

    Both have the layers of the scans around the Site (`TracedSite.layers`) as leading axes. Where
    `count` is 0 the Site did not run, and `value` is zeros.
    """

    count: Any
    value: Any


Readings = dict[str, Reading]  # by Site id


class Tap(Protocol):
    """A handler. An operand that is stored quantized comes as a `Weight`; `plain` makes it float.

    `combine` joins two readings of one Site: two trips of a loop, or two shards of a `shard_map`.
    Neither is ever empty, and neither has layer axes, so any associative function will do.
    """

    def wants(self, site: TracedSite) -> bool: ...

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any: ...

    def combine(self, site_id: str, first: Any, second: Any) -> Any: ...


@dataclass
class Taps:
    """The tap of one interpretation, if any, and the readings of the bodies being run."""

    tap: Tap | None = None
    frames: list[Readings] = field(default_factory=lambda: [{}])
    _inside: dict[Node, bool] = field(default_factory=dict)

    def wants(self, site: TracedSite) -> bool:
        return self.tap is not None and self.tap.wants(site)

    def inside(self, node: Node) -> bool:
        """Whether a wanted Site stands in this body or below; asked once per body."""
        if self.tap is None:
            return False
        if node not in self._inside:
            self._inside[node] = any(map(self.wants, node.walk_sites()))
        return self._inside[node]

    def read(self, site: TracedSite, operands: Sequence[Any], result: Any) -> None:
        assert self.tap is not None
        value = jax.tree.map(jnp.asarray, self.tap.observe(site, operands, result))
        self.frames[-1][site.site.id] = Reading(jnp.ones((), jnp.int32), value)

    def add(self, readings: Mapping[str, Reading]) -> None:
        """Readings that came out of a body, to the body around it."""
        self.frames[-1].update(readings)

    def collected(self, body: Callable[..., Any]) -> Callable[..., tuple[Any, Readings]]:
        """A body whose readings are part of its result, as JAX wants of a function it traces."""

        def with_readings(*args: Any) -> tuple[Any, Readings]:
            self.frames.append({})
            try:
                return body(*args), self.frames[-1]
            finally:
                self.frames.pop()

        return with_readings

    def empty(self, body: Callable[..., tuple[Any, Readings]], *args: Any) -> Readings:
        """The readings of a collected body that has not run."""
        return jax.tree.map(_zeros, jax.eval_shape(lambda *args: body(*args)[1], *args))

    def combine(self, first: Readings, second: Readings) -> Readings:
        """Readings of two runs of one body."""
        assert self.tap is not None
        join = self.tap.combine
        return {s: combine_readings(partial(join, s), first[s], second[s]) for s in first}

    # --- shards: readings leave side by side, without a collective that a branch could skip -------

    def from_shard(self, readings: Readings, axes: Sequence[str]) -> Readings:
        """One shard's readings with an axis for each mesh axis, to leave under P(*axes)."""
        return jax.tree.map(lambda x: jnp.expand_dims(x, tuple(range(len(axes)))), readings)

    def from_shards(self, readings: Readings, differs: Mapping[str, Sequence[bool]]) -> Readings:
        """Readings of a whole `shard_map`; `differs[site]` tells along which axes shards do."""
        result: Readings = {}
        for site, reading in readings.items():
            one = {site: jax.tree.map(whole_array, reading)}
            for split in differs[site]:
                one = self._fold(one) if split else jax.tree.map(lambda x: x[0], one)
            result |= one
        return result

    def _fold(self, readings: Readings) -> Readings:
        """Combined along the first axis, under which the others stay."""
        ((site, reading),) = readings.items()
        first, rest = (jax.tree.map(part, reading) for part in (lambda x: x[0], lambda x: x[1:]))

        def step(done: Reading, more: Reading) -> tuple[Reading, None]:
            return self.combine({site: done}, {site: more})[site], None

        return {site: lax.scan(step, first, rest)[0]}


def combine_readings(
    combine: Callable[[Any, Any], Any], first: Reading, second: Reading
) -> Reading:
    """Two readings of one Site, layer by layer; an empty one adds nothing."""

    def both(first: Reading, second: Reading) -> Reading:
        values = combine(first.value, second.value)

        def pick(a: Any, b: Any, ab: Any) -> Any:
            ab = ab.astype(a.dtype)
            return jnp.where(first.count == 0, b, jnp.where(second.count == 0, a, ab))

        value = jax.tree.map(pick, first.value, second.value, values)
        return Reading(first.count + second.count, value)

    return over_layers(both, first.count.ndim)(first, second)


def over_layers(function: Callable[..., Any], depth: int) -> Callable[..., Any]:
    """A function of arrays without layer axes, for arrays with `depth` of them in front."""
    for _ in range(depth):
        function = jax.vmap(function)
    return function


def _zeros(like: Any) -> jax.Array:
    """Zeros of a result's type: its sharding on an explicit mesh, its shards inside `shard_map`."""
    mesh = like.sharding.mesh if like.sharding is not None else None
    if mesh is not None and not mesh.empty and mesh.are_all_axes_explicit:
        return jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding)
    zeros = jnp.zeros(like.shape, like.dtype)
    varying = tuple(sorted(varying_axes(like)))
    return lax.pcast(zeros, varying, to="varying") if varying else zeros


def differs_over(reading: Reading, axes: Sequence[str]) -> tuple[bool, ...]:
    """Along which mesh axes the shards of a reading differ, asked inside a `shard_map`."""
    varying = all_varying_axes(reading)
    return tuple(axis in varying for axis in axes)


def all_varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which any array of a tree differs, asked inside a `shard_map`."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))


def whole_array(array: Any) -> Any:
    """On an explicit mesh, every device's copy: a scan cannot go over an axis that is split."""
    mesh = jax.typeof(array).sharding.mesh
    return jax.sharding.reshard(array, PartitionSpec()) if mesh.are_all_axes_explicit else array
