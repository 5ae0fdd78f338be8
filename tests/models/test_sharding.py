"""Eight host devices: parameters stay sharded and quantized, on auto and on explicit meshes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8, W8A8, normal, quantized, relative_error
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import CODE_OF_NEXT_LAYER

import fewbit
from fewbit import QuantizationRule, kernels

PARAMS = {"up": normal(0, 64, 128), "down": normal(1, 128, 64)}
SPECS = {"up": P(None, "m"), "down": P("m", None)}
X = normal(2, 16, 64)
TILES = {"nf4": {}, "int3": {}, "mxfp4": {0: 32}}
INT8_DOT = "native int8" if kernels.native_available() else "xla int8 dot"


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind, kind))


def model(params, x, out=None):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.einsum("bf,fo->bo", hidden, params["down"], out_sharding=out)


@pytest.mark.parametrize("rules", [W8A8, W8], ids=["w8a8", "w8"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_tensor_parallel_equals_one_device(kind, rules):
    expected = np.asarray(
        jax.jit(quantized(model, rules, PARAMS, X)[0])(quantized(model, rules, PARAMS, X)[1], X)
    )
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        f = partial(model, out=P("d", None) if kind == AxisType.Explicit else None)
        params = {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in PARAMS.items()}
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        qf, qp, _ = quantized(f, rules, params, x)
        for name, spec in SPECS.items():
            assert qp[name].array.qvalue.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        out = jax.jit(qf)(qp, x)
        # A last place of the hidden layer may turn one of its codes.
        most = 1e-4 if rules is W8 else CODE_OF_NEXT_LAYER * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=most)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("d", None)), 2)
        hlo = jax.jit(qf).lower(qp, x).compile().as_text()
        assert not re.findall(r"f32\[(64,128|128,64)\]\S* all-gather", hlo)
        gradient = jax.jit(jax.grad(lambda x: qf(qp, x).sum()))(x)
        assert relative_error(gradient, jax.grad(lambda x: model(PARAMS, x).sum())(X)) < 0.1


@pytest.mark.parametrize("qtype", ["nf4", "int3", "mxfp4"])
def test_codes_of_other_formats_on_an_explicit_mesh(qtype):
    """nf4 looks its numbers up, and such a mesh asks where results go."""
    rules = [QuantizationRule(weight_qtype=qtype)]
    expected = fewbit.quantize(PARAMS["up"], qtype, channelwise_axes=(1,), tiled_axes=TILES[qtype])
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        up = jax.device_put(PARAMS["up"], NamedSharding(mesh, SPECS["up"]))
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        qf, qp, _ = quantized(lambda params, x: x @ params["up"], rules, {"up": up}, x)
        out = jax.jit(qf)(qp, x)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("d", "m")), 2)
        decoded = np.asarray(fewbit.dequantize(qp["up"]))
    np.testing.assert_array_equal(decoded, np.asarray(fewbit.dequantize(expected)))
    np.testing.assert_allclose(np.asarray(out), np.asarray(X) @ decoded, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_scan_over_sharded_layers(kind):
    stack = {"w": normal(0, 3, 64, 64) / 8}
    f = lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]  # noqa: E731
    expected = np.asarray(f(stack, X))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(stack["w"], NamedSharding(mesh, P(None, None, None)))}
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        qf, qp, _ = quantized(f, W8A8, params, x)
        assert relative_error(jax.jit(qf)(qp, x), expected) < 0.05


def in_shards(mesh):
    def f(params, x):
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(None, "m"), P("m", None), P("d")),
            out_specs=P("d"),
        )
        def block(up, down, x):
            return lax.psum(jnp.tanh(x @ up) @ down, "m")

        return block(params["up"], params["down"], x)

    return f


def test_shard_map_runs_each_shard_quantized():
    f = in_shards(mesh_of(AxisType.Auto))
    qf, qp, plan = quantized(f, W8A8, PARAMS, X)
    assert [row.runs_on for row in plan.sites] == [INT8_DOT, INT8_DOT]
    assert relative_error(jax.jit(qf)(qp, X), f(PARAMS, X)) < 0.05


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "shapes"])
def test_shard_map_on_an_explicit_mesh(abstract):
    """Where a weight lies is part of its type there, in a plan too."""
    mesh = mesh_of(AxisType.Explicit)
    f = in_shards(mesh)
    with jax.set_mesh(mesh):
        params = {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in PARAMS.items()}
        x = jax.device_put(X, NamedSharding(mesh, P("d")))

        def shape_of(a):
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.typeof(a).sharding)

        seen = jax.tree.map(shape_of, (params, x)) if abstract else (params, x)
        plan = fewbit.plan(f, W8A8, *seen)
        qp = fewbit.quantize_params(params, plan)
        qf = fewbit.quantize_model(f, fewbit.PtqProvider(W8A8))
        assert relative_error(jax.jit(qf)(qp, x), f(params, x)) < 0.05


@pytest.mark.parametrize("weight, act", [("int8", "nvfp4"), ("nvfp4", "int8"), ("mxfp8", "mxfp8")])
def test_blocks_of_activations_that_a_mesh_axis_does_not_divide(weight, act):
    """96 columns over 4 devices, in blocks of 16 or 32: a reshape cuts a mesh axis into parts."""
    mesh = mesh_of(AxisType.Auto)
    rules = [QuantizationRule(weight_qtype=weight, act_qtype=act)]
    whole = {"up": normal(0, 64, 96) / 8, "down": normal(1, 96, 64) / 8}
    params = {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in whole.items()}
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    qf, qp, _ = quantized(model, rules, params, x)
    expected = quantized(model, rules, whole, X)
    assert relative_error(qf(qp, x), expected[0](expected[1], X)) < 0.02
    assert jax.jit(jax.grad(lambda x: qf(qp, x).sum()))(x).shape == X.shape


def test_weight_behind_a_sharding_constraint_stays_quantized():
    mesh = mesh_of(AxisType.Auto)

    def f(params, x):
        w = lax.with_sharding_constraint(params["up"], NamedSharding(mesh, P(None, "m")))
        return x @ w

    qf, qp, plan = quantized(f, W8A8, {"up": PARAMS["up"]}, X)
    assert plan.sites[0].runs_on == INT8_DOT
    assert relative_error(jax.jit(qf)(qp, X), X @ PARAMS["up"]) < 0.03


def test_weight_resharded_on_an_explicit_mesh_stays_quantized():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        w = jax.device_put(PARAMS["up"], NamedSharding(mesh, P("m", None)))
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        f = lambda p, x: x @ jax.sharding.reshard(p["up"], P(None, "m"))  # noqa: E731
        qf, qp, plan = quantized(f, W8A8, {"up": w}, x)
        assert plan.sites[0].runs_on == "xla int8 dot"
        assert relative_error(jax.jit(qf)(qp, x), X @ PARAMS["up"]) < 0.03


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators_with_int8_products(platform):
    qf, qp, _ = quantized(model, W8A8, PARAMS, X)
    text = jax.jit(qf).trace(qp, X).lower(lowering_platforms=(platform,)).as_text()
    products = re.findall(
        r"dot_general.*: \(tensor<\S*xi8>, tensor<\S*xi8>\) -> tensor<\S*xi32>", text
    )
    assert len(products) == 2


def test_quantizing_a_sharded_leaf_equals_quantizing_it_whole():
    mesh = mesh_of(AxisType.Auto)
    plan = fewbit.plan(model, W8A8, PARAMS, X)
    whole = fewbit.quantize_params(PARAMS, plan)
    sharded = fewbit.quantize_params(
        {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in PARAMS.items()}, plan
    )
    for name in PARAMS:
        np.testing.assert_array_equal(whole[name].array.qvalue, sharded[name].array.qvalue)
        np.testing.assert_array_equal(whole[name].array.scale, sharded[name].array.scale)


@pytest.mark.parametrize("tile", [32, 96])  # 96: the last tile is shorter
@pytest.mark.parametrize("spec", [P(None, "d"), P("d", None), P("d", "m"), P("m", None)])
def test_tiles_of_a_weight_split_over_an_explicit_mesh(spec, tile):
    mesh = mesh_of(AxisType.Explicit)
    w, x = normal(0, 256, 64), normal(1, 16, 256)
    rules = [fewbit.QuantizationRule(weight_qtype="int4", tile_size=tile)]
    plan = fewbit.plan(lambda w, x: x @ w, rules, w, x)
    split = fewbit.quantize_params(jax.device_put(w, NamedSharding(mesh, spec)), plan).array
    whole = fewbit.unpack(fewbit.quantize_params(w, plan)).array
    assert tuple(split.qvalue.sharding.spec) == tuple(spec)
    np.testing.assert_array_equal(np.asarray(split.scale), np.asarray(whole.scale))
    np.testing.assert_array_equal(
        np.asarray(split.qvalue.astype(jnp.int8)), np.asarray(whole.qvalue.astype(jnp.int8))
    )
