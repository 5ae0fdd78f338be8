"""fewbit.debug.compare: every number against a float64 reference made by hand, on every kind."""

import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import W8A8, normal, quantized
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.calibration._statistics import SimpleMovingAverage
from fewbit.debug import Comparison, compare
from fewbit.debug._metrics import difference

W4A8 = [QuantizationRule(weight_qtype="int4", act_qtype="int8")]
X = normal(9, 8, 16)


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def mlp_params():
    return {"up": normal(0, 16, 32) / 4, "down": normal(1, 32, 5) / 4}


@pytest.fixture(scope="module")
def mlp_pair():
    params = mlp_params()
    qf, qparams, plan = quantized(mlp, W4A8, params, X)
    return params, qf, qparams, plan


@pytest.fixture(scope="module")
def mlp_comparison(mlp_pair):
    params, qf, qparams, _ = mlp_pair
    return compare(mlp, qf, X, params=params, qparams=qparams)


def rounded(x, qtype, axis):
    """A round trip through codes, in float64: the reference multiplies such arrays as they are."""
    q = fewbit.quantize(jnp.asarray(x, jnp.float32), qtype, channelwise_axes=(axis,))
    return np.asarray(fewbit.dequantize(q), np.float64)


def close(found, expected, digits=0.05):  # one code may fall on the other side of a tie
    assert found == pytest.approx(expected, abs=digits)


def test_every_number_of_a_function_is_the_reference(mlp_pair, mlp_comparison):
    params, *_ = mlp_pair
    found = mlp_comparison
    up, down, x = (np.asarray(a, np.float64) for a in (params["up"], params["down"], X))
    qup, qdown = rounded(up, "int4", 1), rounded(down, "int4", 1)
    act = lambda a: rounded(a, "int8", 0)  # noqa: E731
    first, hidden = x @ up, np.tanh(x @ up)
    out = hidden @ down
    local = {"up": act(x) @ qup, "down": act(hidden) @ qdown}
    whole_hidden = np.tanh(local["up"])
    whole = act(whole_hidden) @ qdown
    rows = {row.weight_path: row for row in found.sites}
    close(rows["up"].local.sqnr, difference(first, local["up"]).sqnr)
    close(rows["down"].local.sqnr, difference(out, local["down"]).sqnr)
    close(rows["up"].accumulated.sqnr, difference(first, local["up"]).sqnr)
    close(rows["down"].accumulated.sqnr, difference(out, whole).sqnr)
    close(rows["up"].weight.sqnr, difference(up, qup).sqnr)
    close(rows["down"].local.cosine, difference(out, local["down"]).cosine, 1e-4)
    close(rows["down"].local.relative, difference(out, local["down"]).relative, 1e-3)
    close(rows["up"].only, difference(out, whole_hidden @ down).sqnr)
    close(rows["up"].restored, difference(out, local["down"]).sqnr)
    close(rows["down"].only, difference(out, local["down"]).sqnr)
    close(rows["down"].restored, difference(out, whole_hidden @ down).sqnr)
    close(found.output.sqnr, difference(out, whole).sqnr)
    close(found.output.cosine, difference(out, whole).cosine, 1e-4)
    assert found.output.agreement == np.mean(out.argmax(1) == whole.argmax(1))
    assert all(row.clipped == 0 and row.not_finite == 0 for row in found.sites)
    assert found.first_not_finite is None and found.kind == "function"


def test_worst_first_and_by_name(mlp_comparison):
    found = mlp_comparison
    assert [row.only for row in found.sites] == sorted(row.only for row in found.sites)
    assert found.worst(1) == found.sites[:1]
    assert found.site("up:dot_general0").weight_path == "up"
    with pytest.raises(KeyError, match="no Site 'up:dot_general'. The nearest are up:dot_general0"):
        found.site("up:dot_general")


