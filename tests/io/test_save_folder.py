"""Saving is all or nothing: full disks, other writers, folders that hold something else."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same, quantized_mlp

import fewbit
from fewbit import CheckpointError
from fewbit.io.checkpoint import _manifest

OLD, NEW = {"w": jnp.arange(5000.0)}, {"w": jnp.zeros(20_000), "b": jnp.ones(3)}


def names(folder):
    return sorted(os.listdir(folder))


def leftovers(folder):
    """Files of ours that the manifest does not name."""
    named = {name for name, _ in fewbit.inspect(folder).shards} | {"fewbit.json"}
    return set(os.listdir(folder)) - named


def is_old(folder):
    found = fewbit.load(folder).params
    assert_same(found, OLD)
    return fewbit.verify(folder).ok and not leftovers(folder)


def test_a_killed_first_save_leaves_no_checkpoint(tmp_path):
    (tmp_path / "m").mkdir()
    fewbit.save(tmp_path / "whole", OLD)
    shard = fewbit.inspect(tmp_path / "whole").shards[0][0]
    os.rename(tmp_path / "whole" / shard, tmp_path / "m" / shard)
    (tmp_path / "m" / ".weights-00002-of-00002.tmp-0123456789ab").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="A save into it was interrupted before anything"):
        fewbit.load(tmp_path / "m")
    fewbit.save(tmp_path / "m", OLD)
    assert is_old(tmp_path / "m")


class Boom(Exception):
    pass


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_every_step_may_be_the_last(tmp_path, monkeypatch, call):
    """An error at each system call in turn: old or new, whole, and the next save cleans up."""
    real, seen = getattr(os, call), []
    for stop in range(40):
        fewbit.save(tmp_path / "m", OLD)
        count = 0

        def broken(*args, stop=stop, **kwargs):
            nonlocal count
            count += 1
            if count > stop:
                raise Boom(call)
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            try:
                fewbit.save(tmp_path / "m", NEW, shard_bytes=50_000)
                finished = True
            except Boom:
                finished = False
        found = fewbit.load(tmp_path / "m").params
        seen.append(len(found))
        assert_same(found, NEW if "b" in found else OLD)
        assert fewbit.verify(tmp_path / "m").ok
        if finished:
            break
    assert finished and not leftovers(tmp_path / "m")
    assert seen[-1] == 2 and (seen[0] == 1 or call == "unlink")


# --- disks and places -----------------------------------------------------------------------------


def test_a_full_disk(tmp_path):
    fewbit.save(tmp_path / "m", OLD)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, old[1]))
        with pytest.raises(CheckpointError) as caught:
            fewbit.save(tmp_path / "m", NEW)
        with pytest.raises(CheckpointError) as caught_new:
            fewbit.save(tmp_path / "n", NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert (
        "m could not be written (File too large). The checkpoint that was there is whole."
        in str(caught.value)
    )
    assert "n could not be written (File too large). Nothing was left behind." in str(
        caught_new.value
    )
    assert is_old(tmp_path / "m") and names(tmp_path) == ["m"]


def test_a_really_full_disk(tmp_path):
    """A file system of its own, where the kernel allows one."""
    code = f"""
        import ctypes, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
            sys.exit(77)
        os.mkdir({str(tmp_path / "disk")!r})
        if libc.mount(b"tmpfs", {str(tmp_path / "disk")!r}.encode(), b"tmpfs", 0, b"size=128k"):
            sys.exit(77)
        import jax.numpy as jnp
        import fewbit
        path = {str(tmp_path / "disk" / "m")!r}
        fewbit.save(path, {{"w": jnp.arange(5000.0)}})
        try:
            fewbit.save(path, {{"w": jnp.zeros(50000)}})
        except fewbit.CheckpointError as error:
            sentence = "(No space left on device). The checkpoint that was there is whole."
            assert sentence in str(error), error
        else:
            raise AssertionError("the disk was not full")
        assert fewbit.verify(path).ok and len(os.listdir(path)) == 2
        assert fewbit.load(path).params["w"][4999] == 4999
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    # Without the right to mount, the limit on file sizes above has to do.
    assert done.returncode in (0, 77), done.stderr


def test_a_read_only_target(tmp_path, monkeypatch):
    """The calls of the disk answer as they do to a user without the right."""
    fewbit.save(tmp_path / "m", OLD)

    def refused(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refused)
        patch.setattr(os, "mkdir", refused)
        with pytest.raises(CheckpointError) as caught:
            fewbit.save(tmp_path / "m", NEW)
        with pytest.raises(CheckpointError, match="n could not be written .Permission denied.. No"):
            fewbit.save(tmp_path / "n", NEW)
    assert (
        "m could not be written (Permission denied). The checkpoint that was there is whole"
        in str(caught.value)
    )
    assert is_old(tmp_path / "m") and names(tmp_path) == ["m"]


