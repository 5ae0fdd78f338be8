"""Learned scales: LSQ's gradients against float64 references, starts, and what is stored after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import F32_ULP

import fewbit
from fewbit.qarray import HowToQuantize, dequantize, quantize_with
from fewbit.training._learned import learned_pair, quantize_learned, start_scale, used_scale

RANGES = {"int2": (-2, 1), "int4": (-8, 7), "int8": (-128, 127), "float8_e4m3fn": (-448, 448)}


def learned_rule(**fields):
    fields = {"weight_qtype": "int2", "weight_calibration_method": "learned", **fields}
    return fewbit.QtRule(**fields)


def trains(function, **fields):
    return fewbit.quantize_model(function, fewbit.QtProvider([learned_rule(**fields)]))


# --- the reference: one loop over elements, in float64 -------------------------------------------


def group_of(index, tiles):
    return tuple(i // t for i, t in zip(index, tiles, strict=True))


def surrogate(w, s, tiles, low, high, residue):
    """The rounded weight as a smooth function: what rounding added is held fixed."""
    out = np.zeros_like(w)
    for index in np.ndindex(w.shape):
        scale = s[group_of(index, tiles)]
        out[index] = scale * (np.clip(w[index] / scale, low, high) + residue[index])
    return out


def derivatives(w, s, tiles, low, high, codes, g):
    """Central differences of sum(g * surrogate) over every weight and every scale."""
    clipped = np.array(
        [np.clip(w[i] / s[group_of(i, tiles)], low, high) for i in np.ndindex(w.shape)]
    ).reshape(w.shape)
    residue = codes - clipped

    def loss(w, s):
        return float(np.sum(g * surrogate(w, s, tiles, low, high, residue)))

    def slope(array, index, run):
        step = 1e-6 * max(abs(array[index]), 1e-3)
        up, down = array.copy(), array.copy()
        up[index], down[index] = array[index] + step, array[index] - step
        return (run(up) - run(down)) / (2 * step)

    dw, ds = np.zeros_like(w), np.zeros_like(s)
    for index in np.ndindex(w.shape):
        dw[index] = slope(w, index, lambda w: loss(w, s))
    for index in np.ndindex(s.shape):
        ds[index] = slope(s, index, lambda s: loss(w, s))
    return dw, ds


def group_sizes(shape, tiles, scale_shape):
    counts = np.zeros(scale_shape)
    for index in np.ndindex(tuple(shape)):
        counts[group_of(index, tiles)] += 1
    return counts


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    tiles, channels, tiled = list(shape), [], {}
    for axis, size in enumerate(shape):
        kind = draw(st.sampled_from(["shared", "channel", "tile"]))
        if kind == "channel":
            channels.append(axis)
            tiles[axis] = 1
        elif kind == "tile":
            tiled[axis] = draw(st.integers(1, size))
            tiles[axis] = tiled[axis]
    qtype = draw(st.sampled_from(list(RANGES)))
    how = HowToQuantize(
        qtype=qtype, channelwise_axes=channels, tiled_axes=tiled, calibration_method="learned"
    )
    return shape, tuple(tiles), how, draw(st.integers(0, 2**31)), draw(st.booleans())


@settings(max_examples=6, deadline=None)
@given(cases())
def test_gradients_are_those_of_the_surrogate(case):
    check_gradients(*case)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(cases())
def test_gradients_are_those_of_the_surrogate_in_many_shapes(case):
    check_gradients(*case)


def check_gradients(shape, tiles, how, seed, negative):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape)
    low, high = RANGES[str(how.qtype)]
    scale_shape = tuple(-(-n // t) for n, t in zip(shape, tiles, strict=True))
    s = rng.uniform(0.2, 1.5, scale_shape) / (1 if high < 100 else high / 2)
    g = rng.normal(size=shape)
    for index in np.ndindex(shape):  # no weight on an edge, where a difference looks both ways
        for edge in (low, high):
            scale = s[group_of(index, tiles)]
            if abs(w[index] / scale - edge) < 1e-2 * abs(edge):
                w[index] += 0.05 * scale * abs(edge)
    w, s, g = (np.float32(a).astype(np.float64) for a in (w, s, g))
    parameter = jnp.asarray(-s if negative else s, jnp.float32)

    def loss(w, parameter):
        pair = learned_pair(w, parameter, how)
        return jnp.sum(pair.array * jnp.asarray(g, jnp.float32))

    grads = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(w, jnp.float32), parameter)
    q = quantize_learned(jnp.asarray(w, jnp.float32), parameter, how)
    codes = np.asarray(q.qvalue.astype(jnp.float32), np.float64)
    dw, ds = derivatives(w, s, tiles, low, high, codes, g)
    counts = group_sizes(shape, tiles, scale_shape)
    ds = ds / np.sqrt(counts * high) * (-1 if negative else 1)
    np.testing.assert_allclose(grads[0], dw, atol=1e-5 * np.abs(g).max())
    size = max(high, 1) * np.abs(g).sum() / np.sqrt(high)
    np.testing.assert_allclose(grads[1], ds, atol=2e-6 * size)


def test_without_clipping_the_gradient_passes_everywhere():
    how = HowToQuantize(qtype="int2", calibration_method="learned")
    w, s = jnp.array([5.0, -5.0, 0.1]), jnp.array([0.5])
    run = lambda w, clip: learned_pair(w, s, how, clip=clip).array.sum()  # noqa: E731
    assert jax.grad(run)(w, True).tolist() == [0, 0, 1]
    assert jax.grad(run)(w, False).tolist() == [1, 1, 1]


# --- starts and the parameter's way to a scale ---------------------------------------------------


@pytest.mark.parametrize("start", ["absmax", "absmax,0.7", "mse", "rms,2", "percentile,90"])
def test_a_scale_starts_where_the_method_puts_it(start):
    w = jax.random.normal(jax.random.key(0), (32, 6))
    fields = dict(qtype="int4", channelwise_axes=(1,), tiled_axes={0: 8})
    found = start_scale(w, HowToQuantize(calibration_method=f"learned,{start}", **fields))
    wanted = quantize_with(w, HowToQuantize(calibration_method=start, **fields)).scale
    np.testing.assert_allclose(found, wanted, rtol=2 * F32_ULP)


def test_the_start_of_the_paper():
    w = np.random.default_rng(0).normal(size=(32, 6))
    how = HowToQuantize(
        qtype="int3", channelwise_axes=(1,), tiled_axes={0: 8}, calibration_method="learned,lsq"
    )
    groups = np.abs(w).reshape(4, 8, 6).mean(1)
    found = start_scale(jnp.asarray(w, jnp.float32), how)
    np.testing.assert_allclose(found, 2 * groups / np.sqrt(3), rtol=1e-6)


def test_few_bits_start_from_the_least_error_and_many_from_absmax():
    w = jax.random.normal(jax.random.key(0), (32, 6))
    for qtype, method in (("int4", "mse"), ("int8", "absmax"), ("int2", "mse")):
        found = start_scale(w, HowToQuantize(qtype=qtype, calibration_method="learned"))
        wanted = quantize_with(w, HowToQuantize(qtype=qtype, calibration_method=method)).scale
        np.testing.assert_allclose(found, wanted, rtol=2 * F32_ULP)


@pytest.mark.parametrize("start", ["absmax", "mse", "lsq"])
def test_weights_of_zeros_start_with_a_scale_that_divides(start):
    how = HowToQuantize(qtype="int2", calibration_method=f"learned,{start}")
    assert start_scale(jnp.zeros((4, 4)), how).tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_scale_is_positive_whatever_the_optimizer_did(dtype):
    how = HowToQuantize(qtype="int4", calibration_method="learned", scale_dtype=dtype)
    parameter = jnp.array([0.25, -0.25, 0.0, -0.0, 1e-30, -3e38])
    scale = used_scale(parameter, how, "float32")
    assert scale.dtype == jnp.dtype(dtype) and bool(jnp.all((scale > 0) & jnp.isfinite(scale)))
    assert scale[:2].tolist() == [0.25, 0.25]
    total = lambda w, p: jnp.sum(learned_pair(w, p, how).array)  # noqa: E731
    how = how.replace(channelwise_axes=(0,))
    grads = jax.grad(total, (0, 1))(jnp.ones((6,)), parameter)
    assert bool(jnp.isfinite(jnp.stack(grads)).all())


def test_a_scale_at_zero_finds_its_way_back():
    how = HowToQuantize(qtype="int4", calibration_method="learned")
    w, p = jnp.array([1.0, -0.5]), jnp.zeros((1,))
    loss = lambda p: jnp.sum((learned_pair(w, p, how).array - w) ** 2)  # noqa: E731
    step = jax.jit(lambda p: p - 0.05 * jax.grad(loss)(p))
    for _ in range(200):
        p = step(p)
    assert float(loss(p)) < 0.05


# --- what is stored after training ---------------------------------------------------------------

SHAPES = {
    "dot": (lambda p, x: x @ p["w"], (24, 5), (3, 24)),
    "weight on the left": (lambda p, x: p["w"].T @ x.T, (24, 5), (3, 24)),
    "einsum": (lambda p, x: jnp.einsum("bd,dhk->bhk", x, p["w"]), (24, 2, 5), (3, 24)),
    "conv": (
        lambda p, x: jax.lax.conv_general_dilated(
            x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (3, 3, 4, 5),
        (2, 6, 6, 4),
    ),
    "ragged": (
        lambda p, x: jax.lax.ragged_dot(x, p["w"], jnp.array([3, 1, 2], jnp.int32)),
        (3, 24, 5),
        (6, 24),
    ),
    "tied": (
        lambda p, x: (p["w"][jnp.arange(3)] @ jnp.ones((24, 24))) @ p["w"].T,
        (7, 24),
        (3, 24),
    ),
}
RULES = {
    "per channel": dict(),
    "groups": dict(tile_size=8),
    "uneven groups": dict(tile_size=7),
    "per tensor": dict(disable_channelwise_axes=True),
    "int4, float16 scales": dict(weight_qtype="int4", scale_dtype="float16"),
    "fp8": dict(weight_qtype="float8_e4m3fn"),
    "all int8": dict(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"),
}


QUICK = {("dot", rule) for rule in ("uneven groups", "per tensor", "fp8", "all int8")}
QUICK |= {(op, "groups") for op in SHAPES} | {("conv", "per channel")}
SERVED = [
    pytest.param(op, rule, marks=() if (op, rule) in QUICK else pytest.mark.long)
    for op in SHAPES
    for rule in RULES
    if op != "conv" or "tile_size" not in RULES[rule]
]


@pytest.mark.parametrize(("op", "rule"), SERVED)
def test_what_is_served_is_what_was_trained(op, rule):
    function, shape, inputs = SHAPES[op]
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], shape)}
    x = jax.random.normal(keys[1], inputs)
    f = trains(function, **RULES[rule])
    params = fewbit.add_learned_scales(f, params, x)
    step = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(f(p, x)))))
    for _ in range(2):
        grads = step(params)
        assert all(bool(jnp.any(g != 0)) for g in grads.values())
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
    served = fewbit.to_ptq(f, params, None, x)
    assert jnp.array_equal(served.model(served.params, x), f(params, x))
    assert set(served.params) == {"w"}
    q = served.params["w"].array
    assert jnp.array_equal(
        q.scale.astype(jnp.float32), jnp.abs(params["w_qscale"]).astype(q.scale.dtype).astype("f4")
    )
    # Not a copy of what a plain method would give: it was moved by training.
    assert not jnp.array_equal(q.scale, quantize_with(params["w"], q_how(served)).scale)


def q_how(served):
    return served.plan.leaf("w").how.replace(calibration_method="absmax")


def test_a_bfloat16_weight_has_a_float32_scale_and_stores_a_bfloat16_one():
    f = trains(lambda p, x: x @ p["w"])
    params = {"w": jax.random.normal(jax.random.key(0), (8, 4), jnp.bfloat16)}
    x = jnp.ones((2, 8), jnp.bfloat16)
    params = fewbit.add_learned_scales(f, params, x)
    grads = jax.grad(lambda p: f(p, x).astype(jnp.float32).sum())(params)
    assert params["w_qscale"].dtype == jnp.float32 == grads["w_qscale"].dtype
    assert grads["w"].dtype == jnp.bfloat16
    served = fewbit.to_ptq(f, params, None, x)
    assert served.params["w"].array.scale.dtype == jnp.bfloat16
    assert jnp.array_equal(served.model(served.params, x), f(params, x))


def test_two_uses_of_a_weight_add_their_gradients():
    f = trains(lambda p, x: (x @ p["w"]) @ p["w"], disable_channelwise_axes=True)
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (6, 6))}
    x = jax.random.normal(keys[1], (3, 6))
    params = fewbit.add_learned_scales(f, params, x)
    how = HowToQuantize(qtype="int2", calibration_method="learned")

    def by_hand(p):
        w = learned_pair(p["w"], p["w_qscale"], how).array
        return jnp.sum(jnp.sin((x @ w) @ w))

    wanted = jax.jit(jax.grad(by_hand))(params)
    found = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(f(p, x)))))(params)
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_scan_learn_as_layers_of_their_own(remat):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    body = jax.checkpoint(layer) if remat else layer
    stacked = trains(lambda p, x: jax.lax.scan(body, x, p["w"])[0], tile_size=4)
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (3, 8, 8))}
    x = jax.random.normal(keys[1], (2, 8))
    params = fewbit.add_learned_scales(stacked, params, x)
    assert params["w_qscale"].shape == (3, 2, 8)

    def single(p, x):
        for w in (p["a"], p["b"], p["c"]):
            x, _ = layer(x, w)
        return x

    apart = trains(single, tile_size=4)
    own = {name: params["w"][k] for k, name in enumerate("abc")}
    own = fewbit.add_learned_scales(apart, own, x)
    for k, name in enumerate("abc"):
        assert jnp.array_equal(params["w_qscale"][k], own[f"{name}_qscale"])
    found = jax.jit(jax.grad(lambda p: stacked(p, x).sum()))(params)
    wanted = jax.jit(jax.grad(lambda p: apart(p, x).sum()))(own)
    for end in ("", "_qscale"):
        both = jnp.stack([wanted[name + end] for name in "abc"])
        np.testing.assert_allclose(found["w" + end], both, rtol=1e-4, atol=1e-5)


def test_gradients_are_the_same_on_eight_devices():
    f = trains(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], tile_size=8)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (16, 32)),
        "v": jax.random.normal(keys[1], (32, 8)),
    }
    x = jax.random.normal(keys[2], (8, 16))
    whole = fewbit.add_learned_scales(f, params, x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda a, *s: jax.device_put(  # noqa: E731
        a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*s))
    )
    split = {"w": place(params["w"], None, "model"), "v": place(params["v"], "model")}
    split = fewbit.add_learned_scales(f, split, x)
    assert split["w_qscale"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
    grad = jax.jit(jax.grad(lambda p, x: jnp.mean(jnp.square(f(p, x)))))
    wanted, found = grad(whole, x), grad(split, place(x, "data"))
    for name in whole:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)


def test_per_example_gradients():
    f = trains(lambda p, x: x @ p["w"])
    params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
    x = jax.random.normal(jax.random.key(1), (3, 6))
    params = fewbit.add_learned_scales(f, params, x)
    one = lambda p, x: jnp.sum(jnp.square(f(p, x[None])))  # noqa: E731
    each = jax.vmap(jax.grad(one), (None, 0))(params, x)
    whole = jax.grad(lambda p: jnp.sum(jnp.square(f(p, x))))(params)
    for name in params:
        np.testing.assert_allclose(each[name].sum(0), whole[name], rtol=1e-4, atol=1e-5)


def test_emulated_training_has_the_same_gradients():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (8, 4))}
    x = jax.random.normal(keys[1], (3, 8))
    rules = [learned_rule(tile_size=4)]
    found = []
    for emulate in (False, True):
        provider = fewbit.QtProvider(rules, emulate=emulate)
        f = fewbit.quantize_model(lambda p, x: x @ p["w"], provider)
        full = fewbit.add_learned_scales(f, params, x)
        found.append(jax.grad(lambda p, f=f: jnp.sum(jnp.sin(f(p, x))))(full))
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-6)


def test_a_tree_without_room_keeps_its_scales_beside_it():
    f = trains(lambda p, x: x @ p[0])
    x = jnp.ones((2, 4))
    params = fewbit.add_learned_scales(f, [jax.random.normal(jax.random.key(0), (4, 4))], x)
    assert set(params.adapters) == {"0_qscale"}
    grads = jax.grad(lambda p: jnp.sum(jnp.square(f(p, x))))(params)
    assert bool(jnp.any(grads.adapters["0_qscale"] != 0))
    served = fewbit.to_ptq(f, params, None, x)
    assert jnp.array_equal(served.model(served.params, x), f(params, x))


def test_dequantized_codes_are_the_value_that_gradients_see():
    how = HowToQuantize(qtype="int3", tiled_axes={0: 4}, calibration_method="learned")
    w = jax.random.normal(jax.random.key(0), (8, 3))
    pair = learned_pair(w, start_scale(w, how), how)
    assert jnp.array_equal(pair.array, dequantize(pair.quantized))


@pytest.mark.parametrize("spec", [(None, "model"), ("data", None)])
def test_gradients_on_an_explicit_mesh_even_where_groups_are_cut_open(spec):
    f = trains(lambda p, x: x @ p["w"], tile_size=8)
    params = {"w": jax.random.normal(jax.random.key(0), (16, 8))}
    x = jax.random.normal(jax.random.key(1), (4, 16))
    params = fewbit.add_learned_scales(f, params, x)
    grad = jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.square(f(p, x)))))
    wanted = grad(params, x)
    types = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=types)):
        split = {"w": jax.device_put(params["w"], jax.sharding.PartitionSpec(*spec))}
        whole = jax.device_put(x, jax.sharding.PartitionSpec())
        split = fewbit.add_learned_scales(f, split, whole)
        found = jax.device_get(grad(split, whole))
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_gradients_of_an_ensemble():
    f = trains(lambda p, x: x @ p["w"])
    params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
    x = jax.random.normal(jax.random.key(1), (3, 6))
    params = fewbit.add_learned_scales(f, params, x)
    both = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    grad = jax.grad(lambda p: jnp.sum(jnp.square(f(p, x))))
    found, wanted = jax.jit(jax.vmap(grad))(both), jax.jit(grad)(params)
    for name in params:
        np.testing.assert_allclose(found[name][0], wanted[name], rtol=1e-4, atol=1e-5)
