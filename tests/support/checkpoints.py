"""What the tests of files share: trees of every kind, and what it means that two are equal."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from helpers import normal

import fewbit
from fewbit import QuantizationRule, QuantizedParams, WithAux
from fewbit.calibration._statistics import SimpleMovingAverage
from fewbit.io._safetensors import SafetensorsWriter, dtype_name
from fewbit.numerics import FORMATS, dtype_bits
from fewbit.qarray import HowToQuantize, QArray, is_box, quantize_with, unboxed, unpack


def how_of(qtype, shape, tile=None, method="absmax"):
    row = FORMATS[qtype]
    tile = row.tile or tile
    if row.bound is None:
        method = "minmax"
    tiled = {} if tile is None else {0: tile}
    return HowToQuantize(
        qtype=qtype,
        channelwise_axes=(len(shape) - 1,),
        tiled_axes=tiled,
        calibration_method=method,
        rule=QuantizationRule(
            module_path=".*kernel", weight_qtype=qtype, weight_calibration_method=method
        ),
        roles="kn" if len(shape) == 2 else None,
    )


def weight(qtype, shape=(64, 32), tile=None, seed=0, dtype=jnp.float32, method="absmax"):
    how = how_of(qtype, shape, tile, method)
    return WithAux(quantize_with(normal(seed, *shape, dtype=dtype), how), how)


def bits_of(array):
    """The numbers of an array as integers: equal bits, not equal values (NaN, -0)."""
    array = np.asarray(array)
    if dtype_bits(array.dtype) < 8:
        mask = np.uint8(2 ** dtype_bits(array.dtype) - 1)
        return array.view(np.uint8) & mask
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same(found, wanted, path=""):
    """Same structure, types, static fields and bits; layouts may differ."""
    if isinstance(wanted, WithAux):
        assert isinstance(found, WithAux), path
        assert found.how == wanted.how and found.how.rule == wanted.how.rule, path
        assert found.how.roles == wanted.how.roles, path
        return assert_same(found.array, wanted.array, path)
    if isinstance(wanted, QArray):
        assert isinstance(found, QArray), path
        found, wanted = (q if is_box(q.data) else unpack(q) for q in (found, wanted))
        assert found._static == wanted._static, path
        for part in ("qvalue", "scale", "zero_point", "tensor_scale"):
            assert_same(getattr(found, part), getattr(wanted, part), f"{path}.{part}")
        return None
    if wanted is None or isinstance(wanted, str | bool | int | float):
        assert type(found) is type(wanted), path
        assert found == wanted or (found != found and wanted != wanted), path
        return None
    if is_box(wanted):
        assert type(found) is type(wanted) and found.names == wanted.names, path
        return assert_same(unboxed(found), unboxed(wanted), path)
    if isinstance(wanted, dict | nn.FrozenDict):
        assert type(found) is type(wanted) and set(found) == set(wanted), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}/{key}")
        return None
    if isinstance(wanted, QuantizedParams):
        assert isinstance(found, QuantizedParams), path
        assert_same(found.params, wanted.params, f"{path}/params")
        return assert_same(dict(found.act_scales), dict(wanted.act_scales), f"{path}/act_scales")
    if isinstance(wanted, list | tuple):
        assert type(found) is type(wanted) and len(found) == len(wanted), path
        for i, (f, w) in enumerate(zip(found, wanted, strict=True)):
            assert_same(f, w, f"{path}/{i}")
        return None
    if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        assert found.dtype == wanted.dtype, path
        found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, path
    assert (bits_of(found) == bits_of(wanted)).all(), path
    return None


def mlp(params, x):
    return jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"]) @ params["down"]["kernel"]


X = normal(9, 3, 64)
PARAMS = {
    "up": {"kernel": normal(0, 64, 128), "bias": normal(1, 1, 128)},
    "down": {"kernel": normal(2, 128, 64)},
}
W4 = [QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")]


def quantized_mlp(rules=W4, params=PARAMS):
    """(quantized parameters, plan) of a small function."""
    plan = fewbit.plan(mlp, rules, params, X)
    return fewbit.quantize_params(params, plan), plan


def static_mlp():
    """The same with static activation scales: QuantizedParams."""
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    plan = fewbit.plan(mlp, rules, PARAMS, X)
    average, seen = SimpleMovingAverage(), {"absmax": jnp.array([[3.0]])}
    stats = {s.site: {s.side: average.update(average.init(seen), seen)} for s in plan.scales}
    return fewbit.quantize_params(PARAMS, plan, stats), plan


def write_file(path, tensors):
    """A safetensors file of arrays by name."""
    entries = [(n, dtype_name(np.asarray(a).dtype), np.shape(a)) for n, a in tensors.items()]
    with SafetensorsWriter(path, entries) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
