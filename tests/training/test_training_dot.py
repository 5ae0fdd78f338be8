"""dot_general_qt and einsum_qt against float64 references, the float ops and serving."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from oracles import training as oracle
from tolerances import BF16_ULP, CODES_AT_TIES, QT_FLOAT32

import fewbit
from fewbit import ops
from fewbit.qarray import quantize, quantize_with
from fewbit.training import (
    DotGeneralQtConfig,
    Paired,
    clip_gradient,
    dot_general_qt,
    einsum_qt,
    get_noise_fn,
)

PLAIN = (((1,), (0,)), ((), ()))
TOKENS = (((2,), (0,)), ((), ()))
INT8 = dict(lhs_qtype="int8", rhs_qtype="int8")
INT8_BOTH = dict(INT8, dlhs_grad_qtype="int8", drhs_grad_qtype="int8")
QAT, QT = DotGeneralQtConfig(**INT8), DotGeneralQtConfig(**INT8_BOTH)


def worst(found, expected):
    """Largest error over largest magnitude; a sum that cancels is held against its terms' size."""
    expected = np.asarray(expected, np.float64)
    size = max(np.max(np.abs(expected)), 0.01)
    return np.max(np.abs(np.asarray(found, np.float64) - expected)) / size


def relative(found, expected):
    """Mean error over mean magnitude."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.mean(np.abs(found - expected)) / np.mean(np.abs(expected))


def vjp(function, *operands, seed=7):
    """(result, incoming gradient, gradients)."""
    out, pull = jax.vjp(function, *operands)
    g = normal(seed, *out.shape, dtype=out.dtype)
    return out, g, pull(g)


@st.composite
def products(draw):
    """(letters of lhs, of rhs, of the result in dot_general's order, sizes)."""
    counts = [draw(st.integers(low, 2)) for low in (0, 1, 0, 0)]
    names = iter("abcdefgh")
    batch, summed, left, right = ([next(names) for _ in range(n)] for n in counts)
    lhs = draw(st.permutations(batch + summed + left))
    rhs = draw(st.permutations(batch + summed + right))
    batch.sort(key=lhs.index)
    out = batch + [c for c in lhs if c in left] + [c for c in rhs if c in right]
    sizes = {c: draw(st.integers(1, 4)) for c in batch + summed + left + right}
    return "".join(lhs), "".join(rhs), "".join(out), sizes


TYPES = st.sampled_from([None, "int8", "int4", "float8_e4m3fn"])
GRADIENT_TYPES = st.sampled_from([None, "int8", "float8_e5m2", "int4"])


def check_product(case, types, grads, residual):
    lhs, rhs, out, sizes = case
    letters = (lhs, rhs)
    operands = [normal(i, *(sizes[c] for c in own)) for i, own in enumerate(letters)]
    summed = [c for c in lhs if c in rhs and c not in out]
    batch = [c for c in out if c in lhs and c in rhs]
    numbers = tuple(
        tuple(tuple(own.index(c) for c in some) for own in letters) for some in (summed, batch)
    )
    config = DotGeneralQtConfig(
        lhs_qtype=types[0],
        rhs_qtype=types[1],
        dlhs_grad_qtype=grads[0],
        drhs_grad_qtype=grads[1],
        dlhs_residual_qtype=residual,
        drhs_residual_qtype=residual,
        use_original_residuals=residual is not None,
    )
    found, g, gradients = vjp(lambda a, b: dot_general_qt(a, b, numbers, config), *operands)
    assert worst(found, oracle.forward(letters, out, operands, types)) < QT_FLOAT32
    for side in (0, 1):
        kind = residual or ("shift" if types[1 - side] else "float")
        expected = oracle.gradient(letters, out, operands, types, g, side, grads[side], kind)
        assert gradients[side].shape == operands[side].shape
        assert worst(gradients[side], expected) < QT_FLOAT32, (side, kind)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    products(),
    st.tuples(TYPES, TYPES),
    st.tuples(GRADIENT_TYPES, GRADIENT_TYPES),
    st.sampled_from([None, None, "int8"]),
)
def test_every_product_matches_float64(case, types, grads, residual):
    check_product(case, types, grads, residual)


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    products(),
    st.tuples(TYPES, TYPES),
    st.tuples(GRADIENT_TYPES, GRADIENT_TYPES),
    st.sampled_from([None, None, "int8", "float8_e4m3fn"]),
)
def test_many_products_match_float64(case, types, grads, residual):
    check_product(case, types, grads, residual)


