"""Killed (SIGKILL) at random moments: old or new, whole; a run that goes on ends byte-identical."""

import collections
import hashlib
import json
import os
import pathlib
import random
import shutil
import time

import numpy as np
import pytest
from killed import LAYERS, adapted, calibrate, content_matches, stream, tree

import fewbit
from fewbit.io._safetensors import SafetensorsFile, SafetensorsWriter


def leftovers(folder):
    """Files of ours that the manifest does not name."""
    named = {name for name, _ in fewbit.inspect(folder).shards} | {"fewbit.json"}
    return set(os.listdir(folder)) - named


def contents(folder):
    files = sorted(pathlib.Path(folder).rglob("*"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}


def length_of(work):
    """How long something takes here and now, so that kills hit all of it."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def killed_saves(victims, folder, kills, seed):
    """Old or new, whole; the next save leaves nothing behind."""
    dice, seen, known = random.Random(seed), collections.Counter(), {0}
    fewbit.save(folder, tree(0))
    most = 2 * length_of(lambda: fewbit.save(folder, tree(0)))
    for kill in range(kills):
        victims.kill("save", folder, 2 * kill, dice.uniform(0.0, most))
        found = fewbit.load(folder)
        assert content_matches(found.params), kill
        assert found.params["number"] in known | {2 * kill, 2 * kill + 1}, kill
        assert fewbit.verify(folder).ok
        known = {found.params["number"]}
        seen["killed"] += 1
        seen["half way"] += bool(leftovers(folder))
        if kill % 3 == 0:
            fewbit.save(folder, tree(2 * kill + 2))
            assert not leftovers(folder) and set(os.listdir(folder.parent)) <= {"it", "it.aside"}
            assert fewbit.load(folder).params["number"] == 2 * kill + 2
            known = {2 * kill + 2}
            seen["saved again"] += 1
    return seen


def killed_streams(victims, folder, kills, seed):
    """What is there is whole; what goes on, in the next child or here, ends byte-identical."""
    rng, entries = np.random.default_rng(0), [(n, "F32", s.shape) for n, s in LAYERS.items()]
    with SafetensorsWriter(folder / "a.safetensors", entries) as writer:
        for name, _, shape in entries:
            writer.write(name, rng.normal(size=shape).astype(np.float32))
    stream(folder, "peace")
    most = 2 * length_of(lambda: stream(folder, "again"))
    out, partial, wanted = folder / "out", folder / "out.partial", contents(folder / "peace")
    dice, seen = random.Random(seed), collections.Counter()
    for kill in range(kills):
        victims.kill("stream", folder, kill, dice.uniform(0.0, most))
        seen["killed"] += 1
        seen["half way"] += partial.exists()
        if out.exists():  # it is not there before it is whole
            assert fewbit.verify(out).ok
            named = {name for name, _ in fewbit.inspect(out).shards} | {"fewbit.json"}
            assert {k: v for k, v in contents(out).items() if k in named} == wanted
            seen["whole"] += 1
        if kill % 3 != 1:  # else the next child goes on
            stream(folder, "out")
            assert contents(out) == wanted and not partial.exists(), kill
            fewbit.load(out, lazy=False)
            seen["went on"] += 1
            if kill % 2:  # else the next run finds an old checkpoint
                shutil.rmtree(out)
    return seen


def killed_calibrations(victims, path, kills, seed):
    """No file, the old or the new one, never a part; a restart gives the same bytes."""
    peace = {}
    for batches in (3, 4):
        calibrate(f"{path}.peace", batches)
        peace[pathlib.Path(f"{path}.peace").read_bytes()] = batches
    dice, seen = random.Random(seed), collections.Counter()
    for kill in range(kills):
        victims.kill("calibrate", path, kill, dice.uniform(0.0, 0.5))
        seen["killed"] += 1
        if path.exists():
            assert peace[path.read_bytes()] == fewbit.Statistics.load(path).batches
            seen["whole"] += 1
        seen["half way"] += any(".tmp" in name for name in os.listdir(path.parent))
        if kill % 3 == 0:
            calibrate(path, 3)
            assert peace[path.read_bytes()] == 3
            seen["restarted"] += 1
            path.unlink()
    return seen


def killed_adapters(victims, folder, kills, seed):
    """One of the two that were being saved or the one before, whole and with its own strength."""
    dice, seen = random.Random(seed), collections.Counter()
    known = {0: adapted(0)}
    fewbit.save_adapters(folder, *known[0])
    for kill in range(kills):
        first = 2 * kill
        known |= {number: adapted(number) for number in (first, first + 1)}
        victims.kill("adapters", folder, first, dice.uniform(0.0, 0.06))
        seen["killed"] += 1
        metadata = SafetensorsFile(folder / "adapter_model.safetensors").metadata
        number = int(json.loads(metadata["fewbit.adapter_config"])["lora_alpha"]) - 1
        params, plan = known[number]
        found = fewbit.lora.adapters(fewbit.load_adapters(folder, params, plan))
        wanted = fewbit.lora.adapters(params)
        assert all((np.asarray(found[name]) == wanted[name]).all() for name in wanted), kill
        config = folder / "adapter_config.json"
        if config.exists():
            assert json.loads(config.read_text())["lora_alpha"] == number + 1
        else:
            seen["config inside"] += 1
        seen["half way"] += len(os.listdir(folder)) > 2
        if kill % 3 == 0:
            fewbit.save_adapters(folder, *known[first])
            assert sorted(os.listdir(folder)) == [config.name, "adapter_model.safetensors"]
            seen["saved again"] += 1
        known = {number: known[number], first: known[first]}
    return seen


JOBS = {
    "save_adapters": killed_adapters,
    "save": killed_saves,
    "quantize_checkpoint": killed_streams,
    "calibrate": killed_calibrations,
}


@pytest.mark.parametrize("job", JOBS)
def test_kills_at_random_moments(victims, tmp_path, job):
    place = tmp_path if job == "quantize_checkpoint" else tmp_path / "it"
    kills = 3 if job == "save_adapters" else 6
    assert JOBS[job](victims, place, kills, seed=1)["killed"] == kills


@pytest.mark.long
def test_fifty_kills_of_a_save_of_adapters(victims, tmp_path):
    seen = killed_adapters(victims, tmp_path, 50, seed=3)
    print(", ".join(f"{n} {what}" for what, n in seen.items()))
    assert seen["killed"] == 50 and seen["half way"] > 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "kills"), [("save", 100), ("quantize_checkpoint", 100), ("calibrate", 60)]
)
def test_a_hundred_kills(victims, tmp_path, job, kills):
    """The bar: old or new, whole, and resumes byte-identical, every time."""
    seen = JOBS[job](
        victims, tmp_path if job == "quantize_checkpoint" else tmp_path / "it", kills, 2
    )
    print(f"{job}: " + ", ".join(f"{n} {what}" for what, n in seen.items()))
    assert seen["killed"] == kills
    assert job == "calibrate" or seen["half way"] > 10  # some did hit a file half written
