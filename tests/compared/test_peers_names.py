"""Every public name of the installed Qwix can be imported from fewbit in its place."""

import inspect

import pytest
from peers.environment import answers_of

from fewbit._util._stand_in import found_at
from fewbit.as_qwix import TABLE

pytestmark = pytest.mark.long

# Names of whole modules that nobody outside of Qwix uses, and of test files.
NOT_FOR_USE = ("_test", "test_utils")


@pytest.fixture(scope="module")
def qwix(tmp_path_factory):
    return answers_of("qwix_names", tmp_path_factory).words


def test_every_public_name_is_in_the_table(qwix):
    asked = [full for full in qwix if not full.rpartition(".")[0].endswith(NOT_FOR_USE)]
    assert len(asked) > 200
    missing = []
    for full in asked:
        module, _, name = full.rpartition(".")
        if name not in TABLE.get(module, {}):
            missing.append(full)
    assert missing == []


def test_what_is_ours_is_called_with_the_same_arguments(qwix):
    """By name and place, as far as Qwix's go; ours may take more."""
    compared = 0
    for full, arguments in qwix.items():
        module, _, name = full.rpartition(".")
        entry = TABLE.get(module, {}).get(name)
        if not isinstance(entry, str) or arguments in ("=", "class"):
            continue
        compared += 1
        parameters = inspect.signature(found_at(entry)).parameters
        taken = {"args", "kwargs"} & set(parameters)
        mine = [n for n, p in parameters.items() if p.kind != inspect.Parameter.KEYWORD_ONLY]
        theirs = arguments.split()
        if name in RENAMED:
            theirs = [RENAMED[name].get(word, word) for word in theirs]
        theirs = theirs[: PLACES.get(name)]
        assert taken or mine[: len(theirs)] == theirs, f"{full}: {theirs}, ours {mine}"
    assert compared > 40


# How many arguments have one place; the others are given by name.
PLACES = {"conv_general_qt": 10}
# Called by place alone, as the names of their single arguments say nothing.
RENAMED = {
    "validate_qarray": {"array": "q"},
    "dequantize": {"array": "q"},
    "get_scale_shape": {"array_shape": "shape"},
    "convert_to": {"x": "array"},
}
