"""Mutated checkpoints: an error that says so, or exactly what was saved; never anything else."""

import copy
import json
import os
import random
import shutil
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from checkpoints import assert_same, mlp, weight
from helpers import normal

import fewbit
from fewbit import CheckpointError, QuantizationRule
from fewbit.io.checkpoint import _manifest

HOSTILE = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        8,
        2**31,
        2**63,
        -(2**70),
        0.5,
        1e308,
        "",
        "x",
        "0",
        "nan",
    ),
    *("int3", "float8_e3m4", "\ud800", "a" * 10_000, "../../x", [], [[]], {}, {"dict": {}}),
    *({"list": [None]}, [1, 2, 3], {"array": "none"}, "bits", "sign", "bytes", "plain", -2),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small checkpoint with something of everything: (folder, params, plan)."""
    folder = tmp_path_factory.mktemp("saved") / "m"
    shape = {"up": {"kernel": normal(0, 64, 8), "bias": normal(1, 1, 8)}}
    shape["down"] = {"kernel": normal(2, 8, 64)}
    rules = [
        QuantizationRule(module_path="up.*", weight_qtype="int3", tile_size=24),
        QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    ]
    plan = fewbit.plan(mlp, rules, shape, normal(9, 3, 64))
    params = fewbit.quantize_params(shape, plan)
    params["more"] = {
        "nv": weight("nvfp4", (32, 4)),
        "zero": weight("int4", (16, 6), method="minmax"),
        "sign": weight("int1", (8, 3)),
        "box": nn.Partitioned(jnp.ones((2, 2), jnp.bfloat16), names=("x", None)),
        "key": jax.random.key(3),
        "list": [1.5, None, "text", (jnp.arange(3),)],
        "numbers": {0: jnp.zeros((0, 2)), 1: True},
    }
    fewbit.save(folder, params, plan, shard_bytes=600)
    return folder, params, plan


# --- mutations ------------------------------------------------------------------------------------


def flip(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 16])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def resize(data, rng):
    """Cut off, cut out, doubled, lengthened, emptied."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice(
        [data[:a], data[a:], data[:a] + data[b:], data[:b] + data[a:], data + data[a:b], b""]
        + [
            data + b"\0" * (b - a),
            data[:a] + b"\0" * (b - a) + data[b:],
            data[:a] + b" " + data[a:],
        ]
    )


def places(document, found=()):
    """Every (container, key) of a JSON document."""
    keys = document if isinstance(document, dict) else range(len(document))
    for key in keys:
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


def edit(document, rng):
    """Some value of the document replaced, removed, renamed or exchanged."""
    for _ in range(rng.choice([1, 1, 2])):
        spots = list(places(document))
        if not spots:
            return
        # The plan is most of the document: look at the rest as often.
        if rng.random() < 0.6 and isinstance(document.get("plan"), dict):
            spots = list(places({k: v for k, v in document.items() if k != "plan"}))
            spots = [s for s in spots if s[0] is not document]
        container, key = rng.choice(spots)
        action = rng.randrange(5)
        if action <= 1:
            container[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif action == 2:
            other, there = rng.choice(spots)
            container[key] = json.loads(json.dumps(other[there]))
        elif action == 3:
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(["x", "dict", "qvalue", "0", "shape"])] = container.pop(key)
        else:
            container.append(container[key])


def edit_json(data, rng):
    document = json.loads(data)
    edit(document, rng)
    return json.dumps(document).encode()


def edit_header(data, rng):
    """A shard whose header was edited, its length right or wrong."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    kind = rng.randrange(4)
    if kind == 0:  # sizes alone
        length = rng.choice([0, 1, length - 1, length + 1, 2**32, 2**64 - 1, length * 2])
        return length.to_bytes(8, "little") + data[8:]
    edit(header, rng)
    text = json.dumps(header).encode()
    if kind == 1:
        text = text.ljust(length)[: max(length, len(text))]
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def forged(data, rng):
    """An edited manifest with the right checksum: what only someone who means it would make."""
    document = json.loads(data)
    edit(document, rng)
    document["checksum"] = "0" * 32
    text = json.dumps(document)
    total = _manifest.new_checksum()
    total.update(text.encode())
    return text.replace("0" * 32, total.hexdigest(), 1).encode()


def mutant(saved, tmp_path, rng, mutate=None):
    """A copy of the checkpoint with one file changed; None if the change changed nothing."""
    folder = tmp_path / "mutant"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    manifest = rng.random() < 0.5 or mutate is not None
    name = "fewbit.json" if manifest else rng.choice(sorted(os.listdir(saved))[1:])
    if mutate is None:
        mutate = rng.choice([flip, flip, resize, edit_json if manifest else edit_header])
    before = (folder / name).read_bytes()
    after = mutate(before, rng)
    (folder / name).write_bytes(after)
    return folder


def read_everything(folder):
    info = fewbit.inspect(folder)
    str(info), info.to_json()
    loaded = fewbit.load(folder)
    params, plan = loaded.params, loaded.plan
    jax.block_until_ready([x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)])
    return params, plan


def run(saved, tmp_path, count, seed):
    """(errors, equal); anything else fails."""
    folder, wanted, wanted_plan = saved
    rng = random.Random(seed)
    errors = equal = 0
    for number in range(count):
        path = mutant(folder, tmp_path, rng)
        start = time.monotonic()
        try:
            params, plan = read_everything(path)
        except CheckpointError as error:
            errors += 1
            text = str(error)
            assert str(path) in text and len(text) < 1000 and text.isprintable(), number
            checked = None
            try:
                checked = fewbit.verify(path)
            except CheckpointError:
                pass
            assert not checked, number  # what cannot be loaded does not verify either
        else:
            assert_same(params, wanted)
            assert plan == wanted_plan
            equal += 1
        assert time.monotonic() - start < 20, number
    return errors, equal


def test_mutated_files(saved, tmp_path):
    errors, equal = run(saved, tmp_path, 200, seed=1)
    assert errors > 150


@pytest.mark.long
def test_two_thousand_mutated_files(saved, tmp_path):
    errors, equal = run(saved, tmp_path, 2000, seed=2)
    assert errors + equal == 2000 and errors > 1700


def run_forged(saved, tmp_path, count, seed):
    rng = random.Random(seed)
    errors = 0
    for number in range(count):
        path = mutant(saved[0], tmp_path, rng, forged)
        start = time.monotonic()
        try:
            read_everything(path)  # another valid checkpoint, which no checksum can tell
        except CheckpointError as error:
            errors += 1
            assert len(str(error)) < 1000, number
        except Exception as error:
            raise AssertionError(f"mutant {number}: {type(error).__name__}: {error}") from error
        assert time.monotonic() - start < 20, number
    return errors


def test_forged_manifests(saved, tmp_path):
    assert run_forged(saved, tmp_path, 150, seed=3) > 75


@pytest.mark.long
def test_a_thousand_forged_manifests(saved, tmp_path):
    assert run_forged(saved, tmp_path, 1000, seed=4) > 500
