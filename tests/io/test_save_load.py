"""fewbit.save and fewbit.load: everything comes back bit for bit, from files that last."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import PARAMS, W4, X, assert_same, bits_of, mlp, quantized_mlp, static_mlp, weight
from flax import nnx
from helpers import W8, W8A8, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fewbit
from fewbit import CheckpointError, PtqProvider, QuantizationRule
from fewbit.io._safetensors import SafetensorsFile
from fewbit.io.checkpoint._save import CheckpointWriter
from fewbit.numerics import FORMATS
from fewbit.numerics._bits import pack_bits, pack_pieces, unpack
from fewbit.qarray import apart, quantize_with

# --- bits -----------------------------------------------------------------------------------------


def slow_pack(row, bits):
    """The definition, one bit at a time."""
    out = [0] * (-(-len(row) * bits // 8))
    for i, code in enumerate(row):
        for b in range(bits):
            if int(code) >> b & 1:
                out[(i * bits + b) // 8] |= 1 << ((i * bits + b) % 8)
    return out


@settings(deadline=None, max_examples=80)
@given(
    bits=st.integers(1, 7),
    rows=st.integers(0, 3),
    length=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_codes_take_their_true_width(bits, rows, length, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, length)).astype(np.int8)
    pieces = [piece.reshape(-1) for piece in pack_pieces(codes, bits)]
    packed = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
    assert packed.tolist() == [byte for row in codes for byte in slow_pack(row, bits)]
    back = unpack(packed.reshape(rows, -(-length * bits // 8)), bits, length, np.int8)
    assert back.tolist() == codes.tolist()


@pytest.mark.parametrize("bits", range(1, 8))
def test_files_and_arrays_are_packed_alike(bits):
    codes = np.random.default_rng(bits).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 21))
    codes = codes.astype(np.int8)
    packed = np.concatenate(list(pack_pieces(codes, bits)))
    assert packed.tolist() == np.asarray(pack_bits(jnp.asarray(codes), bits)).reshape(-1).tolist()


def test_long_rows_are_packed_in_pieces_that_join():
    codes = np.random.default_rng(0).integers(-4, 4, 2**21 + 13).astype(np.int8)
    pieces = list(pack_pieces(codes, 3))
    assert len(pieces) == 3
    packed = np.concatenate(pieces)
    assert packed[:300].tolist() == slow_pack(codes[:800], 3)
    assert (unpack(packed, 3, len(codes), np.int8) == codes).all()


# --- round trips ----------------------------------------------------------------------------------


def round_trip(tmp_path, tree, plan=None, **options):
    info = fewbit.save(tmp_path / "ckpt", tree, plan)
    loaded = fewbit.load(tmp_path / "ckpt", **options)
    assert loaded.plan == plan
    assert fewbit.verify(tmp_path / "ckpt").ok
    return loaded.params, info


CASES = {
    **{name: dict(qtype=name) for name in FORMATS},
    **{f"{name} groups": dict(qtype=name, tile=32) for name in ("int3", "int4", "nf4", "int8")},
    "int3 uneven": dict(qtype="int3", tile=24, shape=(50, 7)),
    "mxfp4 uneven": dict(qtype="mxfp4", shape=(40, 6)),
    "nvfp4 stack": dict(qtype="nvfp4", shape=(32, 3, 8)),
    "int4 zero points": dict(qtype="int4", method="minmax", tile=16),
    "int2 zero points": dict(qtype="int2", method="minmax", shape=(9, 5)),
    "bfloat16": dict(qtype="int8", dtype=jnp.bfloat16),
    "one row": dict(qtype="int5", shape=(7,)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_format_comes_back_bit_for_bit(tmp_path, case):
    tree = {"kernel": weight(**CASES[case])}
    found, info = round_trip(tmp_path, tree, layout="plain")
    assert_same(found, tree)
    assert found["kernel"].array.layout == "plain"
    native = fewbit.load(tmp_path / "ckpt").params
    assert (
        native["kernel"].array.layout
        == fewbit.kernels._layouts.for_kernels(found["kernel"].array, found["kernel"].how).layout
    )
    assert_same(native, tree)
    row = FORMATS[CASES[case]["qtype"]]
    codes = SafetensorsFile(tmp_path / "ckpt" / info.shards[0][0]).info("kernel.qvalue")
    shape = CASES[case].get("shape", (64, 32))
    assert codes.nbytes == np.prod(shape[:-1], dtype=int) * -(-shape[-1] * row.bits // 8)
    assert info.leaf("kernel").qtype == row.name


@pytest.mark.parametrize("change", ["packed", "panels", "bits"])
def test_a_file_does_not_depend_on_the_layout_in_memory(tmp_path, change):
    tree = {"w": weight("int4", (64, 64), tile=32), "v": weight("int3", (64, 64))}
    other = {k: v.replace(array=fewbit.qarray.pack(v.array)) for k, v in tree.items()}
    other = {"packed": fewbit.pack(tree), "panels": fewbit.pack(other), "bits": other}[change]
    fewbit.save(tmp_path / "a", tree)
    fewbit.save(tmp_path / "b", other)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_same_input_same_bytes_whatever_the_order_of_dicts(tmp_path):
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "a", params, plan)
    turned = {key: params[key] for key in reversed(params)}
    fewbit.save(tmp_path / "b", turned, fewbit.Plan.from_json(plan.to_json()))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


NATIVE = fewbit.kernels.native_available()


def test_a_plan_and_its_parameters(tmp_path):
    params, plan = quantized_mlp()
    found, info = round_trip(tmp_path, params, plan)
    assert_same(found, params)
    assert found["up"]["kernel"].array.layout == params["up"]["kernel"].array.layout
    assert found["up"]["kernel"].array.layout == ("panels" if NATIVE else "plain")
    qf = fewbit.quantize_model(mlp, PtqProvider(plan.rules))
    assert (qf(found, X) == qf(params, X)).all()
    assert info.plan == plan and info.bits_per_weight == plan.totals.bits_per_weight


def test_static_scales_of_a_function(tmp_path):
    params, plan = static_mlp()
    found, _ = round_trip(tmp_path, params, plan)
    assert_same(found, params)
    qf = fewbit.quantize_model(mlp, PtqProvider(plan.rules))
    assert (qf(found, X) == qf(params, X)).all()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="up")(x)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", ("out", "more")))
        return nn.Dense(64, name="down", kernel_init=init)(x)


def linen(rules):
    model = fewbit.quantize_model(Block(), PtqProvider(rules))
    variables = Block().init(jax.random.key(0), X)
    template = jax.eval_shape(model.init, jax.random.key(0), X)
    return model, fewbit.quantize_params(variables, template)


@pytest.mark.parametrize("freeze", [False, True])
def test_linen_with_boxes(tmp_path, freeze):
    model, variables = linen(W8A8)
    variables = nn.FrozenDict(variables) if freeze else variables
    found, _ = round_trip(tmp_path, variables, fewbit.plan(Block(), W8A8, X))
    assert_same(found, variables)
    kernel = found["params"]["down"]["kernel"].array
    assert kernel.data.names == ("in", ("out", "more")) and kernel.scale.names[0] is None
    assert (model.apply(found, X) == model.apply(variables, X)).all()


@pytest.mark.parametrize("names", [("in", "out"), ("in",), ()])
def test_boxes_into_a_template(tmp_path, names):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    layer = nn.Dense(64, kernel_init=init)
    model = fewbit.quantize_model(layer, PtqProvider(W8A8))
    template = jax.eval_shape(model.init, jax.random.key(0), X)
    variables = fewbit.quantize_params(layer.init(jax.random.key(0), X), template)
    fewbit.save(tmp_path, variables)
    for into in (template, variables, model.init(jax.random.key(1), X)):
        assert_same(fewbit.load(tmp_path, into=into).params, variables)
    four = fewbit.quantize_model(layer, PtqProvider(W4))
    other = jax.eval_shape(four.init, jax.random.key(0), X)
    with pytest.raises(fewbit.CheckpointError, match="int4 codes of .*, found int8 codes of "):
        fewbit.load(tmp_path, into=other).params  # noqa: B018


def test_a_box_around_the_whole_leaf(tmp_path):
    tree = {"a": nn.Partitioned(weight("int4"), names=("x", None)), "b": nn.Partitioned(X, ("y",))}
    tree["c"] = nn.LogicallyPartitioned(X, names=("embed", None))
    assert_same(round_trip(tmp_path, tree)[0], tree)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x)), deterministic=True))


STATIC = [QuantizationRule(weight_qtype="int4", act_qtype="int8", act_static_scale=True)]


@pytest.mark.parametrize("rules", [W4, STATIC], ids=["w4", "static"])
@pytest.mark.parametrize("form", ["model", "state", "pure dict"])
def test_nnx(tmp_path, form, rules):
    model = Net(nnx.Rngs(0))
    model.eval()
    quantized = fewbit.quantize_model(model, PtqProvider(rules), X)
    plan = fewbit.plan(model, rules, X)
    pure = nnx.to_pure_dict(nnx.state(quantized))
    saved = {"model": quantized, "state": nnx.state(quantized), "pure dict": pure}[form]
    found, _ = round_trip(tmp_path, saved, plan)
    assert_same(apart(fewbit.unpack(found)), pure)
    other = fewbit.quantize_model(Net(nnx.Rngs(1)), PtqProvider(rules), X)
    other.eval()
    nnx.update(other, found)
    if rules is W4:
        assert (other(X) == quantized(X)).all()


def test_an_nnx_state_needs_its_plan(tmp_path):
    """Its parts are arrays of their own, and do not say what they are together."""
    model = Net(nnx.Rngs(0))
    quantized = fewbit.quantize_model(model, PtqProvider(W4), X)
    state, plan = nnx.state(quantized), fewbit.plan(model, W4, X)
    words = r"Give the model: fewbit\.save\(path, model\), or the plan too"
    for tree in (state, {"model": state, "step": 3}):
        with pytest.raises(TypeError, match=words):
            fewbit.save(tmp_path / "m", tree)
    fewbit.save(tmp_path / "float", nnx.state(model))
    fewbit.save(tmp_path / "whole", {"model": quantized, "step": 3})
    for layout in ("native", "bits"):
        packed = nnx.state(fewbit.pack(quantized, layout=layout))
        fewbit.save(tmp_path / layout, packed, plan)
        found = fewbit.load(tmp_path / layout).params
        assert_same(apart(fewbit.unpack(found)), nnx.to_pure_dict(state))


class Tables(nnx.Module):
    """Arrays that are plain attributes, of JAX and of numpy, beside Variables."""

    def __init__(self, scale, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.scale, self.shift = jnp.full((64,), scale), np.full((64,), scale, np.float32)
        self.steps = nnx.List([jnp.full((64,), scale)])

    def __call__(self, x):
        return self.linear(x) * self.scale[None] + self.shift[None] + self.steps[0][None]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("form", ["concrete", "abstract", "state"])
def test_into_an_nnx_model_with_arrays_as_attributes(tmp_path, form, quantize):
    def make(scale):
        model = Tables(scale, nnx.Rngs(int(scale)))
        return fewbit.quantize_model(model, PtqProvider(W8A8), X) if quantize else model

    model = make(3.0)
    fewbit.save(tmp_path / "m", model)
    other = make(1.0)
    if form == "abstract":  # nnx.eval_shape leaks tracers that are plain attributes
        graph, state = nnx.split(other)
        other = nnx.merge(graph, jax.eval_shape(lambda: state))
    template = nnx.state(other) if form == "state" else other
    found = fewbit.load(tmp_path / "m", into=template).params
    if form == "state":
        nnx.update(other, found)
        found = other
    assert found.scale[0] == found.shift[0] == found.steps[0][0] == 3
    assert isinstance(found.shift, np.ndarray) or form == "abstract"
    assert jnp.array_equal(found(X), model(X))


@pytest.mark.parametrize("abstract", [False, True])
def test_into_an_nnx_model(tmp_path, abstract):
    model = Net(nnx.Rngs(0))
    quantized = fewbit.quantize_model(model, PtqProvider(W4), X)
    fewbit.save(tmp_path / "m", quantized)
    make = lambda: Net(nnx.Rngs(1))  # noqa: E731
    other = nnx.eval_shape(make) if abstract else make()
    template = fewbit.quantize_model(other, PtqProvider(W4), X)
    found = fewbit.load(tmp_path / "m", into=template).params
    assert type(found) is type(template) and found is not template
    for m in (found, quantized):
        m.eval()
    assert (found(X) == quantized(X)).all()


class Pair(NamedTuple):
    a: jax.Array
    b: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Holder:
    w: object
    rest: object


def test_other_trees_and_leaves(tmp_path):
    tree = {
        "list": [jnp.arange(3), (None, jnp.float16(2.5)), []],
        "numbers": {0: 1, 10: 2.5, 2: True, -1: float("-inf"), 4: float("nan"), 5: 1e300},
        "text": ("", "é\n"),
        "empty": {},
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "numpy": np.arange(6.0).reshape(2, 3),
        "int64": np.array([2**40]),
        "complex": np.array([1 + 2j]),
        "none": None,
        "scalar": fewbit.quantize(jnp.float32(3.0), "int4"),
        "zero": jnp.zeros((0, 3), jnp.int4),
        "e3m4": jnp.ones((2, 3), jnp.float8_e3m4),
        "int2": jnp.array([[1, -2, 0]], jnp.int2),
        "bool": jnp.array([True, False]),
    }
    found, _ = round_trip(tmp_path, tree)
    wanted = {**tree, "numpy": np.asarray(tree["numpy"])}
    assert_same(found, wanted)
    assert isinstance(found["int64"], np.ndarray) and isinstance(found["list"][0], jax.Array)


def test_a_single_array_is_a_tree(tmp_path):
    assert_same(round_trip(tmp_path, weight("int3"))[0], weight("int3"))
    assert round_trip(tmp_path, {})[0] == {} and round_trip(tmp_path, None)[0] is None


def test_names_that_meet(tmp_path):
    tree = {"a": {"w": weight("int4")}, "a/w": jnp.ones(2), "a/w.scale": jnp.ones(1)}
    with pytest.raises(ValueError, match="Two parameters have the path 'a/w': a key with a '/'"):
        fewbit.save(tmp_path / "m", tree)  # and not when it is loaded, which is too late
    assert not (tmp_path / "m").exists()
    del tree["a/w"]
    assert_same(round_trip(tmp_path, tree)[0], tree)


def test_names_that_files_use_themselves(tmp_path):
    tree = {"__metadata__": jnp.ones(2), "\x00": {"": jnp.zeros(1)}, "..": weight("int4")}
    assert_same(round_trip(tmp_path, tree)[0], tree)
    with pytest.raises(ValueError, match="the name is no Unicode text"):
        fewbit.save(tmp_path / "n", {"\ud800": jnp.ones(2)})


def test_numbers_in_the_other_byte_order(tmp_path):
    tree = {"w": np.arange(5, dtype=">f4"), "n": np.arange(5, dtype=">i2")}
    found, _ = round_trip(tmp_path, tree)
    for name in tree:
        np.testing.assert_array_equal(np.asarray(found[name]), tree[name])


# --- into templates -------------------------------------------------------------------------------


def test_classes_of_the_user_s_go_into_a_template(tmp_path):
    tree = Holder(Pair(weight("int4"), jnp.tanh), {"b": jnp.ones(3), "steps": 3})
    fewbit.save(tmp_path / "m", tree)
    with pytest.raises(CheckpointError, match="holds a test_save_load.Holder at ''.*into=template"):
        fewbit.load(tmp_path / "m").params  # noqa: B018
    like = jax.tree.map(lambda x: x if callable(x) else jnp.zeros_like(x), tree)
    found = fewbit.load(tmp_path / "m", into=like).params
    assert isinstance(found, Holder) and isinstance(found.w, Pair) and found.w.b is jnp.tanh
    assert_same(found.w.a, tree.w.a)
    assert_same(found.rest, {"b": jnp.ones(3), "steps": 3})
    tree = {"f": jnp.tanh, "w": jnp.ones(2)}
    fewbit.save(tmp_path / "m", tree)
    with pytest.raises(CheckpointError, match="holds the function tanh at 'f'.*into=template"):
        fewbit.load(tmp_path / "m").params  # noqa: B018
    assert fewbit.load(tmp_path / "m", into=tree).params["f"] is jnp.tanh


def test_equinox_modules(tmp_path):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    plan = fewbit.plan(lambda m, x: jax.vmap(m)(x), W8, model, X)
    quantized = fewbit.quantize_params(model, plan)
    fewbit.save(tmp_path / "m", quantized, plan)
    template = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(1))
    found = fewbit.load(tmp_path / "m", into=template).params
    assert_same(found.layers[0].weight, quantized.layers[0].weight)
    assert found.activation is template.activation


def test_a_template_that_does_not_fit(tmp_path):
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "m", params, plan)

    def into(template, **options):
        return fewbit.load(tmp_path / "m", into=template, **options).params

    floats = jax.eval_shape(lambda: PARAMS)
    assert_same(into(floats), params)  # what quantize_params would make of it
    assert_same(into(params), params)
    with pytest.raises(CheckpointError, match="lacks 1 of the template's parameters: upp/bias"):
        into({**floats, "upp": {"bias": floats["up"]["bias"]}})
    with pytest.raises(CheckpointError, match="holds 1 parameters that the template does not have"):
        into({"up": floats["up"]})
    with pytest.warns(UserWarning, match="holds 1 parameters that the template does not have"):
        assert set(into({"up": floats["up"]}, strict=False)) == {"up"}
    wide = {**floats, "down": {"kernel": jax.ShapeDtypeStruct((128, 65), jnp.float32)}}
    with pytest.raises(CheckpointError) as caught:
        into(wide)
    assert (
        "tensor 'down/kernel' does not fit the template: expected a float32[128,65] array"
        in str(caught.value)
    )
    with pytest.raises(CheckpointError, match="expected int8 codes of .*, found int4 codes of"):
        into(quantized_mlp(W8)[0])
    half = {**floats, "up": {**floats["up"], "bias": jnp.ones((1, 128), jnp.bfloat16)}}
    with pytest.raises(CheckpointError, match="expected a bfloat16.1,128. array, found a float32"):
        into(half)


# --- lazily, leaf by leaf, onto devices -----------------------------------------------------------


def test_one_leaf_at_a_time(tmp_path):
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "m", params, plan)
    loaded = fewbit.load(tmp_path / "m")
    assert loaded.paths == ("down/kernel", "up/bias", "up/kernel")
    assert_same(loaded.leaf("up/kernel"), params["up"]["kernel"])
    assert [path for path, _ in loaded.leaves()] == list(loaded.paths)
    with pytest.raises(
        CheckpointError, match="has no parameter 'up/kernal'. The nearest is 'up/ke"
    ):
        loaded.leaf("up/kernal")
    assert loaded.params is loaded.params


def test_a_save_over_an_opened_checkpoint_does_not_change_it(tmp_path):
    fewbit.save(tmp_path / "m", {"w": jnp.ones(3)})
    loaded = fewbit.load(tmp_path / "m")
    fewbit.save(tmp_path / "m", {"w": jnp.zeros(3)})
    assert loaded.params["w"].tolist() == [1, 1, 1]
    assert fewbit.load(tmp_path / "m").params["w"].tolist() == [0, 0, 0]


MESH = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
SPECS = {"up/kernel": P(None, "m"), "down/kernel": P("m", "d"), "up/bias": P(None, "m")}


@pytest.mark.parametrize("qtype", ["int8", "int3", "nvfp4", "float8_e3m4", "int1"])
def test_into_a_sharding(tmp_path, qtype):
    tile = None if qtype in ("int8", "nvfp4") else 32
    params, plan = quantized_mlp([QuantizationRule(weight_qtype=qtype, tile_size=tile)])
    fewbit.save(tmp_path / "m", params, plan)
    place = lambda path: NamedSharding(MESH, SPECS[path])  # noqa: E731
    found = fewbit.load(tmp_path / "m", sharding=place).params
    assert_same(found, params)
    assert found["up"]["bias"].sharding == NamedSharding(MESH, P(None, "m"))
    plain = fewbit.unpack(found["down"]["kernel"].array)
    assert plain.qvalue.sharding.is_equivalent_to(NamedSharding(MESH, P("m", "d")), 2)
    assert plain.qvalue.addressable_shards[0].data.shape == (32, 32)
    for part in jax.tree.leaves(found):
        assert len(part.sharding.device_set) == 8
    # and back from there
    fewbit.save(tmp_path / "n", found, plan)
    assert files_of(tmp_path / "n") == files_of(tmp_path / "m")


def test_one_sharding_for_all(tmp_path):
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "m", params, plan)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    found = fewbit.load(tmp_path / "m", sharding=device).params
    assert {d for x in jax.tree.leaves(found) for d in x.devices()} == {jax.devices()[3]}
    found = fewbit.load(tmp_path / "m", sharding=NamedSharding(MESH, P())).params
    assert all(len(x.devices()) == 8 for x in jax.tree.leaves(found))
    assert_same(found, params)


# --- what is in the files -------------------------------------------------------------------------


def test_the_manifest_is_readable(tmp_path):
    params, plan = quantized_mlp()
    info = fewbit.save(tmp_path / "m", params, plan)
    manifest = json.loads((tmp_path / "m" / "fewbit.json").read_text())
    assert manifest["format"] == "fewbit-checkpoint" and manifest["version"] == 1
    assert manifest["libraries"]["fewbit"] == fewbit.__version__
    assert manifest["libraries"]["jax"] == jax.__version__
    assert fewbit.Plan.from_json(json.dumps(manifest["plan"])) == plan
    entry = manifest["tensors"]["up/kernel.qvalue"]
    assert entry["bits"] == 4 and entry["shape"] == [64, 128] and entry["bytes"] == 64 * 64
    assert manifest["tree"]["dict"]["up"]["dict"]["bias"] == {"array": "up/bias"}
    assert info.shards[0][0].startswith("weights-00001-of-00001-")


def test_shards(tmp_path):
    params, plan = quantized_mlp()
    one = fewbit.save(tmp_path / "one", params, plan)
    many = fewbit.save(tmp_path / "many", params, plan, shard_bytes=4000)
    assert len(one.shards) == 1 and len(many.shards) > 3
    for i, (name, size) in enumerate(many.shards):
        assert name.startswith(f"weights-{i + 1:05}-of-{len(many.shards):05}-")
        assert (tmp_path / "many" / name).stat().st_size == size
    assert_same(fewbit.load(tmp_path / "many").params, params)
    fewbit.save(tmp_path / "many", params, plan)  # the old shards go
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    with pytest.raises(ValueError, match="shard_bytes must be at least 1, got 0"):
        fewbit.save(tmp_path / "one", params, plan, shard_bytes=0)


def test_inspect(tmp_path):
    params, plan = quantized_mlp()
    info = fewbit.save(tmp_path / "m", params, plan)
    for name, _ in info.shards:
        os.truncate(tmp_path / "m" / name, 10)  # no data is read
    info = fewbit.inspect(tmp_path / "m")
    text = str(info)
    words = " ".join(text.split())
    assert "up/kernel    64x128  int4          4.50  4.50 KiB" in text
    assert (
        "3 parameters, 2 of them quantized" in words and "4.50 bits per quantized weight" in words
    )
    assert "plan: 2 of 2 sites quantized" in text
    assert info.leaf("up/bias").dtype == "float32" and info.leaf("up/kernel").dtype == "float32"
    assert json.loads(info.to_json())["totals"]["bits_per_weight"] == 4.5
    with pytest.raises(KeyError, match="info.leaves lists all of them"):
        info.leaf("no")


def test_another_process_reads_it(tmp_path):
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "m", params, plan)
    code = f"""
        import sys
        import numpy as np
        import fewbit, jax
        loaded = fewbit.load({str(tmp_path / "m")!r}, layout="plain")
        assert "flax" not in sys.modules, "reading plain trees needs no framework"
        w = loaded.params["up"]["kernel"]
        np.save({str(tmp_path / "codes.npy")!r}, np.asarray(w.array.qvalue).astype(np.int8))
        assert loaded.plan.how("up/kernel") == w.how.replace(rule=None)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    codes = np.asarray(params["up"]["kernel"].array.qvalue).astype(np.int8)
    assert (np.load(tmp_path / "codes.npy") == codes).all()


