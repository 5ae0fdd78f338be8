"""What people see of a quantized Keras model: print_model, summary, report, plan, compare."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers as L

import fewbit
import fewbit.debug
import fewbit.keras as fk
from fewbit.debug._metrics import difference

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 32)).astype("float32")


def net():
    block = keras.Sequential([L.Dense(48, activation="relu", name="up")], name="block")
    layers = [keras.Input((32,)), block, L.LayerNormalization(name="norm"), L.Dense(8, name="head")]
    return keras.Sequential(layers, name="net")


@pytest.fixture(scope="module")
def twins():
    model = net()
    config = fk.StaticQuantConfig("int8", weight_scale_granularity="per_channel")
    return model, fk.quantize_model(model, config, [X], inplace=False, progress=False)


# --- print_model ----------------------------------------------------------------------------------


def test_print_model_prints_and_returns_a_line_per_layer(twins, capsys):
    text = fk.print_model(twins[1])
    assert capsys.readouterr().out == text + "\n"
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines if "Input" not in line] == [
        ["Sequential", ".block"],
        ["QStaticDense", ".block.up"],
        ["LayerNormalization", ".norm"],
        ["QStaticDense", ".head"],
    ]
    up = next(line for line in lines if ".up" in line)
    assert re.fullmatch(
        r"QStaticDense \.block\.up a_scale=\[[\d.e-]+\] w_scale=\[\[[\d.e -]+\.\.\. [\d.e -]+\]\]",
        up,
    )
    scale = float(re.search(r"a_scale=\[([^]]+)\]", up)[1])
    held = np.asarray(twins[1].get_layer("block").get_layer("up").a_scale)
    np.testing.assert_allclose(scale, held.item(), rtol=1e-5)


def test_print_model_says_what_is_constant_and_shows_zero_points():
    model = keras.Sequential([keras.Input((32,)), L.Dense(1, use_bias=False, name="up")])
    config = fk.StaticQuantConfig("int8", const_scale=True, const_weight=True, emulate=True)
    fk.quantize_model(model, config, [X + 1], progress=False)
    line = fk.print_model(model, path="top").splitlines()[-1]
    number = r"\[[\d.e+-]+\]"
    assert re.fullmatch(
        rf"QStaticDense top\.up a_scale={number} \(attr\) a_zero_point=\[-?\d+\] \(attr\) "
        rf"w_scale=\[{number}\] \(attr\)",
        line,
    )


def test_print_model_takes_layers_lists_and_limits(twins):
    head = twins[1].get_layer("head")
    assert fk.print_model(head).startswith("QStaticDense .head a_scale=")
    assert fk.print_model([head, head]).count("QStaticDense") == 2
    assert ".up" not in fk.print_model(twins[1], internal=False)
    cut = fk.print_model(twins[1], max_lines=1).splitlines()
    assert len(cut) == 2 and re.fullmatch(r"\.\.\. \d more layers", cut[1])
    wide = fk.print_model(head, str_length=(20, 12))
    assert wide.startswith("QStaticDense         .head        a_scale=")
    with pytest.raises(TypeError, match="print_model takes a Keras model or layer.* got the int 3"):
        fk.print_model(3)
    with pytest.raises(ValueError, match="str_length is two least widths"):
        fk.print_model(head, str_length=(1,))


def test_print_model_logs_in_the_known_shape():
    code = (
        "import keras, numpy as np, fewbit.keras as fk\n"
        "m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name='up')])\n"
        "c = fk.StaticQuantConfig('int8')\n"
        "fk.quantize_model(m, c, [np.ones((1, 4), 'float32')], progress=False)\n"
        "fk.print_model(m)\n"
    )
    environment = {**os.environ, "LOGLEVEL": "DEBUG", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    record = (
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ \[DEBUG\]\[_planning\.py:\d+\] "
        r"QStaticDense \.up a_scale=\[\S+\] w_scale=\[\[\S+\]\]$"
    )
    assert re.search(record, done.stderr, re.MULTILINE), done.stderr[-2000:]
    assert "DEBUG" not in done.stdout and "QStaticDense .up" in done.stdout


def test_summary_works_and_counts_what_is_stored(twins):
    lines = []
    twins[1].summary(print_fn=lines.append, expand_nested=True)
    text = "\n".join(lines)
    assert "QStaticDense" in text and "Non-trainable params" in text


# --- report and plan ------------------------------------------------------------------------------


def test_report_is_what_is_stored(twins):
    model, quantized = twins
    config = fk.StaticQuantConfig("int8", weight_scale_granularity="per_channel")
    found = fewbit.report(quantized, fewbit.plan(model, config))
    assert not found.differences
    kernel = found.leaf("net/block/up/kernel")
    assert (kernel.qtype, kernel.shape, kernel.granularity) == ("int8", (32, 48), "per-channel")
    kernels = 32 * 48 + 48 * 8
    assert found.float_bytes == 4 * (kernels + 48 + 2 * 48 + 8)
    # codes, a scale per column, and the float parameters; panels round up
    assert kernels + 4 * (48 + 8) <= found.bytes - 4 * (48 + 2 * 48 + 8) <= 1.5 * kernels
    assert any("static scales: 8 B, not counted" in note for note in found.notes)
    held = sum(v.value.nbytes for v in quantized.variables)
    assert held == found.bytes + 8
    assert "No parameter is quantized" in str(fewbit.report(model))


def test_plan_after_is_the_plan_before(twins):
    model, quantized = twins
    config = fk.StaticQuantConfig("int8", weight_scale_granularity="per_channel")
    before, after = fewbit.plan(model, config), fewbit.plan(quantized)
    assert after.totals == before.totals
    assert [(s.site.id, s.weight_qtype) for s in after.sites] == [
        (s.site.id, s.weight_qtype) for s in before.sites
    ]
    assert {leaf.path for leaf in after.leaves} == {leaf.path for leaf in before.leaves}
    noted = fewbit.plan(quantized, fk.DynamicQuantConfig("int4"))
    assert "the config given with it was not used" in noted.notes[-1]
    assert noted.sites[0].weight_qtype == "int8"


def test_plan_needs_rules_for_float_models(twins):
    with pytest.raises(TypeError, match="got None"):
        fewbit.plan(lambda params, x: x)


# --- compare --------------------------------------------------------------------------------------


def test_compare_measures_what_the_models_do(twins):
    model, quantized = twins
    found = fewbit.debug.compare(model, quantized, X, progress=False)
    assert found.kind == "keras" and len(found.sites) == 2
    truth = difference(model.predict(X, verbose=0), quantized.predict(X, verbose=0))
    np.testing.assert_allclose(found.output.sqnr, truth.sqnr, atol=0.2)
    np.testing.assert_allclose(found.output.cosine, truth.cosine, atol=1e-5)
    only = [row.only for row in found.sites]
    assert only == sorted(only), "worst first"
    for row in found.sites:
        assert row.types == "int8 x int8 static" and row.clipped is not None
        assert row.only > found.output.sqnr and row.restored > found.output.sqnr
        assert 30 < row.local.sqnr < 60 and 35 < row.weight.sqnr < 60
    # the head alone, by hand
    head = quantized.get_layer("head")
    inputs = model.get_layer("norm")(model.get_layer("block")(X))
    truth = difference(model.get_layer("head")(inputs), head(inputs))
    row = next(row for row in found.sites if "head" in row.site)
    np.testing.assert_allclose(row.local.sqnr, truth.sqnr, atol=0.2)


def test_compare_leaves_both_models_as_they_were(twins):
    model, quantized = twins
    before = model.predict(X, verbose=0), quantized.predict(X, verbose=0)
    fewbit.debug.compare(model, quantized, X, sweep=False, progress=False)
    assert [type(layer).__name__ for layer in model.layers] == [
        "Sequential",
        "LayerNormalization",
        "Dense",
    ]
    assert not any(hasattr(layer, "_fewbit_scope") for layer in model.layers)
    np.testing.assert_array_equal(before[0], model.predict(X, verbose=0))
    np.testing.assert_array_equal(before[1], quantized.predict(X, verbose=0))


def shared():
    x = keras.Input((32,))
    dense = L.Dense(32, name="twice")
    return keras.Model(x, dense(keras.ops.relu(dense(x)))), X


def attention():
    x = keras.Input((6, 32))
    y = L.MultiHeadAttention(2, 16, name="mha")(x, x)
    return keras.Model(x, L.Dense(8)(y)), RNG.normal(size=(3, 6, 32)).astype("float32")


def tokens():
    ids = keras.Input((6,), dtype="int32", name="token_ids")
    inputs = {"token_ids": ids, "mask": keras.Input((6,), name="mask")}
    table = L.ReversibleEmbedding(40, 32, name="table")
    y = table(inputs["token_ids"]) * inputs["mask"][..., None]
    model = keras.Model(inputs, table(L.Dense(32)(y), reverse=True))
    ids = RNG.integers(0, 40, (3, 6)).astype("int32")
    return model, {"token_ids": ids, "mask": np.ones((3, 6), "float32")}


@pytest.mark.parametrize(
    ("make", "sites"),
    [(shared, 2), pytest.param(attention, 7, marks=pytest.mark.long), (tokens, 3)],
    ids=["shared", "mha", "tokens"],
)
@pytest.mark.parametrize(
    "kind",
    ["static", *(pytest.param(k, marks=pytest.mark.long) for k in ("dynamic", "emulated"))],
)
def test_compare_models_of_every_kind(make, sites, kind):
    model, batch = make()
    fields = dict(weight_scale_granularity="per_channel", quantize_attention=True)
    config = {
        "static": fk.StaticQuantConfig("int8", **fields),
        "dynamic": fk.DynamicQuantConfig("int8", **fields),
        "emulated": fk.StaticQuantConfig("fp8", emulate=True, **fields),
    }[kind]
    data = () if kind == "dynamic" else ([batch],)
    quantized = fk.quantize_model(model, config, *data, inplace=False, progress=False)
    found = fewbit.debug.compare(model, quantized, batch, sweep=False, progress=False)
    truth = difference(model(batch), quantized(batch))
    np.testing.assert_allclose(found.output.sqnr, truth.sqnr, atol=0.5)
    assert len(found.sites) == sites and all(row.ran for row in found.sites)


def test_compare_says_what_is_wrong_with_its_arguments(twins):
    model, quantized = twins
    with pytest.raises(TypeError, match="is not quantized. Pass the float model first"):
        fewbit.debug.compare(model, model, X)
    with pytest.raises(TypeError, match="The float model comes first"):
        fewbit.debug.compare(quantized, model, X)
    with pytest.raises(TypeError, match="A Keras model holds its parameters; params= and qparams="):
        fewbit.debug.compare(model, quantized, X, params={})
    with pytest.raises(ValueError, match="The model does not take this batch"):
        fewbit.debug.compare(model, quantized, X[:, :5], progress=False)
    other = keras.Sequential([keras.Input((32,)), L.Dense(8)])
    with pytest.raises(ValueError, match="do not have the same layers"):
        fewbit.debug.compare(other, quantized, X)
