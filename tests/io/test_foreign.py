"""Checkpoints of GPTQ, AWQ, compressed-tensors and fp8: every code and every number, exactly."""

import json
import pathlib
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import foreign

import fewbit
from fewbit.io._errors import CheckpointError
from fewbit.io._safetensors import SafetensorsFile


def config(**settings):
    return {"quantization_config": settings}


def random_weight(rng, rows, columns, groups, bits, *, middle=False):
    """Unsigned codes, zero points and float16 scales."""
    codes = rng.integers(0, 2**bits, (rows, columns))
    zeros = rng.integers(0, 2**bits, (groups, columns))
    if middle:
        zeros = np.full((groups, columns), 2 ** (bits - 1))
    scales = (rng.uniform(0.01, 0.1, (groups, columns))).astype(np.float16)
    return codes, zeros, scales


def named(module, parts):
    return {f"{module}.{part}": array for part, array in parts.items()}


def numbers(q):
    return np.asarray(fewbit.dequantize(q, "float32"), np.float64)


def assert_exact(q, wanted):
    """Codes times scales are exact in float32 here: at most 8 + 11 bits."""
    assert q.shape == wanted.shape
    np.testing.assert_array_equal(numbers(q), wanted)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("middle", [True, False])
def test_gptq(bits, version, middle):
    rng = np.random.default_rng(bits)
    rows, columns, group = 64, 32, 32
    codes, zeros, scales = random_weight(rng, rows, columns, 2, bits, middle=middle)
    if version == 1:  # AutoGPTQ's packing cannot hold a zero point of 0
        zeros = np.maximum(zeros, 1)
    groups = np.arange(rows) // group
    parts = foreign.gptq(codes, zeros, scales, groups, bits, version=version)
    said = config(
        quant_method="gptq",
        bits=bits,
        group_size=group,
        **({"checkpoint_format": "gptq_v2"} if version == 2 else {}),
    )
    found = fewbit.read_checkpoint(named("layers.0.up", parts), config=said)
    q = found["layers/0/up/weight"]
    np.testing.assert_array_equal(np.asarray(q.qvalue, np.int32), codes - 2 ** (bits - 1))
    assert q.qtype == f"int{bits}" or jnp.dtype(q.qtype).name == f"int{bits}"
    assert (q.zero_point is None) == middle
    assert q.tile_shape == (group, 1) and q.dtype == jnp.float16
    assert_exact(q, foreign.dequantized(codes, zeros, scales, groups))
    assert found.format == f"GPTQ v{version}, {bits} bits, groups of 32"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_v1_of_gptqmodel_borrows_between_fields(bits):
    """It subtracts whole words, so a zero point of 0 borrows from its neighbour."""
    rng = np.random.default_rng(7)
    codes, zeros, scales = random_weight(rng, 32, 32, 1, bits)
    zeros[:, ::3] = 0
    parts = foreign.gptq_by_borrowing(codes, zeros, scales, [0] * 32, bits)
    said = config(quant_method="gptq", bits=bits, group_size=-1)
    q = fewbit.read_checkpoint(named("up", parts), config=said)["up/weight"]
    assert_exact(q, foreign.dequantized(codes, zeros, scales, [0] * 32))


