"""Every statistic that observers collect, against float64 references over the same arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from test_static_scales import STATIC

import fewbit
from fewbit.qarray import HowToQuantize, _ranges

F64 = np.float64
W = normal(1, 6, 5)
BATCHES = [normal(i, n, 6) * (i + 1) for i, n in enumerate((4, 7, 4))]  # of different sizes


def product(params, x):
    return x @ params["w"]


def collect(rule=STATIC, batches=BATCHES, observers=("range",), f=product, params=None, **kwargs):
    params = {"w": W} if params is None else params
    return fewbit.calibrate(f, [rule], params, batches, observers, **kwargs)


def lhs(stats, site="w:dot_general0", side="lhs"):
    return stats[site][side]


def test_ranges():
    stat = lhs(collect())
    rows = [np.abs(F64(x)).max(1) for x in BATCHES]
    assert stat["count"] == 3 and stat["max_of_absmax"].shape == (1, 1)
    np.testing.assert_allclose(stat["sum_of_absmax"], sum(r.mean() for r in rows), rtol=1e-6)
    np.testing.assert_allclose(stat["max_of_absmax"], max(r.max() for r in rows), rtol=1e-7)


def test_asymmetric_ranges():
    stat = lhs(collect(STATIC.replace(act_calibration_method="minmax,0.9")))
    low = [np.minimum(F64(x).min(1), 0) * 0.9 for x in BATCHES]
    high = [np.maximum(F64(x).max(1), 0) * 0.9 for x in BATCHES]
    np.testing.assert_allclose(stat["sum_of_min"], sum(r.mean() for r in low), rtol=1e-6)
    np.testing.assert_allclose(stat["sum_of_max"], sum(r.mean() for r in high), rtol=1e-6)
    np.testing.assert_allclose(stat["min_of_min"], min(r.min() for r in low), rtol=1e-6)
    np.testing.assert_allclose(stat["max_of_max"], max(r.max() for r in high), rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 1), (-3,), ()])
def test_batch_axes(axes):
    batches = [normal(i, 2, 3, 6) for i in range(2)]
    stat = lhs(collect(STATIC.replace(act_batch_axes=axes), batches))
    rows = np.abs(F64(jnp.stack(batches))).max(-1, keepdims=True)  # one range for each row
    shared = tuple(a % 3 + 1 for a in axes)
    averages = rows.mean(shared, keepdims=True) if axes else rows
    extremes = rows.max(shared, keepdims=True) if axes else rows
    np.testing.assert_allclose(stat["sum_of_absmax"], averages.sum(0), rtol=1e-6)
    np.testing.assert_allclose(stat["max_of_absmax"], extremes.max(0), rtol=1e-7)


@pytest.mark.parametrize("method", ["rms,3", "absmax,0.5"])
def test_other_methods_are_measured_batch_by_batch(method):
    stat = lhs(collect(STATIC.replace(act_calibration_method=method)))
    name, factor = method.split(",")
    of = {"rms": lambda x: np.sqrt((x**2).mean(1)), "absmax": lambda x: np.abs(x).max(1)}[name]
    rows = [of(F64(x)) * float(factor) for x in BATCHES]
    np.testing.assert_allclose(stat["max_of_absmax"], max(r.max() for r in rows), rtol=1e-5)
    np.testing.assert_allclose(stat["sum_of_absmax"], sum(r.mean() for r in rows), rtol=1e-5)


def scale(rule, stats, params=None, x=BATCHES[0]):
    params = {"w": W} if params is None else params
    made = fewbit.plan(product, [rule], params, x)
    quantized = fewbit.quantize_params(params, made, stats)
    return F64(quantized.act_scales["w:dot_general0"]["lhs_scale"].array)


def test_default_scales_cover_the_range_and_averages_do_not():
    whole = np.abs(F64(jnp.concatenate(BATCHES))).max()
    np.testing.assert_allclose(scale(STATIC, collect()) * 127.5, whole, rtol=1e-6)
    rule = STATIC.replace(act_static_reduction="mean")
    mean = np.mean([np.abs(F64(x)).max(1).mean() for x in BATCHES])
    np.testing.assert_allclose(scale(rule, collect(rule)) * 127.5, mean, rtol=1e-6)


def test_a_fixed_range_needs_no_data():
    rule = STATIC.replace(act_calibration_method="fixed,-6,6")
    made = fewbit.plan(product, [rule], {"w": W}, BATCHES[0])
    quantized = fewbit.quantize_params({"w": W}, made)
    qf = fewbit.quantize_model(product, fewbit.PtqProvider([rule]))
    found = quantized.act_scales["w:dot_general0"]["lhs_scale"].array
    np.testing.assert_allclose(F64(found) * 127.5, 6, rtol=1e-6)
    np.testing.assert_allclose(qf(quantized, BATCHES[0]), BATCHES[0] @ W, atol=0.3)
    rules = [
        STATIC.replace(module_path="a", act_calibration_method="fixed,0,4"),
        STATIC.replace(module_path="b"),
    ]
    f = lambda p, x: (x @ p["a"]) @ p["b"]  # noqa: E731
    params = {"a": normal(2, 6, 6), "b": W}
    stats = fewbit.calibrate(f, rules, params, BATCHES)
    assert list(stats) == ["b:dot_general0"]
    both = fewbit.quantize_params(params, fewbit.plan(f, rules, params, BATCHES[0]), stats)
    assert set(both.act_scales) == {"a:dot_general0", "b:dot_general0"}
    entries = both.act_scales["a:dot_general0"]
    np.testing.assert_allclose(F64(entries["lhs_scale"].array) * 255, 4, rtol=1e-6)
    assert "lhs_zero_point" in entries


# --- histograms -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 2.0**23, width=32), min_size=1, max_size=50))
def test_every_number_is_in_its_bin(numbers):
    array = jnp.array(numbers, jnp.float32)
    bins = np.asarray(_ranges.bin_of(array))
    edges = _ranges.bin_edges()
    x = np.asarray(array)
    tiny = x < edges[1]  # bins are of normal numbers: what is smaller is all in the first
    assert (bins[tiny] == 0).all()
    assert ((edges[bins] <= x) & (x < edges[bins + 1]))[~tiny].all()
    assert _ranges.bin_of(jnp.array([3e38]))[0] == _ranges.BINS - 1


def test_histograms_count_every_value():
    stat = lhs(collect(observers=("range", "histogram")))
    everything = np.abs(np.concatenate([np.asarray(x).ravel() for x in BATCHES]))
    wanted, _ = np.histogram(everything, _ranges.bin_edges())
    np.testing.assert_array_equal(stat["histogram"].ravel(), wanted)


@pytest.mark.parametrize("percent", [50, 99.9, 100])
def test_percentiles_over_all_batches(percent):
    rule = STATIC.replace(act_calibration_method=f"percentile,{percent}")
    batches = [normal(i, 64, 6) * (1 + 4 * (i == 2)) for i in range(4)]
    found = scale(rule, collect(rule, batches)) * 127.5
    wanted = np.quantile(np.abs(F64(jnp.concatenate(batches))), percent / 100)
    np.testing.assert_allclose(found, wanted, rtol=1 / 64)


def test_a_percentile_is_not_moved_by_an_outlier():
    rule = STATIC.replace(act_calibration_method="percentile,99")
    batches = [normal(i, 64, 6) for i in range(3)]
    spoilt = [*batches[:2], batches[2].at[0, 0].set(1e4)]
    a, b = (scale(rule, collect(rule, x)) for x in (batches, spoilt))
    np.testing.assert_allclose(a, b, rtol=0.05)
    with pytest.warns(UserWarning, match="far beyond almost all of the values"):
        whole = collect(STATIC, spoilt)
    assert scale(STATIC, whole) > 1000 * a


def squared_error(x, edge, bound=7.5, levels=(-8, 7)):
    step = edge / bound
    codes = np.clip(np.rint(x / step), *levels)
    return ((x - codes * step) ** 2).sum()


def test_mse_finds_the_clip_with_the_least_error():
    rule = STATIC.replace(act_qtype="int4", act_calibration_method="mse")
    batches = [jax.random.laplace(jax.random.key(i), (256, 6)) for i in range(4)]
    x = np.abs(F64(jnp.concatenate(batches))).ravel()
    found = float(scale(rule, collect(rule, batches)).ravel()[0]) * 7.5
    factors = np.linspace(0.1, 1.2, 1000)
    best = min(squared_error(x, f * x.max()) for f in factors)
    assert found < 0.9 * x.max()  # int4 of a long-tailed distribution clips
    assert squared_error(x, found) < 1.02 * best
    assert squared_error(x, found) < 0.9 * squared_error(x, x.max())


@pytest.mark.parametrize("qtype", ["int8", "int6", "fp8"])
def test_mse_is_never_worse_than_the_whole_range(qtype):
    x = jax.random.normal(jax.random.key(0), (512, 64))
    errors = []
    for method in ("absmax", "mse"):
        array = fewbit.quantize(x, qtype, calibration_method=method)
        errors.append(np.square(F64(x) - F64(fewbit.dequantize(array))).sum())
    assert errors[1] <= errors[0] * 1.0001


def test_mse_and_percentile_can_be_averaged_over_batches():
    for method, of in (
        ("percentile,90", lambda x: np.quantile(np.abs(x), 0.9, axis=1)),
        ("mse", None),
    ):
        rule = STATIC.replace(act_calibration_method=method, act_static_reduction="mean")
        stats = collect(rule)
        assert "histogram" not in lhs(stats)
        if of is not None:
            mean = np.mean([of(F64(x)).mean() for x in BATCHES])
            np.testing.assert_allclose(scale(rule, stats) * 127.5, mean, rtol=1e-5)


def test_histograms_of_each_scale():
    rule = STATIC.replace(act_calibration_method="percentile,75", act_batch_axes=(0,))
    batches = [normal(i, 8, 3, 6) for i in range(3)]
    made = fewbit.plan(product, [rule], {"w": W}, batches[0])
    assert made.scales[0].shape == (1, 3, 1)
    quantized = fewbit.quantize_params({"w": W}, made, collect(rule, batches))
    found = F64(quantized.act_scales["w:dot_general0"]["lhs_scale"].array) * 127.5
    whole = np.abs(F64(jnp.stack(batches))).transpose(2, 0, 1, 3).reshape(3, -1)
    np.testing.assert_allclose(found[0, :, 0], np.quantile(whole, 0.75, axis=1), rtol=1 / 32)


def test_ranges_of_huge_and_tiny_values_stay_in_the_range_seen():
    how = HowToQuantize(qtype="int8", calibration_method="percentile,99")
    for size in (1e30, 1e-30):
        x = normal(0, 1000) * size
        counts = _ranges.histogram(jnp.abs(x), jnp.zeros((1000,), jnp.int32), 1)
        absmax = jnp.max(jnp.abs(x))[None]
        found = float(_ranges.range_from_histogram(counts, absmax, how)[0])
        assert np.isfinite(found) and 0 <= found <= float(absmax[0])


# --- channels and Hessians ------------------------------------------------------------------------


def test_channels_and_hessians_of_a_weight_only_rule():
    rule = fewbit.QuantizationRule(weight_qtype="int4")
    stat = lhs(collect(rule, observers=("channels", "hessian")))
    rows = F64(jnp.concatenate(BATCHES))
    np.testing.assert_allclose(stat["channel_absmax"], np.abs(rows).max(0), rtol=1e-6)
    np.testing.assert_allclose(stat["channel_absmean"], np.abs(rows).mean(0), rtol=1e-5)
    np.testing.assert_allclose(stat["hessian"], rows.T @ rows / len(rows), rtol=1e-5, atol=1e-5)
    assert stat["hessian_rows"] == len(rows) == stat["channel_rows"]


def test_hessians_follow_the_product_s_axes():
    """Two contracted axes, a weight on the left, and a group for each head."""
    w = normal(5, 2, 3, 4)
    x = normal(6, 5, 7, 2, 3)
    rule = fewbit.QuantizationRule(weight_qtype="int8")

    def first(f, params):
        stats = collect(rule, [x], ("hessian", "channels"), f, params)
        ((_, sides),) = stats.items()
        (stat,) = sides.values()
        return stat

    flat = F64(x).reshape(-1, 6)
    for f in (
        lambda p, x: jnp.einsum("abcd,cde->abe", x, p["w"]),
        lambda p, x: jnp.einsum("cde,abcd->eab", p["w"], x),
    ):
        stat = first(f, {"w": w})
        np.testing.assert_allclose(stat["hessian"], flat.T @ flat / 35, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(stat["channel_absmax"], np.abs(flat).max(0), rtol=1e-6)
    heads = first(lambda p, x: jnp.einsum("abcd,cde->abce", x, p["w"]), {"w": w})
    grouped = F64(x).reshape(35, 2, 3).transpose(1, 0, 2)
    wanted = np.stack([g.T @ g / 35 for g in grouped])
    np.testing.assert_allclose(heads["hessian"], wanted, rtol=1e-4, atol=1e-5)


def test_channels_of_a_convolution():
    rule = fewbit.QuantizationRule(weight_qtype="int8")
    x = normal(7, 2, 8, 8, 3)

    def f(p, x):
        return jax.lax.conv_general_dilated(
            x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    stats = collect(rule, [x], ("channels",), f, {"w": normal(8, 3, 3, 3, 4)})
    stat = stats["w:conv_general_dilated0"]["lhs"]
    np.testing.assert_allclose(stat["channel_absmax"], np.abs(F64(x)).max((0, 1, 2)), rtol=1e-6)
    made = fewbit.plan(f, [rule], {"w": normal(8, 3, 3, 3, 4)}, x)
    fewbit.quantize_params({"w": normal(8, 3, 3, 3, 4)}, made, stats)  # what it does not need


def test_statistics_add_up_however_they_are_split():
    rule = STATIC.replace(act_calibration_method="percentile,99")
    names = ("range", "histogram", "channels", "hessian")
    whole = collect(rule, observers=names)
    parts = [collect(rule, [x], names) for x in BATCHES]
    for order in ((0, 1, 2), (2, 0, 1)):
        a, b, c = (parts[i] for i in order)
        for merged in (a.merge(b).merge(c), a.merge(b.merge(c))):
            assert merged.batches == 3
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
                merged.tree,
                whole.tree,
            )


def test_an_observer_of_ones_own():
    class Mean:
        name = "mean"

        def wants(self, operand):
            return operand.side == "lhs"

        def init(self, operand):
            return {"total": jnp.zeros(()), "size": jnp.zeros(())}

        def observe(self, operand, state, array):
            new = {"total": jnp.sum(array), "size": jnp.array(float(array.size))}
            return self.merge(state, new)

        def merge(self, first, second):
            return jax.tree.map(jnp.add, first, second)

        def finalize(self, state):
            return {"mean": state["total"] / state["size"]}

    stats = collect(observers=("range", Mean()))
    everything = F64(jnp.concatenate(BATCHES))
    np.testing.assert_allclose(lhs(stats)["mean"], everything.mean(), rtol=1e-4)
    assert lhs(stats.merge(stats))["mean"] == pytest.approx(lhs(stats)["mean"])
    scale(STATIC, stats)
