"""One program in which every Site can be float or quantized, as a traced vector of booleans says.

The vector rides beside the static scales, so it reaches every body; both forms of every weight are
there. So any subset of Sites can be tried without tracing or compiling again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit import jaxprs
from fewbit.debug._batch import telling_about
from fewbit.debug._metrics import measured, output_difference
from fewbit.decisions import Decision
from fewbit.engine import Traced
from fewbit.interpret import Interpreter, fit
from fewbit.jaxprs import Eqn
from fewbit.models.pairs import Pair
from fewbit.sites import SiteRunner
from fewbit.static_run import StaticScales
from fewbit.trace import Program, TracedSite
from fewbit.weight import is_weight, plain

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
                close = get_close_matches(leaf.path, floats, 3)
                near = f" The nearest are {', '.join(close)}." if close else ""
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
