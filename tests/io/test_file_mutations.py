"""Mutated files of every kind that is read: an error that is meant for people, or a result.

Where a file has checksums the result is what was saved (`test_save_mutations.py` has the
checkpoints of ours); in the formats of others a changed number is just another number.
"""

import json
import os
import random
import shutil
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from oracles import foreign
from test_quantize_checkpoint import NAMES as STREAM_NAMES
from test_quantize_checkpoint import contents, interrupted, plan_of, source
from test_save_mutations import edit, edit_header, flip, resize

import fewbit
from fewbit import CheckpointError
from fewbit.io._safetensors import SafetensorsWriter, dtype_name


def write_tensors(path, arrays):
    entries = [(n, dtype_name(np.asarray(a).dtype), np.shape(a)) for n, a in arrays.items()]
    with SafetensorsWriter(path, entries) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


# --- kinds of files: what writes them, what reads them --------------------------------------------


def quantized(method, **settings):
    """A small checkpoint of another tool, with its config.json."""

    def write(folder):
        rng = np.random.default_rng(0)
        codes, zeros = rng.integers(0, 16, (32, 16)), rng.integers(1, 16, (2, 16))
        scales = rng.uniform(0.01, 0.1, (2, 16)).astype(np.float16)
        groups = np.arange(32) // 16
        if method == "gptq":
            parts = foreign.gptq(codes, zeros, scales, groups, 4)
        elif method == "awq":
            parts = {
                "qweight": rng.integers(0, 2**31, (32, 2)).astype(np.int32),
                "qzeros": rng.integers(0, 2**31, (2, 2)).astype(np.int32),
                "scales": scales,
            }
        elif method == "fp8":
            weight = jnp.asarray(rng.normal(size=(32, 16)), "float8_e4m3fn")
            parts = {"weight": np.asarray(weight), "weight_scale_inv": np.ones((2, 1), np.float32)}
        else:
            parts = {
                "weight_packed": rng.integers(0, 2**31, (16, 4)).astype(np.int32),
                "weight_scale": scales.T.copy(),
                "weight_shape": np.array([16, 32]),
                "weight_zero_point": np.zeros((16, 2), np.int8),
            }
        tensors = {f"h.0.up.{part}": array for part, array in parts.items()}
        tensors["h.0.norm.weight"] = np.ones(4, np.float32)
        write_tensors(folder / "model.safetensors", tensors)
        config = {"quantization_config": {"quant_method": method, **settings}}
        (folder / "config.json").write_text(json.dumps(config))

    return write


def read_foreign(folder):
    found = fewbit.read_checkpoint(folder)
    str(found), found.format
    for path in found:
        found[path]


