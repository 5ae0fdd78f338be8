"""Metrics, channels, distributions and the search, against slow float64 references."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbit
from fewbit.debug._bisect import guilty, minimal_subset, smallest_prefix
from fewbit.debug._metrics import (
    agreement,
    channel_absmax,
    difference,
    distribution,
    far_out,
    from_sums,
    measured,
    metric_of,
    outliers_of,
    output_difference,
    sums,
)
from fewbit.debug._mixed import clipped_count
from fewbit.debug._mixed import sums as sums_on_device

NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40)


def slow_difference(f, q):
    """Element by element in Python's own floats."""
    signal = math.fsum(a * a for a in f)
    noise = math.fsum((b - a) ** 2 for a, b in zip(f, q, strict=True))
    power = math.fsum(b * b for b in q)
    dot = math.fsum(a * b for a, b in zip(f, q, strict=True))
    if noise == 0:
        return math.inf, 1.0, 0.0
    if signal == 0:
        return -math.inf, 0.0, math.inf
    cosine = dot / math.sqrt(signal * power) if power else 0.0
    return 10 * math.log10(signal / noise), cosine, math.sqrt(noise / signal)


@settings(deadline=None, max_examples=60)
@given(NUMBERS, st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_difference_is_the_slow_one(values, seed, size):
    f = np.float64(values)
    q = f + size * np.random.default_rng(seed).standard_normal(len(f))
    expected = slow_difference(f.tolist(), q.tolist())
    found = difference(f, q)
    for a, b in zip((found.sqnr, found.cosine, found.relative), expected, strict=True):
        assert a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@settings(deadline=None, max_examples=30)
@given(NUMBERS, st.integers(1, 39))
def test_sums_add_up_over_parts(values, cut):
    f = np.float64(values)
    q = f * 1.01 + 0.5
    cut %= len(f) + 1
    whole, first, second = sums(f, q), sums(f[:cut], q[:cut]), sums(f[cut:], q[cut:])
    assert np.allclose(whole, np.add(first, second), rtol=1e-12)


def test_sums_taken_on_the_device_are_these():
    f = jax.random.normal(jax.random.key(0), (64, 33))
    q = f + 0.01 * jax.random.normal(jax.random.key(1), f.shape)
    assert np.allclose(sums_on_device(f, q), sums(f, q), rtol=1e-4)
    noisy = sums_on_device(f.astype(jnp.bfloat16), q.astype(jnp.bfloat16))
    assert noisy.dtype == jnp.float32


def test_edges_of_the_metrics():
    assert difference([0.0, 0.0], [0.0, 0.0]).sqnr == math.inf
    assert difference([0.0, 0.0], [1.0, 0.0]).sqnr == -math.inf
    assert difference([1.0], [0.0]).cosine == 0.0
    assert math.isnan(difference([1.0, 2.0], [1.0, math.nan]).sqnr)
    assert difference([math.inf, 1.0], [math.inf, 1.0]).sqnr != -math.inf
    assert difference([1 + 1j], [1 + 2j]).relative == pytest.approx(1 / math.sqrt(2))
    assert difference([3.0, 4.0], [-3.0, -4.0]).cosine == -1.0
    assert from_sums(100.0, 1.0, 1.0, 1.0).sqnr == pytest.approx(20.0)


def test_agreement_is_of_rows():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 7))
    slow = sum(list(x).index(max(x)) == list(y).index(max(y)) for x, y in zip(a, b, strict=True))
    assert agreement(a, b) == slow / 50
    assert agreement(1.0, 2.0) is None and agreement(np.zeros((3, 1)), np.zeros((3, 1))) is None


def test_what_of_an_output_is_measured():
    key, ids = jax.random.key(0), jnp.arange(3)
    logits = jnp.ones((2, 3))
    assert [x.shape for x in measured([ids, logits, key])] == [(2, 3)]
    assert [x.shape for x in measured([ids, key])] == [(3,)]
    both = output_difference([np.ones(3), np.zeros(1)], [np.ones(3), np.full(1, 0.3)])
    assert both.relative == pytest.approx(0.3 / math.sqrt(3))


def test_metrics_by_name_and_by_function():
    assert metric_of("sqnr").within(31.0, 30.0) and not metric_of("sqnr").within(math.nan, 30.0)
    assert metric_of("relative").within(0.01, 0.03) and not metric_of("relative").within(0.1, 0.03)
    assert not metric_of(lambda f, q: 0.0, higher_is_better=False).within(2.0, 1.0)
    with pytest.raises(ValueError, match="There is no metric 'snr'. Use one of sqnr, cosine, rela"):
        metric_of("snr")


# --- channels ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_channel_absmax_is_the_slow_one(shape, data):
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    axes = axes[: data.draw(st.integers(1, len(shape)))]
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    slow = []
    for channel in np.ndindex(*(shape[a] for a in axes)):
        picked = [slice(None)] * len(shape)
        for axis, index in zip(axes, channel, strict=True):
            picked[axis] = index
        slow.append(np.abs(array[tuple(picked)]).max())
    assert np.array_equal(channel_absmax(jnp.asarray(array), axes), slow)