def test_json_goes_and_comes_back(mlp_comparison):
    text = mlp_comparison.to_json()
    assert Comparison.from_json(text) == mlp_comparison
    json.loads(text, parse_constant=pytest.fail)  # no Infinity or NaN that other readers refuse
    for bad, message in (
        ("nonsense", "This is no JSON document"),
        ("[1]", "no comparison of fewbit: a list of int objects"),
        ('{"format": "fewbit comparison", "version": 9}', "in version 9 of its format"),
        ('{"format": "fewbit comparison", "version": 1}', "The comparison is damaged: 'sites'"),
        (text.replace('"sqnr": ', '"sqnr": [], "x": ', 1), "The comparison is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            Comparison.from_json(bad)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits(mlp_comparison, width):
    lines = mlp_comparison.table(width=width).split("\n")
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("Output of the quantized model: ")
    assert any(line.startswith("site ") and line.endswith(" restored") for line in lines)
    hidden = any(line.startswith("…    no room here for: types") for line in lines)
    assert hidden == (width < 80)


@pytest.mark.long
def test_without_the_sweep(mlp_pair):
    params, qf, qparams, _ = mlp_pair
    found = compare(mlp, qf, (X,), params=params, qparams=qparams, sweep=False, memory=1)
    assert all(row.only is None and row.restored is None for row in found.sites)
    levels = [row.local.sqnr for row in found.sites]
    assert levels == sorted(levels)
    assert "only" not in found.table(width=100).split("\n")[3]


# --- other kinds ----------------------------------------------------------------------------------


class Small(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 24, rngs=rngs)
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.last = nnx.Linear(24, 6, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))

    def hidden(self, x):
        return self.first(x)


def test_nnx_and_neither_model_is_changed():
    model = Small(nnx.Rngs(0))  # in training mode: BatchNorm writes statistics
    small = fewbit.quantize_model(model, PtqProvider(W4A8), X)
    before = [np.array(x) for x in jax.tree.leaves(nnx.state(model))]
    found = compare(model, small, X)
    for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True):
        assert np.array_equal(a, b)
    reference, output = (m(X) for m in (nnx.clone(model), nnx.clone(small)))
    close(found.output.sqnr, difference(reference, output).sqnr, 1e-3)
    assert {row.site for row in found.sites} == {"first:dot_general0", "last:dot_general0"}
    assert found.kind == "nnx" and not found.notes
    hidden = compare(model, small, {"x": X}, method="hidden", sweep=False)
    assert [row.site for row in hidden.sites] == ["hidden.first:dot_general0"]
    small.norm.mean.set_value(small.norm.mean.get_value() + 1)
    noted = compare(model, small, X, sweep=False).notes[0]
    assert noted.startswith("Variables other than Params differ between the two models (norm/mean)")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16, name="down")(nn.relu(nn.Dense(16, name="up")(x))), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(11, 16, name="embed")
        make = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = make(name="layers")(table(ids), jnp.zeros(3))
        return table.attend(x)


@pytest.fixture(scope="module")
def stack():
    model, ids = Stack(), jnp.arange(10).reshape(2, 5)
    params = model.init(jax.random.key(0), ids)["params"]
    kernel = params["layers"]["up"]["kernel"]
    params["layers"]["up"]["kernel"] = kernel.at[1, 7].multiply(30.0)  # layer 1, channel 7
    plan = fewbit.plan(model, W4A8, ids)
    qmodel = fewbit.quantize_model(model, PtqProvider(W4A8))
    return model, qmodel, params, fewbit.quantize_params(params, plan), ids


@pytest.fixture(scope="module")
def stack_comparison(stack):
    model, qmodel, params, qparams, ids = stack
    return compare(model, qmodel, ids, params={"params": params}, qparams=qparams)


