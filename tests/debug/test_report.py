"""What fewbit.report says is stored, against the arrays themselves."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import W8, normal, quantized

import fewbit
from fewbit import PtqProvider, QuantizationRule

INT4 = [QuantizationRule(weight_qtype="int4", tile_size=16)]
MIXED = [QuantizationRule(module_path="down", weight_qtype="int3"), *INT4]


def model(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


PARAMS = {"up": normal(0, 32, 64), "bias": jnp.zeros((1, 64)), "down": normal(1, 64, 8)}
X = normal(2, 4, 32)


def bytes_of(tree):
    def one(x):
        return x.nbytes if isinstance(x, fewbit.QArray) else x.size * x.dtype.itemsize

    is_q = lambda x: isinstance(x, fewbit.QArray)  # noqa: E731
    return sum(one(x) for x in jax.tree.leaves(tree, is_leaf=is_q))


def test_a_tree_leaf_by_leaf():
    _, params, plan = quantized(model, MIXED, PARAMS, X)
    found = fewbit.report(params, plan)
    rows = {leaf.path: leaf for leaf in found.leaves}
    assert list(rows) == ["bias", "down", "up"]
    up = rows["up"]
    assert (up.shape, up.dtype, up.qtype) == ((32, 64), "float32", "int4")
    assert (up.granularity, up.layout) == ("tile 16", "panels")
    assert (up.bytes, up.float_bytes) == (32 * 64 // 2 + 2 * 64 * 4, 32 * 64 * 4)
    assert rows["bias"].qtype is None and rows["bias"].bytes == rows["bias"].float_bytes == 256
    assert rows["down"].granularity == "per-channel"
    assert found.bytes == bytes_of(params)
    assert found.float_bytes == sum(p.nbytes for p in PARAMS.values())
    assert found.leaf("up") is up and [leaf.path for leaf in found.quantized] == ["down", "up"]
    with pytest.raises(KeyError, match="no parameter 'upp'"):
        found.leaf("upp")


def test_bits_per_weight_agree_with_the_plan_once_packed():
    _, params, plan = quantized(model, MIXED, PARAMS, X)
    plain, packed = fewbit.report(params, plan), fewbit.report(fewbit.pack(params), plan)
    assert packed.differences == () and packed.bytes == plan.totals.bytes_after
    assert packed.bits_per_weight == pytest.approx(plan.totals.bits_per_weight)
    assert packed.leaf("down").layout == "bits"
    (difference,) = plain.differences
    assert "down takes 288 bytes, the plan says 224; fewbit.pack(params)" in difference


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "per-tensor"),
        ({"channelwise_axes": (0,)}, "per-channel"),
        ({"tiled_axes": {0: 8, 1: 16}}, "tile 8x16"),
        ({"channelwise_axes": (1,), "tiled_axes": {0: 12}}, "tile 12"),
    ],
)
def test_granularity_is_read_off_the_scales(how, text):
    array = fewbit.quantize(normal(0, 32, 64), "int8", **how)
    assert fewbit.report({"w": array}).leaves[0].granularity == text


def test_differences_from_a_plan():
    _, params, _ = quantized(model, W8, PARAMS, X)
    _, _, plan = quantized(model, MIXED, PARAMS, X)
    found = fewbit.report({**params, "upp": X}, plan).differences
    assert "down is stored as int8, the plan says int3" in found
    assert "upp is stored, but not in the plan" in found
    missing = fewbit.report({k: v for k, v in params.items() if k != "bias"}, plan).differences
    assert "bias is in the plan, but not stored" in missing
    kept = fewbit.report(PARAMS, plan).differences
    assert "up is stored as float32, the plan says int4" in kept
    tiled = fewbit.plan(model, [QuantizationRule(weight_qtype="int8", tile_size=8)], PARAMS, X)
    tiles = fewbit.report(params, tiled).differences
    assert "up has scales of shape (1, 64), the plan says (4, 64)" in tiles
    turned = fewbit.report({**PARAMS, "bias": jnp.zeros(64)}, fewbit.plan(model, [], PARAMS, X))
    assert turned.differences == ("bias is (64,) where the plan has (1, 64)",)
    other = fewbit.plan(
        model,
        [QuantizationRule(weight_qtype="int8", weight_calibration_method="absmax,0.9")],
        PARAMS,
        X,
    )
    (method, _) = fewbit.report(params, other).differences
    assert "was calibrated by 'absmax', the plan says 'absmax,0.9'" in method
    with pytest.raises(TypeError, match="takes a Plan, got a list. Make one with fewbit.plan"):
        fewbit.report(params, W8)


def test_table_and_json():
    _, params, plan = quantized(model, MIXED, PARAMS, X)
    found = fewbit.report(params, plan)
    text = str(found)
    assert "2 of 3 parameter arrays are quantized at" in text and "x smaller)" in text
    assert "Differs from the plan:" in text and "tile 16" in text
    assert all(len(line) <= 60 for line in found.table(width=60).splitlines())
    data = json.loads(found.to_json())
    assert data["totals"]["bytes"] == found.bytes
    assert data["totals"]["quantized_parameters"] == 32 * 64 + 64 * 8
    assert [leaf["path"] for leaf in data["leaves"]] == ["bias", "down", "up"]
    assert data["differences"] == list(found.differences)
    assert fewbit.report({}).bytes == 0 and "0 of 0" in str(fewbit.report({}).summary)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="up")(x)
        return nn.BatchNorm(use_running_average=True, name="norm")(x)


def test_linen_variables():
    ptq = fewbit.quantize_model(Linen(), PtqProvider(W8))
    variables = ptq.init(jax.random.key(0), X)
    plan = fewbit.plan(Linen(), W8, X)
    found = fewbit.report(variables, plan)
    assert found.differences == () and found.leaf("up/kernel").qtype == "int8"
    assert found.notes == ("batch_stats: 128 B, not counted",)
    assert found.leaves == fewbit.report(variables["params"]).leaves
    abstract = fewbit.report(jax.eval_shape(ptq.init, jax.random.key(0), X))
    assert abstract.leaves == found.leaves
    with pytest.raises(
        TypeError, match=r"Linen module \(Linen\) holds none.*fewbit.report\(params\)"
    ):
        fewbit.report(ptq)


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
        return nn.Dense(16, kernel_init=init, name="up")(x)


def test_partitioned_parameters():
    variables = fewbit.quantize_model(Boxed(), PtqProvider(W8)).init(jax.random.key(0), X)
    found = fewbit.report(variables, fewbit.plan(Boxed(), W8, X))
    assert found.differences == ()
    assert found.leaf("up/kernel").bytes == 32 * 16 + 16 * 4


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.up(x)))


def test_nnx_models():
    floats = Nnx(nnx.Rngs(0))
    q = fewbit.quantize_model(floats, PtqProvider(W8), X)
    found = fewbit.report(q, fewbit.plan(floats, W8, X))
    assert found.differences == ()
    assert [leaf.path for leaf in found.leaves] == [
        "norm/bias",
        "norm/scale",
        "up/bias",
        "up/kernel",
    ]
    assert found.leaf("up/kernel").bytes == 32 * 16 + 16 * 4
    assert len(found.notes) == 1 and "other Variables" in found.notes[0]
    assert fewbit.report(nnx.state(q)).leaves == found.leaves
    assert fewbit.report(floats).quantized == ()
    abstract = fewbit.quantize_model(
        nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))),
        PtqProvider(W8),
        jax.ShapeDtypeStruct((4, 32), "float32"),
    )
    assert fewbit.report(abstract).leaves == found.leaves


def test_what_holds_no_parameters():
    qf, _, plan = quantized(model, W8, PARAMS, X)
    for nothing, kind in ((model, "function"), (qf, "function"), (plan, "Plan")):
        with pytest.raises(TypeError, match=f"a {kind} holds none. Give it the parameters"):
            fewbit.report(nothing)
    for nothing, kind in (
        (3, "the int 3"),
        ("x", "the string 'x'"),
        (None, "None"),
        (W8, "a list of QuantizationRule objects"),
        ({"step": 3}, "a dict with the key 'step'"),
    ):
        with pytest.raises(TypeError, match=f"and {kind} holds none. Give it the parameters"):
            fewbit.report(nothing)


def test_a_tree_without_quantized_parameters_says_so():
    found = fewbit.report(PARAMS)
    assert found.table(width=60).splitlines()[-1] == (
        "No parameter is quantized (0 of 3 arrays, 10.2 KiB)."
    )
    assert str(fewbit.report({})) == "No parameter is quantized (0 of 0 arrays, 0 B)."
    assert "(root)" in str(fewbit.report(jnp.zeros(3)))


@pytest.mark.parametrize("width", [60, 70, 80, 100])
@pytest.mark.parametrize("qtype", ["int3", "int8", "float8_e4m3b11fnuz", "mxfp4"])
def test_numbers_are_never_cut(width, qtype, monkeypatch):
    array = jax.eval_shape(
        lambda x: fewbit.quantize(x, qtype, tiled_axes={0: 32}),
        jax.ShapeDtypeStruct((14336, 11008), "float32"),
    )
    path = "decoder/layers/0/attention/query_projection"
    found = fewbit.report({path: {"kernel": array, "bias": jnp.zeros(11008)}})
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(found)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    names = lines[0].split()
    row = next(line for line in lines if line.split()[0].endswith("kernel"))
    assert "…" in row.split()[0] and row.count("…") == 1
    assert "14336x11008" in row and qtype in row
    assert row.endswith(fewbit._util._text.human_bytes(array.nbytes)) and names[-1] == "bytes"
    for column in {"scales", "layout"} - set(names):  # what is missing is named
        assert "No room here for: " in text and column in text.partition("No room")[2]


def test_a_shape_wider_than_the_page_is_still_whole():
    shape = (1234,) * 12
    leaf = jax.ShapeDtypeStruct(shape, "float32")
    text = fewbit.report({"a/rather/long/path/to/it": leaf}).table(width=60)
    assert "x".join(map(str, shape)) in text and "…" in text