def test_outliers_are_channels_far_above_the_median():
    rows = np.ones((3, 8))
    rows[1, 5], rows[2, 0] = 40.0, 4.0
    found = list(outliers_of("up:dot_general0", "weight", rows, (3,)))
    assert [(o.layer, o.channel, o.ratio) for o in found] == [((1,), 5, 40.0), ((2,), 0, 4.0)]
    assert [o.channel for o in far_out(found, 5.0)] == [5]
    assert str(found[0]) == (
        "up:dot_general0: weight channel 5 in layer 1 reaches 40, 40.0x the median channel"
    )
    rows[1] = np.nan
    assert len(list(outliers_of("a", "weight", rows, (3,)))) == 1  # a NaN has no median
    with pytest.raises(ValueError, match="ratio must be a positive number, got -1"):
        far_out(found, -1)


# --- clipping and distributions ------------------------------------------------------------------


# The last code and half a step beyond it (nothing beyond, where steps are not equal).
EDGES = {
    "int8": (-128.501, 127.501),
    "int4": (-8.501, 7.501),
    "uint8": (-0.501, 255.501),
    "fp8": (-448.448, 448.448),
    "nf4": (-1.001, 1.001),
    "int1": (-math.inf, math.inf),
}


@pytest.mark.parametrize("qtype", EDGES)
@pytest.mark.parametrize("method", ["range", "fixed,-1,1"])
def test_clipped_values_are_those_beyond_the_last_code(qtype, method):
    if method == "range":
        method = "minmax" if qtype == "uint8" else "absmax"
    elif qtype == "uint8":
        method = "fixed,-1,2"
    x = 2 * jax.random.normal(jax.random.key(0), (40, 32))
    q = fewbit.quantize(x, qtype, channelwise_axes=(0,), calibration_method=method)
    units = np.asarray(x, np.float64) / np.asarray(q.scale, np.float64)
    if q.zero_point is not None:
        units = units + np.asarray(q.zero_point, np.float64)
    low, high = EDGES[qtype]
    clipped, seen = np.asarray(clipped_count(x, q))
    assert seen == x.size
    assert clipped == np.sum((units < low) | (units > high))
    assert (clipped > 100) == (method.startswith("fixed") and qtype != "int1")


@pytest.mark.parametrize("qtype", ["int8", "int4", "int3", "int1", "int16", "fp8", "nf4", "mxfp4"])
def test_distributions_count_every_number_once(qtype):
    w = jax.random.normal(jax.random.key(0), (64, 96))
    tiles = {0: 32} if qtype == "mxfp4" else {}
    q = fewbit.quantize(w, qtype, channelwise_axes=(1,), tiled_axes=tiles)
    d = distribution("w", w, q)
    assert sum(d.before) == sum(d.after) == w.size == d.elements
    assert len(d.codes) == len(d.after) <= 256
    assert list(d.codes) == sorted(d.codes)
    assert d.low < d.codes[0] and d.codes[-1] < d.high
    assert d.absmax == float(jnp.abs(w).max())
    if qtype in ("int4", "int3"):
        codes, counts = np.unique(np.asarray(q.qvalue, np.int32), return_counts=True)
        assert {c: n for c, n in zip(d.codes, d.after, strict=True) if n} == dict(
            zip(codes.astype(float).tolist(), counts.tolist(), strict=True)
        )


def test_the_same_distribution_from_packed_codes():
    w = jax.random.normal(jax.random.key(0), (64, 96))
    q = fewbit.quantize(w, "int4", channelwise_axes=(1,))
    assert distribution("w", w, fewbit.qarray.pack(q)) == distribution("w", w, q)


# --- the search ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 60), st.data())
def test_the_search_finds_exactly_the_culprits(n, data):
    culprits = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=min(n, 5)))
    tries = []

    def enough(chosen):
        tries.append(tuple(chosen))
        return culprits <= set(chosen)

    assert set(guilty(range(n), enough)) == culprits
    log = math.ceil(math.log2(n)) if n > 1 else 1
    assert len(tries) <= log + 1 + 2 * len(culprits) * (log + 1)
    if len(culprits) == 1:
        assert len(tries) <= log + 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_no_part_of_what_is_found_would_do(weights, needed):
    """Where each suspect brings something: what is found is minimal, though not unique."""
    needed = min(needed, sum(weights))

    def enough(chosen):
        return sum(weights[k] for k in chosen) >= needed

    found = minimal_subset(range(len(weights)), enough)
    assert enough(found)
    assert all(not enough([k for k in found if k != left]) for left in found)
    prefix = smallest_prefix(range(len(weights)), enough)
    assert enough(range(prefix)) and not enough(range(prefix - 1))