@pytest.mark.parametrize("tile", [4, 1 / 2, 8])
def test_gradient_tiles_are_cut_from_the_whole_contraction(tile):
    x, w = normal(0, 4, 6, 5), normal(1, 5, 3)
    config = DotGeneralQtConfig(**INT8_BOTH, drhs_tile_size=tile)
    _, g, (_, dw) = vjp(lambda x, w: dot_general_qt(x, w, TOKENS, config), x, w)
    size = tile if isinstance(tile, int) else int(24 * tile)
    expected = oracle.gradient(
        ("abk", "kn"), "abn", (x, w), ("int8", "int8"), g, 1, "int8", tile=size
    )
    assert worst(dw, expected) < QT_FLOAT32


def test_long_tiles_run_natively_and_equal_the_reference():
    x, w = normal(0, 4, 128, 32), normal(1, 32, 64)
    for tile in (1 / 2, 1 / 4, 128):
        config = DotGeneralQtConfig(**INT8_BOTH, drhs_tile_size=tile)
        run = jax.jit(
            lambda x, w, c=config: vjp(lambda a, b: dot_general_qt(a, b, TOKENS, c), x, w)
        )
        _, g, (_, dw) = run(x, w)
        size = tile if isinstance(tile, int) else int(512 * tile)
        expected = oracle.gradient(
            ("abk", "kn"), "abn", (x, w), ("int8", "int8"), g, 1, "int8", tile=size
        )
        assert relative(dw, expected) < CODES_AT_TIES


def test_without_types_it_is_the_float_op():
    x, w = normal(0, 3, 4, 6), normal(1, 6, 5)
    plain = DotGeneralQtConfig()
    for config in (plain, plain.replace(disable_gradient_clipping=True)):
        mine = vjp(lambda a, b, c=config: dot_general_qt(a, b, TOKENS, c), x, w)
        theirs = vjp(lambda a, b: jax.lax.dot_general(a, b, TOKENS), x, w)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fields", [{}, dict(tile_size=32), dict(rhs_qtype="nf4", tile_size=16)])
def test_the_forward_is_the_serving_product_to_the_bit(fields):
    x, w = normal(0, 2, 64, 128), normal(1, 128, 96)
    for extra in ({}, dict(dlhs_grad_qtype="int8", drhs_grad_qtype="int8")):
        config = DotGeneralQtConfig(**{**INT8, **fields, **extra})
        hows = [
            ops.dot_how(
                dimension_numbers=TOKENS, ndims=(3, 2), for_lhs=side == 0, **config.operand(side)
            )
            for side in (0, 1)
        ]
        q = quantize_with(w, hows[1])
        served = jax.jit(
            lambda x, q, how=hows[0]: ops.dot_general(ops.Deferred(x, how), q, TOKENS)
        )(x, q)
        for rhs in (w, Paired(w, q)):
            trained = jax.jit(lambda x, r, c=config: dot_general_qt(x, r, TOKENS, c))(x, rhs)
            np.testing.assert_array_equal(trained, served)


def test_straight_through_gradients_are_those_of_the_float_product():
    x, w = normal(0, 4, 6), normal(1, 6, 5)
    _, _, mine = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QAT), x, w)
    _, _, theirs = vjp(lambda a, b: jax.lax.dot_general(a, b, PLAIN), x, w)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_gradient_may_be_float():
    x, w = normal(0, 4, 6), normal(1, 6, 5)
    config = DotGeneralQtConfig(**INT8, drhs_grad_qtype="int8")
    _, g, (dx, dw) = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, config), x, w)
    np.testing.assert_allclose(dx, g @ w.T, rtol=1e-6)
    assert 1e-4 < relative(dw, x.T @ g) < 0.03


