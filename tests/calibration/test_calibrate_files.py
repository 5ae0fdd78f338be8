"""Statistics in files: whole or not at all, read in another process, damaged ones named."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zipfile

import jax
import numpy as np
import pytest
from helpers import normal, says
from test_calibrate_statistics import BATCHES, W, collect, product
from test_static_scales import STATIC

import fewbit
from fewbit import Statistics
from fewbit.calibration import _statistics

RULE = STATIC.replace(act_calibration_method="percentile,99")
STATS = collect(RULE, observers=("range", "channels", "hessian"))


@pytest.fixture
def path(tmp_path):
    STATS.save(tmp_path / "stats.npz")
    return tmp_path / "stats.npz"


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.tree, b.tree)
    return (a.kind, a.model, a.batches) == (b.kind, b.model, b.batches)


def test_what_is_saved_is_loaded(path):
    again = Statistics.load(path)
    assert (
        same(again, STATS)
        and repr(again) == repr(STATS) == "Statistics(function, 1 operand, 3 batches)"
    )
    assert str(again) == str(STATS)
    assert again.merge(STATS).batches == 6
    made = fewbit.plan(product, [RULE], {"w": W}, BATCHES[0])
    a, b = (fewbit.quantize_params({"w": W}, made, s) for s in (again, STATS))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    with np.load(path, allow_pickle=False) as arrays:
        assert "arrays/0" in arrays.files or "arrays/0.npy" in arrays.files


def test_the_same_statistics_are_the_same_bytes(path, tmp_path):
    Statistics.load(path).save(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again.npz", "stats.npz"]


def test_another_process_reads_them(path):
    code = f"""
import fewbit, jax.numpy as jnp
stats = fewbit.Statistics.load({str(path)!r})
plan = fewbit.plan(lambda p, x: x @ p['w'], [{RULE!r}], {{'w': jnp.ones((6, 5))}}, jnp.ones((4, 6)))
q = fewbit.quantize_params({{'w': jnp.ones((6, 5))}}, plan, stats)
print(repr(stats), float(q.act_scales['w:dot_general0']['lhs_scale'].array[0, 0]))
""".replace("QuantizationRule(", "fewbit.QuantizationRule(")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    text, _, number = run.stdout.strip().rpartition(" ")
    assert text == repr(STATS)
    made = fewbit.plan(product, [RULE], {"w": W}, BATCHES[0])
    scale = fewbit.quantize_params({"w": W}, made, STATS).act_scales["w:dot_general0"]["lhs_scale"]
    assert float(number) == pytest.approx(float(scale.array[0, 0]))


@pytest.mark.parametrize(
    "moment", [1, *(pytest.param(m, marks=pytest.mark.long) for m in (0, 2, 3, 4, 5))]
)
def test_a_killed_save_leaves_the_old_file_whole(path, moment):
    code = f"""
import sys, fewbit
stats = fewbit.Statistics.load({str(path)!r})
print('ready', flush=True)
while True:
    stats = stats.merge(stats) if stats.batches < 1000 else stats
    stats.save({str(path)!r})
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n"
    time.sleep(0.05 + 0.13 * moment)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    found = Statistics.load(path)
    assert found.batches % 3 == 0 and list(found) == list(STATS)


def test_a_save_that_fails_leaves_the_old_file_whole(path, monkeypatch):
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        STATS.merge(STATS).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(path.parent) == ["stats.npz"]
    with pytest.raises(FileNotFoundError):
        STATS.save(path.parent / "missing" / "stats.npz")