@pytest.mark.parametrize("act_order", ["rows", "sort"])
def test_gptq_act_order(act_order):
    rng = np.random.default_rng(3)
    rows, columns, group = 96, 16, 32
    codes, zeros, scales = random_weight(rng, rows, columns, 3, 4)
    zeros = np.maximum(zeros, 1)
    groups = rng.permutation(np.arange(rows) // group)
    parts = foreign.gptq(codes, zeros, scales, groups, 4)
    said = config(quant_method="gptq", bits=4, group_size=group, desc_act=True)
    found = fewbit.read_checkpoint(named("up", parts), config=said, act_order=act_order)
    q, wanted = found["up/weight"], foreign.dequantized(codes, zeros, scales, groups)
    order = found.permutation("up/weight")
    if act_order == "rows":
        assert order is None and q.scale.shape == (rows, columns)
        assert_exact(q, wanted)
        return
    assert q.scale.shape == (3, columns)  # groups stay groups
    assert_exact(q, wanted[order])
    x = rng.normal(size=(5, rows)).astype(np.float32)
    product = np.asarray(fewbit.dot(jnp.asarray(x[:, order]), q.with_dtype("float32")), np.float64)
    np.testing.assert_allclose(product, x.astype(np.float64) @ wanted, rtol=1e-4, atol=1e-4)
    tree = found.tree()
    np.testing.assert_array_equal(tree["up"]["weight_permutation"], order)


def test_gptq_act_order_with_uneven_groups_falls_back_to_rows():
    rng = np.random.default_rng(4)
    codes, zeros, scales = random_weight(rng, 64, 8, 2, 4, middle=True)
    groups = np.array([0] * 40 + [1] * 24)[rng.permutation(64)]
    said = config(quant_method="gptq", bits=4, group_size=32, desc_act=True)
    tensors = named("up", foreign.gptq(codes, zeros, scales, groups, 4))
    found = fewbit.read_checkpoint(tensors, config=said, act_order="sort")
    assert_exact(found["up/weight"], foreign.dequantized(codes, zeros, scales, groups))
    assert found.permutation("up/weight") is None


def test_gptq_dynamic_gives_a_module_its_own_width():
    rng = np.random.default_rng(5)
    tensors, wanted = {}, {}
    for module, bits, group in (("a.up", 4, 32), ("a.down", 8, 16)):
        codes, zeros, scales = random_weight(rng, 32, 16, 32 // group, bits, middle=True)
        groups = np.arange(32) // group
        tensors |= named(module, foreign.gptq(codes, zeros, scales, groups, bits))
        wanted[module] = foreign.dequantized(codes, zeros, scales, groups)
    dynamic = {"-:.*skip": {}, "+:.*\\.down": {"bits": 8, "group_size": 16}}
    said = config(quant_method="gptq", bits=4, group_size=32, dynamic=dynamic)
    found = fewbit.read_checkpoint(tensors, config=said)
    assert_exact(found["a/up/weight"], wanted["a.up"])
    assert_exact(found["a/down/weight"], wanted["a.down"])


@pytest.mark.parametrize("middle", [True, False])
def test_awq(middle):
    rng = np.random.default_rng(11)
    rows, columns, group = 64, 24, 16
    codes, zeros, scales = random_weight(rng, rows, columns, 4, 4, middle=middle)
    parts = foreign.awq(codes, zeros, scales)
    said = config(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
    found = fewbit.read_checkpoint(named("up", parts), config=said)
    q = found["up/weight"]
    np.testing.assert_array_equal(np.asarray(q.qvalue, np.int32), codes - 8)
    assert (q.zero_point is None) == middle
    assert_exact(q, foreign.dequantized(codes, zeros, scales, np.arange(rows) // group))
    assert found.format == "AWQ gemm, 4 bits, groups of 16"
    kept = fewbit.read_checkpoint(named("up", parts), config=said, transpose=False)["up/weight"]
    np.testing.assert_array_equal(numbers(kept), numbers(q).T)


def compressed_config(kind, bits, **weights):
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    return config(quant_method="compressed-tensors", format=kind, config_groups={"group_0": scheme})


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8]),
    group=st.sampled_from([8, 16, 48]),
    columns=st.integers(1, 13),
    symmetric=st.booleans(),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_compressed_tensors_packed(bits, group, columns, symmetric, shuffled, seed):
    rng = np.random.default_rng(seed)
    rows = 48
    codes, zeros, scales = random_weight(rng, rows, columns, rows // group, bits, middle=symmetric)
    groups = np.arange(rows) // group
    if shuffled:
        groups = rng.permutation(groups)
    given_groups = groups if shuffled else None
    parts = foreign.compressed_packed(codes, zeros, scales, bits, given_groups, symmetric=symmetric)
    said = compressed_config("pack-quantized", bits, group_size=group, strategy="group")
    q = fewbit.read_checkpoint(named("up", parts), config=said)["up/weight"]
    np.testing.assert_array_equal(np.asarray(q.qvalue, np.int32), codes - 2 ** (bits - 1))
    assert_exact(q, foreign.dequantized(codes, zeros, scales, groups))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("zero", [True, False])
def test_compressed_tensors_int8(strategy, zero):
    rng = np.random.default_rng(2)
    out, rows = 6, 32
    codes = rng.integers(-128, 128, (out, rows)).astype(np.int8)
    shape = {"tensor": (1,), "channel": (out, 1), "group": (out, 4)}[strategy]
    scale = rng.uniform(0.01, 0.1, shape).astype(ml_dtypes.bfloat16)
    zeros = rng.integers(-9, 9, shape).astype(np.int8) if zero else None
    parts = {"weight": codes, "weight_scale": scale}
    if zeros is not None:
        parts["weight_zero_point"] = zeros
    weights = {"strategy": strategy, "group_size": 8 if strategy == "group" else None}
    said = compressed_config("int-quantized", 8, **weights)
    q = fewbit.read_checkpoint(named("up", parts), config=said)["up/weight"]
    spread = lambda a: np.repeat(np.broadcast_to(a, (out, a.shape[-1])), rows // a.shape[-1], 1)  # noqa: E731
    points = spread(zeros.astype(int)) if zeros is not None else 0
    wanted = (codes.astype(int) - points) * spread(scale.astype(np.float64))
    assert_exact(q, wanted.T)
    assert q.dtype == jnp.bfloat16


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_compressed_tensors_fp8(strategy):
    rng = np.random.default_rng(8)
    codes = rng.normal(size=(6, 32)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.1, 1, (1,) if strategy == "tensor" else (6, 1)).astype(np.float32)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    said = compressed_config("float-quantized", 8, type="float", strategy=strategy)
    found = fewbit.read_checkpoint(named("up", parts), config=said)
    wanted = codes.astype(np.float32) * scale  # one rounding, as in the product itself
    np.testing.assert_array_equal(numbers(found["up/weight"]), wanted.astype(np.float64).T)
    np.testing.assert_array_equal(found["up/input_scale"], [1.0])


def test_compressed_tensors_groups_of_modules():
    """Two schemes in one checkpoint, told apart by their targets."""
    rng = np.random.default_rng(9)
    tensors, wanted = {}, {}
    for module, bits in (("m.up", 4), ("m.down", 8)):
        codes, zeros, scales = random_weight(rng, 32, 4, 2, bits, middle=True)
        parts = foreign.compressed_packed(codes, zeros, scales, bits, symmetric=True)
        tensors |= named(module, parts)
        wanted[module] = foreign.dequantized(codes, zeros, scales, np.arange(32) // 16)
    schemes = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}},
        "group_1": {"targets": ["re:.*down$"], "weights": {"num_bits": 8, "group_size": 16}},
    }
    said = config(quant_method="compressed-tensors", format="pack-quantized", config_groups=schemes)
    found = fewbit.read_checkpoint(tensors, config=said)
    for module, numbers_ in wanted.items():
        assert_exact(found[module.replace(".", "/") + "/weight"], numbers_)
    assert "int4, groups of 16; int8, groups of 16" in found.format


@pytest.mark.parametrize(("out", "rows"), [(256, 384), (200, 300), (128, 100), (7, 130)])
def test_fp8_blocks(out, rows):
    rng = np.random.default_rng(out)
    codes = rng.normal(size=(out, rows)).astype(ml_dtypes.float8_e4m3fn)
    # Few bits, so that the product of code and scale is exact in float32.
    scales = rng.uniform(0.1, 2, (-(-out // 128), -(-rows // 128))).astype(np.float16)
    scales = scales.astype(np.float32)
    said = config(quant_method="fp8", weight_block_size=[128, 128], fmt="e4m3")
    tensors = named("up", {"weight": codes, "weight_scale_inv": scales})
    found = fewbit.read_checkpoint(tensors, config=said)
    assert_exact(found["up/weight"], foreign.blocks(codes, scales, (128, 128)).T)
    assert found.format == "fp8, blocks of 128x128"


def test_fp8_blocks_of_stacked_experts():
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(3, 200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.1, 2, (3, 2, 3)).astype(np.float16).astype(np.float32)
    said = config(quant_method="fp8", weight_block_size=[128, 128])
    tensors = {"experts.gate": codes, "experts.gate_scale_inv": scales}
    q = fewbit.read_checkpoint(tensors, config=said)["experts/gate"]
    for e in range(3):
        wanted = foreign.blocks(codes[e], scales[e], (128, 128)).T
        np.testing.assert_array_equal(numbers(q)[e], wanted)


def test_fp8_scale_of_a_tensor():
    codes = np.linspace(-4, 4, 12).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    tensors = named("up", {"weight": codes, "weight_scale": np.array(0.5, np.float32)})
    q = fewbit.read_checkpoint(tensors, config=config(quant_method="fp8"))["up/weight"]
    np.testing.assert_array_equal(numbers(q), codes.astype(np.float64).T * 0.5)


def small_checkpoint(rng, layers=2):
    """A GPTQ checkpoint with float tensors beside it, and the numbers it stands for."""
    tensors, wanted = {}, {}
    for layer in range(layers):
        codes, zeros, scales = random_weight(rng, 32, 16, 2, 4)
        zeros = np.maximum(zeros, 1)
        groups = np.arange(32) // 16
        module = f"model.layers.{layer}.mlp.up_proj"
        tensors |= named(module, foreign.gptq(codes, zeros, scales, groups, 4))
        wanted[layer] = foreign.dequantized(codes, zeros, scales, groups)
        tensors[f"model.layers.{layer}.norm.weight"] = rng.normal(size=32).astype(np.float32)
    tensors["lm_head.weight"] = rng.normal(size=(5, 16)).astype(ml_dtypes.bfloat16)
    tensors["model.rotary.inv_freq"] = rng.normal(size=4).astype(np.float32)
    return tensors, wanted


SAID = config(quant_method="gptq", bits=4, group_size=16)
NAMES = [
    (r"model\.layers\.{i}\.mlp\.(\w+)_proj\.weight", r"layers/{i}/\1/kernel"),
    (r"model\.layers\.{i}\.norm\.weight", "layers/{i}/norm/scale"),
    (r"lm_head\.weight", "head/kernel", "T"),
    (r".*\.inv_freq", None),
]


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_files_and_names(tmp_path, shards):
    tensors, wanted = small_checkpoint(np.random.default_rng(1))
    path = tmp_path
    if shards == 0:
        path = tmp_path / "model.safetensors"
        write_file(path, tensors)
    else:
        places = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[number::shards])
            write_file(tmp_path / file, part)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SAID}))
    found = fewbit.read_checkpoint(path, names=NAMES, dtype="float32")
    assert sorted(found) == sorted(
        [
            *("layers/0/norm/scale", "layers/0/up/kernel"),
            *("layers/1/norm/scale", "layers/1/up/kernel", "head/kernel"),
        ]
    )
    for layer, numbers_ in wanted.items():
        q = found[f"layers/{layer}/up/kernel"]
        assert q.dtype == jnp.float32
        assert_exact(q, numbers_)
    np.testing.assert_array_equal(found["head/kernel"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(
        found["layers/1/norm/scale"], tensors["model.layers.1.norm.weight"]
    )
    assert "2 of 5 parameters quantized" in repr(found)
    assert set(found.sources("layers/0/up/kernel")) == {
        f"model.layers.0.mlp.up_proj.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
    }
    assert found.tree()["layers"]["0"]["up"]["kernel"].shape == (32, 16)


def test_layers_are_stacked():
    tensors, wanted = small_checkpoint(np.random.default_rng(1), layers=3)
    names = [
        (r"model\.layers\.{i}\.mlp\.(\w+)_proj\.weight", r"layers/\1/kernel"),
        (r"model\.layers\.{i}\.norm\.weight", "layers/norm"),
    ]
    found = fewbit.read_checkpoint(tensors, config=SAID, names=names)
    q = found["layers/up/kernel"]
    assert q.shape == (3, 32, 16) and q.scale.shape == (3, 2, 16)
    assert_exact(q, np.stack([wanted[layer] for layer in range(3)]))
    assert found["layers/norm"].shape == (3, 32)


def test_a_read_weight_runs_in_a_model():
    """Straight into process_prequantized_params: the product is the checkpoint's."""
    tensors, wanted = small_checkpoint(np.random.default_rng(1), layers=1)
    found = fewbit.read_checkpoint(tensors, config=SAID, names=NAMES, dtype="float32")
    params = {"w": found["layers/0/up/kernel"]}
    model = lambda params, x: x @ params["w"]  # noqa: E731
    rules = [
        fewbit.QuantizationRule(
            weight_qtype="int4", tile_size=16, weight_calibration_method="minmax"
        )
    ]
    x = np.random.default_rng(2).normal(size=(3, 32)).astype(np.float32)
    plan = fewbit.plan(model, rules, {"w": jnp.zeros((32, 16))}, jnp.asarray(x))
    ready = fewbit.process_prequantized_params(params, plan)
    y = fewbit.quantize_model(model, fewbit.PtqProvider(rules))(ready, jnp.asarray(x))
    np.testing.assert_allclose(
        np.asarray(y), x @ wanted[0].astype(np.float32), rtol=2e-5, atol=1e-4
    )


# What can be wrong with such a checkpoint, and the sentence that says so.
def broken(change):
    tensors, _ = small_checkpoint(np.random.default_rng(1), layers=1)
    base = "model.layers.0.mlp.up_proj."
    change(tensors, base)
    return tensors


FAULTS = {
    "no scale": (
        lambda t, b: t.pop(b + "scales"),
        SAID,
        r"tensor 'model.layers.0.mlp.up_proj.weight' is quantized with gptq, but scales is "
        r"missing; the checkpoint has qweight, qzeros, g_idx. Fetch all files",
    ),
    "scales of another shape": (
        lambda t, b: t.update({b + "scales": t[b + "scales"][:, :8]}),
        SAID,
        r"scales does not fit a qweight of 32x16 codes of 4 bits in groups of 16: expected "
        r"\(2, 16\), found \(2, 8\). Check that config.json",
    ),
    "a scale that is no number": (
        lambda t, b: t[b + "scales"].__setitem__((1, 3), np.nan),
        SAID,
        r"tensor 'model.layers.0.mlp.up_proj.weight' cannot be read: scales holds 1 number that is "
        r"NaN or infinite, the first at index \(1, 3\): nan. Every number that shares",
    ),
    "zeros of another shape": (
        lambda t, b: t.update({b + "qzeros": t[b + "qzeros"][:1]}),
        SAID,
        r"qzeros does not fit .* expected \(2, 2\), found \(1, 2\)",
    ),
    "codes as floats": (
        lambda t, b: t.update({b + "qweight": t[b + "qweight"].astype(np.float32)}),
        SAID,
        "qweight has another type: expected int32, found float32",
    ),
    "a group too many": (
        lambda t, b: t.update({b + "g_idx": t[b + "g_idx"] + 1}),
        SAID,
        "g_idx names groups that have no scale: expected 0 to 1, found 1 to 2",
    ),
    "5 bits": (
        lambda t, b: None,
        config(quant_method="gptq", bits=5),
        "has 5 bits, and gptq is read with 2, 3, 4, 8. Dequantize it",
    ),
    "groups of nothing": (
        lambda t, b: None,
        config(quant_method="gptq", bits=4, group_size=0),
        "its groups are of 0 inputs. Check that config.json",
    ),
    "groups of a word": (
        lambda t, b: None,
        config(quant_method="gptq", bits=4, group_size="all"),
        "its groups are of 'all' inputs",
    ),
    "codes in a row": (
        lambda t, b: t.update({b + "qweight": t[b + "qweight"].ravel()}),
        SAID,
        r"qweight does not fit a weight: expected two axes, found \(64,\)",
    ),
    "marlin": (
        lambda t, b: None,
        config(quant_method="gptq", bits=4, checkpoint_format="marlin"),
        "is GPTQ stored as 'marlin', and 'gptq' and 'gptq_v2' are read",
    ),
    "gemv": (
        lambda t, b: t.pop(b + "g_idx"),
        config(quant_method="awq", bits=4, group_size=16, version="gemv"),
        "is AWQ of the version 'gemv', and 'gemm' is read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_said(fault):
    change, said, sentence = FAULTS[fault]
    found = fewbit.read_checkpoint(broken(change), config=said, names=NAMES)
    with pytest.raises(CheckpointError, match=sentence):
        found["layers/0/up/kernel"]


def with_bad_numbers(shape, dtype, *places):
    array = np.ones(shape, dtype)
    for place in places:
        array[place] = np.inf
    return array


@pytest.mark.parametrize(
    ("parts", "said", "sentence"),
    [
        (
            {
                "qweight": np.zeros((16, 2), np.int32),
                "qzeros": np.zeros((1, 2), np.int32),
                "scales": with_bad_numbers((1, 16), np.float16, (0, 5), (0, 9)),
            },
            config(quant_method="awq", bits=4, group_size=16),
            r"'up.weight' cannot be read: scales holds 2 numbers that are NaN or infinite, the "
            r"first at index \(0, 5\): inf",
        ),
        (
            {
                "weight": np.zeros((4, 4), np.int8),
                "weight_scale": with_bad_numbers((4, 1), ml_dtypes.bfloat16, (2, 0)),
            },
            compressed_config("int-quantized", 8),
            r"scale holds 1 number that is NaN or infinite, the first at index \(2, 0\): inf",
        ),
        (
            {
                "weight": np.zeros((130, 4), ml_dtypes.float8_e4m3fn),
                "weight_scale_inv": with_bad_numbers((2, 1), np.float32, (1, 0)),
            },
            config(quant_method="fp8", weight_block_size=[128, 128]),
            r"scale_inv holds 1 number that is NaN or infinite, the first at index \(1, 0\): inf",
        ),
        (
            {"weight": np.zeros((4, 4), np.int8)},
            compressed_config("int-quantized", 8),
            "is quantized with compressed-tensors, but scale is missing; the checkpoint has weight",
        ),
        (
            {"weight": np.zeros((4, 4), ml_dtypes.float8_e4m3fn)},
            config(quant_method="fp8"),
            "is quantized with fp8, but scale_inv is missing",
        ),
        (
            {
                "weight": np.zeros((130, 4), ml_dtypes.float8_e4m3fn),
                "weight_scale_inv": np.ones((1, 2), np.float32),
            },
            config(quant_method="fp8", weight_block_size=[128, 128]),
            r"scale_inv does not fit a weight of 130x4 in blocks of 128x128: expected \(2, 1\)",
        ),
        (
            {
                "weight_packed": np.zeros((4, 1), np.int32),
                "weight_scale": np.ones((4, 1), np.float16),
            },
            compressed_config("pack-quantized", 4),
            "but shape is missing; the checkpoint has packed, scale",
        ),
        (
            {
                "weight_packed": np.zeros((4, 1), np.int32),
                "weight_scale": np.ones((4, 1), np.float16),
                "weight_shape": np.array([4, 16]),
            },
            compressed_config("pack-quantized", 4),
            r"packed does not fit a weight of 4x16 with 8 codes in a word: expected \(4, 2\)",
        ),
        (
            {
                "weight_packed": np.zeros((4, 1), np.int32),
                "weight_scale": np.ones((4, 1), np.float16),
            },
            compressed_config("nvfp4-pack-quantized", 4),
            "is compressed-tensors of the format 'nvfp4-pack-quantized', and these are read: pack-",
        ),
    ],
)
def test_what_is_wrong_with_other_formats(parts, said, sentence):
    found = fewbit.read_checkpoint(named("up", parts), config=said)
    with pytest.raises(CheckpointError, match=sentence):
        found["up/weight"]


F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
GPTQ_PARTS = {
    "qweight": np.zeros((4, 16), np.int32),
    "qzeros": np.zeros((2, 2), np.int32),
    "scales": np.ones((2, 16), np.float16),
}
FP8_PARTS = {"weight": np.ones((4, 4), F8), "weight_scale": np.ones((4, 1), np.float32)}
INT8_PARTS = {"weight": np.zeros((4, 4), np.int8), "weight_scale": np.ones((4, 1), np.float32)}
PACKED_PARTS = {
    "weight_packed": np.zeros((4, 2), np.int32),
    "weight_scale": np.ones((4, 1), np.float16),
    "weight_shape": np.array([4, 16]),
}
FP8 = config(quant_method="fp8")
GPTQ = config(quant_method="gptq", bits=4, group_size=16)
AWQ = config(quant_method="awq", bits=4, group_size=16)
INT8 = compressed_config("int-quantized", 8)
GROUPED = "quantization_config.config_groups.group_0.weights"


def grouped(form, **weights):
    return config(
        quant_method="compressed-tensors",
        format=form,
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )


# What one says and the other is: refused, with the tensor, the key and what to write there.
CONTRADICTIONS = {
    "int-quantized, float8": (
        FP8_PARTS,
        INT8,
        r"'up.weight' is float8_e4m3fn, but quantization_config.format in config.json says "
        r"'int-quantized'. If the config is wrong, write 'float-quantized' there; if it is right",
    ),
    "int, float8": (
        FP8_PARTS,
        grouped("naive-quantized", num_bits=8, type="int"),
        f"'up.weight' is float8_e4m3fn, but {GROUPED}.type in config.json says 'int'. If the "
        "config is wrong, write 'float' there",
    ),
    "4-bit floats, float8": (
        FP8_PARTS,
        grouped("float-quantized", num_bits=4, type="float"),
        f"is float8_e4m3fn, but {GROUPED}.num_bits in config.json says 4. .* write 8 there",
    ),
    "float-quantized, int8": (
        INT8_PARTS,
        grouped("float-quantized", num_bits=8, type="float"),
        "is int8, but quantization_config.format in config.json says 'float-quantized'. .* write "
        "'int-quantized' there",
    ),
    "float, int8": (
        INT8_PARTS,
        grouped("naive-quantized", num_bits=8, type="float"),
        f"is int8, but {GROUPED}.type in config.json says 'float'. .* write 'int' there",
    ),
    "codes of 4 bits, larger ones": (
        {**INT8_PARTS, "weight": np.full((4, 4), -9, np.int8)},
        grouped("int-quantized", num_bits=4, type="int"),
        f"is of codes from -9 to -9, but {GROUPED}.num_bits in config.json says 4. "
        ".* write 5 there",
    ),
    "int-quantized, packed": (
        PACKED_PARTS,
        grouped("int-quantized", num_bits=4, type="int"),
        "is packed, but quantization_config.format .* 'int-quantized'. .*write 'pack-quantized'",
    ),
    "float, packed": (
        PACKED_PARTS,
        grouped("pack-quantized", num_bits=4, type="float"),
        f"is int32, but {GROUPED}.type in config.json says 'float'. .* write 'int' there",
    ),
    "fp8, int8": (
        INT8_PARTS,
        FP8,
        "'up.weight' is int8, but quantization_config.quant_method in config.json says 'fp8'. If "
        "the config is wrong, write the quant_method that made this file",
    ),
    "fp8, float16": (
        {**FP8_PARTS, "weight": np.ones((4, 4), np.float16)},
        FP8,
        "is float16, but quantization_config.quant_method in config.json says 'fp8'",
    ),
    "fp8 of AMD without a scale": (
        {"weight": np.zeros((4, 4), ml_dtypes.float8_e4m3fnuz)},
        FP8,
        "is float8_e4m3fnuz, but quantization_config.quant_method in config.json says 'fp8'",
    ),
    "e5m2, e4m3": (
        FP8_PARTS,
        config(quant_method="fp8", fmt="e5m2"),
        "is float8_e4m3fn, but quantization_config.fmt .* says 'e5m2'. .* write 'e4m3' there",
    ),
    "not quantized, GPTQ": (
        GPTQ_PARTS,
        config(quant_method="gptq", bits=4, group_size=16, dynamic={"-:u.*": {}}),
        "is quantized, but quantization_config.dynamic .* says '-:u..'. .*leave the pattern out",
    ),
    "two weights, GPTQ": (
        {**GPTQ_PARTS, "weight": np.ones((16, 32), np.float16)},
        GPTQ,
        "'up.weight' is there twice, as qweight and as weight. Take the one that is left over out",
    ),
    "two weights, AWQ": (
        {**GPTQ_PARTS, "weight": np.ones((16, 32), np.float16)},
        AWQ,
        "is there twice, as qweight and as weight",
    ),
    "two weights, packed": (
        {**PACKED_PARTS, "weight": np.ones((4, 16), np.float16)},
        compressed_config("pack-quantized", 4),
        "is there twice, as packed and as weight",
    ),
    "two scales": (
        {**FP8_PARTS, "weight_scale_inv": np.ones((1, 1), np.float32)},
        FP8,
        "is there twice, as scale and as scale_inv",
    ),
    "zero points of floats": (
        {**FP8_PARTS, "weight_zero_point": np.ones((4, 1), F8)},
        grouped("float-quantized", num_bits=8, type="float"),
        "its codes are floats, and it has zero points that are not zero. Fetch the file again",
    ),
    "zero points out of range": (
        {**PACKED_PARTS, "weight_zero_point": np.full((4, 1), 100, np.int8)},
        compressed_config("pack-quantized", 4),
        "its zero points are no codes: expected -8 to 7 for 4 bits, found 100 to 100. Fetch",
    ),
    "zero points of another type": (
        {**PACKED_PARTS, "weight_zero_point": np.zeros((4, 1), np.float16)},
        compressed_config("pack-quantized", 4),
        "zero_point has another type: expected int8, found float16. Check that config.json",
    ),
    "zero points as floats, GPTQ": (
        {**GPTQ_PARTS, "qzeros": np.zeros((2, 2), np.float32)},
        GPTQ,
        "qzeros has another type: expected int32, found float32",
    ),
    "groups as floats, GPTQ": (
        {**GPTQ_PARTS, "g_idx": np.full(32, -1, np.float32)},
        GPTQ,
        "g_idx has another type: expected int32 or int64, found float32",
    ),
    "scales of 64 bits, GPTQ": (
        {**GPTQ_PARTS, "scales": np.ones((2, 16))},
        GPTQ,
        "scales has another type: expected float16 or bfloat16 or float32, found float64",
    ),
    "scales of 8 bits, AWQ": (
        {**GPTQ_PARTS, "scales": np.ones((2, 16), F8)},
        AWQ,
        "scales has another type: expected float16 or bfloat16 or float32, found float8_e4m3fn",
    ),
    "scales as integers": (
        {**INT8_PARTS, "weight_scale": np.ones((4, 1), np.int32)},
        INT8,
        "scale has another type: expected float16 or bfloat16 or float32, found int32",
    ),
    "fp8 in a row": (
        {"weight": np.ones(4, F8), "weight_scale": np.ones(1, np.float32)},
        FP8,
        "weight does not fit a weight: expected two axes or more, found .4,.",
    ),
    "int8 in a row": (
        {"weight": np.ones(4, np.int8), "weight_scale": np.ones(1, np.float32)},
        INT8,
        "weight does not fit a weight: expected two axes, found .4,.",
    ),
    "true groups": (
        GPTQ_PARTS,
        config(quant_method="gptq", bits=4, group_size=True),
        "its groups are of True inputs. Check that config.json",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_contradicts_its_tensors(case):
    parts, said, sentence = CONTRADICTIONS[case]
    found = fewbit.read_checkpoint(named("up", parts), config=said)
    with pytest.raises(CheckpointError, match=sentence):
        found["up/weight"]


@pytest.mark.parametrize(
    ("parts", "said", "tensor", "methods"),
    [
        (GPTQ_PARTS, FP8, "qweight", "gptq or awq"),
        (GPTQ_PARTS, INT8, "qweight", "gptq or awq"),
        ({**GPTQ_PARTS, "g_idx": np.zeros(32, np.int32)}, AWQ, "g_idx", "gptq"),
        (FP8_PARTS, GPTQ, "weight_scale", "fp8 or compressed-tensors"),
        (INT8_PARTS, AWQ, "weight_scale", "fp8 or compressed-tensors"),
        (PACKED_PARTS, GPTQ, "weight_packed", "compressed-tensors"),
        (PACKED_PARTS, FP8, "weight_packed", "compressed-tensors"),
        ({"weight_scale_inv": np.ones((1, 1), np.float32)}, INT8, "weight_scale_inv", "fp8"),
    ],
)
def test_tensors_of_another_tool(parts, said, tensor, methods):
    """They were given back as plain arrays, as if nobody had quantized them."""
    method = said["quantization_config"]["quant_method"]
    sentence = (
        f"tensor 'up.{tensor}' is a part of a weight quantized with {methods}, but "
        f"quantization_config.quant_method in config.json says '{method}'. If the config is wrong, "
        f"write '{methods.split()[0]}' there"
    )
    both = {**named("up", parts), **named("down", {"weight": np.ones((4, 4), np.float16)})}
    with pytest.raises(CheckpointError, match=sentence):
        fewbit.read_checkpoint(both, config=said)
    rest = fewbit.read_checkpoint(both, config=said, names=[(r"up\..*", None)])
    assert rest["down/weight"].shape == (4, 4)


def test_floats_of_64_bits_are_plain_arrays():
    """Their name begins like that of floats of 6 bits."""
    tensors = {"norm.weight": np.ones(3), "rope": np.ones(2)}
    for said in (FP8, GPTQ, None):
        found = fewbit.read_checkpoint(tensors, config=said)
        assert found.quantized == () and found["rope"].dtype == np.float64


def test_small_floats_without_a_scale_are_never_plain_arrays():
    tensors = {"experts.up": np.ones((2, 4, 4), F8)}
    with pytest.raises(CheckpointError, match="'experts.up' is quantized with fp8, but scale_inv"):
        fewbit.read_checkpoint(tensors, config=FP8)["experts/up"]
    with pytest.raises(CheckpointError, match="looks quantized .'experts.up'"):
        fewbit.read_checkpoint(tensors)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (dict(quant_method="gptq", dynamic=[1]), "dynamic: expected an object, found .1.. Correct"),
        (dict(quant_method="gptq", dynamic={"+:a": 4}), "dynamic.'.:a'.: expected an object"),
        (dict(quant_method="gptq", meta="x"), "quantization_config.meta: expected an object"),
        (dict(quant_method="gptq", dynamic={"+:(": {}}), r"dynamic: '\(' is no regular expression"),
        (
            dict(quant_method="gptq", dynamic={r"(a)\1": {}}),
            "dynamic: the pattern .* cannot be matched within a bound",
        ),
        (dict(quant_method="fp8", weight_block_size=[0, 1]), "weight_block_size: expected two siz"),
        (dict(quant_method="fp8", weight_block_size="axb"), "weight_block_size: expected two siz"),
        (dict(quant_method="fp8", weight_block_size=128), "weight_block_size: expected two sizes"),
        (dict(config_groups=["a"]), "config_groups: expected an object, found"),
        (dict(config_groups={"g": ["a"]}), "config_groups.g: expected an object, found"),
        (dict(config_groups={"g": {"weights": 4}}), "config_groups.g.weights: expected an obj"),
        (dict(config_groups={"g": {"targets": "re:.*"}}), "g.targets: expected a list of names"),
        (
            dict(config_groups={"g": {"targets": [r"re:(a)\1"]}}),
            "config_groups.g.targets: the pattern .* cannot be matched within a bound",
        ),
        (dict(config_groups={"g": {}}, sparsity_config="x"), "sparsity_config: expected an obj"),
    ],
)
def test_settings_of_the_wrong_kind(said, sentence):
    tensors = {"norm.weight": np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match="the checkpoint has a bad quantization_config") as e:
        fewbit.read_checkpoint(tensors, config=config(**said))
    assert re.search(sentence, str(e.value)), e.value


def test_patterns_of_configs_do_not_run_away():
    endless = "(a|a)*b"  # re takes years for this name
    tensors = named("a" * 60, GPTQ_PARTS)
    said = config(quant_method="gptq", bits=4, group_size=16, dynamic={f"+:{endless}": {"bits": 8}})
    found = fewbit.read_checkpoint(tensors, config=said)
    assert found["a" * 60 + "/weight"].shape == (32, 16)
    said = grouped("int-quantized", num_bits=8)
    said["quantization_config"]["config_groups"]["group_0"]["targets"] = [f"re:{endless}", "Linear"]
    found = fewbit.read_checkpoint(named("a" * 60, INT8_PARTS), config=said)
    assert found["a" * 60 + "/weight"].shape == (4, 4)


def test_unknown_methods_and_missing_configs(tmp_path):
    tensors, _ = small_checkpoint(np.random.default_rng(1), layers=1)
    with pytest.raises(
        CheckpointError,
        match="is quantized with 'bitsandbytes', which is not read; 'fp8', 'compressed-tensors', "
        "'gptq', 'awq' are",
    ):
        fewbit.read_checkpoint(tensors, config=config(quant_method="bitsandbytes"))
    with pytest.raises(CheckpointError, match="a quantization_config that is no object"):
        fewbit.read_checkpoint(tensors, config={"quantization_config": [4]})
    write_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="looks quantized .*qweight.*no config.json"):
        fewbit.read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(CheckpointError, match="config.json is no JSON"):
        fewbit.read_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 16}))
    assert fewbit.read_checkpoint(tmp_path).method == "gptq"  # as AutoGPTQ wrote it at first
    with pytest.raises(KeyError, match="no 'lm_head/weigt' among its 4 parameters. The nearest"):
        fewbit.read_checkpoint(tmp_path)["lm_head/weigt"]
    with pytest.raises(ValueError, match="act_order is 'columns'; it is 'rows'"):
        fewbit.read_checkpoint(tmp_path, act_order="columns")


def test_folders_that_are_no_checkpoint(tmp_path):
    fewbit.save(tmp_path / "own", {"w": np.zeros(3)})
    with pytest.raises(CheckpointError, match="is a checkpoint of fewbit. fewbit.load"):
        fewbit.read_checkpoint(tmp_path / "own")
    with pytest.raises(CheckpointError, match="has no safetensors file. Give a .safetensors file"):
        fewbit.read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        fewbit.read_checkpoint(tmp_path / "nothing.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="model-1.safetensors is missing, and model.safetens"):
        fewbit.read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="is no index of a sharded checkpoint"):
        fewbit.read_checkpoint(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is no index of a sharded checkpoint"):
        fewbit.read_checkpoint(tmp_path)
    write_file(tmp_path / "model-1.safetensors", {"v": np.zeros(2, np.float32)})
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="tensor 'w' is missing from the file"):
        fewbit.read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "sentence"),
    [
        ([("a",)], TypeError, "entry 0 is .'a',."),
        (["ab"], TypeError, "entry 0 is 'ab'. An example:"),
        ([("(", "b")], ValueError, "'.' is no regular expression"),
        ([(r"(a)\1", "b")], ValueError, "names: the pattern .* cannot be matched within a bound"),
        ([("lm_head.*", r"\1")], ValueError, "does not fit the pattern .* has 0 groups"),
        ([("lm_head.*", "{i}")], ValueError, "it has no .i."),
        ([("lm_head.*", "head", "Q")], ValueError, "axes of 'lm_head.*' are 'Q'. Write 'T'"),
        ([("lm_heat.weight", "head")], ValueError, "nothing in the checkpoint matches 'lm_heat.*"),
        ([(".*weight", "all")], CheckpointError, "has two tensors for 'all'"),
        (
            [(r"model\.layers\.{i}\.norm\.weight", "norm"), (r".*\.0\.norm.*", None)][::-1],
            CheckpointError,
            r"has no 'number \(0,\) beside model.layers.1.norm.weight', which 'norm' stacks",
        ),
    ],
)
def test_names_that_do_not_work(names, error, sentence):
    tensors, _ = small_checkpoint(np.random.default_rng(1))
    with pytest.raises(error, match=sentence):
        fewbit.read_checkpoint(tensors, config=SAID, names=names)


