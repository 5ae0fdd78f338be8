"""The blocks of docs/from-qwix.md give what they give under Qwix, but for the table of the page."""

import fnmatch
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from peers import page
from peers.environment import answers_of

import fewbit

pytestmark = pytest.mark.long

EXACT = ("qvalue", "scale", "zero_point")
# What the table of the page names; each has a test of its own below.
STATISTICS = "*/max_of_absmax"
STATIC = ("*_lhs_scale/array", "*/sum_of_absmax", "*output", STATISTICS)
DIFFERENT = {
    "An NNX model made inside `jit`": ("*/qvalue", "output"),
    "Static ranges, Linen": STATIC,
    "Static ranges, NNX": STATIC,
    "Statistics, NNX": (STATISTICS, "*/linear2/*/sum_of_absmax"),
    "Random numbers of an NNX model": ("*grads/*",),
    "QLoRA, Linen": ("*_lora_a",),
    "QLoRA, NNX": ("*_lora_a",),
}


@pytest.fixture(scope="module")
def qwix(tmp_path_factory):
    return answers_of("qwix_page", tmp_path_factory)


def plain(tree):
    """Without what fewbit does to a tree for this machine's kernels."""
    if isinstance(tree, nnx.State):  # of parts, which nothing has packed
        return tree
    holds = isinstance(tree, nnx.Module) or any(hasattr(x, "dtype") for x in jax.tree.leaves(tree))
    return fewbit.unpack(tree) if holds else tree


def ran(heading, wide=False, **change):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*reaches weights of opaque kernels")
        found = page.run(heading, "fewbit", wide, **change)
    return page.arrays(found.bound, plain), found.printed


def name_of(heading, wide):
    return f"{heading}{' wide' if wide else ''}"


def theirs(qwix, heading, wide=False):
    prefix = name_of(heading, wide) + "/"
    return {path: qwix.arrays[prefix + path] for path in qwix.names(prefix)}


def numbers(array):
    """As `cases.Results` keeps them."""
    wide = np.asarray(array)
    return wide if wide.dtype.kind in "iub" else wide.astype(np.float32)


def is_among(path, patterns):
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def assert_same(qwix, heading, wide, mine, different):
    other, prefix = theirs(qwix, heading, wide), name_of(heading, wide) + "/"
    assert {p for p in mine if p in other or not is_among(p, different)} == set(other)
    for path in other:
        assert mine[path].shape == other[path].shape, path
        assert jnp.dtype(mine[path].dtype).name == qwix.dtypes[prefix + path], path
        if is_among(path, different):
            continue
        found, wanted = numbers(mine[path]), other[path]
        if path.split("/")[-1] in EXACT or wanted.dtype.kind in "iub":
            assert np.array_equal(found, wanted), path
        else:
            error = np.abs(found - wanted).max()
            assert error <= tolerances.PEER_PAGE * np.abs(wanted).max(), (path, error)


@pytest.mark.parametrize(("heading", "wide"), list(page.every_run()))
def test_same_codes_scales_and_results(qwix, heading, wide):
    mine, printed = ran(heading, wide)
    assert_same(qwix, heading, wide, mine, DIFFERENT.get(heading, ()))
    assert printed == qwix.words[name_of(heading, wide)]


# --- the table of the page ------------------------------------------------------------------------


def test_what_differs_is_a_block_of_the_page():
    assert set(DIFFERENT) <= set(page.BLOCKS)


def test_codes_made_inside_jit_are_those_made_outside(qwix):
    heading, outside = "An NNX model made inside `jit`", theirs(qwix, "NNX state")
    mine, jitted = ran(heading)[0], theirs(qwix, heading)
    for layer in ("linear1", "linear2"):
        path = f"ptq_model/{layer}/kernel/array/qvalue"
        assert np.array_equal(mine[path], outside[path])
        off = np.abs(jitted[path].astype(int) - outside[path].astype(int))
        assert off.max() == 1 and 0 < off.mean() < 0.01


@pytest.mark.parametrize("heading", ["Static ranges, Linen", "Static ranges, NNX"])
def test_static_scales_are_of_the_range_seen_or_averaged_as_by_qwix(qwix, heading):
    mine, other = ran(heading)[0], theirs(qwix, heading)
    scales = [path for path in other if path.endswith("_lhs_scale/array")]
    assert scales and all((mine[path] > other[path]).all() for path in scales)
    averaged, _ = ran(heading, change=page.MEAN)
    assert_same(qwix, heading, False, averaged, (STATISTICS,))


def test_noise_is_drawn_anew(qwix):
    heading = "Random numbers of an NNX model"
    mine, other = ran(heading)[0], theirs(qwix, heading)
    for path in (p for p in other if is_among(p, DIFFERENT[heading])):
        error = np.abs(mine[path] - other[path]).max() / np.abs(other[path]).max()
        assert 0 < error < tolerances.NOISE


@pytest.mark.parametrize("heading", ["QLoRA, Linen", "QLoRA, NNX"])
def test_adapters_start_from_other_numbers_of_the_same_kind(qwix, heading):
    mine, other = ran(heading)[0], theirs(qwix, heading)
    for path in (p for p in other if p.endswith("_lora_a")):
        bound = np.sqrt(6 / mine[path].shape[0])
        assert not np.array_equal(mine[path], other[path])
        for drawn in (mine[path], other[path]):
            assert 0.9 * bound < np.abs(drawn).max() <= bound


def test_a_weight_without_the_word_array(qwix):
    assert "Cannot set key 'qvalue' on immutable node of type WithAux" in qwix.words["bare"]
    heading = "A quantized checkpoint into an abstract NNX model"
    mine, _ = ran(heading, change=page.BARE)
    assert np.array_equal(mine["output"], ran(heading)[0]["output"])
