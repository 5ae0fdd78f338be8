"""Products whose weight has a batch axis (experts side by side) run over the packed stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8, W8A8, normal, quantized, relative_error

import fewbit
from fewbit import QuantizationRule, kernels, ops
from fewbit.qarray import dequantize, quantize
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

RULES = {
    "int8": W8,
    "int8 rows": W8A8,
    "int4": [QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")],
    "int4 rows": [QuantizationRule(weight_qtype="int4", tile_size=32, act_qtype="int8")],
    "nf4": [QuantizationRule(weight_qtype="nf4")],
}
E, K, N = 3, 96, 126
SPECS = {
    "emk,ekn->emn": ((E, 5, K), (E, K, N)),
    "ek,ekn->en": ((E, K), (E, K, N)),
    "abek,ekn->abn": ((2, 3, E, K), (E, K, N)),  # no batch: the experts are summed over too
    "mek,ekn->men": ((4, E, K), (E, K, N)),
    "abek,ekn->ebna": ((2, 3, E, K), (E, K, N)),
    "ekn,emk->enm": ((E, K, N), (E, 5, K)),
    "enk,emk->emn": ((E, N, K), (E, 5, K)),
    "emk,ekhd->emhd": ((E, 5, K), (E, K, 4, 32)),
    "emjk,ejkn->emn": ((E, 5, 2, 64), (E, 2, 64, N)),
}


CASES = [(spec, name) for spec in SPECS for name in ("int8", "int4 rows")]
CASES += [("emk,ekn->emn", name) for name in RULES if name not in ("int8", "int4 rows")]


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_native_plain_and_float64_agree(spec, name):
    shapes = SPECS[spec]
    side = 0 if "n" in spec.split(",")[0] else 1
    w, x = {"w": normal(1, *shapes[side])}, normal(0, *shapes[1 - side])

    def f(p, x):
        return jnp.einsum(spec, *((p["w"], x) if side == 0 else (x, p["w"])))

    model, packed, plan = quantized(f, RULES[name], w, x)
    # Rows in tiles over two summed axes are quantized by XLA.
    codes = "rows" in name and not ("int4" in name and spec in ("abek,ekn->abn", "emjk,ejkn->emn"))
    assert plan.sites[0].runs_on == ("native int8" if codes else "native float")
    assert packed["w"].array.layout == "panels"
    plain = fewbit.unpack(packed)
    got = model(packed, x)
    assert relative_error(got, model(plain, x)) < 1e-5
    if "rows" not in name:
        whole = np.asarray(dequantize(plain["w"].array, jnp.float32), np.float64)
        operands = (whole, x) if side == 0 else (x, whole)
        exact = np.einsum(spec, *(np.asarray(a, np.float64) for a in operands))
        assert relative_error(got, exact) < 1e-5

    def loss(x, params):
        return jnp.sum(model(params, x) ** 2)

    slopes = [jax.jit(jax.grad(loss))(x, params) for params in (packed, plain)]
    assert relative_error(*slopes) < 1e-4


@pytest.mark.parametrize("name", ("int8", "int8 rows"))
def test_a_layer_of_experts_in_a_scan_is_read_in_place(name):
    def f(p, x):
        def layer(x, w):
            return x + jnp.tanh(jnp.einsum("emk,ekn->emn", x, w)), None

        return jax.lax.scan(layer, x, p["w"])[0]

    w, x = {"w": normal(1, 2, E, 64, 64) / 8}, normal(0, E, 5, 64)
    model, packed, plan = quantized(f, RULES[name], w, x)
    assert plan.sites[0].runs_on == f"native {'int8' if 'rows' in name else 'float'} + tanh"
    assert relative_error(model(packed, x), model(fewbit.unpack(packed), x)) < 2e-2
    bytes_of = ",".join(map(str, packed["w"].array.data.shape[2:]))
    text = jax.jit(model).lower(packed, x).compile().as_text()
    assert f"u8[{E},{bytes_of}]" not in text.replace(" ", "")  # no copy of a layer


def test_vmap_of_a_product_over_its_weight_is_a_batch():
    w, x = {"w": normal(1, E, K, N)}, normal(0, E, 5, K)
    f = lambda p, x: jax.vmap(lambda w, x: x @ w)(p["w"], x)  # noqa: E731
    model, packed, plan = quantized(f, W8A8, w, x)
    assert plan.sites[0].runs_on == "native int8"
    assert relative_error(model(packed, x), model(fewbit.unpack(packed), x)) < 1e-6


def test_a_bias_and_an_activation_follow_the_batch():
    q = quantize(normal(1, E, K, N), "int8", channelwise_axes=(0, 2))
    numbers, x, bias = (((2,), (1,)), ((0,), (0,))), normal(0, E, 5, K), normal(2, N)
    packed = to_panels(q, "lkn")
    out = ops.dot_general(x, packed, numbers, bias=bias, activation="relu")
    wanted = jax.nn.relu(ops.dot_general(x, packed, numbers) + bias[None, None])
    np.testing.assert_array_equal(out, wanted)
    assert ops.describe_dot(x, packed, numbers, bias, "relu") == "native float + bias + relu"


def test_two_batch_axes_stay_on_xla():
    w, x = {"w": normal(1, 2, E, K, N)}, normal(0, 2, E, 5, K)
    f = lambda p, x: jnp.einsum("aemk,aekn->aemn", x, p["w"])  # noqa: E731
    model, packed, plan = quantized(f, W8, w, x)
    assert plan.sites[0].runs_on == "xla dequantize + float dot, slow"
    assert relative_error(model(packed, x), f(w, x)) < 2e-2
