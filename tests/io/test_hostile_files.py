"""Pipes, endless devices, bombs and nonsense in the place of every file that is read.

Each ends in an error of ours, within a limit of processor time and of memory.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from hostile import PLACES, THINGS, YAML, ZIPS, cases

SUPPORT = pathlib.Path(__file__).resolve().parents[1] / "support"
KINDS = {"pipe": "a pipe", "zeros": "a device", "noise": "a device", "socket": "a socket"}
OURS = ("CheckpointError", "ValueError", "NoPlainFile", "Misuse", "TypeError")
# Nothing is wrong: what is no journal or shard is made again, no backend is configured, nothing is
# said of a quantization.
HARMLESS = {("journal", thing) for thing in THINGS} | {("partial shard", t) for t in THINGS}
HARMLESS |= {("keras.json", thing) for thing in THINGS}
HARMLESS |= {("config", "brackets"), ("named config", "brackets")}


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hostile"), quick=True)


def run(folder, quick):
    """What the child says of each attempt; one that it did not survive is the last of them."""
    child = subprocess.run(
        [sys.executable, str(SUPPORT / "hostile.py"), str(folder), *["quick"] * quick],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parents[1])},
    )
    found = {}
    for line in child.stdout.splitlines():
        if line.startswith("["):
            place, thing, kind, text = json.loads(line)
            found[place, thing] = (kind, text)
    assert list(found) == list(cases(quick)) and child.returncode == 0, (
        f"ended with {child.returncode} at {list(found)[-1:]}: {child.stderr[-2000:]}"
    )
    return found


def check(place, thing, kind, text):
    if kind == "nothing" and (place, thing) in HARMLESS:
        return
    assert kind in OURS, (place, thing, kind, text)
    if not (place.startswith("names") and thing == "endless pattern"):
        assert "/" in text and len(text) < 1000, (place, thing, text)  # it names the file
    if thing in KINDS:
        assert f"is not a file, but {KINDS[thing]}" in text, (place, thing, text)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_a_file(attempts, place):
    for (where, thing), (kind, text) in attempts.items():
        if where == place:
            check(place, thing, kind, text)


@pytest.mark.long
def test_everything_everywhere(tmp_path):
    for (place, thing), (kind, text) in run(tmp_path, quick=False).items():
        check(place, thing, kind, text)


def test_yaml_without_end(attempts):
    said = {thing: attempts["rules.yaml", thing][1] for thing in YAML}
    assert "its aliases stand for more than 200,000 values; write out" in said["laughs"]
    assert "its aliases stand for more than 200,000 values" in said["merges"]
    assert "the alias *a stands inside of what it names" in said["itself"]
    assert "it is nested more than 300 levels deep" in said["deep yaml"]
    assert "it is nested more than 300 levels deep" in said["deep block"]
    assert "and at most 500,000 are read; write it as JSON" in said["long yaml"]
    assert "a value has more than 60,000 characters" in said["sexagesimal"]
    assert (
        "module_path: the pattern '(a+)\\\\1' cannot be matched within" in said["endless pattern"]
    )


def test_archives_that_unpack_to_more_than_they_are(attempts):
    words = {
        "zip bomb": "manifest.json is compressed, which stats.save never does",
        "one array often": "its manifest names more arrays than there is room for in the file",
        "a lie": "count is no plain array ((137438953472,) of float64 in 0 bytes)",
    }
    for thing in ZIPS:
        kind, text = attempts["statistics", thing]
        assert kind == "ValueError" and "is damaged" in text and words[thing] in text, text
