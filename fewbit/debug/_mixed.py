"""One program in which every Site can be float or quantized, as a traced vector of booleans says.

The vector rides beside the static scales, so it reaches every body; both forms of every weight are
there. So any subset of Sites can be tried without tracing or compiling again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import describe, is_array_like, nearest
from fewbit.debug._metrics import (
    channel_absmax,
    kept_axes,
    measured,
    output_difference,
    summed_axes,
)
from fewbit.interpreter import (
    Interpreter,
    Reading,
    SiteRunner,
    StaticScales,
    Taps,
    Traced,
    UntraceableModelError,
    fit,
    is_weight,
    plain,
)
from fewbit.models import Pair
from fewbit.numerics import format_of, should_quantize
from fewbit.planning import Decision, activation_how
from fewbit.qarray import QArray, quantize_static, quantize_with, units
from fewbit.tracing import Eqn, Node, Program, TracedSite, jaxprs

# --- In which order Sites run, and which is the first to give a value that is not finite ----------


def first_not_finite(
    program: Program, readings: Mapping[str, Sequence[Reading]], run: int
) -> str | None:
    """The Site, with its layer in a scan, whose result is the first with NaN or infinity."""
    bad = []
    for site_id, place in _places(program.root).items():
        if site_id not in readings:
            continue
        counts = np.asarray(readings[site_id][run].value["not_finite"])
        for layer in np.ndindex(counts.shape[:-1]):
            if counts[layer][0] > 0:
                bad.append((place(layer), site_id, layer, counts[layer][1:].tolist()))
    if not bad:
        return None
    _, site_id, layer, (activations, weight) = min(bad)
    text = site_id + (f", layer {', '.join(map(str, layer))}" if layer else "")
    if weight:
        return f"{text} (its stored weight is not finite)"
    return f"{text} (its operands were not finite already)" if activations else text


def _places(root: Node) -> dict[str, Any]:
    """For each Site a function from its layer to a key that sorts in the order of running."""
    found: dict[str, Any] = {}

    def walk(node: Node, before: tuple[int, ...]) -> None:
        """`before` has -1 where a layer's number comes in, -2 where layers run backwards."""
        for i in range(len(node.jaxpr.eqns)):
            if i in node.sites:
                found[node.sites[i].site.id] = _filled((*before, i))
            for k, child in enumerate(node.children.get(i, ())):
                step: tuple[int, ...] = (i, k)
                if child.per_layer:
                    step += (-2 if jaxprs.scan_params(node.jaxpr.eqns[i]).reverse else -1,)
                walk(child, (*before, *step))

    walk(root, ())
    return found


def _filled(places: tuple[int, ...]) -> Any:
    def key(layer: tuple[int, ...]) -> tuple[int, ...]:
        numbers = iter(layer)
        return tuple(
            place if place >= 0 else next(numbers) * (1 if place == -1 else -1) for place in places
        )

    return key


# --- A batch as people hold it, as the arguments of one call; and what goes wrong with it, told ---