def sharded(folder):
    for number in range(2):
        write_tensors(
            folder / f"model-{number}.safetensors", {f"w{number}": np.ones((4, 4), np.float32)}
        )
    places = {f"w{number}": f"model-{number}.safetensors" for number in range(2)}
    text = json.dumps({"metadata": {"total_size": 128}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def product(params, x):
    return jnp.tanh(x @ params["w0"]) @ params["w1"]


BASE = {name: jnp.ones((4, 4)) for name in ("w0", "w1")}
X = jnp.ones((1, 4))
LORA = fewbit.plan(product, fewbit.LoraProvider(rank=2, alpha=4.0), BASE, X)
TRAINED = fewbit.lora.init(LORA, BASE, jax.random.key(0))
RULES = [
    fewbit.QuantizationRule(module_path="w0", weight_qtype="int4", tile_size=2),
    fewbit.QtRule(module_path=".*(w1|w2)", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"),
    fewbit.LoraRule(rank=2, alpha=4.0),
]
PLAN = fewbit.plan(product, RULES[:1] + [fewbit.QuantizationRule(weight_qtype="int8")], BASE, X)


def read_adapters(folder):
    found = fewbit.lora.adapters(fewbit.load_adapters(folder, BASE, LORA))
    assert {name: array.shape for name, array in found.items()} == {
        name: array.shape for name, array in fewbit.lora.adapters(TRAINED).items()
    }


STATIC = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
STATS = fewbit.calibrate(product, [STATIC], BASE, [normal(0, 3, 4)], progress=False)


def read_statistics(folder):
    found = fewbit.Statistics.load(folder / "stats.npz")
    jax.tree.map(np.testing.assert_array_equal, found.tree, STATS.tree)
    assert found.batches == STATS.batches


def comparison():
    small = fewbit.quantize_model(product, fewbit.PtqProvider(PLAN.rules))
    params = fewbit.quantize_params(BASE, PLAN)
    return fewbit.debug.compare(product, small, (X,), params=BASE, qparams=params)


def text_of(name, text):
    return lambda folder: (folder / name).write_text(text(), encoding="utf-8")


KINDS = {
    "gptq": (
        quantized("gptq", bits=4, group_size=16, dynamic={"+:h.*": {"bits": 4}}),
        read_foreign,
    ),
    "awq": (quantized("awq", bits=4, group_size=16), read_foreign),
    "fp8": (quantized("fp8", weight_block_size=[16, 16], fmt="e4m3"), read_foreign),
    "compressed": (
        quantized(
            "compressed-tensors",
            format="pack-quantized",
            config_groups={
                "group_0": {
                    "targets": ["re:.*up", "Linear"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 16},
                }
            },
        ),
        read_foreign,
    ),
    "shards": (
        sharded,
        lambda folder: fewbit.quantize_checkpoint(folder, folder / "out", PLAN, progress=False),
    ),
    "adapters": (lambda folder: fewbit.save_adapters(folder, TRAINED, LORA), read_adapters),
    "statistics": (lambda folder: STATS.save(folder / "stats.npz"), read_statistics),
    "rules.yaml": (
        text_of("rules.yaml", lambda: fewbit.rules_to_yaml(RULES)),
        lambda folder: fewbit.rules_from_yaml(folder / "rules.yaml"),
    ),
    "rules.json": (
        text_of("rules.json", lambda: fewbit.rules_to_json(RULES)),
        lambda folder: fewbit.rules_from_json(folder / "rules.json"),
    ),
    "plan": (
        text_of("plan.json", PLAN.to_json),
        lambda folder: str(fewbit.Plan.from_json((folder / "plan.json").read_bytes())),
    ),
    "comparison": (
        text_of("comparison.json", lambda: comparison().to_json()),
        lambda folder: str(
            fewbit.debug.Comparison.from_json((folder / "comparison.json").read_bytes())
        ),
    ),
}
FILES_OF_CHECKPOINTS = ("gptq", "awq", "fp8", "compressed", "shards", "adapters")


def mutated(data, name, dice):
    if not data:
        return b"x"
    kinds = [flip, flip, resize]
    if name.endswith(".json"):
        kinds += [_edit_json] * 4
    elif name.endswith(".safetensors"):
        kinds += [edit_header] * 3
    return dice.choice(kinds)(data, dice)


def _edit_json(data, dice):
    document = json.loads(data)
    edit(document, dice)
    return json.dumps(document).encode()


@pytest.fixture
def alarm():
    """Not a measure of speed: a reader that never ends fails its test instead of all of them."""
    signal.alarm(3600)
    yield
    signal.alarm(0)


def run(kind, tmp_path, count, seed):
    write, read = KINDS[kind]
    allowed = CheckpointError if kind in FILES_OF_CHECKPOINTS else (ValueError, TypeError)
    whole, folder, dice = tmp_path / "whole", tmp_path / "mutant", random.Random(seed)
    whole.mkdir()
    write(whole)
    shutil.copytree(whole, folder)
    read(folder)  # unharmed
    errors = 0
    for number in range(count):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        name = dice.choice(sorted(os.listdir(folder)))
        (folder / name).write_bytes(mutated((folder / name).read_bytes(), name, dice))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                read(folder)
        except allowed as error:
            errors += 1
            assert not isinstance(error, UnicodeError), (number, name)
            if kind in FILES_OF_CHECKPOINTS:
                assert str(folder) in str(error) and len(str(error)) < 2000, (number, str(error))
        except Exception as error:
            shutil.copy(folder / name, tmp_path / "culprit")
            raise AssertionError(f"mutant {number}, {name}: {error!r}") from error
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(alarm, tmp_path, kind):
    assert run(kind, tmp_path, 40, seed=1) > 4


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_mutated_files(alarm, tmp_path, kind):
    errors = run(kind, tmp_path, 2000, seed=2)
    print(f"{kind}: {errors} errors")
    assert errors > 200


def partial_folders(tmp_path, monkeypatch, count, seed):
    """What a stopped run left, changed: the next one ends with the right bytes, or says why not."""
    path, plan, dice = source(tmp_path), plan_of(), random.Random(seed)
    fewbit.quantize_checkpoint(path, tmp_path / "wanted", plan, STREAM_NAMES, shard_size=2000)
    wanted = contents(tmp_path / "wanted")
    interrupted(tmp_path, monkeypatch, path, plan, after=3, shard_size=2000)
    shutil.copytree(tmp_path / "out.partial", tmp_path / "left")
    errors = 0
    for number in range(count):
        for name in ("out", "out.partial"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        shutil.copytree(tmp_path / "left", tmp_path / "out.partial")
        file = dice.choice(sorted((tmp_path / "out.partial").iterdir()))
        file.write_bytes(mutated(file.read_bytes(), file.name, dice))
        options = dict(shard_size=2000, progress=False)
        try:
            fewbit.quantize_checkpoint(path, tmp_path / "out", plan, STREAM_NAMES, **options)
        except CheckpointError as error:  # the journal is of other inputs now
            assert "resume=False" in str(error), number
            assert not (tmp_path / "out").exists()
            options["resume"] = False
            fewbit.quantize_checkpoint(path, tmp_path / "out", plan, STREAM_NAMES, **options)
            errors += 1
        assert contents(tmp_path / "out") == wanted, (number, file.name)
        assert not (tmp_path / "out.partial").exists()
    return errors


def test_mutated_partial_folders(alarm, tmp_path, monkeypatch):
    partial_folders(tmp_path, monkeypatch, 15, seed=1)


@pytest.mark.long
def test_two_thousand_mutated_partial_folders(alarm, tmp_path, monkeypatch):
    partial_folders(tmp_path, monkeypatch, 2000, seed=2)
