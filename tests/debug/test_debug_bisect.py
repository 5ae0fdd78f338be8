"""fewbit.debug.bisect: the guilty Sites are found in few runs, and its rules cure the model."""

import io
import math
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal, quantized

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.debug import bisect, compare
from fewbit.debug._bisect import together
from fewbit.debug._metrics import difference, output_difference

N = 12
X = normal(99, 6, 16)


def deep(params, x):
    for k in range(N):
        x = x + jnp.tanh(x @ params[f"w{k}"]) / 4
    return x


def deep_params():
    return {f"w{k}": normal(k, 16, 16) / 4 for k in range(N)}


def rules_with(**bad):
    """int8 everywhere, fewer bits at some places."""
    rules = [QuantizationRule(module_path=path, weight_qtype=kind) for path, kind in bad.items()]
    return [*rules, QuantizationRule(weight_qtype="int8")]


@pytest.fixture(scope="module")
def one_guilty():
    rules = rules_with(w7="int2")
    qf, qparams, _ = quantized(deep, rules, deep_params(), X)
    return rules, qf, bisect(deep, qf, X, params=deep_params(), qparams=qparams, limit=30)


def test_one_guilty_site_is_found_in_logarithmically_many_runs(one_guilty):
    _, qf, found = one_guilty
    assert found.guilty == ("w7:dot_general0",)
    assert found.runs <= 3 + math.ceil(math.log2(N)) + 1
    assert found.before < 30 <= found.after
    assert found.steps[0].restored == () and found.steps[0].value == found.before
    assert all(step.within == (step.value >= 30) for step in found.steps)


def test_the_proposed_rules_bring_the_model_within_the_limit(one_guilty):
    rules, _, found = one_guilty
    assert found.rules == (QuantizationRule(module_path="w7"),)
    assert found.rule_lines == "QuantizationRule(module_path='w7'),"
    better = [*found.rules, *rules[1:]]  # the rule for w7 alone would match nothing any more
    qf, qparams, plan = quantized(deep, better, deep_params(), X)
    assert [row.site.path for row in plan.sites if not row.quantized] == ["w7"]
    value = difference(deep(deep_params(), X), qf(qparams, X)).sqnr
    assert value == pytest.approx(found.after, abs=0.1)


def test_it_prints_what_to_paste(one_guilty):
    text = one_guilty[2].table(width=80)
    assert text.startswith("1 of 12 Sites is guilty: with it in float sqnr goes from ")
    assert "matches nothing:\n  QuantizationRule(module_path='w7')," in text
    assert max(map(len, text.split("\n"))) <= 80


@pytest.mark.long
def test_several_guilty_sites():
    rules = rules_with(w2="int2", w9="int2")
    qf, qparams, _ = quantized(deep, rules, deep_params(), X)
    found = bisect(deep, qf, X, params=deep_params(), qparams=qparams, limit=30)
    assert set(found.guilty) == {"w2:dot_general0", "w9:dot_general0"}
    lone = bisect(deep, qf, X, params=deep_params(), qparams=qparams, metric="cosine", limit=-1.0)
    assert lone.guilty == () and lone.rules == () and lone.runs == 1
    assert str(lone).startswith("No Site is guilty: cosine is ")


@pytest.mark.long
def test_a_metric_of_ones_own():
    qf, qparams, _ = quantized(deep, rules_with(w7="int2"), deep_params(), X)
    trees = dict(params=deep_params(), qparams=qparams)

    def largest(reference, output):
        return float(np.abs(output[0] - reference[0]).max())

    found = bisect(deep, qf, X, metric=largest, limit=0.05, higher_is_better=False, **trees)
    assert found.guilty == ("w7:dot_general0",) and found.metric == "largest"
    with pytest.raises(ValueError, match="bisect needs limit= for a metric of your own"):
        bisect(deep, qf, X, metric=largest, **trees)
    hopeless = "Even with every Site in float the metric largest is 0, not within 7: no set of Site"
    with pytest.raises(ValueError, match=hopeless):
        bisect(deep, qf, X, metric=largest, limit=7.0, **trees)
    with pytest.raises(ValueError, match="The float model's own output on this batch is not fin"):
        bisect(deep, qf, X.at[0, 0].set(jnp.nan), **trees)


def test_sites_that_share_a_parameter_go_together():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, ids):
            table = nn.Embed(9, 16, name="embed")
            return table.attend(nn.Dense(16, name="mid")(table(ids)))

    model, ids = Tied(), jnp.arange(8).reshape(2, 4)
    params = model.init(jax.random.key(0), ids)["params"]
    rules = [
        QuantizationRule(module_path="embed", weight_qtype="int2"),
        QuantizationRule(weight_qtype="int8"),
    ]
    qmodel = fewbit.quantize_model(model, PtqProvider(rules))
    qparams = fewbit.quantize_params(params, fewbit.plan(model, rules, ids))
    found = bisect(model, qmodel, ids, params=params, qparams=qparams, limit=30)
    assert found.guilty == ("embed:take0", "embed:dot_general0")
    assert found.rules == (QuantizationRule(module_path="embed", op_names=("dot_general", "take")),)
    plan = fewbit.plan(model, [*found.rules, *rules[1:]], ids)
    assert [row.site.path for row in plan.sites if row.quantized] == ["mid"]


def test_groups_of_sites_that_no_rule_tells_apart():
    def model(params, x):  # two products of `a`, and `b` meets `a` in no way
        return (x @ params["a"]) @ params["a"] + x @ params["b"]

    params = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
    qf, qparams, _ = quantized(model, [QuantizationRule(weight_qtype="int8")], params, X)
    from fewbit.debug._mixed import mix
    from fewbit.models._pairs import pair

    mixed = mix(pair(model, qf, (X,), {}, params=params, qparams=qparams), X)
    assert together(mixed.sites) == [[0, 1], [2]]


def test_nnx_compiles_once_for_all_trials():
    """Every subset runs through one compiled program."""
    model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(k)) for k in range(4)))
    rules = rules_with(**{"layers/2": "int2"})
    small = fewbit.quantize_model(model, PtqProvider(rules), X)
    from fewbit.debug._mixed import mix
    from fewbit.models._pairs import pair

    mixed = mix(pair(model, small, (X,), {}), X)
    levels = []
    for k in range(16):
        mask = [bool(k >> j & 1) for j in range(4)]
        levels.append(output_difference(mixed.reference, mixed.outputs(mask)).sqnr)
    assert mixed._run._cache_size() == 1
    assert levels[0] == math.inf and len(set(levels)) > 10
    with_two = [v for k, v in enumerate(levels) if k >> 2 & 1]
    assert max(with_two) < min(v for k, v in enumerate(levels) if not k >> 2 & 1)
    # The mask is what `compare` calls `only` and `restored`.
    found = compare(model, small, X)
    assert found.site("layers/2:dot_general0").only == pytest.approx(levels[4])
    assert found.site("layers/2:dot_general0").restored == pytest.approx(levels[11])


def test_progress_is_shown_where_somebody_looks(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def model(params, x):
        return x @ params["a"] @ params["b"]

    monkeypatch.setattr("fewbit._util._text._EVERY", 0)
    monkeypatch.setattr("fewbit._util._text._PATIENCE", 0)
    params = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
    qf, qparams, _ = quantized(model, rules_with(b="int2"), params, X)
    for progress in (True, False):
        shown = Terminal()
        monkeypatch.setattr(sys, "stderr", shown)
        bisect(model, qf, X, params=params, qparams=qparams, limit=30, progress=progress)
        assert ("1 of 2 in float: " in shown.getvalue()) == progress
        assert bool(shown.getvalue()) == progress
