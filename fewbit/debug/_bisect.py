"""Bisect: the Sites that must go back to float for the model's output to be good enough."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fewbit._util import Progress, terminal_width, wrap
from fewbit.debug._metrics import Metric, difference, from_parts, metric_of, metric_text
from fewbit.debug._mixed import Mixed, arguments, mix, probe
from fewbit.models import pair
from fewbit.rules import QuantizationRule
from fewbit.tracing import TracedSite

_MSG_LIMIT = (
    "bisect needs limit= for a metric of your own: the value that is good enough, such as 0.99."
)
_MSG_HOPELESS = (
    "Even with every Site in float the metric {name} is {value}, not within {limit}: no set of "
    "Sites is to blame. Check the metric and its direction (higher_is_better={higher}), or choose "
    "another limit."
)
_MSG_REFERENCE = (
    "The float model's own output on this batch is not finite, so nothing can be held against it. "
    "Check the batch and the float parameters."
)


@dataclass(frozen=True)
class Step:
    """One trial: which Sites were float, and what came of it."""

    restored: tuple[str, ...]
    value: float
    within: bool


@dataclass(frozen=True)
class Bisection:
    """The guilty Sites, with the way they were found. Prints as a few lines with rules to paste.

    `before` is the metric of the quantized model, `after` that with the guilty Sites in float.
    """

    guilty: tuple[str, ...]
    metric: str
    limit: float
    before: float
    after: float
    steps: tuple[Step, ...]
    rules: tuple[QuantizationRule, ...]
    sites: int

    @property
    def runs(self) -> int:
        """How many times the model was run."""
        return len(self.steps)

    @property
    def rule_lines(self) -> str:
        """The rules as Python, to stand before the others in the list of rules."""
        return "\n".join(f"{rule!r}," for rule in self.rules)

    def table(self, *, width: int | None = None) -> str:
        """As text of the terminal's width."""
        width = terminal_width() if width is None else width
        show = lambda value: metric_text(self.metric, value)  # noqa: E731
        if not self.guilty:
            text = (
                f"No Site is guilty: {self.metric} is {show(self.before)} with all {self.sites} "
                f"Sites quantized, within {show(self.limit)}."
            )
            return "\n".join(wrap(text, width))
        are, them = ("is", "it") if len(self.guilty) == 1 else ("are", "them")
        text = (
            f"{len(self.guilty)} of {self.sites} Sites {are} guilty: with {them} in float "
            f"{self.metric} goes from {show(self.before)} to {show(self.after)} (limit "
            f"{show(self.limit)}). Found in {self.runs} runs."
        )
        lines = wrap(text, width)
        lines += [f"  {site}" for site in self.guilty]
        lines += ["", "Put these before the other rules, and drop one that then matches nothing:"]
        return "\n".join([*lines, *(f"  {line}" for line in self.rule_lines.split("\n"))])

    def __str__(self) -> str:
        return self.table()


def bisect(
    model: Any,
    quantized: Any,
    batch: Any,
    *,
    metric: Any = "sqnr",
    limit: float | None = None,
    higher_is_better: bool = True,
    params: Any = None,
    qparams: Any = None,
    method: Any = None,
    rngs: Any = None,
    progress: bool = True,
) -> Bisection:
    """The smallest set of Sites that must stay float for `metric` to be within `limit`.

    `metric` is 'sqnr' (30 dB unless told), 'cosine' (0.999), 'relative' (0.03), 'agreement' (of the
    argmax, 0.99), or a function of the two outputs (lists of arrays, the float model's first). The
    model is compiled once; each trial is one run. Sites that share a parameter, or that one rule
    must cover, are tried together. Other arguments are those of `compare`.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> key = jax.random.key(0)
    >>> params = {'up': jax.random.normal(key, (16, 16)), 'down': jax.random.normal(key, (16, 4))}
    >>> params['up'] = params['up'].at[0].multiply(100.0)  # a channel that spoils int4
    >>> f = lambda params, x: jnp.tanh(x @ params['up']) @ params['down']
    >>> x = jax.random.normal(key, (8, 16))
    >>> rules = [fewbit.QuantizationRule(module_path='up', weight_qtype='int4'),
    ...          fewbit.QuantizationRule(weight_qtype='int8')]
    >>> qparams = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    >>> qf = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
    >>> found = bisect(f, qf, x, params=params, qparams=qparams, limit=35)
    >>> found.guilty, found.rules
    (('up:dot_general0',), (QuantizationRule(module_path='up'),))
    """
    measure = metric_of(metric, higher_is_better)
    limit = measure.limit if limit is None else limit
    if limit is None:
        raise ValueError(_MSG_LIMIT)
    trees = dict(params=params, qparams=qparams, method=method, rngs=rngs)
    mixed = mix(pair(model, quantized, *arguments(batch), **trees), batch)
    if any(math.isnan(difference(x, x).sqnr) for x in mixed.reference):
        raise ValueError(_MSG_REFERENCE)
    units = together(mixed.sites)
    expected = 4 + 2 * max(len(units), 1).bit_length()
    with Progress("Bisecting", expected, show=progress) as bar:
        return _search(_Trials(mixed, measure, float(limit), units, bar))


