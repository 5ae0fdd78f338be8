"""What training_stats says of a model that trains, held against plain float64 and plain JAX."""

import html.parser
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit
from fewbit.debug import TrainingHistory, training_stats

METRICS = ("weight_clipped", "scale_drift", "cotangent_snr_db", "weight_grad_snr_db")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def trains(function, **fields):
    return fewbit.quantize_model(function, fewbit.QtProvider([fewbit.QtRule(**fields)]))


def two_layers(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def square(out):
    return jnp.sum(jnp.square(out))


def decibels(exact, noisy):
    exact, noisy = (np.asarray(a, np.float64) for a in (exact, noisy))
    return 10 * math.log10(np.sum(exact**2) / np.sum((noisy - exact) ** 2))


PARAMS = {"up": normal(0, 8, 12), "down": normal(1, 12, 5)}
X = normal(2, 6, 8)
INT4 = dict(weight_qtype="int4", act_qtype="int8", bwd_qtype="int8")


def test_gradients_are_held_against_those_of_the_float_model():
    f = trains(two_layers, **INT4)
    stats = training_stats(f, PARAMS, X, loss=square)
    exact = jax.grad(lambda p: square(two_layers(p, X)))(PARAMS)
    noisy = jax.grad(lambda p: square(f(p, X)))(PARAMS)
    for name in PARAMS:
        found = float(stats[f"{name}:dot_general0/weight_grad_snr_db"])
        assert found == pytest.approx(decibels(exact[name], noisy[name]), abs=0.05)
    # At the last product the cotangent of a sum of squares is twice the output.
    found = float(stats["down:dot_general0/cotangent_snr_db"])
    assert found == pytest.approx(decibels(two_layers(PARAMS, X), f(PARAMS, X)), abs=0.05)
    assert float(stats["up:dot_general0/cotangent_snr_db"]) < 60


def test_equal_gradients_are_said_to_be():
    def linear(p, x):
        return x @ p["up"]

    f = trains(linear, weight_qtype="int8")
    stats = training_stats(f, {"up": PARAMS["up"]}, X, loss=jnp.sum)
    assert float(stats["up:dot_general0/cotangent_snr_db"]) == 200
    assert float(stats["up:dot_general0/weight_grad_snr_db"]) == 200


def test_clipping_of_weights_and_activations():
    f = trains(
        two_layers,
        weight_qtype="int4",
        act_qtype="int8",
        weight_calibration_method="fixed,1",
        act_calibration_method="fixed,0.5",
    )
    stats = training_stats(f, PARAMS, X)
    step = 1 / 7.5
    outside = (np.asarray(PARAMS["up"]) > 7.5 * step) | (np.asarray(PARAMS["up"]) < -8.5 * step)
    found = float(stats["up:dot_general0/weight_clipped"])
    assert found == pytest.approx(outside.mean(), abs=0.02) and found > 0.1
    found = float(stats["up:dot_general0/act_clipped"])
    assert found == pytest.approx((np.abs(np.asarray(X)) > 0.5).mean(), abs=0.02)
    assert not any("snr" in name for name in stats)  # no loss, no gradients


def test_learned_scales_show_what_they_clip():
    f = trains(two_layers, weight_qtype="int2", weight_calibration_method="learned,mse")
    params = fewbit.add_learned_scales(f, PARAMS, X)
    params["up_qscale"] = params["up_qscale"] / 4
    stats = training_stats(f, params, X, loss=square)
    in_units = np.asarray(PARAMS["up"] / params["up_qscale"])
    outside = (in_units > 1.5) | (in_units < -2.5)
    assert float(stats["up:dot_general0/weight_clipped"]) == pytest.approx(outside.mean(), abs=0.02)
    assert float(stats["up:dot_general0/weight_clipped"]) > 0.3


def test_static_ranges_clip_what_they_have_not_seen_and_noise_takes_its_key():
    f = trains(two_layers, **INT4, act_static_scale=True, bwd_stochastic_rounding="uniform")
    seen = {}
    key = jax.random.key(0)
    _, seen = f.collecting(PARAMS, seen, X, stochastic_rounding=key)
    look = jax.jit(
        lambda x: training_stats(
            f, PARAMS, x, loss=square, quant_stats=seen, stochastic_rounding=key
        )
    )
    assert float(look(X)["up:dot_general0/act_clipped"]) == 0
    stats = look(8 * X)
    edge = np.abs(np.asarray(X)).max()
    outside = np.abs(8 * np.asarray(X)) > edge
    assert float(stats["up:dot_general0/act_clipped"]) == pytest.approx(outside.mean(), abs=0.03)
    assert math.isfinite(float(stats["up:dot_general0/weight_grad_snr_db"]))


def test_drift_is_the_relative_change_of_scales_and_works_inside_jit():
    f = trains(two_layers, **INT4)
    look = jax.jit(lambda p, before: training_stats(f, p, X, loss=square, previous=before))
    first = training_stats(f, PARAMS, X, loss=square)
    assert float(first["up:dot_general0/scale_drift"]) == 0
    second = look({"up": 1.25 * PARAMS["up"], "down": PARAMS["down"]}, first)
    assert float(second["up:dot_general0/scale_drift"]) == pytest.approx(0.25, rel=1e-5)
    assert float(second["down:dot_general0/scale_drift"]) == 0
    assert set(second) == set(first) and all(v.shape == () for v in second.values())
    again = look(PARAMS, second)
    assert float(again["up:dot_general0/scale_drift"]) == pytest.approx(0.2, rel=1e-5)


def test_layers_of_a_scan_are_told_apart():
    def layer(x, w):
        return jnp.tanh(x @ w), None

    stacked = trains(lambda p, x: jax.lax.scan(jax.checkpoint(layer), x, p["w"])[0], **INT4)

    def apart(p, x):
        return layer(layer(x, p["a"])[0], p["b"])[0]

    w = normal(3, 2, 8, 8)
    found = training_stats(stacked, {"w": w}, X, loss=square)
    wanted = training_stats(trains(apart, **INT4), {"a": w[0], "b": w[1]}, X, loss=square)
    for k, name in enumerate("ab"):
        for metric in METRICS:
            mine = float(found[f"w:dot_general0/layer{k}/{metric}"])
            assert mine == pytest.approx(float(wanted[f"{name}:dot_general0/{metric}"]), abs=0.2), (
                metric
            )


def test_a_linen_model_and_an_nnx_model():
    import flax.linen as nn
    from flax import nnx

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(6, name="up")(x))
            return nn.Dense(3, name="down")(nn.relu(x))

    rules = [fewbit.QtRule(**INT4)]
    linen = fewbit.quantize_model(Net(), fewbit.QtProvider(rules))
    variables = linen.init(jax.random.key(0), X)
    stats = training_stats(linen, variables, X, train=True, loss=square)
    assert {name.partition(":")[0] for name in stats} == {"up", "down"}
    assert all(math.isfinite(float(v)) for v in stats.values())

    net = nnx.Sequential(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 3, rngs=nnx.Rngs(1)))
    model = fewbit.quantize_model(net, fewbit.QtProvider(rules), X)
    stats = training_stats(model, None, X, loss=square)
    assert {name.partition(":")[0] for name in stats} == {"layers/0", "layers/1"}
    assert 5 < float(stats["layers/1:dot_general0/weight_grad_snr_db"]) < 60


