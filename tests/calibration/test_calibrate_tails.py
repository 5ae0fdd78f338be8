"""Ranges that a few huge activations set are named; those of ordinary activations are not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal, relative_error
from jax.extend import core as jex

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.calibration._tails import SAMPLE, sample_places

STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
ALL_ROWS = STATIC.replace(act_batch_axes=(0, 1))  # one scale for all tokens
WIDTH = 64
PARAMS = {"up": normal(1, WIDTH, WIDTH) / 8, "down": normal(2, WIDTH, WIDTH) / 8}


def net(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def calibrate(batches, rules=(ALL_ROWS,), function=net, params=PARAMS, **kwargs):
    """The statistics, and what was warned of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        stats = fewbit.calibrate(function, rules, params, batches, **kwargs)
    return stats, [str(w.message) for w in heard]


def products(params, inputs):
    return [inputs[name] @ params[name] for name in params]


def batch(seed=0, rows=8, tokens=64):
    return normal(seed, rows, tokens, WIDTH)


def massive(x, size=500.0):
    """One channel of the first token."""
    return x.at[:, 0, 7].set(size)


ORDINARY = {
    "normal": lambda x: x,
    "small": lambda x: 1e-6 * x,
    "laplace": lambda x: jnp.sign(x) * x**2,
    "relu": jax.nn.relu,
    "squared relu": lambda x: jax.nn.relu(x) ** 2,
    "gated": lambda x: jax.nn.silu(x) * jnp.roll(x, 1, 0),
    "gelu": jax.nn.gelu,
    "one hot": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), WIDTH),
    "one hot, few": lambda x: (
        jax.nn.one_hot(jnp.argmax(x, -1), WIDTH) * (x[..., :1] > 3).astype("float32")
    ),
    "pixels": lambda x: jnp.clip(x, 0, 1),
    "uneven channels": lambda x: x * jnp.linspace(0.1, 4, WIDTH)[None, None],
    "a few rows": lambda x: x[:1, :2],
    "one value": lambda x: x[:1, :1],
}
HUGE = {
    "a token's channel": massive,
    "of one row": lambda x: x.at[3, 0, 7].set(-900.0),
    "a channel": lambda x: x * jnp.where(jnp.arange(WIDTH) == 5, 100.0, 1.0)[None, None],
    "a token": lambda x: x * jnp.where(jnp.arange(64) == 0, 300.0, 1.0)[None, :, None],
    "among zeros": lambda x: massive(jax.nn.relu(x - 1.5), 90.0),
}


@pytest.mark.parametrize("rule", [STATIC, ALL_ROWS], ids=["by token", "all tokens"])
def test_ordinary_ranges_are_not_told(rule):
    params = {name: PARAMS["up"] for name in ORDINARY}
    batches = [{name: make(batch(seed)) for name, make in ORDINARY.items()} for seed in (0, 1)]
    stats, heard = calibrate(batches, [rule], products, params)
    assert heard == [] and "far beyond" not in str(stats) and len(stats.entries) == len(ORDINARY)


def test_huge_activations_are_told():
    params = {name: PARAMS["up"] for name in ("ordinary", *HUGE)}
    batches = [
        {"ordinary": batch(seed), **{n: make(batch(seed)) for n, make in HUGE.items()}}
        for seed in (0, 1)
    ]
    stats, (text,) = calibrate(batches, function=products, params=params)
    assert text.startswith("5 of 6 static ranges lie far beyond almost all of the values")
    for name in HUGE:
        assert f"{name}/dot_general0 (lhs) ±" in text
        assert f"far beyond most values: {name}/dot_general0 (lhs) ±" in str(stats)


def test_a_single_batch_is_enough():
    stats, (text,) = calibrate([batch(), massive(batch(1)), batch(2)])
    assert text.startswith("1 of 2 static ranges lies far beyond almost all of the values")
    assert "up/dot_general0 (lhs) ±500" in text and "down" not in text
    fixed = "put QuantizationRule(module_path='up', weight_qtype='int8', act_qtype='int8', "
    assert fixed in text and "act_batch_axes=(0, 1)) before the other rules." in text
    assert "act_calibration_method='percentile,99.9' or 'mse'" in text
    assert "far beyond most values: up/dot_general0 (lhs) ±500" in str(stats)


def test_the_numbers():
    (text,) = calibrate([massive(batch(), 812.0)])[1]
    assert "up/dot_general0 (lhs) ±812, but 99.9 % within ±3." in text


