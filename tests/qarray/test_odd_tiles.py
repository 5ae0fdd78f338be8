"""Tiles beside the usual groups of rows: blocks of rows and columns, sums shorter than a tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, quantized, relative_error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fewbit
from fewbit import QuantizationRule
from fewbit.qarray import quantize_with


@pytest.mark.parametrize("tile", [{0: 16, 1: 4}, {1: 4}, {-2: 128, 1: 128}, {0: 32, 1: 0.25}])
@pytest.mark.parametrize("qtype, act", [("int8", None), ("int4", "int8"), ("fp8", None)])
def test_blocks_of_rows_and_columns(qtype, act, tile):
    rules = [QuantizationRule(weight_qtype=qtype, act_qtype=act, tile_size=tile)]
    params, x = {"w": normal(0, 256, 256)}, normal(1, 3, 256)

    def f(params, x):
        return x @ params["w"]

    qf, qp, _ = quantized(f, rules, params, x)
    rows, columns = (tile.get(a, tile.get(a - 2, 256)) for a in (0, 1))
    columns = round(columns * 256) if isinstance(columns, float) else columns
    assert qp["w"].array.scale.shape == (256 // rows, 256 // columns)
    w = np.asarray(params["w"], np.float64)
    by_block = w.reshape(256 // rows, rows, 256 // columns, columns)
    bound = {"int8": 127.5, "int4": 7.5, "fp8": 448.0}[qtype]
    scale = np.abs(by_block).max((1, 3)) / bound
    np.testing.assert_allclose(qp["w"].array.scale, scale, rtol=1e-6)
    stored = np.asarray(fewbit.dequantize(qp["w"].array), np.float64)
    if act is None:
        np.testing.assert_allclose(qf(qp, x), np.asarray(x, np.float64) @ stored, atol=1e-4)
    with fewbit.kernels.backend("xla"):
        assert relative_error(jax.jit(qf)(qp, x), qf(qp, x)) < 1e-5
    assert relative_error(fewbit.pack(qp)["w"].array.qvalue, qp["w"].array.qvalue) == 0
    assert relative_error(jax.jit(qf)(fewbit.pack(qp), x), f(params, x)) < 0.3


def attention(params, x):
    q, k, v = (x @ params[name] for name in "qkv")
    return jax.nn.softmax(q @ k.T / 8) @ v @ params["o"]


@pytest.mark.parametrize(
    "rule",
    [
        QuantizationRule(
            weight_qtype="int4", act_qtype="int8", tile_size=32, scale_dtype="float16"
        ),
        QuantizationRule(weight_qtype="mxfp8", act_qtype="mxfp8"),
        QuantizationRule(weight_qtype="nvfp4", act_qtype="nvfp4"),
    ],
    ids=["int4", "mxfp8", "nvfp4"],
)
def test_a_sequence_may_be_shorter_than_a_tile(rule):
    """What attention sums over is as long as the text, which no rule can know."""
    params = {name: normal(i, 64, 64) / 8 for i, name in enumerate("qkvo")}
    qf, qp, _ = quantized(attention, [rule], params, normal(9, 64, 64))
    for length in (48, 33, 32, 8, 1):
        x = normal(9, length, 64)
        assert relative_error(jax.jit(qf)(qp, x), attention(params, x)) < 0.5
        fewbit.plan(attention, [rule], params, x)


def test_a_short_sum_of_activations_is_one_tile():
    """As if the rule had no tile: one scale for all that is summed over."""
    a, b = normal(0, 4, 8), normal(1, 8, 5)
    params = {"w": normal(2, 64, 64)}

    def f(params, x):
        return (x @ params["w"]).sum() * 0 + a @ b

    outs = []
    for tile in (32, None):
        rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=tile)]
        qf, qp, _ = quantized(f, rules, params, jnp.ones((2, 64)))
        outs.append(np.asarray(qf(qp, jnp.ones((2, 64)))))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_a_weight_that_is_shorter_than_a_tile_is_still_a_mistake():
    rules = [QuantizationRule(weight_qtype="int4", tile_size=32)]
    with pytest.raises(ValueError, match=r"cannot be tiled as \{0: 32\}"):
        fewbit.plan(lambda p, x: x @ p, rules, normal(0, 8, 64), normal(1, 2, 8))


def test_in_training_a_mapping_names_the_axes_of_the_weight():
    """Of two activations it names none; a trained model serves the same bits."""
    rule = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", tile_size={0: 24, 1: 32})
    params, x = {"w": normal(0, 64, 40)}, normal(1, 6, 64)

    def f(params, x):
        y = x @ params["w"]
        return y @ y.T

    model = fewbit.quantize_model(f, fewbit.QtProvider([rule]))
    assert relative_error(model(params, x), f(params, x)) < 0.03
    served = fewbit.to_ptq(model, params, None, x)
    assert served.params["w"].array.scale.shape == (3, 2)
    np.testing.assert_array_equal(served.model(served.params, x), model(params, x))


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_uneven_tiles_of_a_sharded_array_have_the_same_codes(qtype, method, kind):
    """Also at exact ties, which numbers on a grid often are."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(KINDS[kind],) * 2)
    for shape, tiles, spec in (
        ((104, 64), {0: 30}, P("a", "b")),
        ((64, 96), {1: 40}, P(None, "b")),
        ((96, 96), {0: 40, 1: 36}, P("b", "a")),
        ((96, 64), {0: 32}, P("a", "b")),
    ):
        channels = tuple(axis for axis in (0, 1) if axis not in tiles)
        how = fewbit.HowToQuantize(
            qtype=qtype, tiled_axes=tiles, channelwise_axes=channels, calibration_method=method
        )
        for seed in range(3):
            x = jnp.round(normal(seed, *shape) * 16) / 16
            wanted = quantize_with(x, how)
            with jax.set_mesh(mesh):
                found = quantize_with(jax.device_put(x, NamedSharding(mesh, spec)), how)
            assert jax.device_get(found) == jax.device_get(wanted)


def test_codes_beside_a_zero_point_are_rounded_once_and_once_more():
    """Not in one step, a fused multiply-add, which XLA takes in some programs only."""
    x = jnp.round(normal(0, 104, 64) * 16) / 16
    q = quantize_with(x, fewbit.HowToQuantize(qtype="int8", calibration_method="minmax"))
    ratio = np.asarray(x) * (np.float32(1) / np.asarray(q.scale))
    codes = np.clip(np.round(ratio + np.asarray(q.zero_point, np.float32)), -128, 127)
    np.testing.assert_array_equal(q.qvalue, codes.astype(np.int8))
