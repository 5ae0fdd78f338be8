"""Settings of training act, or are refused: none is dropped without a word."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal
from oracles import training as oracle
from tolerances import QT_FLOAT32

import fewbit
from fewbit import DotGeneralQtConfig, QtProvider, QtRule, einsum_qt

X = jax.random.normal(jax.random.key(0), (16, 32))
PARAMS = {"w": jax.random.normal(jax.random.key(1), (32, 8)) / 4}
INT8 = dict(weight_qtype="int8", act_qtype="int8")


def product(params, x):
    return x @ params["w"]


def trained(emulate=False, **fields):
    return fewbit.quantize_model(product, QtProvider([QtRule(**fields)], emulate=emulate))


def zeros(loss):
    return int((jax.grad(loss)(X) == 0).sum())


@pytest.mark.parametrize("method", ["rms,1", "fixed,-1,1", "percentile,90"])
def test_emulated_activations_are_clipped_like_real_ones(method):
    real, emulated, kept = (
        zeros(lambda x, m=m: m(PARAMS, x).sum())
        for m in (
            trained(act_calibration_method=method, **INT8),
            trained(True, act_calibration_method=method, **INT8),
            trained(
                True,
                act_calibration_method=method,
                additional_qt_config={"disable_gradient_clipping": True},
                **INT8,
            ),
        )
    )
    assert real == emulated > 0 == kept


@pytest.mark.parametrize("disable", [False, True])
def test_static_ranges_clip_unless_told_otherwise(disable):
    model = trained(
        act_static_scale=True,
        act_static_reduction="mean",
        additional_qt_config={"disable_gradient_clipping": disable},
        **INT8,
    )
    _, stats = model.collecting(PARAMS, {}, X * 0.3)
    found = zeros(lambda x: model.collecting(PARAMS, stats, x)[0].sum())
    assert (found == 0) == disable


@pytest.mark.parametrize("layout", ["bds,df->bf", "bb,bf->bf", "bd,dfs->bf", "bds,df->fb"])
def test_a_letter_of_one_operand_has_the_float_gradient(layout):
    sizes = dict(b=6, d=32, s=3, f=8)
    inputs = layout.split("->")[0].split(",")
    operands = [
        jax.random.normal(jax.random.key(k), [sizes[c] for c in letters])
        for k, letters in enumerate(inputs)
    ]

    exact = jax.grad(lambda a, b: jnp.einsum(layout, a, b).sum(), (0, 1))(*operands)
    for config, bound in (
        (DotGeneralQtConfig(lhs_qtype="int4", rhs_qtype="int4"), 1e-6),
        (
            DotGeneralQtConfig(
                lhs_qtype="int4",
                rhs_qtype="int4",
                dlhs_grad_qtype="int16",
                drhs_grad_qtype="int16",
                use_original_residuals=True,
            ),
            1e-4,
        ),
        (
            DotGeneralQtConfig(
                lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype="int8", drhs_grad_qtype="int8"
            ),
            2e-2,
        ),
    ):
        found = jax.grad(lambda a, b, c=config: einsum_qt(layout, a, b, c).sum(), (0, 1))(*operands)
        for g, e in zip(found, exact, strict=True):
            assert jnp.linalg.norm(g - e) <= bound * jnp.linalg.norm(e)
    # The value is that of rounded numbers.
    coarse = einsum_qt(layout, *operands, DotGeneralQtConfig(lhs_qtype="int4", rhs_qtype="int4"))
    assert 0.01 < float(jnp.abs(coarse - jnp.einsum(layout, *operands)).max())


@pytest.mark.parametrize(
    ("additional", "shown"),
    [({"lhs_qtype": None}, None), ({"lhs_qtype": "int4"}, "int4")],
)
def test_an_operand_with_a_type_of_its_own_serves_as_it_trained(additional, shown):
    model = trained(additional_qt_config=additional, **INT8)
    served = fewbit.to_ptq(model, PARAMS, None, X)
    np.testing.assert_array_equal(served.model(served.params, X), model(PARAMS, X))
    assert served.plan.sites[0].act_qtype == shown
    assert np.abs(model(PARAMS, X) - trained(**INT8)(PARAMS, X)).max() > 0


def test_two_activations_with_types_of_their_own():
    def attention(params, x):
        return jnp.einsum("bd,cd->bc", x, jnp.tanh(x @ params["w"]) @ params["w"].T)

    rule = QtRule(additional_qt_config={"lhs_qtype": None}, disable_channelwise_axes=True, **INT8)
    model = fewbit.quantize_model(attention, QtProvider([rule]))
    served = fewbit.to_ptq(model, PARAMS, None, X)
    np.testing.assert_array_equal(served.model(served.params, X), model(PARAMS, X))
    assert "float x int8" in [row.act_qtype for row in served.plan.sites]


def test_an_activation_only_type_serves_too():
    model = trained(weight_qtype="int8", additional_qt_config={"lhs_qtype": "int8"})
    served = fewbit.to_ptq(model, PARAMS, None, X)
    np.testing.assert_array_equal(served.model(served.params, X), model(PARAMS, X))
    assert served.plan.sites[0].act_qtype == "int8"


def test_statistics_of_a_broken_step_say_so():
    model = trained(bwd_qtype="int8", **INT8)
    weight = {"w": PARAMS["w"].at[0, 0].set(jnp.nan)}
    for params, x in ((weight, X), (PARAMS, X.at[0, 0].set(jnp.inf))):
        stats = dict(
            fewbit.debug.training_stats(model, params, x, loss=lambda out: jnp.mean(out**2))
        )
        assert np.isnan(stats["w:dot_general0/weight_grad_snr_db"])


def test_merging_can_be_differentiated():
    provider = fewbit.LoraProvider(rank=2, alpha=4.0, lora_b_initializer="ones")
    plan = fewbit.plan(product, provider, PARAMS, X)
    params = fewbit.lora.init(plan, PARAMS, jax.random.key(0))
    adapted = fewbit.apply_lora_to_model(product, provider)

    def merged(params):
        return product(fewbit.lora.merge_lora(params, plan)[0], X).sum()

    for name, g in jax.grad(merged)(params).items():
        expected = jax.grad(lambda params: adapted(params, X).sum())(params)[name]
        np.testing.assert_allclose(g, expected, rtol=1e-4, atol=1e-4)


def rule(**fields):
    return QtRule(**INT8, **fields)


REFUSED = {
    "emulated gradients": (
        lambda: QtProvider([rule(bwd_qtype="int8")], emulate=True),
        "emulate=True.*this rule quantizes gradients. Leave emulate out, or bwd_qtype",
    ),
    "an emulated gradient": (
        lambda: QtProvider([rule(additional_qt_config={"drhs_grad_qtype": "int8"})], emulate=True),
        "this rule quantizes gradients",
    ),
    "scale types of a layer": (
        lambda: fewbit.training.DotGeneral(rule(scale_dtype="bfloat16")),
        "scale_dtype='bfloat16' is for weights as they are stored",
    ),
    "a hook of a rule": (
        lambda: rule(additional_qt_config={"rhs_collect_quant_stat": lambda c: c}),
        r"\['rhs_collect_quant_stat'\].*Write act_static_scale=True",
    ),
    "a float weight": (
        lambda: trained(additional_qt_config={"rhs_qtype": None}, **INT8)(PARAMS, X),
        r"\['rhs_qtype'\] is None, which would leave the parameter 'w' float. Write weight_qtype",
    ),
    "a delayed operand": (
        lambda: rule(additional_qt_config={"lhs_calibration_method": "delayed"}),
        "Write act_calibration_method .*='delayed' in the rule instead",
    ),
    "a delayed gradient": (
        lambda: rule(additional_qt_config={"dlhs_grad_calibration_method": "delayed,4"}),
        "Write bwd_calibration_method='delayed,4' in the rule instead",
    ),
    "histories of nothing": (
        lambda: fewbit.to_ptq(trained(**INT8), PARAMS, None, X, amax_history={"a": 1}),
        "got an amax_history, but no rule",
    ),
    "a word for pack": (
        lambda: fewbit.to_ptq(trained(**INT8), PARAMS, None, X, pack="yes"),
        "to_ptq: pack must be True or False, got 'yes'",
    ),
    "no config": (
        lambda: fewbit.dot_general_qt(X, PARAMS["w"], (((1,), (0,)), ((), ())), None),
        "dot_general_qt is configured by a DotGeneralQtConfig, got None",
    ),
    "a config of an einsum": (lambda: einsum_qt("bd,df->bf", X, PARAMS["w"], {}), "got {}"),
    "one delayed, one not": (
        lambda: fewbit.training._history_plans.serving_rule(
            rule(
                act_calibration_method="delayed,4",
                additional_qt_config={"lhs_calibration_method": "absmax"},
            )
        ),
        "static ranges for all activations of a rule or for none. Give these products a rule each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_act_is_refused(case):
    call, text = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=text):
        call()


def worst(found, expected):
    """Largest error over largest magnitude."""
    expected = np.asarray(expected, np.float64)
    return np.max(np.abs(np.asarray(found, np.float64) - expected)) / np.max(np.abs(expected))


# --- a mapping of tiles in a rule: the weight's axes forward, the activation's backward -----------

TILES = dict(tile_size={0: 8, 1: 3}, bwd_weight_grad_tile_size={0: 1, 1: 4})
TILED_RULE = fewbit.QtRule(weight_qtype="int4", act_qtype="int8", bwd_qtype="int8", **TILES)
OWN_TILES = TILED_RULE.replace(
    tile_size=None,
    bwd_weight_grad_tile_size=None,
    additional_qt_config=dict(tile_size=TILES["tile_size"], drhs_tile_size={0: 1, -2: 4}),
)
TILED_W, TILED_X = normal(0, 16, 6), normal(1, 2, 8, 16)
LEFT = ((0,), (2,)), ((), ())


class TiledLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, use_bias=False, name="up")(x)


class TiledNnx(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(16, 6, use_bias=False, rngs=nnx.Rngs(0))
        self.up.kernel[...] = TILED_W

    def __call__(self, x):
        return self.up(x)


def tiled_run(kind, provider):
    """(result, gradient of the weight, gradient of the input) for an incoming gradient `G`."""
    g = normal(7, 2, 8, 6)
    if kind == "linen":
        model = fewbit.quantize_model(TiledLinen(), provider)
        run = lambda w, x: model.apply({"params": {"up": {"kernel": w}}}, x)  # noqa: E731
    elif kind == "nnx":
        graph, state = nnx.split(fewbit.quantize_model(TiledNnx(), provider, TILED_X))

        def run(w, x):
            held = jax.tree.map(lambda leaf: w if leaf.shape == w.shape else leaf, state)
            return nnx.merge(graph, held)(x)

    else:
        spelled = {
            "dot": lambda w, x: x @ w,
            "einsum": lambda w, x: jnp.einsum("kn,abk->abn", w, x),  # JAX multiplies x by w
            "left": lambda w, x: jnp.moveaxis(jax.lax.dot_general(w, x, LEFT), 0, -1),
        }
        model = fewbit.quantize_model(lambda p, x: spelled[kind](p["w"], x), provider)
        run = lambda w, x: model({"w": w}, x)  # noqa: E731
    out, pull = jax.vjp(run, TILED_W, TILED_X)
    return out, g, *pull(g)


@pytest.mark.parametrize("rule", [TILED_RULE, OWN_TILES], ids=["rule", "additional_qt_config"])
@pytest.mark.parametrize("kind", ["dot", "einsum", "left", "linen", "nnx"])
def test_a_mapping_of_tiles_in_a_rule_matches_float64(kind, rule):
    if kind == "left" and rule is OWN_TILES:
        own = dict(rule.additional_qt_config)
        own["dlhs_tile_size"] = own.pop("drhs_tile_size")
        rule = rule.replace(additional_qt_config=own)
    out, g, dw, dx = tiled_run(kind, fewbit.QtProvider([rule]))
    operands, forward = (TILED_X, TILED_W), dict(k=8, n=3)
    letters, types = ("abk", "kn"), ("int8", "int4")
    decoded = [
        oracle.quantized(TILED_X, "int8", (0, 1), {2: 8})[1],
        oracle.quantized(TILED_W, "int4", (), {0: 8, 1: 3})[1],
    ]
    expected = oracle.forward(letters, "abn", operands, types, forward)
    assert worst(out, expected) < QT_FLOAT32
    # Tiled codes cannot serve a gradient, which reads the float operands instead.
    case = letters, "abn", operands, types, g
    wanted = oracle.gradient(*case, 1, "int8", "float", dict(a=1, b=4))
    assert worst(dw, wanted) < QT_FLOAT32
    assert worst(dx, oracle.gradient(*case, 0, "int8", "float")) < QT_FLOAT32
    np.testing.assert_allclose(np.einsum("abk,kn->abn", *decoded), expected, rtol=1e-12)


def test_a_mapping_of_tiles_is_in_the_plan_and_in_files():
    f = lambda p, x: x @ p["w"]  # noqa: E731
    for rule in (TILED_RULE, OWN_TILES):
        row = fewbit.plan(f, fewbit.QtProvider([rule]), {"w": TILED_W}, TILED_X).sites[0]
        assert row.drhs == "int8 x float tile 1x4" and row.dlhs == "int8 x float"
        for text, read in ((fewbit.rules_to_yaml([rule]), fewbit.rules_from_yaml),
                           (fewbit.rules_to_json([rule]), fewbit.rules_from_json)):  # fmt: skip
            assert read(text) == (rule,) or list(read(text)) == [rule]
    alone = TILED_RULE.replace(tile_size={1: 3}, bwd_weight_grad_tile_size=None)
    row = fewbit.plan(f, fewbit.QtProvider([alone]), {"w": TILED_W}, TILED_X).sites[0]
    assert row.drhs == "int8 x int8"  # the activation has no tiles, so its codes serve


def test_static_ranges_beside_a_mapping_of_tiles():
    """The activation's scale has the tiles of what is summed, as it has when it is measured."""
    f, rule = lambda p, x: x @ p["w"], TILED_RULE.replace(act_static_scale=True)
    (scale,) = fewbit.plan(f, fewbit.QtProvider([rule]), {"w": TILED_W}, TILED_X).scales
    assert scale.shape == (1, 8, 2)
    ptq = fewbit.QuantizationRule(
        weight_qtype="int4", act_qtype="int8", act_static_scale=True, tile_size=TILES["tile_size"]
    )
    assert fewbit.plan(f, [ptq], {"w": TILED_W}, TILED_X).scales[0].shape == (1, 8, 2)


def test_a_trained_mapping_serves_the_same_bits():
    f, params = lambda p, x: x @ p["w"], {"w": TILED_W}
    qt = fewbit.quantize_model(f, fewbit.QtProvider([TILED_RULE]))
    served = fewbit.to_ptq(qt, params, None, TILED_X)
    assert served.params["w"].array.scale.shape == (2, 2)
    np.testing.assert_array_equal(served.model(served.params, TILED_X), qt(params, TILED_X))