def test_a_pair_is_used_as_it_is():
    x, w = normal(0, 4, 6), normal(1, 6, 5)
    q = quantize(2 * w, "int8", channelwise_axes=(1,))  # not what the config would make
    config = QT.replace(rhs_qtype="int4", rhs_calibration_method="fixed,0.1")

    def loss(x, w):
        return dot_general_qt(x, Paired(w, q), PLAIN, config)

    out, g, (dx, dw) = vjp(loss, x, w)
    assert relative(out, 2 * x @ w) < 0.02
    assert relative(dx, 2 * g @ w.T) < 0.03
    assert relative(dw, x.T @ g) < 0.03
    plain = dot_general_qt(x, Paired(w), PLAIN, QAT)
    assert relative(plain, x @ w) < 0.02


CLIPPING = ["fixed,0.8", "percentile,80", "rms,1", "absmax,0.5", "mse"]


@pytest.mark.parametrize("method", CLIPPING)
@pytest.mark.parametrize("grad", [None, "int8"])
def test_gradients_are_zero_where_values_were_clipped(method, grad):
    x, w = normal(0, 6, 16), normal(1, 16, 5)
    config = DotGeneralQtConfig(**INT8, lhs_calibration_method=method, dlhs_grad_qtype=grad)
    (how,) = [ops.dot_how(dimension_numbers=PLAIN, ndims=(2, 2), for_lhs=True, **config.operand(0))]
    q = quantize_with(x, how)
    edge = np.asarray(q.scale) * 127.5
    outside = np.abs(np.asarray(x)) > edge * (1 + 1e-6)
    assert outside.any() and not outside.all()
    run = lambda c: vjp(lambda a: dot_general_qt(a, w, PLAIN, c), x)[2][0]  # noqa: E731
    clipped, whole = run(config), run(config.replace(disable_gradient_clipping=True))
    np.testing.assert_array_equal(clipped == 0, outside)
    np.testing.assert_array_equal(clipped[~outside], whole[~outside])
    assert (np.asarray(whole)[outside] != 0).any()


def test_clipping_of_an_asymmetric_range():
    x = jnp.array([-2.0, -0.9, 0.5, 2.9, 3.2])
    q = quantize(x, "int8", calibration_method="fixed,-1,3")
    found = jax.grad(lambda x: (clip_gradient(x, q) * 2).sum())(x)
    np.testing.assert_array_equal(found, [0, 2, 2, 2, 0])


@pytest.mark.parametrize("config", [QAT, QT])
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_dtypes(config, types):
    x, w = (normal(i, 16, 16, dtype=dtype) for i, dtype in enumerate(types))
    for preferred in (None, jnp.float32, jnp.bfloat16):
        run = functools.partial(
            dot_general_qt,
            dimension_numbers=PLAIN,
            config=config,
            preferred_element_type=preferred,
            precision="highest",
        )
        out, g, (dx, dw) = vjp(lambda a, b, run=run: run(a, b), x, w)
        assert out.dtype == (preferred or types[0])
        assert (dx.dtype, dw.dtype) == tuple(map(jnp.dtype, types))
        wide = [np.asarray(v, np.float64) for v in (x, w, g)]
        assert relative(out, wide[0] @ wide[1]) < 0.02
        assert relative(dx, wide[2] @ wide[1].T) < 0.03
        assert relative(dw, wide[0].T @ wide[2]) < 0.03


def test_float16_and_integers():
    x, w = normal(0, 8, 16, dtype=jnp.float16), normal(1, 16, 4, dtype=jnp.float16)
    out, _, gradients = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QT), x, w)
    assert {out.dtype, *(d.dtype for d in gradients)} == {jnp.dtype("float16")}
    whole = jnp.ones((8, 16), jnp.int32)
    assert dot_general_qt(whole, whole.T, PLAIN, QAT).dtype == jnp.int32