# --- leaf by leaf ---------------------------------------------------------------------------------


def test_a_writer_takes_leaves_that_were_never_together(tmp_path):
    params, plan = quantized_mlp()
    abstract = jax.eval_shape(lambda: fewbit.unpack(params))
    with CheckpointWriter(tmp_path / "a", abstract, plan) as writer:
        for leaf in writer.leaves:
            keys = leaf.path.split("/")
            writer.write(leaf.path, params[keys[0]][keys[1]])
    fewbit.save(tmp_path / "b", params, plan)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    with pytest.raises(ValueError, match="up/bias: this leaf does not fit where 'down/kernel'"):
        with CheckpointWriter(tmp_path / "a", abstract, plan) as writer:
            writer.write("up/bias", params["up"]["bias"])
    with pytest.raises(ValueError, match="is not complete: 'down/kernel' is missing"):
        with CheckpointWriter(tmp_path / "a", abstract, plan) as writer:
            pass
    with pytest.raises(ValueError, match="down/kernel.qvalue: .'float32', .128, 64.. does not fit"):
        with CheckpointWriter(tmp_path / "a", abstract, plan) as writer:
            writer.write("down/kernel", PARAMS["down"]["kernel"])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")  # still the old one


def peak(code):
    """Kilobytes that the code added to the largest size the process had before."""
    text = """
        import resource, sys
        import jax, jax.numpy as jnp, numpy as np
        import fewbit
        from fewbit.qarray import HowToQuantize, quantize_with
        def now():
            for line in open("/proc/self/status"):
                if line.startswith("VmHWM"):
                    return int(line.split()[1])
        how = HowToQuantize(qtype="int4", channelwise_axes=(1,), roles="kn")
        def made(seed):
            w = jax.random.normal(jax.random.key(seed), (1024, 4096))
            return fewbit.WithAux(quantize_with(w, how), how)
    """
    full = textwrap.dedent(text) + textwrap.dedent(code)
    # What is held is measured, not what the allocator keeps for later.
    quiet = {
        **os.environ,
        "XLA_FLAGS": "",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run([sys.executable, "-c", full], capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.long
def test_loading_and_saving_hold_one_leaf_beside_the_tree(tmp_path):
    """24 leaves of 4M codes: 4 MB each as one-byte codes, 2 MB in panels or files."""
    save = f"""
        tree = {{str(i): made(i) for i in range(24)}}
        fewbit.save({str(tmp_path / "warm")!r}, {{"w": tree["0"]}})
        before = now()
        fewbit.save({str(tmp_path / "m")!r}, tree)
        print(now() - before)
    """
    assert peak(save) < 30_000
    load = f"""
        fewbit.load({str(tmp_path / "warm")!r}, layout="plain", lazy=False)
        before = now()
        params = fewbit.load({str(tmp_path / "m")!r}, layout="plain", lazy=False).params
        print(now() - before)
    """
    assert peak(load) < 24 * 4_200 + 25_000  # a second copy would be 100 MB more


# --- mistakes -------------------------------------------------------------------------------------


def test_arguments_of_the_wrong_kind(tmp_path):
    params, plan = quantized_mlp()
    path = tmp_path / "m"
    with pytest.raises(TypeError, match="The parameters come second and the plan third"):
        fewbit.save(path, plan, params)
    with pytest.raises(TypeError, match="takes a Plan .or None. as its third argument, got a list"):
        fewbit.save(path, params, W4)
    with pytest.raises(
        ValueError, match="2 of the plan's parameters are not stored as it says: do"
    ):
        fewbit.save(path, PARAMS, plan)
    with pytest.warns(UserWarning, match="down/kernel is float32, the plan says int4"):
        fewbit.save(tmp_path / "other", PARAMS, plan, strict=False)
    product = lambda params, x: x @ params["up"]["kernel"]  # noqa: E731
    wider = fewbit.plan(product, plan.rules, {"up": {"kernel": normal(0, 64, 256)}}, X)
    said = r"up/kernel is int4\[64,128\] in tiles of 32 along axis 0, the plan says int4\[64,256\]"
    with pytest.raises(ValueError, match=said):
        fewbit.save(path, params, wider)
    tiled = fewbit.plan(mlp, [rule.replace(tile_size=16) for rule in plan.rules], PARAMS, X)
    with pytest.raises(ValueError, match="the plan says .* in tiles of 16 along axis 0"):
        fewbit.save(path, params, tiled)
    with pytest.raises(ValueError, match="the keys 1, 'a' cannot be saved"):
        fewbit.save(path, {1: X, "a": X})
    with pytest.raises(ValueError, match="w: object arrays cannot be saved"):
        fewbit.save(path, {"w": np.array([None])})
    with pytest.raises(ValueError, match="w is a traced value: save outside jit"):
        jax.jit(lambda w: fewbit.save(path, {"w": w}))(X)
    with pytest.raises(ValueError, match="w is abstract: it has a shape, but no values"):
        fewbit.save(path, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    deep = X
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        fewbit.save(path, deep)
    noisy = weight("int8")
    noisy = noisy.replace(how=noisy.how.replace(noise_fn=lambda shape: jnp.zeros(shape)))
    with pytest.raises(ValueError, match="its noise function is an object of this process"):
        fewbit.save(path, {"w": noisy})
    assert not path.exists()
    fewbit.save(path, params, plan)
    with pytest.raises(ValueError, match="layout='packed' is not known: 'native'"):
        fewbit.load(path, layout="packed")
    with pytest.raises(TypeError, match="sharding takes a jax.sharding.Sharding, or a function"):
        fewbit.load(path, sharding="x")


def test_quantizing_leaves_no_trace_in_the_file(tmp_path):
    """Codes in the file equal codes that are computed anew."""
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "m", params, plan)
    found = fewbit.load(tmp_path / "m", layout="plain").params["up"]["kernel"]
    again = quantize_with(normal(0, 64, 128), plan.how("up/kernel"))
    assert (bits_of(found.array.qvalue) == bits_of(again.qvalue)).all()
    assert (found.array.scale == again.scale).all()