def test_names_do_not_run_away():
    """`re` takes years for the first two, and the third has five wildcards to try."""
    many = "h." + "up." * 30 + "weight"
    tensors = {"a" * 60: np.ones(2, np.float32), many: np.ones(3, np.float32)}
    names = [
        ("(a|a)*b", None),
        ("(a+)+!", None),
        (r"(.*)\.(.*)\.(.*)\.(.*)\.(.*)", r"\1/\2/\5"),
    ]
    found = fewbit.read_checkpoint(tensors, names=names)
    assert set(found) == {"a" * 60, "h." + "up." * 26 + "up/up/weight"}


def test_a_number_that_no_layer_has():
    tensors = {f"h.{'9' * 5000}.w": np.ones(2, np.float32)}
    with pytest.raises(CheckpointError, match="cannot be mapped by names .Exceeds the limit"):
        fewbit.read_checkpoint(tensors, names=[(r"h\.{i}\.w", "w")])


GOLDEN = sorted(pathlib.Path(__file__).parents[1].glob("golden/foreign/*.safetensors"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_files_that_the_tools_themselves_wrote(path):
    """Made by AutoGPTQ 0.7.1, AutoAWQ 0.1.8 and compressed-tensors 0.10.2 from known numbers."""
    file = SafetensorsFile(path)
    said = {"quantization_config": json.loads(file.metadata["quantization_config"])}
    found = fewbit.read_checkpoint(path, config=said)
    wanted = file.read("wanted")
    np.testing.assert_array_equal(
        np.asarray(fewbit.dequantize(found["up/weight"], "float32")), wanted
    )


def test_there_are_such_files():
    stems = {path.stem.split("-")[0] for path in GOLDEN}
    assert stems == {"autogptq", "autoawq", "compressed"}