def test_a_read_only_file_system(tmp_path):
    """The real thing, where the kernel allows one."""
    fewbit.save(tmp_path / "m", OLD)
    code = f"""
        import ctypes, sys
        libc, path = ctypes.CDLL(None, use_errno=True), {str(tmp_path)!r}.encode()
        if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
            sys.exit(77)
        bind, again, read_only = 4096, 32, 1
        for flags in (bind, bind | again | read_only):
            if libc.mount(path, path, None, flags, None):
                sys.exit(77)
        import jax.numpy as jnp
        import fewbit
        for name in ("m", "n"):
            try:
                fewbit.save(f"{tmp_path}/{{name}}", {{"w": jnp.zeros(3)}})
            except fewbit.CheckpointError as error:
                assert "could not be written (Read-only file system)." in str(error), error
            else:
                raise AssertionError("it could be written")
        assert fewbit.load("{tmp_path}/m").params["w"][4999] == 4999
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode in (0, 77), done.stderr
    assert is_old(tmp_path / "m") and names(tmp_path) == ["m"]


def test_targets_that_are_something_else(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file is a file. A checkpoint is a folder"):
        fewbit.save(tmp_path / "file", OLD)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files .letter.txt. and no fewbit chec"):
        fewbit.save(tmp_path / "folder", OLD)
    assert names(tmp_path / "folder") == ["letter.txt"]
    with pytest.raises(CheckpointError, match="could not be written .No such file or directory."):
        fewbit.save(tmp_path / "none" / "m", OLD)
    (tmp_path / "empty").mkdir()
    fewbit.save(tmp_path / "empty", OLD)
    assert is_old(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    fewbit.save(tmp_path / "link", NEW)
    assert_same(fewbit.load(tmp_path / "empty").params, NEW)


def test_files_of_the_user_s_stay(tmp_path):
    fewbit.save(tmp_path / "m", OLD)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_text("mine")
    fewbit.save(tmp_path / "m", NEW)
    fewbit.save(tmp_path / "m", OLD)
    assert leftovers(tmp_path / "m") == {"tokenizer.json", "model.safetensors"}


def test_two_writers(tmp_path):
    fewbit.save(tmp_path / "m", OLD)
    number = os.open(tmp_path / "m", os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="m is being written by another process. Wait"):
            fewbit.save(tmp_path / "m", NEW)
        assert is_old(tmp_path / "m")  # which can be read meanwhile
    finally:
        os.close(number)
    fewbit.save(tmp_path / "m", NEW)
    assert_same(fewbit.load(tmp_path / "m").params, NEW)


def test_a_damaged_checkpoint_can_be_replaced_and_loses_nothing_before(tmp_path):
    fewbit.save(tmp_path / "m", OLD)
    manifest = tmp_path / "m" / "fewbit.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    shard = next(name for name in names(tmp_path / "m") if name.startswith("weights"))
    with pytest.raises(ValueError, match="cannot be saved"):
        fewbit.save(tmp_path / "m", {"w": np.array([None])})
    assert shard in names(tmp_path / "m")
    fewbit.save(tmp_path / "m", NEW)
    assert_same(fewbit.load(tmp_path / "m").params, NEW)
    assert not leftovers(tmp_path / "m")


# --- reading what is not there, or not ours -------------------------------------------------------


def test_what_is_there_instead(tmp_path):
    readers = (fewbit.load, fewbit.inspect, fewbit.verify)

    def says(path, sentence):
        for read in readers:
            with pytest.raises(CheckpointError, match=sentence):
                read(path)

    says(tmp_path / "none", "none does not exist. fewbit.save.path, params, plan. makes a check")
    (tmp_path / "hf").mkdir()
    says(tmp_path / "hf", "hf is no checkpoint of fewbit: it has no fewbit.json")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"x")
    says(tmp_path / "hf", "fewbit.quantize_checkpoint.src, dst, plan. reads those")
    says(tmp_path / "hf" / "model.safetensors", "is a file.*fewbit.quantize_checkpoint")
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "_METADATA").write_text("{}")
    says(tmp_path / "orbax", "It looks like an Orbax checkpoint")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "fewbit.json").write_text('{"format": "other"}')
    says(tmp_path / "foreign", "expected .format.: .fewbit-checkpoint., found 'other'")
    (tmp_path / "foreign" / "fewbit.json").unlink()
    (tmp_path / "foreign" / "fewbit.json").mkdir()
    says(tmp_path / "foreign", "fewbit.json is no manifest")


def edited(folder, change, checksum=True):
    """The manifest changed as JSON; with its checksum made right again, or not."""
    file = folder / "fewbit.json"
    document = json.loads(file.read_text())
    change(document)
    document["checksum"] = "0" * 32
    text = json.dumps(document)
    if checksum:
        total = _manifest.new_checksum()
        total.update(text.encode())
        text = text.replace("0" * 32, total.hexdigest(), 1)
    file.write_text(text)


def test_a_newer_format(tmp_path):
    fewbit.save(tmp_path / "m", OLD)
    edited(tmp_path / "m", lambda d: d.update(version=2, news="unknown"))
    with pytest.raises(
        CheckpointError, match="has format version 2, but this fewbit reads up to 1"
    ):
        fewbit.load(tmp_path / "m")


def test_a_manifest_that_was_edited(tmp_path):
    params, plan = quantized_mlp()
    fewbit.save(tmp_path / "m", params, plan)
    edited(tmp_path / "m", lambda d: d["tensors"]["up/bias"].update(shape=[128]), checksum=False)
    with pytest.raises(CheckpointError, match="was changed after it was written .checksum.: expec"):
        fewbit.load(tmp_path / "m")
    edited(tmp_path / "m", lambda d: None)
    with pytest.raises(CheckpointError) as caught:
        fewbit.load(tmp_path / "m").params  # noqa: B018
    assert (
        "tensor 'up/bias' is not what the manifest says: expected F32 (128,), found F32 (1, 128)"
        in str(caught.value)
    )


def test_a_flipped_bit_names_the_tensor_and_both_checksums(tmp_path):
    params, plan = quantized_mlp()
    info = fewbit.save(tmp_path / "m", params, plan)
    good = json.loads((tmp_path / "m" / "fewbit.json").read_text())["tensors"]
    file = tmp_path / "m" / info.shards[0][0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last byte of up/kernel.scale
    data[-2] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        fewbit.load(tmp_path / "m", lazy=False)
    wanted = good["up/kernel.scale"]["checksum"]
    assert "tensor 'up/kernel.scale' was changed after it was saved (checksum): expected" in str(
        caught.value
    )
    assert caught.value.tensor == "up/kernel.scale" and caught.value.expected == wanted
    assert wanted in str(caught.value) and str(caught.value.found) in str(caught.value)
    checked = fewbit.verify(tmp_path / "m")
    assert not checked.ok and not checked and len(checked.differences) == 1
    assert checked.differences[0].tensor == "up/kernel.scale"
    assert (checked.differences[0].expected, checked.differences[0].found) == (
        wanted,
        caught.value.found,
    )
    assert "5 tensors" in str(checked) and "1 not as saved:" in str(checked)
    loaded = fewbit.load(tmp_path / "m")  # the others can still be had
    assert_same(loaded.leaf("up/bias"), params["up"]["bias"])


def test_a_missing_and_a_truncated_shard(tmp_path):
    params, plan = quantized_mlp()
    info = fewbit.save(tmp_path / "m", params, plan, shard_bytes=5000)
    first, second = (tmp_path / "m" / name for name, _ in info.shards[:2])
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(
        CheckpointError, match="tensor '.*' is cut off; the file is shorter than it"
    ):
        fewbit.load(tmp_path / "m")
    first.unlink()
    with pytest.raises(CheckpointError, match="safetensors cannot be opened .No such file"):
        fewbit.load(tmp_path / "m")
    found = {one.tensor: one.found for one in fewbit.verify(tmp_path / "m").differences}
    assert "no whole shard" in found["down/kernel.qvalue"] and len(found) >= 2


def test_shards_cannot_lead_out_of_the_folder(tmp_path):
    fewbit.save(tmp_path / "m", OLD)
    edited(tmp_path / "m", lambda d: d["shards"][0].update(file="../m/../secret.safetensors"))
    with pytest.raises(CheckpointError, match="expected weights-<number>-of-<count>-<hash>"):
        fewbit.load(tmp_path / "m")


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder .*nowhere; make it first"):
        fewbit.save(tmp_path / "nowhere" / "model", {"w": np.ones(3)})
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("value", [b"abc", {1, 2}, 1j])
def test_data_that_would_be_lost_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match="note: .* cannot be saved"):
        fewbit.save(tmp_path / "model", {"w": np.ones(3), "note": value})
    assert not (tmp_path / "model").exists()
