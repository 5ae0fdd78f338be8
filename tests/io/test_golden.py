"""Checkpoints of every earlier version, kept in tests/golden: readable for ever, by others too."""

import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from golden import make_nnx_state
from golden.make import MAKERS, numbers
from oracles import arrays, checkpoint

import fewbit
from fewbit.numerics import qtype_name

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if (path / "fewbit.json").exists())


def expected(name):
    return json.loads((GOLDEN / name / "expected.json").read_text())


def test_there_is_one_of_every_kind():
    assert set(FOLDERS) == set(MAKERS)
    for name in FOLDERS:
        size = sum(file.stat().st_size for file in (GOLDEN / name).iterdir())
        assert size < 40_000, (name, size)


@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_read_as_it_was_written(name):
    loaded = fewbit.load(GOLDEN / name)
    found, wanted = numbers(loaded.params), expected(name)["decoded"]
    assert found.keys() == wanted.keys()
    for path in wanted:
        assert found[path] == wanted[path], path
    assert fewbit.verify(GOLDEN / name).ok
    assert loaded.plan.totals.quantized_sites >= 1
    for leaf in loaded.plan.leaves:
        assert leaf.how is not None or "bias" in leaf.path


@pytest.mark.parametrize("name", FOLDERS)
def test_another_program_reads_it_from_the_description(name):
    folder, wanted = GOLDEN / name, expected(name)["decoded"]
    document = checkpoint.manifest(folder)
    found = dict(checkpoint.leaves(document["tree"]))
    assert set(wanted) <= set(found)
    for path in wanted:
        values = checkpoint.decoded(folder, document, found[path])
        np.testing.assert_allclose(values, wanted[path], rtol=1e-6, atol=1e-30, err_msg=path)


@pytest.mark.parametrize(("name", "qtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_codes_are_those_of_the_definition(name, qtype):
    floats = np.array(expected(name)["floats"]["up"]).reshape(16, -1)
    found = np.array(expected(name)["decoded"]["up"]).reshape(16, -1)
    scale, decoded = arrays.symmetric(floats, qtype, (16, 1))
    # The largest number lies half way between two codes, and float32 may round it either way.
    inner = np.abs(floats) < np.abs(floats).max(axis=0)
    np.testing.assert_allclose(decoded[inner], found[inner], rtol=1e-5)
    assert (np.abs(found - floats) <= 0.5001 * scale)[~inner].all() or name == "fp8"


@pytest.mark.parametrize("name", FOLDERS)
def test_saving_it_again_gives_the_same_shards(name, tmp_path):
    """Names and content of shards are the data's alone; a manifest also names its libraries."""
    loaded = fewbit.load(GOLDEN / name)
    fewbit.save(tmp_path / "m", loaded.params, loaded.plan)
    shards = [name for name, _ in loaded.info.shards]
    assert [n for n, _ in fewbit.inspect(tmp_path / "m").shards] == shards
    for shard in shards:
        assert (tmp_path / "m" / shard).read_bytes() == (GOLDEN / name / shard).read_bytes()


def test_structures_of_frameworks():
    linen = fewbit.load(GOLDEN / "linen").params
    assert type(linen).__name__ == "FrozenDict"
    kernel = linen["params"]["up"]["kernel"].array
    assert kernel.data.names == ("in", None) and kernel.scale.names == (None, None)
    nnx = fewbit.load(GOLDEN / "nnx").params
    assert set(nnx["layers"]) == {0, 1}
    assert jax.dtypes.issubdtype(nnx["dropout"]["rngs"]["key"].dtype, jax.dtypes.prng_key)
    static = fewbit.load(GOLDEN / "static").params
    assert isinstance(static, fewbit.QuantizedParams)
    scale = static.act_scales["up:dot_general0"]["lhs_scale"]
    np.testing.assert_allclose(np.asarray(scale.array), 3 / 127.5, rtol=1e-6)


# --- States of NNX models, in which 0.1 held each weight in one Param -----------------------------


def nnx_state(form):
    """What the libraries that wrote it read, without a template."""
    if form == "msgpack":
        return serialization.msgpack_restore((GOLDEN / "nnx_state/state.msgpack").read_bytes())
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(GOLDEN / "nnx_state" / form)


def nnx_model(form):
    """A quantized model with other weights, in a layout that fits the file."""
    rules = make_nnx_state.WITHOUT_NF4 if form == "plain" else make_nnx_state.RULES
    float_model = make_nnx_state.Net(nnx.Rngs(1))
    model = fewbit.quantize_model(float_model, fewbit.PtqProvider(rules), make_nnx_state.x())
    return fewbit.pack(model, layout="bits") if form == "bytes" else model


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("form", ["orbax", "plain", "bytes", "msgpack"])
def test_a_state_of_0_1_fills_a_model(form, packs):
    raw, model = nnx_state(form), nnx_model(form)
    if packs and form != "bytes":
        model = fewbit.pack(model)
    nnx.update(model, fewbit.process_prequantized_params(raw, model))
    wanted = np.array(json.loads((GOLDEN / "nnx_state/expected.json").read_text())[form])
    assert np.abs(model(make_nnx_state.x()) - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert (
        model.value.kernel.array.layout == ("plain" if not packs else "panels") or form == "bytes"
    )


def test_a_state_of_0_1_in_bytes_says_which_model_takes_it():
    raw, model = nnx_state("bytes"), nnx_model("orbax")
    with pytest.raises(ValueError, match=r"as bytes, .*fewbit\.pack\(model, layout='bits'\)"):
        fewbit.process_prequantized_params(raw, model)


def test_the_rules_of_a_state_of_0_1():
    with pytest.warns(UserWarning, match=r"Conflicting quantization rules .* layers/\[\^/\]\+:"):
        found = fewbit.restore_quantization_rules(nnx_state("msgpack"), fewbit.QuantizationRule)
    for path, qtype, tile in (("value", "int8", None), ("head", "nf4", 32)):
        (rule,) = (rule for rule in found if rule.matches(path, "dot_general"))
        assert (qtype_name(rule.weight_qtype), rule.tile_size) == (qtype, tile)