_MSG_EMPTY = (
    "The batch is empty. Pass what the model is called with: one array, a tuple of arguments, or a "
    "dict of keyword arguments."
)
_MSG_BATCH_SHAPE = (
    "The model does not take this batch ({batch}): {error} Pass what it is called with: one array, "
    "a tuple of arguments, or a dict of keyword arguments."
)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: a tuple is several, a dict with string keys keywords.

    >>> arguments((1, 2)), arguments({'x': 1}), arguments(3)
    (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    if isinstance(batch, tuple):
        args, kwargs = batch, {}
    elif isinstance(batch, Mapping) and batch and all(isinstance(k, str) for k in batch):
        args, kwargs = (), dict(batch)
    else:
        args, kwargs = (batch,), {}
    if batch is None or not jax.tree.leaves((args, kwargs)):
        raise ValueError(_MSG_EMPTY)
    return args, kwargs


@contextmanager
def telling_about(batch: Any) -> Iterator[None]:
    """Around the float model's trace: what it raises is told with the batch it was called with."""
    try:
        yield
    except UntraceableModelError:
        raise
    except Exception as error:
        first = next(filter(_tells, str(error).strip().split("\n")), "")
        first += "" if first.endswith(".") else "."
        text = f"{type(error).__name__}: {first}"
        raise ValueError(_MSG_BATCH_SHAPE.format(batch=_shapes(batch), error=text)) from error


def _tells(line: str) -> bool:
    """Whether a line of an error says something: Keras first says where it was raised."""
    return bool(line.strip()) and not line.startswith("Exception encountered when calling")


def _shapes(batch: Any) -> str:
    leaves = jax.tree.leaves(batch)
    texts = [
        f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" if is_array_like(leaf) else describe(leaf)
        for leaf in leaves[:4]
    ]
    return ", ".join(texts) + (", ..." if len(leaves) > 4 else "")


# --- Both models as one program: a vector of booleans says which Sites are quantized --------------

MASK = "which Sites are quantized"  # no scale's name has spaces

# The same float program compiled twice may fuse, and so round, differently.
_SAME_FLOAT = 60.0

_MSG_SITES = (
    "The two models do not have the same Sites. {only} They must be one model: pass the float "
    "model that quantize_model was given."
)
_MSG_NO_LEAF = (
    "The quantized model has a parameter '{leaf}' that the float one has not.{near} Pass the float "
    "parameters that were quantized."
)
_MSG_SHAPE = (
    "Parameter '{leaf}' is {found} in the float model and {wanted} in the quantized one. Pass the "
    "float parameters that were quantized."
)
_MSG_NOTHING = (
    "Nothing is quantized in this model on this batch: no rule is in force at any of its {count} "
    "Sites, and no parameter is stored quantized. fewbit.plan(model, rules, ...) shows which rule "
    "meets which Site."
)
_MSG_OTHER_PROGRAM = (
    "The two models have the same Sites, but with every Site in float they still differ: "
    "{difference}. Something else than quantization is different between them: another function, "
    "other settings, or random numbers (dropout). Pass one model in inference mode."
)


@dataclass
class MixedSites(SiteRunner):
    """At a Site: both products, and the one that its entry of the vector asks for."""

    numbers: dict[str, int] = field(default_factory=dict)
    both: tuple[Any, Any] | None = None  # (float, quantized) of the last Site, for a tap

    def __call__(
        self, ts: TracedSite, ins: Sequence[Any], finish: tuple[Any, str | None] = (None, None)
    ) -> Any:
        assert finish == (None, None), "a Site that is compared is run without what follows it"
        aval, where = ts.eqn.outvars[0].aval, ts.site.id
        exact = fit(jaxprs.bind(ts.eqn, [exactly(v) for v in ins])[0], aval, where)
        quantized = fit(super().__call__(ts, ins), aval, where)
        self.both = exact, quantized
        return jnp.where(self.static.values[MASK][self.numbers.get(where, -1)], quantized, exact)


@dataclass
class MixedInterpreter(Interpreter):
    """Moves both forms of a weight; what reads one elsewhere follows the vector's last entry."""

    @property
    def runner(self) -> MixedSites:
        assert isinstance(self.at_site, MixedSites)
        return self.at_site

    def move(self, eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
        outs = super().move(eqn, ins)
        if not any(is_weight(v) and v.twin is not None for v in ins):
            return outs
        exact = jaxprs.bind(eqn, [exactly(v) for v in ins])
        return [
            out.moved(out.array, twin) if is_weight(out) else self.pick(out, twin)
            for out, twin in zip(outs, exact, strict=True)
        ]

    def floats(self, values: Sequence[Any], why: str) -> list[Any]:
        read = super().floats(values, why)
        return [
            self.pick(quantized, v.twin) if is_weight(v) and v.twin is not None else quantized
            for quantized, v in zip(read, values, strict=True)
        ]

    def pick(self, quantized: Any, exact: Any) -> Any:
        return jnp.where(self.static.values[MASK][-1], quantized, exact)


def exactly(value: Any) -> Any:
    """The float array behind a value: a weight's twin if it has one."""
    if is_weight(value) and value.twin is not None:
        return value.twin
    return plain(value)


@dataclass
class Mixed:
    """A pair of models as one program, and what is in it. Masks have one boolean per Site."""

    pair: Pair
    traced: Traced
    decisions: dict[str, Decision]
    sites: tuple[TracedSite, ...]  # the quantized ones, in program order
    values: list[Any]
    others: dict[int, Any]  # parameters that are not quantized, but other numbers in the float tree
    reference: list[np.ndarray]  # the float model's output

    def __post_init__(self) -> None:
        self._run = jax.jit(self.program)

    def interpreter(self, mask: Any, scales: dict[str, Any]) -> MixedInterpreter:
        static = StaticScales({**scales, MASK: mask})
        numbers = {ts.site.id: k for k, ts in enumerate(self.sites)}
        runner = MixedSites(
            self.pair.runner.provider, self.decisions, static=static, numbers=numbers
        )
        return MixedInterpreter(runner, lambda ts: ts.site.id in numbers, static=static)

    def inputs(self, mask: Any, values: list[Any], others: dict[int, Any]) -> list[Any]:
        return [
            jnp.where(mask[-1], value, others[k]) if k in others else value
            for k, value in enumerate(values)
        ]

    def program(self, mask: Any, values: list[Any], others: dict[int, Any], scales: Any) -> Any:
        """What is jitted: the model's outputs under a mask with one entry more than Sites."""
        interpreter = self.interpreter(mask, scales)
        outs = interpreter.run(self.traced.program.root, self.inputs(mask, values, others))
        return [plain(out) for out in outs[: self.pair.outputs(self.traced)]]

    def outputs(self, mask: Sequence[bool], rest: bool = True) -> list[np.ndarray]:
        """The output with these Sites quantized. `rest`: what reads weights besides Sites."""
        outs = self._run(full_mask(mask, rest), self.values, self.others, self.traced.scales)
        return measured(outs)


def full_mask(mask: Sequence[bool], rest: bool) -> jax.Array:
    """A mask with its last entry."""
    return jnp.asarray([*mask, rest], bool)


def mix(pair: Pair, batch: Any) -> Mixed:
    """Both models as one program, once they are known to be one model."""
    with telling_about(batch):
        float_traced = pair.float_runner.trace(pair.float_tree)
    traced, decisions = pair.runner.ready(pair.tree)
    _check_same_sites(float_traced.program, traced.program)
    stored = {v.leaf for v in traced.values if is_weight(v)}
    sites = tuple(
        ts
        for ts in traced.program.sites
        if decisions[ts.site.id].rule is not None or ts.site.weight in stored
    )
    if not sites and not stored:
        raise ValueError(_MSG_NOTHING.format(count=len(traced.program.sites)))
    values, others = _paired(traced, float_traced)
    reference = measured(pair.float_runner.as_traced(pair.float_tree)[: pair.outputs(float_traced)])
    mixed = Mixed(pair, traced, decisions, sites, values, others, reference)
    same = output_difference(reference, mixed.outputs([False] * len(sites), rest=False))
    if same.sqnr < _SAME_FLOAT:  # NaN: the float model itself is not finite, which is told later
        raise ValueError(_MSG_OTHER_PROGRAM.format(difference=same))
    return mixed


def _check_same_sites(first: Program, second: Program) -> None:
    ids = [{ts.site.id: ts.site for ts in program.sites} for program in (first, second)]
    shape = lambda site: (site.lhs, site.rhs, site.out)  # noqa: E731
    texts = []
    for mine, theirs, name in ((ids[0], ids[1], "float"), (ids[1], ids[0], "quantized")):
        missing = [i for i in mine if i not in theirs]
        if missing:
            more = ", ..." if len(missing) > 3 else ""
            texts.append(f"Only the {name} one has {', '.join(missing[:3])}{more}.")
    for i in ids[0]:
        if not texts and shape(ids[0][i]) != shape(ids[1][i]):
            a, b = (" x ".join(map(str, shape(found[i])[:2])) for found in ids)
            texts.append(f"{i} is {a} in the float one and {b} in the quantized one.")
    if texts:
        raise ValueError(_MSG_SITES.format(only=" ".join(texts)))


def _paired(traced: Traced, float_traced: Traced) -> tuple[list[Any], dict[int, Any]]:
    """The quantized model's values with the float ones beside them."""
    floats = {
        leaf.path: value
        for leaf, value in zip(float_traced.leaves, float_traced.values, strict=True)
        if leaf is not None
    }
    values, others = [], {}
    for k, (value, leaf) in enumerate(zip(traced.values, traced.leaves, strict=True)):
        if leaf is not None:
            if leaf.path not in floats:
                near = nearest(leaf.path, floats, " The nearest are {}.", 3, 0.6, show=str)
                raise ValueError(_MSG_NO_LEAF.format(leaf=leaf.path, near=near))
            twin = floats[leaf.path]
            if tuple(twin.shape) != leaf.shape:
                sizes = dict(found=tuple(twin.shape), wanted=leaf.shape)
                raise ValueError(_MSG_SHAPE.format(leaf=leaf.path, **sizes))
            if is_weight(value):
                value = replace(value, twin=jnp.asarray(plain(twin), value.array.dtype))
            elif value is not twin and not np.array_equal(value, twin, equal_nan=True):
                others[k] = jnp.asarray(twin, value.dtype)
        values.append(value)
    return values, others


# --- What is read at every Site while a pair of models runs: sums, channels, clipping, results ----

_ADDED = ("local", "weight", "clipped", "not_finite")
_ROUNDING = 0.5 + 1e-3  # a code away from the edge is rounding, not clipping


@dataclass
class Probe:
    """A tap on the Sites of a mixed run."""

    runner: MixedSites
    wanted: frozenset[str]
    results: bool = True  # all there is to read, or the local error alone

    def wants(self, site: TracedSite) -> bool:
        return site.site.id in self.wanted

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any:
        assert self.runner.both is not None
        local = sums(*self.runner.both)
        if not self.results:
            return {"local": local}
        sides = [k for k in (0, 1) if k == 0 or site.site.op != "take"]
        weights = [v for v in operands if is_weight(v)]
        parts = ([result], [v for v in operands if not is_weight(v)], weights)
        seen = {
            "out": result,
            "local": local,
            "not_finite": jnp.stack([_not_finite(part) for part in parts]),
        }
        clipped = []
        for k in sides:
            operand = operands[k]
            if is_weight(operand):
                exact = exactly(operand)
                seen["weight"] = sums(exact, plain(operand))
                if exact.size:
                    seen["channels of weight"] = channel_absmax(exact, summed_axes(site, k))
                    kept = kept_axes(site, k)
                    if kept:
                        seen["channels of weight output"] = channel_absmax(exact, kept)
            elif should_quantize(operand.dtype) and operand.size and site.sources[k] is None:
                name = "channels of activation" + " (rhs)" * (k == 1)
                seen[name] = channel_absmax(operand, summed_axes(site, k))
                quantized = self._activation(site, k, operand)
                if quantized is not None:
                    clipped.append(clipped_count(operand, quantized))
        if clipped:
            seen["clipped"] = jnp.sum(jnp.stack(clipped), axis=0)
        return seen

    def _activation(self, ts: TracedSite, side: int, operand: Any) -> QArray | None:
        rule = self.runner.decisions[ts.site.id].rule
        if rule is None or ts.site.op == "take":
            return None
        how = activation_how(ts, side, rule)
        if how is None:
            return None
        static = self.runner.static.of(ts, rule)
        if side in static:
            return quantize_static(operand, how, *static[side])
        return quantize_with(operand, how)

    def combine(self, site_id: str, first: Any, second: Any) -> Any:
        return {
            name: first[name] + second[name]
            if name in _ADDED
            else jnp.maximum(first[name], second[name])
            if name.startswith("channels")
            else second[name]
            for name in first
        }


def sums(exact: Any, quantized: Any) -> Any:
    """Signal, noise, dot and power, as `_metrics.sums`, where the arrays are."""
    f, q = (x.astype(jnp.float32) for x in (exact, quantized))
    noise = jnp.where(f == q, jnp.float32(0), q - f)
    return jnp.stack([jnp.sum(x) for x in (f * f, noise * noise, f * q, q * q)])


def clipped_count(array: Any, q: QArray) -> Any:
    """How many numbers lie outside the range of their scale, and how many there are.

    >>> import fewbit
    >>> q = fewbit.quantize(jnp.array([1.0, -2.0, 100.0]), 'int8', calibration_method='fixed,-4,4')
    >>> clipped_count(jnp.array([1.0, -2.0, 100.0]), q)
    Array([1., 3.], dtype=float32)
    """
    row = format_of(q.qtype)
    in_units = units(array, q.scale, q.zero_point, q.tensor_scale, q.tile_shape)
    in_units = in_units.astype(jnp.float32)
    if row.kind == "sign":
        return jnp.array([0, array.size], jnp.float32)
    if row.kind == "int":
        low, high = row.asymmetric or (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
        low, high = low - _ROUNDING, high + _ROUNDING
    else:
        high = (1.0 if row.kind == "table" else float(jnp.finfo(row.storage).max)) * 1.001
        low = -high
    outside = (in_units > jnp.float32(high)) | (in_units < jnp.float32(low))
    count = jnp.sum(outside.astype(jnp.float32))
    return jnp.stack([count, jnp.float32(array.size)])


def _not_finite(values: Sequence[Any]) -> Any:
    counts = [
        jnp.sum((~jnp.isfinite(plain(v))).astype(jnp.float32))
        for v in values
        if is_weight(v) or jnp.issubdtype(v.dtype, jnp.inexact)
    ]
    return jnp.sum(jnp.stack(counts)) if counts else jnp.float32(0)


def probe(
    mixed: Mixed,
    masks: Sequence[tuple[Sequence[bool], bool]],
    memory: int = 2**30,
    results: bool = True,
) -> Iterator[tuple[TracedSite, list[Reading]]]:
    """For every Site its readings under each mask. At most `memory` bytes of results at once."""
    for group in _groups(mixed.sites, memory, len(masks)) if results else [mixed.sites]:
        wanted = frozenset(ts.site.id for ts in group)

        def program(mask, values, others, scales, wanted=wanted):
            interpreter = mixed.interpreter(mask, scales)
            interpreter.taps = Taps(Probe(interpreter.runner, wanted, results))
            inputs = mixed.inputs(mask, values, others)
            return interpreter.run_tapped(mixed.traced.program.root, inputs)[1]

        run = jax.jit(program)
        arguments = (mixed.values, mixed.others, mixed.traced.scales)
        found = [
            jax.tree.map(np.asarray, run(full_mask(mask, rest), *arguments)) for mask, rest in masks
        ]
        for ts in group:
            yield ts, [readings.get(ts.site.id) for readings in found]


def _groups(
    sites: Sequence[TracedSite], memory: int, runs: int
) -> Iterator[tuple[TracedSite, ...]]:
    """Sites in order, in groups whose results fit; a Site that does not fit is its own group."""
    group: list[TracedSite] = []
    used = 0
    for ts in sites:
        aval = ts.eqn.outvars[0].aval
        size = prod((*ts.layers, *aval.shape)) * aval.dtype.itemsize * runs
        if group and used + size > memory:
            yield tuple(group)
            group, used = [], 0
        group.append(ts)
        used += size
    if group:
        yield tuple(group)