# --- the curves ----------------------------------------------------------------------------------


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_history_becomes_a_page(tmp_path):
    f = trains(two_layers, **INT4)
    history, params, before = TrainingHistory(), dict(PARAMS), None
    look = jax.jit(lambda p, b: training_stats(f, p, X, loss=square, previous=b))
    for step in (0, 10, 20):
        stats = look(params, before)
        history.add(step, stats)
        before, params = stats, jax.tree.map(lambda a: 1.1 * a, params)
    curve = history.curves("scale_drift")["up:dot_general0"]
    assert curve[0] == 0 and curve[1:] == pytest.approx([0.1, 0.1], rel=1e-3)
    path = history.plot(tmp_path / "run.html", title="A <run>")
    page = pathlib.Path(path).read_text("utf-8")
    reader = Reader()
    reader.feed(page)
    assert not reader.open and "A &lt;run&gt;" in page and "http:" not in page
    lines = [attrs for tag, attrs in reader.seen if tag == "polyline"]
    assert len(lines) == 2 * 5 and all(len(a["points"].split()) == 3 for a in lines)
    # The drawn heights are those of the numbers: larger is higher.
    drift = page[page.index('id="chart-scale_drift-title"') :]
    points = re.search(r'points="([^"]+)"', drift).group(1).split()
    heights = [float(point.split(",")[1]) for point in points]
    assert heights[0] > heights[1] == pytest.approx(heights[2], abs=0.2)


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    history = TrainingHistory()
    history.add(0, {"up:dot_general0/weight_clipped": 0.5})
    with pytest.raises(OSError, match="The report cannot be written to .*Nothing was changed"):
        history.plot(tmp_path / "no" / "such" / "folder.html")
    assert not list(tmp_path.iterdir())


# --- messages ------------------------------------------------------------------------------------


def test_what_does_not_train_is_refused():
    with pytest.raises(TypeError, match=r"training_stats looks at a model while it trains: one .*"):
        training_stats(two_layers, PARAMS, X)
    rules = [fewbit.QuantizationRule(weight_qtype="int8")]
    served = fewbit.quantize_model(two_layers, fewbit.PtqProvider(rules))
    with pytest.raises(TypeError, match="stored quantized and have no gradients; .*compare"):
        training_stats(served, PARAMS, X)


def test_wrong_arguments_are_told():
    f = trains(two_layers, **INT4)
    with pytest.raises(TypeError, match=r"loss= takes a function of the model's output"):
        training_stats(f, PARAMS, X, loss=3)
    with pytest.raises(TypeError, match=r"must return one number; got"):
        training_stats(f, PARAMS, X, loss=lambda out: out)
    with pytest.raises(TypeError, match=r"dict\(stats\) is for loggers and has no scales"):
        training_stats(f, PARAMS, X, previous={"a": 1.0})
    with pytest.raises(TypeError, match=r"training_stats needs the parameters"):
        training_stats(f)
    other = training_stats(trains(lambda p, x: x @ p["v"], **INT4), {"v": PARAMS["up"]}, X)
    with pytest.raises(ValueError, match="It has no scales of up:dot_general0: the two looks"):
        training_stats(f, PARAMS, X, previous=other)


def test_wrong_histories_are_told():
    history = TrainingHistory()
    with pytest.raises(ValueError, match="This history is empty: add"):
        history.html()
    with pytest.raises(TypeError, match="takes the number of the step first, got"):
        history.add("first", {})
    with pytest.raises(TypeError, match="takes what fewbit.debug.training_stats returned"):
        history.add(0, [1.0])

    def traced(x):
        history.add(0, {"up:dot_general0/weight_clipped": x})
        return x

    with pytest.raises(TypeError, match="Inside jit its numbers are not known yet"):
        jax.jit(traced)(1.0)