def test_linen_through_scan_remat_and_a_tied_table(stack, stack_comparison):
    model, qmodel, params, qparams, ids = stack
    found = stack_comparison
    output = qmodel.apply({"params": qparams}, ids)
    close(found.output.sqnr, difference(model.apply({"params": params}, ids), output).sqnr, 1e-3)
    assert {row.site for row in found.sites} == {
        *("embed:take0", "embed:dot_general0"),
        *("layers/up:dot_general0", "layers/down:dot_general0"),
    }
    row = found.site("layers/up:dot_general0")
    assert [layer.layer for layer in row.layers] == [(0,), (1,), (2,)]
    assert row.worst_layer.layer == (1,)
    kernel = params["layers"]["up"]["kernel"]
    stored = fewbit.dequantize(qparams["layers"]["up"]["kernel"].array)
    for k, layer in enumerate(row.layers):
        close(layer.weight.sqnr, difference(kernel[k], stored[k]).sqnr, 0.01)
    close(row.weight.sqnr, difference(kernel, stored).sqnr, 0.01)
    worst = found.outliers()[0]
    assert (worst.site, worst.of, worst.channel, worst.layer) == (row.site, "weight", 7, (1,))
    assert 20 < worst.ratio < 60
    assert Comparison.from_json(found.to_json()) == found


def test_layers_of_a_scan_add_up_to_the_whole(stack_comparison):
    for row in stack_comparison.sites:
        if row.layers:
            errors = [layer.local.relative for layer in row.layers]
            assert min(errors) <= row.local.relative <= max(errors)


def branches(params, x):
    x = lax.cond(x[0, 0] > 1e9, lambda x: x @ params["never"], lambda x: x @ params["always"], x)
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["loop"]), x)
    x = lax.while_loop(lambda x: x.sum() < -1e9, lambda x: x @ params["idle"], x)
    return x @ params["last"]


def test_branches_and_loops():
    names = ("never", "always", "loop", "idle", "last")
    params = {name: normal(k, 16, 16) / 4 for k, name in enumerate(names)}
    qf, qparams, _ = quantized(branches, W8A8, params, X)
    found = compare(branches, qf, X, params=params, qparams=qparams)
    ran = {row.weight_path: row.ran for row in found.sites}
    assert ran == {"always": True, "loop": True, "last": True, "never": False, "idle": False}
    text = "did not run on this batch (a branch not taken): never:dot_general0, idle:dot_general0"
    several = (
        "ran more than once on this batch (a loop over time, the shards of a shard_map): "
        "loop:dot_general0; their accumulated error is of the last run alone, their other numbers "
        "are of all runs"
    )
    assert found.notes == (text, several)
    assert [row.ran for row in found.sites] == [True] * 3 + [False] * 2
    output = difference(branches(params, X), qf(qparams, X)).sqnr
    close(found.output.sqnr, output, 1e-3)
    assert found.site("never:dot_general0").only is None
    assert "not run" in str(found)
    # The loop's local error is that of all three trips together.
    x, signal, noise = X @ params["always"], 0.0, 0.0
    for _ in range(3):
        exact = np.asarray(x @ params["loop"], np.float64)
        coarse = rounded(x, "int8", 0) @ rounded(params["loop"], "int8", 1)
        signal, noise = signal + (exact**2).sum(), noise + ((coarse - exact) ** 2).sum()
        x = jnp.tanh(jnp.asarray(exact, jnp.float32))
    close(found.site("loop:dot_general0").local.sqnr, 10 * math.log10(signal / noise))


