"""Ragged products of packed stacks: against the plain form, whose numbers other tests hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, relative_error
from jax.sharding import NamedSharding, PartitionSpec

import fewbit
from fewbit import PtqProvider, QuantizationRule, kernels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

GROUPS, K, N, ROWS = 4, 96, 192, 11
X = normal(0, ROWS, K)
W = {"w": normal(1, GROUPS, K, N)}
RULES = {
    "int8": dict(weight_qtype="int8"),
    "int8 rows": dict(weight_qtype="int8", act_qtype="int8"),
    "int4": dict(weight_qtype="int4", tile_size=32, scale_dtype="float16"),
    "int4 rows": dict(weight_qtype="int4", tile_size=32, act_qtype="int8"),
    "nf4": dict(weight_qtype="nf4"),
    "fp8": dict(weight_qtype="fp8"),
}


def experts(params, x, sizes):
    return jax.lax.ragged_dot(x, params["w"], sizes)


def quantized(rule, f=experts, params=W, x=X):
    rules = [QuantizationRule(op_names=("ragged_dot",), **rule)]
    plan = fewbit.plan(f, rules, params, x, jnp.ones(GROUPS, jnp.int32))
    qparams = fewbit.quantize_params(params, plan)
    return fewbit.quantize_model(f, PtqProvider(rules)), qparams, plan


def sizes_of(*sizes):
    return jnp.array(sizes, jnp.int32)


@pytest.mark.parametrize("name", RULES)
def test_native_and_plain_agree(name):
    model, packed, plan = quantized(RULES[name])
    assert plan.sites[0].runs_on == ("native int8" if "rows" in name else "native float")
    assert packed["w"].array.layout == "panels"
    plain = fewbit.unpack(packed)
    for sizes in (sizes_of(3, 0, 5, 3), sizes_of(1, 2, 3, 1), sizes_of(0, 0, 0, 0)):
        got, want = model(packed, X, sizes), model(plain, X, sizes)
        assert got.shape == (ROWS, N) and relative_error(got + 1, want + 1) < 1e-5
        assert not got[int(sizes.sum()) :].any()

        def loss(x, params, sizes=sizes):
            return jnp.sum(model(params, x, sizes) ** 2)

        slopes = [jax.grad(loss)(X, params) for params in (packed, plain)]
        assert relative_error(slopes[0] + 1, slopes[1] + 1) < 1e-4
    text = jax.jit(model).lower(packed, X, sizes).as_text()
    assert text.count("fewbit_matmul") == 1


def test_more_rows_than_there_are_are_cut_off_as_by_xla():
    model, packed, _ = quantized(RULES["int8"])
    for sizes in (sizes_of(8, 8, 8, 8), sizes_of(20, 1, 1, 1)):
        got, want = model(packed, X, sizes), model(fewbit.unpack(packed), X, sizes)
        assert relative_error(got, want) < 1e-5


def test_sizes_that_do_not_fit_the_stack():
    _, packed, _ = quantized(RULES["int8"])
    stack = packed["w"].array
    for sizes in (sizes_of(3, 3, 3), sizes_of(1, 1, 1, 1, 1), jnp.array(3)):
        with pytest.raises(ValueError, match=r"one number for each entry of .*, shape \(4,\)"):
            kernels.panel_product(X, stack, group_sizes=sizes)
    with pytest.raises(ValueError, match="is a stack"):
        kernels.panel_product(X, stack)


def test_experts_of_each_layer_of_a_scan():
    def layers(params, x, sizes):
        def layer(x, w):
            return jnp.tanh(jax.lax.ragged_dot(x, w, sizes)), None

        return jax.lax.scan(layer, x, params["w"])[0]

    params, x = {"w": 0.1 * normal(2, 3, GROUPS, 128, 128)}, normal(0, ROWS, 128)
    model, packed, plan = quantized(RULES["int4"], layers, params, x)
    assert plan.sites[0].runs_on == "native float + tanh"
    sizes = sizes_of(2, 4, 4, 1)
    want = model(fewbit.unpack(packed), x, sizes)
    assert relative_error(model(packed, x, sizes), want) < 1e-5
    text = jax.jit(model).lower(packed, x, sizes).compile().as_text()
    assert "fewbit_matmul" in text and "u8[1,4," not in text  # no layer is copied


def test_columns_stay_on_their_devices():
    model, packed, _ = quantized(RULES["int8"], params={"w": normal(3, GROUPS, K, 1024)})
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    q = packed["w"].array

    def split(part):
        spec = PartitionSpec(None, "d") if part.ndim > 1 else PartitionSpec()
        return jax.device_put(part, NamedSharding(mesh, spec))

    placed = {"w": packed["w"].replace(array=jax.tree.map(split, q))}
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec()))
    sizes = sizes_of(3, 3, 3, 2)
    program = jax.jit(model).lower(placed, x, sizes).compile()
    assert "fewbit_matmul" in program.as_text() and "all-gather" not in program.as_text()
    assert relative_error(program(placed, x, sizes), model(packed, X, sizes)) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_rows(dtype):
    model, packed, _ = quantized(RULES["int8 rows"], x=X.astype(dtype))
    sizes = sizes_of(3, 0, 5, 3)
    got = model(packed, X.astype(dtype), sizes)
    want = model(fewbit.unpack(packed), X.astype(dtype), sizes)
    assert relative_error(np.asarray(got, np.float32), np.asarray(want, np.float32)) < 2e-2


def test_other_platforms_get_no_native_call():
    model, packed, _ = quantized(RULES["int8"])
    traced = jax.jit(model).trace(packed, X, sizes_of(3, 0, 5, 3))
    for platform in ("tpu", "cuda"):
        assert "fewbit_matmul" not in traced.lower(lowering_platforms=(platform,)).as_text()


def gated(params, x, sizes):
    hidden = jax.nn.silu(jax.lax.ragged_dot(x, params["w"], sizes))
    return jax.nn.gelu(jax.lax.ragged_dot(x, params["w"], sizes) + params["b"][None]) * hidden


@pytest.mark.parametrize("name", ("int8", "int8 rows", "int4 rows"))
def test_bias_and_activation_are_done_on_the_way(name):
    params = {**W, "b": normal(2, N)}
    model, packed, plan = quantized(RULES[name], gated, params)
    what = "native int8" if "rows" in name else "native float"
    assert [site.runs_on for site in plan.sites] == [f"{what} + silu", f"{what} + bias + gelu"]
    plain = fewbit.unpack(packed)
    for sizes in (sizes_of(3, 0, 5, 3), sizes_of(1, 2, 3, 1), sizes_of(0, 0, 0, 0)):
        got, want = jax.jit(model)(packed, X, sizes), jax.jit(model)(plain, X, sizes)
        assert relative_error(got + 1, want + 1) < 1e-5  # rows of no entry too

        def loss(x, params, sizes=sizes):
            return jnp.sum(model(params, x, sizes) ** 2)

        slopes = [jax.grad(loss)(X, params) for params in (packed, plain)]
        assert relative_error(slopes[0] + 1, slopes[1] + 1) < 1e-4


def test_a_batch_of_weights_finishes_too():
    def batched(params, x, _):
        return jax.nn.relu(jnp.einsum("emk,ekn->emn", x, params["w"]) + params["b"][None, None])

    params, x = {**W, "b": normal(2, N)}, normal(0, GROUPS, 5, K)
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(batched, rules, params, x, 0)
    assert plan.sites[0].runs_on == "native int8 + bias + relu"
    packed = fewbit.quantize_params(params, plan)
    model = fewbit.quantize_model(batched, PtqProvider(rules))
    got, want = model(packed, x, 0), model(fewbit.unpack(packed), x, 0)
    assert relative_error(got, want) < 1e-5
