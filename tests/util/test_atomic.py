"""Files and folders made whole: exchanged in one step, tidied after the dead, never the living."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from fewbit._util import _atomic
from fewbit._util._atomic import beside, move_into_place, tidy, write_atomically


def names(folder):
    return sorted(os.listdir(folder))


def make(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


# The file alone: importing all of fewbit takes most of such a test.
ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("atomic", {_atomic.__file__!r})
atomic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic)
"""


def in_a_process(code, *args):
    """A process that says a line and waits to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE + code, *map(str, args)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"now\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


WRITING = """
import sys, time

def stop(*args):
    print("now", flush=True)
    time.sleep(60)

if sys.argv[1] == "file":
    atomic.write_atomically(sys.argv[2], stop)
else:
    with atomic.beside(sys.argv[2]) as place:
        (place / "half").write_text("half")
        stop()
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_a_dead_process_left_goes_with_the_next_write(what, tmp_path):
    write_atomically(tmp_path / "a", lambda file: file.write(b"old"))
    process = in_a_process(WRITING, what, tmp_path / "a")
    try:
        assert len(names(tmp_path)) == 2
        write_atomically(tmp_path / "b", lambda file: file.write(b"new"))
        assert len(names(tmp_path)) == 3  # it lives: its half is left alone
    finally:
        kill(process)
    with beside(tmp_path / "c"):
        assert len(names(tmp_path)) == 3  # its own place and the two files
    assert names(tmp_path) == ["a", "b"] and (tmp_path / "a").read_bytes() == b"old"


def test_a_thread_of_the_same_process_counts_as_alive(tmp_path):
    with beside(tmp_path / "a") as place:
        thread = threading.Thread(target=tidy, args=(tmp_path,))
        thread.start()
        thread.join()
        assert place.is_dir()
    assert names(tmp_path) == []


def test_a_name_that_is_not_ours_is_left_alone(tmp_path):
    for name in ("a.fewbit.tmp", ".a.tmp", ".fewbit"):
        (tmp_path / name).write_text("mine")
    os.mkfifo(tmp_path / ".pipe.fewbit.tmp")  # opening it to read must not wait for a writer
    tidy(tmp_path)
    assert names(tmp_path) == [".a.tmp", ".fewbit", "a.fewbit.tmp"]


def test_a_folder_is_exchanged_in_one_step(tmp_path, monkeypatch):
    new, old = make(tmp_path / "new", x="new"), make(tmp_path / "a", x="old", y="old")
    monkeypatch.setattr(_atomic, "_moved_in_steps", None)  # it would be two
    move_into_place(new, old)
    assert names(tmp_path) == ["a"] and names(old) == ["x"] and (old / "x").read_text() == "new"


def test_all_of_it_is_on_the_disk_before_it_moves(tmp_path, monkeypatch):
    new = make(tmp_path / "new", x="1")
    make(new / "below", y="2")
    make(tmp_path / "a", x="old")
    done = []
    sync, exchange = os.fsync, _atomic.exchanged
    monkeypatch.setattr(os, "fsync", lambda n: done.append(os.fstat(n).st_ino) or sync(n))

    def exchanged(one, other):
        done.append("exchange")
        return exchange(one, other)

    monkeypatch.setattr(_atomic, "exchanged", exchanged)
    places = [new / "x", new / "below" / "y", new / "below", new]
    wanted = {os.stat(place).st_ino for place in places}
    move_into_place(new, tmp_path / "a")
    moment = done.index("exchange")
    assert wanted == set(done[:moment]) and os.stat(tmp_path).st_ino in done[moment:]


def test_a_link_stays_one(tmp_path):
    old = make(tmp_path / "a", x="old")
    (tmp_path / "link").symlink_to("a")
    with beside(tmp_path / "link") as place:
        move_into_place(make(place / "new", x="new"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (old / "x").read_text() == "new"


def test_a_place_that_cannot_be_exchanged_is_an_error(tmp_path, monkeypatch):
    def busy(*args):
        _atomic.ctypes.set_errno(errno.EBUSY)
        return -1

    monkeypatch.setattr(_atomic, "_renameat2", lambda: busy)
    with pytest.raises(OSError, match="busy"):
        move_into_place(make(tmp_path / "new"), make(tmp_path / "a"))
    assert names(tmp_path) == ["a", "new"]


# --- disks that cannot exchange -------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["no function", "not on this disk"])
def test_without_an_exchange_the_old_one_steps_aside(tmp_path, monkeypatch, reason):
    def unable(*args):
        _atomic.ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(_atomic, "_renameat2", lambda: None if reason == "no function" else unable)
    new, old = make(tmp_path / "new", x="new"), make(tmp_path / "a", x="old")
    move_into_place(new, old)
    assert names(tmp_path) == ["a"] and (old / "x").read_text() == "new"


STEPPING = """
import os, sys, time

rename, count = os.rename, 0

def slow(one, other):
    global count
    count += 1
    if count == int(sys.argv[2]):
        print("now", flush=True)
        time.sleep(60)
    rename(one, other)

os.rename = slow
atomic._renameat2 = lambda: None
with atomic.beside(sys.argv[1]) as place:
    (place / "new").mkdir()
    (place / "new" / "x").write_text("new")
    atomic.move_into_place(place / "new", sys.argv[1])
"""


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_between_the_steps_is_repaired(step, tmp_path):
    old = make(tmp_path / "a", x="old")
    process = in_a_process(STEPPING, old, step)
    try:
        assert old.exists() == (step == 1)
        tidy(tmp_path)  # the other one lives, and may still finish
        assert old.exists() == (step == 1)
    finally:
        kill(process)
    tidy(tmp_path)
    assert names(tmp_path) == ["a"] and (old / "x").read_text() == "old"


def test_a_failing_second_step_undoes_the_first(tmp_path, monkeypatch):
    rename, made = os.rename, []

    def failing(one, other):
        made.append(one)
        if len(made) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(one, other)

    monkeypatch.setattr(os, "rename", failing)
    monkeypatch.setattr(_atomic, "_renameat2", lambda: None)
    new, old = make(tmp_path / "new", x="new"), make(tmp_path / "a", x="old")
    with pytest.raises(OSError, match="No space left"):
        move_into_place(new, old)
    assert names(tmp_path) == ["a", "new"] and (old / "x").read_text() == "old"


def test_a_disk_without_locks_is_written_and_never_tidied(tmp_path, monkeypatch):
    def none(number, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_atomic.fcntl, "flock", none)
    (tmp_path / ".a.0123abcd.fewbit.tmp").mkdir()
    write_atomically(tmp_path / "a", lambda file: file.write(b"new"))
    assert names(tmp_path) == [".a.0123abcd.fewbit.tmp", "a"]