def test_the_cures_are_better_and_are_not_told():
    x = massive(batch())
    exact = net(PARAMS, x)

    def error(*rules):
        stats, heard = calibrate([x], rules)
        plan = fewbit.plan(net, rules, PARAMS, x)
        q = fewbit.quantize_model(net, PtqProvider(rules))
        out = q(fewbit.quantize_params(PARAMS, plan, stats), x)
        return relative_error(out[:, 1:], exact[:, 1:]), heard

    bad, heard = error(ALL_ROWS)
    assert len(heard) == 1
    dynamic = ALL_ROWS.replace(module_path="up", act_static_scale=None)
    clipped = ALL_ROWS.replace(act_calibration_method="percentile,99.9")
    for rules in ([dynamic, ALL_ROWS], [clipped]):
        good, heard = error(*rules)
        assert heard == [] and good < bad / 10


@pytest.mark.parametrize("change", [dict(act_qtype="float8_e4m3fn"), dict(act_qtype="int16")])
def test_formats_with_codes_for_small_numbers_are_not_told(change):
    assert calibrate([massive(batch())], [ALL_ROWS.replace(**change)])[1] == []


def test_layers_of_a_scan_are_told_apart():
    stack = {"w": normal(3, 3, WIDTH, WIDTH) / 8}

    def layers(params, x):
        def body(x, layer):
            w, factor = layer
            return (x @ w).at[:, 0, 0].multiply(factor), None

        return jax.lax.scan(body, x, (params["w"], jnp.array([1.0, 1e3, 1.0])))[0]

    with pytest.warns(UserWarning, match=r"w/dot_general0 \(lhs, layer 2\) ±.*, but 99.9 % within"):
        fewbit.calibrate(layers, [ALL_ROWS], stack, [batch()])


def test_minmax_and_nnx():
    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(7)])

        def __call__(self, x):
            return sum(block(massive(x)) for block in self.blocks)

    rule = ALL_ROWS.replace(act_calibration_method="minmax")
    with pytest.warns(UserWarning) as heard:
        fewbit.calibrate(Net(), [rule], [batch()])
    text = str(heard[0].message)
    assert text.startswith("7 of 7 static ranges lie far beyond")
    assert "blocks/4/dot_general0 (lhs)" in text and "blocks/5/" not in text
    assert "; and 2 more." in text and "and the like for 6 more paths" in text
    assert "module_path='blocks/0'" in text


def test_saved_and_merged_statistics_tell_it_too(tmp_path):
    stats = calibrate([massive(batch())])[0]
    stats.save(tmp_path / "stats.npz")
    loaded = fewbit.Statistics.load(tmp_path / "stats.npz")
    assert str(loaded) == str(stats)
    other = calibrate([batch(1)])[0]
    for both in (loaded.merge(other), other.merge(loaded)):
        assert "far beyond most values: up/" in str(both)
    old = calibrate([batch(1)])[0]
    entries = {
        name: fewbit.calibration._statistics.Entry(
            e.site, e.side, e.count, {"range": e.states["range"]}, e.method
        )
        for name, e in old.entries.items()
    }
    older = fewbit.Statistics(old.kind, old.model, old.batches, entries)  # of a file without
    assert older.merge(stats).batches == stats.merge(older).batches == 2
    assert set(stats["up:dot_general0"]["lhs"]) == {"count", "sum_of_absmax", "max_of_absmax"}


def test_few_values_are_looked_at_however_many_there_are():
    x = jax.ShapeDtypeStruct((64, 256, WIDTH), "float32")
    runs = fewbit.models.front_end(net).float_runs(net, PtqProvider([ALL_ROWS]), PARAMS)
    runner, dynamic = runs("__call__", (x,), {})
    observer = fewbit.observers.observer_named("tail")

    def look(tree):
        from fewbit.calibration._observers import operands_of
        from fewbit.calibration._registry import ObserverTap

        def tap(traced, decisions):
            sites = traced.program.sites
            found = [o for ts in sites for o in operands_of(ts, decisions[ts.site.id])]
            return ObserverTap(found, {"tail": observer}, ["tail"])

        return runner.tapped(tree, tap)[1]

    sizes = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "gather":
                sizes.append(eqn.outvars[0].aval.size)
            for inner in jex.jaxprs_in_params(eqn.params):
                walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(look)(dynamic).jaxpr)
    assert sizes and max(sizes) == SAMPLE


def test_places_are_spread_over_every_axis():
    groups, inside = sample_places((32, 512, 128), (1, 512, 1))
    assert groups.shape == (512,) and inside.shape == (1024,)
    places = np.unravel_index(inside, (32, 512, 128))
    assert len(set(places[0])) == 32 and set(places[1]) == {0} and len(set(places[2])) == 128
    groups, inside = sample_places((32, 512, 128), (1, 1, 1))
    assert inside.shape == (SAMPLE,) and len(set(inside % 128)) == 128
    assert len(set(np.unravel_index(inside, (32, 512, 128))[1])) == 512
    assert sample_places((4, 5), (1, 2)) is None and sample_places((0, 4), (1, 1)) is None