@pytest.mark.parametrize("config", [QAT, QT])
def test_per_example_gradients(config):
    x, w = normal(0, 3, 4, 6), normal(1, 6, 5)

    def loss(w, x):
        return jnp.sum(jnp.square(dot_general_qt(x, w, PLAIN, config)))

    batched = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    for i in range(3):
        np.testing.assert_allclose(batched[i], jax.grad(loss)(w, x[i]), rtol=1e-5, atol=1e-5)


def test_straight_through_has_every_derivative():
    x, w = normal(0, 3, 4), normal(1, 4, 2)

    def loss(run, w):
        return jnp.sum(jnp.tanh(run(x, w)) ** 2)

    mine = functools.partial(loss, lambda x, w: dot_general_qt(x, w, PLAIN, QAT))
    rounded = ops.dot_general(
        quantize(x, "int8", channelwise_axes=(0,)),
        quantize(w, "int8", channelwise_axes=(1,)),
        PLAIN,
    )
    # The same loss of a linear function through the rounded value has the same derivatives.
    offset = rounded - x @ w
    theirs = functools.partial(loss, lambda x, w: x @ w + offset)
    np.testing.assert_allclose(jax.hessian(mine)(w), jax.hessian(theirs)(w), rtol=1e-4, atol=1e-4)
    direction = normal(3, 4, 2)
    a, b = (jax.jvp(f, (w,), (direction,))[1] for f in (mine, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_quantized_gradients_refuse_second_derivatives():
    x, w = normal(0, 3, 4), normal(1, 4, 2)

    def loss(w, x):
        return jnp.sum(dot_general_qt(x, w, PLAIN, QT))  # linear: g itself has no tangent

    first = jax.grad(loss)(w, x)
    assert first.shape == w.shape
    sentence = (
        "dot_general_qt with quantized gradients cannot be differentiated twice: rounding a "
        "gradient has no useful derivative. Leave dlhs_grad_qtype and drhs_grad_qtype None"
    )
    for argument in (0, 1):
        twice = jax.grad(lambda *a, k=argument: jax.grad(loss, k)(*a).sum(), 1 - argument)
        with pytest.raises(NotImplementedError, match=sentence):
            twice(w, x)
        with pytest.raises(NotImplementedError, match=sentence):
            jax.jit(twice)(w, x)


def equations(jaxpr, name):
    """How often a primitive occurs, bodies included."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == name
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += equations(inner, name)
    return count


@pytest.mark.parametrize("config", [QAT, QT])
def test_remat_with_the_policy_does_not_quantize_twice(config):
    x, w1, w2 = normal(0, 4, 6), normal(1, 6, 8), normal(2, 8, 3)

    def model(w1, w2, x):
        h = jnp.tanh(dot_general_qt(x, w1, PLAIN, config))
        return jnp.sum(dot_general_qt(h, w2, PLAIN, config) ** 2)

    def rounds(function):
        return equations(jax.make_jaxpr(jax.grad(function, (0, 1)))(w1, w2, x).jaxpr, "round")

    policies = jax.checkpoint_policies
    named = jax.checkpoint(model, policy=policies.save_only_these_names("fewbit_quantized"))
    nothing = jax.checkpoint(model, policy=policies.nothing_saveable)
    assert rounds(named) == rounds(model) < rounds(nothing)
    for a, b in zip(
        jax.grad(named, (0, 1))(w1, w2, x), jax.grad(model, (0, 1))(w1, w2, x), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_residuals_are_codes():
    x, w = normal(0, 64, 128), normal(1, 128, 32)
    _, pull = jax.vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QT), x, w)
    floats = sum(v.size for v in jax.tree.leaves(pull) if jnp.issubdtype(v.dtype, jnp.floating))
    codes = sum(v.size for v in jax.tree.leaves(pull) if v.dtype == jnp.int8)
    assert codes == x.size + w.size
    assert floats <= 64 + 32  # the scales


def test_int8_gradients_are_products_of_codes():
    x, w = normal(0, 64, 128), normal(1, 128, 64)

    def step(x, w):
        return vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QT), x, w)

    jaxpr = jax.make_jaxpr(step)(x, w).jaxpr
    if fewbit.kernels.info().native:
        assert equations(jaxpr, "fewbit_codes_dot") == 3
    assert equations(jaxpr, "dot_general") == 3 - equations(jaxpr, "fewbit_codes_dot")


@pytest.mark.parametrize(
    "einsum_str, shapes",
    [
        ("ab,bc->", ((3, 4), (4, 5))),
        ("aab,bc->ac", ((3, 3, 4), (4, 5))),
        ("...d,df->...f", ((2, 3, 8), (8, 5))),
        ("ab,cb->ac", ((3, 1), (4, 6))),
        ("abz,bc->ca", ((3, 4, 2), (4, 5))),
        ("bqhd,bkhd->bhqk", ((2, 5, 3, 8), (2, 4, 3, 8))),
    ],
)
def test_einsums_of_any_shape(einsum_str, shapes):
    operands = [jnp.abs(normal(i, *shape)) + 0.1 for i, shape in enumerate(shapes)]
    for config in (QAT, QT):
        mine = vjp(lambda a, b, c=config: einsum_qt(einsum_str, a, b, c), *operands)
        theirs = vjp(lambda a, b: jnp.einsum(einsum_str, a, b), *operands)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert a.shape == b.shape and relative(a, b) < 0.06
        served = fewbit.einsum(
            einsum_str,
            *[
                quantize_with(
                    x,
                    ops.einsum_how(
                        einsum_str=einsum_str,
                        ndims=[v.ndim for v in operands],
                        for_lhs=side == 0,
                        **config.operand(side),
                    ),
                )
                for side, x in enumerate(operands)
            ],
        )
        np.testing.assert_allclose(mine[0], served, rtol=1e-6)


def test_two_contracted_axes_may_be_tiled_on_different_letters():
    x, w = normal(0, 3, 4, 8), normal(1, 8, 4, 5)
    config = DotGeneralQtConfig(**INT8, tile_size=2)
    found = einsum_qt("abk,kbn->an", x, w, config)
    expected = oracle.forward(("abk", "kbn"), "an", (x, w), ("int8", "int8"), tile=2)
    assert worst(found, expected) < QT_FLOAT32


def test_stored_scales_through_the_hook():
    x, w = 3 * normal(0, 4, 6), normal(1, 6, 5)
    seen = []

    def collect(calibration):
        seen.append(set(calibration))
        return {"absmax": jnp.ones_like(calibration["absmax"])}

    config = QAT.replace(lhs_collect_quant_stat=collect)
    out, g, (dx, _) = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, config), x, w)
    assert seen == [{"absmax"}]
    assert relative(out, jnp.clip(x, -1, 1) @ w) < 0.02
    np.testing.assert_array_equal(dx == 0, jnp.abs(x) > 1)


def test_explicit_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w = normal(0, 8, 16), normal(1, 16, 12)
    for config in (QAT, QT):
        alone = vjp(lambda a, b, c=config: dot_general_qt(a, b, PLAIN, c), x, w)
        with jax.set_mesh(mesh):
            placed = (
                jax.device_put(x, PartitionSpec("data", None)),
                jax.device_put(w, PartitionSpec(None, "model")),
            )

            def step(a, b, g, c=config):
                out, pull = jax.vjp(lambda a, b: dot_general_qt(a, b, PLAIN, c), a, b)
                return out, pull(g)

            g = jax.device_put(alone[1], PartitionSpec("data", "model"))
            out, gradients = jax.jit(step)(*placed, g)
        assert [d.sharding.spec for d in gradients] == [v.sharding.spec for v in placed]
        np.testing.assert_allclose(out, alone[0], rtol=1e-5, atol=1e-5)
        for a, b in zip(gradients, alone[2], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_backward_tile_that_does_not_divide():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    config = QT.replace(drhs_tile_size=4)
    message = (
        r"drhs_tile_size=4 does not divide the gradient product of dot_general_qt: axis 0 of its "
        r"operand of shape \(6, 5\) has 6 values, in tiles of 4\. Choose a divisor of 6"
    )
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda w: dot_general_qt(x, w, PLAIN, config).sum())(w)


def test_noise_reaches_the_gradients_and_is_reproducible():
    x, w = normal(0, 32, 16), normal(1, 16, 8)

    @jax.jit
    def step(key):
        noise = get_noise_fn("uniform", key, (0, 1))
        config = QT.replace(
            dlhs_stochastic_rounding_noise_fn=noise, drhs_stochastic_rounding_noise_fn=noise
        )
        return vjp(lambda a, b: dot_general_qt(a, b, PLAIN, config), x, w)[2]

    first, again, other = (step(jax.random.key(k)) for k in (0, 0, 1))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    exact = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QAT), x, w)[2]
    mean = jax.tree.map(
        lambda v: v.mean(0), jax.vmap(step)(jax.random.split(jax.random.key(3), 256))
    )
    nearest = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QT), x, w)[2]
    # Stochastic gradients are right on average, up to the rounding of the residual.
    codes = [quantize(v, "int8", channelwise_axes=(k,)) for k, v in enumerate((x, w))]
    _, g, _ = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QT), x, w)
    ideal = g @ fewbit.dequantize(codes[1]).T, fewbit.dequantize(codes[0]).T @ g
    for a, b, c, d in zip(mean, ideal, nearest, exact, strict=True):
        assert relative(a, b) < 0.4 * relative(c, b) + 2e-4
        assert relative(a, d) < 0.02


def test_bfloat16_gradients_are_quantized_in_float32():
    x, w = (normal(i, 32, 32, dtype=jnp.bfloat16) for i in (0, 1))
    _, g, (dx, _) = vjp(lambda a, b: dot_general_qt(a, b, PLAIN, QT), x, w)
    wide = [np.asarray(v, np.float64) for v in (x, w, g)]
    assert relative(dx, wide[2] @ wide[1].T) < 0.012 + BF16_ULP


# (spelling, sizes, tiles of rhs by letter)
TILED = {
    "2-D blocks": ("abk,kn->abn", dict(a=2, b=3, k=8, n=6), dict(k=4, n=3)),
    "columns alone": ("ak,kn->an", dict(a=3, k=8, n=6), dict(n=2)),
    "two summed": ("ahk,hkn->an", dict(a=3, h=4, k=6, n=5), dict(h=2, k=3)),
    "a batch axis": ("eak,ekn->ean", dict(e=2, a=3, k=6, n=4), dict(k=2, n=2)),
}


@pytest.mark.parametrize("op", ["dot", "einsum"])
@pytest.mark.parametrize("case", TILED)
def test_a_mapping_gives_axes_of_rhs_tiles_of_their_own(case, op):
    spelling, sizes, tiles = TILED[case]
    (lhs, rhs), out = spelling.split("->")[0].split(","), spelling.split("->")[1]
    x, w = (normal(i, *(sizes[c] for c in own)) for i, own in enumerate((lhs, rhs)))
    by_axis = {rhs.index(c) - len(rhs) * (k % 2): n for k, (c, n) in enumerate(tiles.items())}
    config = DotGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int4", tile_size=by_axis)
    summed, batch = (
        tuple(tuple(own.index(c) for c in some) for own in (lhs, rhs))
        for some in ([c for c in lhs if c not in out], [c for c in out if c in lhs and c in rhs])
    )
    if op == "dot":
        found = dot_general_qt(x, w, (summed, batch), config)
    else:
        found = einsum_qt(spelling, x, w, config)
    expected = oracle.forward((lhs, rhs), out, (x, w), ("int8", "int4"), tiles)
    assert worst(found, expected) < QT_FLOAT32


@pytest.mark.parametrize("op", ["dot", "einsum"])
@pytest.mark.parametrize("residual", ["shift", "float", "int8"])
@pytest.mark.parametrize("tiles", [dict(a=2), dict(b=3), dict(a=2, b=2), dict(b=-1)], ids=str)
def test_a_mapping_gives_a_gradient_tiles_on_axes_of_the_other_operand(tiles, residual, op):
    x, w = normal(0, 4, 6, 5), normal(1, 5, 3)
    tiles = {c: 6 if n < 0 else n for c, n in tiles.items()}
    kinds = dict(shift={}, float=dict(use_original_residuals=True))
    again = dict(use_original_residuals=True, drhs_residual_qtype="int8")
    by_axis = {"abk".index(c) - 3 * (c == "b"): n for c, n in tiles.items()}
    config = DotGeneralQtConfig(**INT8_BOTH, drhs_tile_size=by_axis, **kinds.get(residual, again))
    run = dict(
        dot=lambda x, w: dot_general_qt(x, w, TOKENS, config),
        einsum=lambda x, w: einsum_qt("abk,kn->abn", x, w, config),
    )[op]
    _, g, (dx, dw) = vjp(run, x, w)
    case = ("abk", "kn"), "abn", (x, w), ("int8", "int8"), g
    expected = oracle.gradient(*case, 1, "int8", residual, tile=tiles)
    assert worst(dw, expected) < QT_FLOAT32
    kind = "shift" if residual == "shift" else "float"
    assert worst(dx, oracle.gradient(*case, 0, "int8", kind)) < QT_FLOAT32


def test_blocks_of_a_residual_that_is_quantized_anew():
    """Two-dimensional blocks of the weight in the gradient of the activation."""
    x, w = normal(0, 3, 8), normal(1, 8, 6)
    settings = dict(use_original_residuals=True, dlhs_residual_qtype="int8")
    config = DotGeneralQtConfig(**INT8_BOTH, dlhs_tile_size={0: 4, 1: 3}, **settings)
    _, g, (dx, _) = vjp(lambda x, w: dot_general_qt(x, w, PLAIN, config), x, w)
    expected = oracle.gradient(
        ("ak", "kn"), "an", (x, w), ("int8", "int8"), g, 0, "int8", "int8", dict(k=4, n=3)
    )
    assert worst(dx, expected) < QT_FLOAT32


def test_tiles_of_an_einsum_whose_operands_lose_axes():
    """A 1-wide axis that faces a wide one is dropped; tiles follow their axes."""
    x, w = normal(0, 1, 6, 5), normal(1, 4, 5, 3)
    config = DotGeneralQtConfig(**INT8_BOTH, drhs_tile_size={1: 2})
    moved = config.replace(drhs_tile_size={0: 2})
    wide = lambda x, w: einsum_qt("abk,akn->abn", x, w, config)  # noqa: E731
    plain = lambda x, w: einsum_qt("bk,akn->abn", x[0], w, moved)  # noqa: E731
    (_, _, found), (_, _, expected) = vjp(wide, x, w), vjp(plain, x, w)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axis", [2, 7])
def test_a_tile_on_an_axis_that_no_gradient_sums(axis):
    x, w = normal(0, 4, 6, 5), normal(1, 5, 3)
    config = DotGeneralQtConfig(**INT8_BOTH, drhs_tile_size={axis: 2})
    text = (
        rf"drhs_tile_size=.{axis}: 2. names axis {axis}, but this gradient product of "
        r"dot_general_qt sums over axes 0, 1 of lhs, which has 3 axes.*write drhs_tile_size=.0: 2."
    )
    with pytest.raises(ValueError, match=text):
        vjp(lambda x, w: dot_general_qt(x, w, TOKENS, config), x, w)