class _Trials:
    """Runs with some groups of Sites in float, each remembered."""

    def __init__(
        self, mixed: Mixed, metric: Metric, limit: float, units: list[list[int]], bar: Progress
    ):
        self.mixed, self.metric, self.limit, self.units, self.bar = mixed, metric, limit, units, bar
        self.steps: list[Step] = []
        self.known: dict[frozenset[int], Step] = {}

    def step(self, chosen: Sequence[int], rest: bool = True) -> Step:
        """`chosen` are numbers of groups."""
        key = frozenset(chosen)
        if key in self.known and rest:
            return self.known[key]
        restored = {k for unit in chosen for k in self.units[unit]}
        mask = [k not in restored for k in range(len(self.mixed.sites))]
        outputs = self.mixed.outputs(mask, rest)
        value = float(self.metric.of(self.mixed.reference, outputs))
        names = tuple(self.mixed.sites[k].site.id for k in sorted(restored))
        step = Step(names, value, self.metric.within(value, self.limit))
        self.steps.append(step)
        self.known[key] = step
        verdict = "good" if step.within else "not enough"
        self.bar.total = max(self.bar.total or 0, len(self.steps) + 1)
        text = metric_text(self.metric.name, value)
        self.bar.update(note=f"{len(chosen)} of {len(self.units)} in float: {text}, {verdict}")
        return step


def _search(trials: _Trials) -> Bisection:
    everything = range(len(trials.units))
    start = trials.step([])
    found: list[int] = []
    if not start.within:
        whole = trials.step(everything, rest=False)
        if not whole.within:
            metric = trials.metric
            value, limit = (metric_text(metric.name, v) for v in (whole.value, trials.limit))
            text = dict(name=metric.name, value=value, limit=limit, higher=metric.higher)
            raise ValueError(_MSG_HOPELESS.format(**text))
        found = guilty(_likeliest_first(trials), lambda chosen: trials.step(chosen).within)
    end = trials.step(found)
    sites = [trials.mixed.sites[k] for unit in found for k in trials.units[unit]]
    return Bisection(
        tuple(ts.site.id for ts in sites),
        trials.metric.name,
        trials.limit,
        start.value,
        end.value,
        tuple(trials.steps),
        exclusion_rules(sites, trials.mixed.sites),
        len(trials.mixed.sites),
    )


def together(sites: Sequence[TracedSite]) -> list[list[int]]:
    """Groups of Sites that no rule can tell apart: one module and op, or one shared parameter."""
    owner: dict[Any, int] = {}
    groups: list[set[int]] = []
    for k, ts in enumerate(sites):
        one: Any = (ts.site.path, ts.site.op)
        keys = [one] if ts.site.weight is None else [one, ts.site.weight]
        joined = {owner[key] for key in keys if key in owner}
        target = min(joined, default=len(groups))
        if target == len(groups):
            groups.append(set())
        for other in joined - {target}:
            groups[target] |= groups[other]
            groups[other] = set()
        groups[target].add(k)
        owner = {key: target if g in joined else g for key, g in owner.items()}
        owner |= {key: target for key in keys}
    return [sorted(group) for group in groups if group]


def exclusion_rules(
    chosen: Sequence[TracedSite], sites: Sequence[TracedSite]
) -> tuple[QuantizationRule, ...]:
    """Rules that keep the chosen Sites float and no other of `sites`."""
    ops: dict[str, set[str]] = defaultdict(set)
    for ts in chosen:
        ops[ts.site.path].add(ts.site.op)
    rules = []
    for path, names in ops.items():
        present = {ts.site.op for ts in sites if ts.site.path == path}
        # A look-up stays float only by name.
        narrow = present - names or "take" in names
        module = re.escape(path).replace("\\-", "-")
        op_names = tuple(sorted(names)) if narrow else ()
        rules.append(QuantizationRule(module_path=module, op_names=op_names))
    return tuple(rules)


def _likeliest_first(trials: _Trials) -> list[int]:
    """Groups by the largest error of a Site in them, measured in one run of the float model."""
    mixed = trials.mixed
    off = [False] * len(mixed.sites)
    errors = []
    for _, (reading,) in probe(mixed, [(off, False)], results=False):
        level = from_parts(reading.value["local"]).sqnr
        errors.append(-math.inf if math.isnan(level) else level)
    worst = [min(errors[k] for k in unit) for unit in trials.units]
    return sorted(range(len(worst)), key=worst.__getitem__)


# --- Which of many suspects must go: group testing with few trials --------------------------------

T = TypeVar("T")
Enough = Callable[[Sequence[T]], bool]


def smallest_prefix(suspects: Sequence[T], enough: Enough[T]) -> int:
    """The least n for which the first n are enough; all of them are taken to be.

    >>> smallest_prefix('abcdefgh', lambda chosen: 'c' in chosen)
    3
    """
    low, high = 0, len(suspects)  # `low` is not enough, `high` is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(suspects[:middle]) else (middle, high)
    return high


def minimal_subset(suspects: Sequence[T], enough: Enough[T]) -> list[T]:
    """A subset that is enough and of which no part is; the suspects together are taken to be.

    Junker's QuickXplain: halve; what one half needs beside the other is found first.

    >>> minimal_subset('abcdefgh', lambda chosen: {'c', 'g'} <= set(chosen))
    ['c', 'g']
    """

    def needed(given: list[T], added: bool, rest: list[T]) -> list[T]:
        if added and enough(given):
            return []
        if len(rest) == 1:
            return rest
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        late = needed(given + first, True, second)
        early = needed(given + late, bool(late), first)
        return early + late

    return needed([], False, list(suspects)) if suspects else []


def guilty(suspects: Sequence[T], enough: Enough[T]) -> list[T]:
    """The few of `suspects`, likeliest first, that must be taken away.

    >>> tries = []
    >>> guilty(range(64), lambda chosen: tries.append(chosen) or 0 in chosen), len(tries)
    ([0], 6)
    """
    prefix = list(suspects[: smallest_prefix(suspects, enough)])
    # The last of the prefix is needed, or a shorter one would do.
    *others, last = prefix
    if not others:
        return prefix
    with_last = lambda chosen: enough([*chosen, last])  # noqa: E731
    if with_last([]):
        return [last]
    return [*minimal_subset(others, with_last), last]
