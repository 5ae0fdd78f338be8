"""Which layout a parameter is kept in: the limit of padding, there and back, codes of NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8, W8A8, normal, quantized

import fewbit
from fewbit import QuantizationRule, kernels
from fewbit.qarray import HowToQuantize, QArray, WithAux
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)


@pytest.mark.parametrize(
    ("n", "layout"),
    ((48, "panels"), (96, "panels"), (100, "panels"), (200, "panels"), (33, "plain")),
)
def test_padding_is_bounded_and_counted(n, layout):
    w, x = {"w": normal(0, 128, n)}, normal(1, 2, 128)
    model, q, plan = quantized(lambda p, x: x @ p["w"], W8A8, w, x)
    assert q["w"].array.layout == layout
    assert plan.sites[0].runs_on.startswith("native" if layout == "panels" else "xla")
    report = fewbit.report(q, plan)
    stored = sum(part.nbytes for part in jax.tree.leaves(q["w"].array))
    assert report.leaf("w").bytes == stored
    assert report.bits_per_weight == pytest.approx(8 * stored / (128 * n))
    assert report.bits_per_weight < 8 * 1.34 * (1 + 4 / 128) + 0.01 or layout == "plain"
    plain = fewbit.unpack(q)
    np.testing.assert_allclose(model(q, x), model(plain, x), rtol=1e-5, atol=1e-5)


def depthwise(p, x):
    return jax.lax.conv_general_dilated(
        x,
        p["w"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


@pytest.mark.parametrize("qtype", ("int8", "int4", "nf4", "fp8"))
def test_there_and_back_is_the_layout_it_was(qtype):
    rules = [QuantizationRule(weight_qtype=qtype)]
    models = {
        "depthwise": (depthwise, normal(0, 3, 3, 1, 64), normal(1, 1, 8, 8, 64)),
        "dense": (lambda p, x: x @ p["w"], normal(0, 64, 128), normal(1, 3, 64)),
        "narrow": (lambda p, x: x @ p["w"], normal(0, 64, 8), normal(1, 3, 64)),
    }
    for name, (f, w, x) in models.items():
        _, q, _ = quantized(f, rules, {"w": w}, x)
        again = fewbit.pack(fewbit.unpack(q))
        assert again["w"].array.layout == q["w"].array.layout, name
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
            np.testing.assert_array_equal(a, b)


def test_three_bits_are_packed_where_no_kernel_reads_them():
    _, q, _ = quantized(
        depthwise,
        [QuantizationRule(weight_qtype="int3")],
        {"w": normal(0, 3, 3, 1, 64)},
        normal(1, 1, 8, 8, 64),
    )
    assert fewbit.pack(q)["w"].array.layout == "bits"
    assert fewbit.pack(q)["w"].array.nbytes < q["w"].array.nbytes


@pytest.mark.parametrize(("qtype", "bad"), (("float8_e4m3fn", np.nan), ("float8_e5m2", np.inf)))
def test_codes_that_are_no_numbers_stay_out_of_the_kernels(qtype, bad):
    codes = jnp.ones((64, 64), qtype).at[3, 5].set(bad)
    q = QArray(codes, jnp.ones((1, 64)))
    how = HowToQuantize(qtype=qtype, channelwise_axes=(1,), roles="kn", rule=W8[0])
    with pytest.raises(
        ValueError, match="codes of NaN or infinity, which the kernels read as numb"
    ):
        to_panels(q, "kn")
    packed = fewbit.pack({"w": WithAux(q, how)})
    assert packed["w"].array.layout == "plain"
    rules = [QuantizationRule(weight_qtype=qtype)]
    out = fewbit.quantize_model(lambda p, x: x @ p["w"], fewbit.PtqProvider(rules))(
        packed, jnp.ones((2, 64))
    )
    assert not np.isfinite(out[:, 5]).any() and np.isfinite(np.delete(out, 5, axis=1)).all()
    finite = q.replace(qvalue=jnp.ones((64, 64), qtype))
    assert fewbit.pack({"w": WithAux(finite, how)})["w"].array.layout == "panels"