def test_shards():
    """Each of eight devices has its rows; the Site's numbers are of all of them."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    params = {"up": normal(0, 16, 16), "down": normal(1, 16, 4)}
    x = normal(2, 8, 16)

    def whole(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    def sharded(params, x):
        over = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        return jnp.tanh(over(x, params["up"])) @ params["down"]

    found = []
    for f in (whole, sharded):
        qf, qparams, _ = quantized(f, W8A8, params, x)
        found.append(compare(f, qf, x, params=params, qparams=qparams))
    one, other = found
    for site in ("up:dot_general0", "down:dot_general0"):
        close(other.site(site).local.sqnr, one.site(site).local.sqnr, 1e-3)
        close(other.site(site).only, one.site(site).only, 1e-3)
    close(other.output.sqnr, one.output.sqnr, 1e-3)
    close(other.site("up:dot_general0").weight.sqnr, one.site("up:dot_general0").weight.sqnr, 1e-3)
    assert one.notes == () and "shard_map): up:dot_general0; their accum" in other.notes[0]


def test_static_scales_and_what_they_clip():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = fewbit.plan(mlp, [rule], mlp_params(), X)
    average = SimpleMovingAverage()

    def statistic(x):  # a range that covers half of what comes
        seen = {"absmax": jnp.max(jnp.abs(x)).reshape(1, 1) / 2}
        return {"lhs": average.update(average.init(seen), seen)}

    params = mlp_params()
    hidden = jnp.tanh(X @ params["up"])
    stats = {"up:dot_general0": statistic(X), "down:dot_general0": statistic(hidden)}
    qparams = fewbit.quantize_params(params, plan, stats)
    qf = fewbit.quantize_model(mlp, PtqProvider([rule]))
    found = compare(mlp, qf, X, params=params, qparams=qparams)
    row = found.site("up:dot_general0")
    assert row.types == "int8 x int8 static"
    limit = float(jnp.max(jnp.abs(X))) / 2
    close(row.clipped, float(np.mean(np.abs(np.asarray(X)) > limit)), 0.02)
    assert 0.05 < row.clipped < 0.5
    close(found.output.sqnr, difference(mlp(params, X), qf(qparams, X)).sqnr, 1e-3)


@pytest.mark.long
def test_convolutions_and_products_of_two_activations():
    def model(params, x):
        y = lax.conv_general_dilated(
            x, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = y.reshape(2, 16, 8)
        return jnp.einsum("bsd,btd->bst", y, y)

    params = {"conv": normal(0, 3, 3, 4, 8).at[:, :, 2, :].multiply(20.0)}
    x = normal(1, 2, 4, 4, 4)
    qf, qparams, _ = quantized(model, W8A8, params, x)
    found = compare(model, qf, x, params=params, qparams=qparams)
    assert {row.site for row in found.sites} == {"conv:conv_general_dilated0", ":einsum0"}
    assert found.site(":einsum0").weight is None and found.site(":einsum0").types == "- x int8"
    assert (found.outliers()[0].of, found.outliers()[0].channel) == ("weight", 2)


# --- not finite, and what else goes wrong ---------------------------------------------------------


def test_the_first_site_that_is_not_finite_is_named(stack):
    params = mlp_params()
    qf, qparams, _ = quantized(mlp, W8A8, params, X)
    broken = jax.tree.map(lambda x: x, qparams)
    q = fewbit.unpack(broken["up"].array)
    broken["up"] = broken["up"].replace(array=q.replace(scale=q.scale * jnp.nan))
    found = compare(mlp, qf, X, params=params, qparams=broken)
    assert found.first_not_finite == "up:dot_general0 (its stored weight is not finite)"
    assert [row.site for row in found.sites][0] == "up:dot_general0"
    assert found.sites[0].not_finite > 0 and math.isnan(found.output.sqnr)
    assert "NaN or infinity first appears at up:dot_general0" in str(found)
    assert Comparison.from_json(found.to_json()).first_not_finite == found.first_not_finite


@pytest.mark.long
def test_in_a_scan_the_first_layer_is_named(stack):
    model, qmodel, params, qparams, ids = stack
    broken = jax.tree.map(lambda x: x, qparams)
    leaf = broken["layers"]["down"]["kernel"]
    q = fewbit.unpack(leaf.array)
    spoilt = q.replace(scale=q.scale.at[1].set(jnp.nan))
    broken["layers"]["down"]["kernel"] = leaf.replace(array=spoilt)
    found = compare(model, qmodel, ids, params=params, qparams=broken, sweep=False)
    # In program order `up` comes first, but its layer 2 runs after layer 1 of `down`.
    where = "layers/down:dot_general0, layer 1 (its stored weight is not finite)"
    assert found.first_not_finite == where


@pytest.mark.long
def test_a_float_model_that_is_not_finite_itself():
    qf, qparams, _ = quantized(mlp, W8A8, mlp_params(), X)
    x = X.at[0, 0].set(jnp.nan)
    found = compare(mlp, qf, x, params=mlp_params(), qparams=qparams, sweep=False)
    assert found.first_not_finite.startswith("up:dot_general0 (its operands were not finite")
    assert any("the float model's own output is not finite" in note for note in found.notes)


def test_errors_name_the_fix(mlp_pair):
    params, qf, qparams, _ = mlp_pair
    trees = dict(params=params, qparams=qparams)

    def raises(kind, message, *args, **kwargs):
        with pytest.raises(kind, match=message):
            compare(*args, **kwargs)

    raises(TypeError, "not quantized. Pass the float model first", mlp, mlp, X, **trees)
    raises(TypeError, "is quantized already. The float model comes first", qf, mlp, X, **trees)
    raises(TypeError, "pass the float tree as params= and .* qparams is missing", mlp, qf, X,
           params=params)  # fmt: skip
    raises(TypeError, "The two models are of different kinds", nn.Dense(3), qf, X, **trees)
    raises(ValueError, "The batch is empty", mlp, qf, (), **trees)
    shape = r"does not take this batch \(float32\[8,7\]\): TypeError: dot_general requires"
    raises(ValueError, shape, mlp, qf, X[:, :7], **trees)
    other = fewbit.quantize_model(lambda p, x: x @ p["up"] @ p["down"] @ p["down"].T, qf.provider)
    only = "Only the quantized one has down:dot_general1. They must be one model"
    raises(ValueError, only, mlp, other, X, **trees)
    lost = {"up": params["up"], "dwn": params["down"]}
    raises(ValueError, "does not take this batch", mlp, qf, X, params=lost, qparams=qparams)
    linear = lambda params, x: x @ params["up"] @ params["down"]  # noqa: E731
    text = "with every Site in float they still differ: .* Something else than quantization"
    raises(ValueError, text, linear, qf, X, **trees)
    model = Small(nnx.Rngs(0))
    small = fewbit.quantize_model(model, PtqProvider(W8A8), X)
    raises(TypeError, "An NNX model holds its parameters; params=", model, small, X, **trees)


def test_nothing_quantized_and_parameters_of_another_size():
    rules = [QuantizationRule(module_path="nothing", weight_qtype="int8")]
    qf = fewbit.quantize_model(mlp, PtqProvider(rules, strict=False))
    with pytest.raises(ValueError, match="Nothing is quantized in this model on this batch: no"):
        compare(mlp, qf, X, params=mlp_params(), qparams=mlp_params())
    qf, qparams, _ = quantized(mlp, W8A8, mlp_params(), X)
    wide = {"up": normal(0, 16, 40), "down": normal(1, 40, 5)}
    with pytest.raises(ValueError, match=r"is float32\[8,16\] x float32\[16,40\] in the float one"):
        compare(mlp, qf, X, params=wide, qparams=qparams)


def test_parameters_that_differ_without_being_quantized_are_told():
    def model(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": normal(0, 16, 4), "b": jnp.zeros((1, 4))}
    rules = [QuantizationRule(weight_qtype="int8")]
    qf, qparams, _ = quantized(model, rules, params, X)
    qparams = {**qparams, "b": jnp.ones((1, 4))}
    found = compare(model, qf, X, params=params, qparams=qparams)
    assert "1 parameters that are not quantized are other numbers in the two models (b)" in (
        found.notes
    )
    close(found.output.sqnr, difference(model(params, X), qf(qparams, X)).sqnr, 1e-3)
    assert found.sites[0].only > 30  # the bias is no fault of the Site


def test_the_program_is_the_models_own_at_both_ends(stack):
    """All Sites float gives the float model's output, all quantized the quantized model's."""
    from fewbit.debug._mixed import mix
    from fewbit.models._pairs import pair

    model, qmodel, params, qparams, ids = stack
    mixed = mix(pair(model, qmodel, (ids,), {}, params=params, qparams=qparams), ids)
    n = len(mixed.sites)
    (exact,), (rounded,) = mixed.outputs([False] * n, rest=False), mixed.outputs([True] * n)
    assert difference(model.apply({"params": params}, ids), exact).sqnr > 100
    assert difference(qmodel.apply({"params": qparams}, ids), rounded).sqnr > 100
