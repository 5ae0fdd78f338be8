"""The progress bar: drawn for people, silent for files, and never in the way of the work."""

import io

import pytest

from fewbit._util import _text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(_text.time, "monotonic", lambda: now[0])
    return now


def run(clock, items, total=None, seconds=1.0, **kwargs):
    stream = Terminal()
    for _ in _text.progress(items, "Working", total, stream=stream, **kwargs):
        clock[0] += seconds
    return stream.getvalue()


def test_a_bar_with_a_known_end(clock):
    lines = run(clock, [1, 2, 3, 4]).split("\r")
    assert lines[1].startswith("Working  25% |█████ ") and "1/4 [0:01 < 0:03]" in lines[1]
    assert lines[-1] == "Working 100% |████████████████████| 4/4 [0:04 < 0:00]\n"


def test_a_bar_of_a_generator_counts(clock):
    text = run(clock, (i for i in range(3)))
    assert text.endswith("Working 3 [0:03, 1/s]\n") and "%" not in text
    assert "3/3" in run(clock, (i for i in range(3)), total=3)


def test_quick_work_draws_nothing(clock):
    assert run(clock, [1, 2, 3], seconds=0.1) == ""
    assert run(clock, [1, 2, 3], show=False) == ""


def test_it_draws_ten_times_a_second_at_most(clock):
    assert run(clock, range(1000), seconds=0.01).count("\r") < 110


def test_files_and_wishes(clock, monkeypatch):
    stream = io.StringIO()
    assert list(_text.progress([1, 2], "Working", stream=stream)) == [1, 2]
    assert stream.getvalue() == ""
    monkeypatch.setenv("FEWBIT_PROGRESS", "0")
    assert run(clock, [1, 2]) == ""


def test_work_that_breaks_off_ends_the_line(clock):
    stream = Terminal()
    bar = _text.progress([1, 2, 3], "Working", stream=stream)
    next(bar)
    clock[0] += 1
    next(bar)
    bar.close()  # what Python does with a generator that an error leaves behind
    assert stream.getvalue().endswith("1/3 [0:01 < 0:02]\n")


def test_wrong_totals_are_not_more_than_all(clock):
    assert run(clock, [1, 2, 3], total=2).rstrip().endswith("Working 3 [0:03, 1/s]")


def test_a_long_label_fits_the_terminal(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = run(clock, [1, 2]).strip().split("\r")
    assert max(map(len, lines)) <= 30


def test_a_bar_that_is_told_what_is_at_hand(clock):
    stream = Terminal()
    with _text.Progress("Comparing", 2, stream=stream) as bar:
        for name in ("up", "down"):
            clock[0] += 1
            bar.update(note=name)
    lines = stream.getvalue().split("\r")
    assert lines[1].endswith("1/2 [0:01 < 0:01] up")
    assert lines[2].endswith("2/2 [0:02 < 0:00] down\n")
