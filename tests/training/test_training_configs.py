"""Configs, noise and the drop-ins: what they accept, what they refuse, and what noise does."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal
from tolerances import STOCHASTIC_MEAN

import fewbit
from fewbit.numerics import FORMATS, convert_from, convert_to
from fewbit.training import (
    ConvGeneralQtConfig,
    DotGeneral,
    DotGeneralQtConfig,
    Einsum,
    NoiseFn,
    RaggedDotQtConfig,
    config_from_rule,
    dot_general_cls,
    einsum_cls,
    get_noise_fn,
    low_bit_uniform_noise,
    uniform_noise,
)

RULE = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
NOISY = RULE.replace(bwd_stochastic_rounding="uniform")


@pytest.mark.parametrize(
    "cls, fields, sentence",
    [
        (DotGeneralQtConfig, dict(lhs_qtype="int9"), "DotGeneralQtConfig: lhs_qtype"),
        (
            DotGeneralQtConfig,
            dict(dlhs_stochastic_rounding_noise_fn="unifrom"),
            "must be a function from shape to noise or None, got 'unifrom'",
        ),
        (
            DotGeneralQtConfig,
            dict(drhs_grad_qtype="float8_e5m2", drhs_grad_calibration_method="minmax"),
            "drhs_grad_calibration_method='minmax' with float8_e5m2",
        ),
        (DotGeneralQtConfig, dict(drhs_tile_size=2.5), "drhs_tile_size must be a positive"),
        (DotGeneralQtConfig, dict(dlhs_grad_calibration_method=None), "is None. Write 'absmax'"),
        (DotGeneralQtConfig, dict(sparsity_rule=1), "sparsity_rule is not there yet"),
        (
            DotGeneralQtConfig,
            dict(drhs_grad_qtype="mxfp8", drhs_tile_size=64),
            "Format mxfp8 requires a tile size of 32, but drhs_tile_size is 64",
        ),
        (ConvGeneralQtConfig, dict(tile_size=32), "one scale per image and per output feature"),
        (ConvGeneralQtConfig, dict(drhs_grad_qtype="mxfp8"), "drhs_grad_qtype=mxfp8 has a scale"),
        (RaggedDotQtConfig, dict(use_original_residuals="yes"), "must be True or False"),
    ],
)
def test_mistakes_are_errors_when_the_config_is_made(cls, fields, sentence):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        cls(**fields)
    assert sentence in str(error.value) and cls.__name__ in str(error.value)


def test_formats_with_a_tile_fill_it_in():
    config = DotGeneralQtConfig(drhs_grad_qtype="mxfp8", rhs_qtype="nvfp4")
    assert (config.drhs_tile_size, config.dlhs_tile_size, config.tile_size) == (32, None, 16)


def test_a_config_is_a_pytree_of_its_noise():
    noise = get_noise_fn("uniform", jax.random.key(0))
    config = DotGeneralQtConfig(
        lhs_qtype="int8", tile_size=1, drhs_stochastic_rounding_noise_fn=noise
    )
    (leaf,) = jax.tree.leaves(config)
    assert leaf is noise.key
    again = jax.jit(lambda c: c)(config)
    assert again.lhs_qtype == jnp.int8 and isinstance(
        again.drhs_stochastic_rounding_noise_fn, NoiseFn
    )
    one, share = (DotGeneralQtConfig(tile_size=size) for size in (1, 1.0))
    assert one != share and jax.tree.structure(one) != jax.tree.structure(share)
    assert DotGeneralQtConfig(tile_size=1) == one and hash(DotGeneralQtConfig(tile_size=1)) == hash(
        one
    )


def test_noise_functions():
    key = jax.random.key(1)
    for method, draw in (("uniform", uniform_noise), ("low_bit_uniform", low_bit_uniform_noise)):
        noise = np.asarray(draw(key, (4096,)), np.float64)
        assert noise.min() >= -0.5 and noise.max() < 0.5
        assert abs(noise.mean()) < 0.02 and abs(noise.var() - 1 / 12) < 0.005
        assert get_noise_fn(method, key, (1, -1))((3, 4, 5)).shape == (1, 4, 5)
        assert get_noise_fn(method, key, None)((3, 4)).shape == (3, 4)
        assert get_noise_fn(method, key)(()).shape == ()
        np.testing.assert_array_equal(
            get_noise_fn(method, key)((8, 1))[:, 0], draw(key, (8, 1))[:, 0]
        )
    assert get_noise_fn(None, None) is None
    with pytest.raises(ValueError, match="'unifrom' is not a way to round stochastically. Did you "
                                         "mean 'uniform'\\?"):  # fmt: skip
        get_noise_fn("unifrom", key)
    with pytest.raises(ValueError, match="needs a key, got None"):
        get_noise_fn("uniform", None)


@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
@pytest.mark.parametrize("qtype", [name for name in FORMATS if not name.startswith("uint")])
def test_rounding_is_unbiased_in_every_format(qtype, method):
    grid = sorted(
        {float(v) for v in convert_from(convert_to(jnp.linspace(-1.0, 1.0, 4001), qtype), qtype)}
    )
    low, high = grid[-2:]
    points = jnp.array([low, high, low + 0.25 * (high - low), low + 0.7 * (high - low)])

    @jax.jit
    @jax.vmap
    def draw(key):
        noise = get_noise_fn(method, key, None)
        return convert_from(convert_to(points, qtype, noise), qtype)

    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4096)), np.float64)
    assert set(np.unique(drawn)) <= {low, high}
    assert (drawn[:, 0] == low).all() and (drawn[:, 1] == high).all()
    up = (drawn[:, 2:] == high).mean(0)
    np.testing.assert_allclose(up, [0.25, 0.7], atol=STOCHASTIC_MEAN)


def test_a_rule_becomes_a_config():
    rule = fewbit.QtRule(
        weight_qtype="int4",
        act_qtype="int8",
        tile_size=32,
        bwd_qtype="float8_e5m2",
        bwd_weight_grad_tile_size=1 / 4,
        bwd_stochastic_rounding="low_bit_uniform",
        channelwise_noise_axes=(0, 1),
        additional_qt_config={"dlhs_grad_qtype": None, "use_original_residuals": True},
    )
    for weight in (0, 1):
        config = config_from_rule(rule, jax.random.key(0), weight=weight)
        names = ("lhs", "rhs")
        own, other = names[weight], names[1 - weight]
        assert getattr(config, f"{own}_qtype") == jnp.int4
        assert getattr(config, f"{other}_qtype") == jnp.int8
        assert getattr(config, f"d{own}_tile_size") == 1 / 4
        assert getattr(config, f"d{other}_tile_size") is None
        assert config.dlhs_grad_qtype is None and config.use_original_residuals
        keys = [config.gradient(k).noise_fn.key for k in (0, 1)]
        assert keys[0] != keys[1]
        assert config.gradient(1).noise_fn.channelwise_noise_axes == (0, 1)
    conv = config_from_rule(RULE, op_name="conv_general_dilated")
    assert isinstance(conv, ConvGeneralQtConfig)


def steps(layer, params, x, **apply):
    return jax.grad(lambda p: jnp.sum(layer.apply(p, x, **apply) ** 2))(params)


@pytest.mark.parametrize(
    "given",
    [
        dict(dot_general=DotGeneral(RULE)),
        dict(dot_general_cls=dot_general_cls(RULE)),
        dict(dot_general_cls=functools.partial(fewbit.QtDotGeneral, RULE)),
        dict(dot_general=DotGeneral(config_from_rule(RULE))),
    ],
)
def test_one_linen_layer(given):
    x = normal(0, 4, 8)
    for layer, plain in (
        (nn.Dense(6, **given), nn.Dense(6)),
        (nn.DenseGeneral((2, 3), **given), nn.DenseGeneral((2, 3))),
    ):
        params = plain.init(jax.random.key(1), x)
        assert jax.tree.structure(layer.init(jax.random.key(1), x)) == jax.tree.structure(params)
        quantized, exact = layer.apply(params, x), plain.apply(params, x)
        assert 0 < float(jnp.abs(quantized - exact).mean()) < 0.02 * float(jnp.abs(exact).mean())
        mine, theirs = (steps(one, params, x)["params"]["kernel"] for one in (layer, plain))
        assert 0 < float(jnp.abs(mine - theirs).mean()) < 0.05 * float(jnp.abs(theirs).mean())


def test_a_linen_layer_draws_its_noise():
    x = normal(0, 4, 8)
    layer = nn.Dense(6, dot_general_cls=functools.partial(fewbit.QtDotGeneral, NOISY))
    params = layer.init(jax.random.key(1), x)
    first, again, other = (
        steps(layer, params, x, rngs={"stochastic_rounding": jax.random.key(k)})["params"]["kernel"]
        for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    with pytest.raises(ValueError, match="rounds gradients stochastically and finds no key. Pass "
                                         "rngs={'stochastic_rounding': key}"):  # fmt: skip
        steps(layer, params, x)


def test_nnx_layers_take_them_too():
    x = normal(0, 4, 8)
    rngs = nnx.Rngs(0)
    layer = nnx.Linear(8, 6, dot_general=DotGeneral(RULE), rngs=rngs)
    twin = nnx.Einsum("ab,bc->ac", (8, 6), einsum_op=Einsum(RULE), rngs=rngs)
    for one in (layer, twin):
        kernel = one.kernel[...]
        assert float(jnp.abs(one(x) - x @ kernel).max()) < 0.1
    keys = iter(jax.random.split(jax.random.key(2)))
    noisy = DotGeneral(NOISY, key=lambda: next(keys))
    numbers = (((1,), (0,)), ((), ()))
    w = normal(1, 8, 6)
    a, b = (jax.grad(lambda w: (noisy(x, w, numbers) ** 2).sum())(w) for _ in range(2))
    assert (a != b).any()


def test_attention_takes_the_einsum_twin():
    x = normal(0, 2, 5, 8)
    given = dict(num_heads=2, qkv_features=8)
    plain = nn.MultiHeadDotProductAttention(**given)
    quantized = nn.MultiHeadDotProductAttention(
        **given,
        qk_attn_weights_einsum_cls=einsum_cls(RULE),
        qkv_dot_general_cls=dot_general_cls(RULE),
        attn_weights_value_einsum_cls=functools.partial(fewbit.QtEinsum, RULE),
    )
    params = plain.init(jax.random.key(0), x)
    a, b = (one.apply(params, x) for one in (quantized, plain))
    assert 0 < float(jnp.abs(a - b).mean()) < 0.05 * float(jnp.abs(b).mean())


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: DotGeneral("int8"), "DotGeneral takes a QtRule, a QuantizationRule or"),
        (lambda: DotGeneral(NOISY), "bwd_stochastic_rounding='uniform', which needs a key"),
        (lambda: dot_general_cls(NOISY), "functools.partial(fewbit.QtDotGeneral, rule)"),
        (lambda: Einsum(RULE.replace(act_static_scale=True)), "act_static_scale=True needs ranges"),
        (lambda: Einsum(RULE)("ab->ab", jnp.ones((2, 2))), "multiplies two operands, got 1"),
    ],
)
def test_what_a_single_layer_cannot_do(make, sentence):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert sentence in str(error.value)


def test_a_rule_knows_the_fields_of_the_configs():
    from fewbit.rules._training import QT_FIELDS

    fields = [field.name for field in dataclasses.fields(DotGeneralQtConfig)]
    assert sorted(QT_FIELDS) == sorted(fields)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(bwd_stochastic_rounding="unifrm"), "is unknown. Did you mean 'uniform'?"),
        (dict(bwd_stochastic_rounding=True), "bwd_stochastic_rounding=True is unknown"),
        (dict(disable_channelwise_axes="yes"), "must be True or False, got 'yes'"),
        (dict(disable_channelwise_axes=(0,)), "must be True or False, got (0,)"),
        (dict(channelwise_noise_axes=0), "Write channelwise_noise_axes=(0,)"),
        (dict(channelwise_noise_axes=(0.5,)), "must be a collection of integer axes"),
        (dict(additional_qt_config=3), "must be a mapping from field name to value, got 3"),
        (
            dict(additional_qt_config={"lhs_qtyp": "int8"}),
            "additional_qt_config has 'lhs_qtyp', which is no field of fewbit.DotGeneralQtConfig. "
            "Did you mean 'lhs_qtype'",
        ),
        (
            dict(additional_qt_config={"dlhs_grad_qtype": "int99"}),
            "additional_qt_config['dlhs_grad_qtype']: data type 'int99' not understood",
        ),
        (
            dict(additional_qt_config={"drhs_grad_calibration_method": "absmx"}),
            "['drhs_grad_calibration_method']='absmx': Unsupported calibration",
        ),
        (
            dict(additional_qt_config={"drhs_tile_size": -3}),
            "additional_qt_config['drhs_tile_size'] must be a positive integer",
        ),
        (
            dict(additional_qt_config={"disable_gradient_clipping": "yes"}),
            "['disable_gradient_clipping'] must be True or False, got 'yes'",
        ),
        (
            dict(additional_qt_config={"dlhs_stochastic_rounding_noise_fn": "uniform"}),
            "must be a function or None, got 'uniform'. For all steps write bwd_stochastic",
        ),
        (dict(additional_qt_config={"lhs_collect_quant_stat": 3}), "must be a function or None"),
        (
            dict(additional_qt_config={"grad_delayed_range": 1.0}),
            "is made at each step from a history. Write bwd_calibration_method='delayed'",
        ),
        (dict(additional_qt_config={"sparsity_rule": 1}), "['sparsity_rule'] is not there yet"),
    ],
)
def test_wrong_values_are_told_when_the_rule_is_made(fields, sentence):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", **fields)
    assert sentence in str(error.value)


def test_noise_reaches_a_gradient_that_only_additional_fields_quantize():
    rule = fewbit.QtRule(
        weight_qtype="int8",
        act_qtype="int8",
        bwd_stochastic_rounding="uniform",
        channelwise_noise_axes=(0, 1),
        additional_qt_config={"drhs_grad_qtype": "int4"},
    )
    f = fewbit.quantize_model(lambda p, x: jnp.tanh(x @ p["w"]), fewbit.QtProvider([rule]))
    params, x = {"w": normal(1, 8, 6)}, normal(0, 16, 8)
    grads = [
        jax.grad(lambda p, k=k: f(p, x, stochastic_rounding=jax.random.key(k)).sum())(params)["w"]
        for k in (0, 0, 1)
    ]
    np.testing.assert_array_equal(grads[0], grads[1])
    assert (grads[0] != grads[2]).any()