def rewrite(path, change):
    """The same archive with its manifest, or an array, changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def edited(**fields):
    def change(members):
        manifest = json.loads(members["manifest.json"])
        members["manifest.json"] = json.dumps({**manifest, **fields}).encode()

    return change


def test_foreign_newer_and_changed_files(path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"hello")
    with says(ValueError, "other is no file of fewbit statistics: it is no zip archive", "save"):
        Statistics.load(other)
    np.savez(tmp_path / "plain.npz", a=np.ones(3))
    with says(ValueError, "it has no manifest.json"):
        Statistics.load(tmp_path / "plain.npz")
    with pytest.raises(FileNotFoundError):
        Statistics.load(tmp_path / "missing")
    rewrite(path, edited(format="something else"))
    with says(ValueError, "its format is 'something else'"):
        Statistics.load(path)
    rewrite(path, edited(format="fewbit statistics", version=99))
    with says(ValueError, "is in format 99 of fewbit statistics", "reads up to 1", "newer fewbit"):
        Statistics.load(path)
    rewrite(path, edited(version=1, operands=[{"name": "x"}]))
    with says(ValueError, "its manifest is not complete"):
        Statistics.load(path)
    rewrite(path, lambda members: members.update({"manifest.json": b"{"}))
    with says(ValueError, "is damaged: manifest.json"):
        Statistics.load(path)


def test_a_flipped_bit_is_named(path):
    def flip(members):
        data = bytearray(members["arrays/1.npy"])
        data[-1] ^= 1
        members["arrays/1.npy"] = bytes(data)

    rewrite(path, flip)
    with says(ValueError, "is damaged: the checksum of w/dot_general0_lhs ", ", expected "):
        Statistics.load(path)


def test_a_pickle_inside_is_refused(path):
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    def put(members):
        members["arrays/0.npy"] = pickle.dumps(Evil())

    rewrite(path, put)
    with says(ValueError, "checksum"):
        Statistics.load(path)
    stream = _statistics.io.BytesIO()
    np.lib.format.write_array(stream, np.array([Evil()], dtype=object), allow_pickle=True)

    def put_object(members):
        data = stream.getvalue()
        manifest = json.loads(members["manifest.json"])
        place = manifest["operands"][0]["count"]
        members[place["array"]] = data
        place["sha256"] = _statistics.hashlib.sha256(data).hexdigest()
        members["manifest.json"] = json.dumps(manifest).encode()

    STATS.save(path)
    rewrite(path, put_object)
    with says(ValueError, "w/dot_general0_lhs count is no plain array", "allow_pickle"):
        Statistics.load(path)


def test_mutated_files_are_clear_errors(path):
    """Bytes changed and files cut at random: a ValueError, or the same statistics."""
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    loaded = 0
    for i in range(150):
        data = bytearray(whole)
        if i % 3 == 0:
            data = data[: random.integers(0, len(data))]
        else:
            for _ in range(random.integers(1, 4)):
                data[random.integers(0, len(data))] ^= 1 << random.integers(0, 8)
        path.write_bytes(bytes(data))
        try:
            found = Statistics.load(path)
        except ValueError as error:
            assert str(path) in str(error), error
        else:
            loaded += same(found, STATS)
    assert loaded < 75


def test_a_target_that_cannot_be_written(tmp_path):
    with says(OSError, f"The statistics cannot be written to {tmp_path}: Is a directory. What was"):
        collect(STATIC).save(tmp_path)
    with says(OSError, "No such file or directory"):
        collect(STATIC).save(tmp_path / "nowhere" / "stats.npz")


def test_statistics_of_another_model(path):
    stats = Statistics.load(path)
    params = {"w": normal(0, 6, 7)}
    made = fewbit.plan(product, [RULE], params, BATCHES[0])
    with says(ValueError, "These are statistics of another model", "Calibrate the model"):
        fewbit.quantize_params(params, made, stats)
    with says(ValueError, "These are statistics of another model"):
        stats.merge(collect(RULE, params=params))
    with says(ValueError, "was observed by channels, hessian, histogram, range here and by range"):
        stats.merge(collect(STATIC))
    with says(ValueError, "for act_calibration_method='absmax' here and 'rms,7' there"):
        collect(STATIC).merge(collect(STATIC.replace(act_calibration_method="rms,7")))
    wide = [normal(i, 2, 3, 6) for i in range(2)]
    a, b = (collect(STATIC.replace(act_batch_axes=axes), wide) for axes in ((0,), (0, 1)))
    with says(
        ValueError, "Statistics of w/dot_general0_lhs have different forms", "act_batch_axes"
    ):
        a.merge(b)
    with says(TypeError, "merge takes Statistics", "dict"):
        stats.merge(stats.tree)
