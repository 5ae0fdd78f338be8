"""Errors teach: each says what is wrong, where, what comes nearest, and the line that cures it."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zoo
from flax import nnx
from helpers import W8, W8A8, normal, quantized, relative_error, says

import fewbit
from fewbit import HowToQuantize, PlanError, PtqProvider, QuantizationRule, UntraceableModelError


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


PARAMS = {"up": normal(0, 4, 8), "down": normal(1, 8, 4)}
X = normal(2, 2, 4)
PLAN = fewbit.plan(mlp, W8, PARAMS, X)


def plan(*rules, function=mlp, params=PARAMS, **kwargs):
    return fewbit.plan(function, rules, params, X, **kwargs)


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["weight_qtype", "act_qtype"])
def test_a_type_without_negative_codes_needs_a_method_with_a_zero_point(field):
    method = field.replace("qtype", "calibration_method")
    with says(ValueError, method, "'absmax' with uint8", "Use calibration_method='minmax'"):
        QuantizationRule(**{field: "uint8"})


def test_a_rule_that_matches_no_site():
    with says(
        PlanError,
        "QuantizationRule(module_path='upp', weight_qtype='int8') matches no Site of the model.",
        "The nearest module paths are 'up'.",
        "Correct or drop it.",
        "Pass strict=False to turn this into a warning.",
    ):
        plan(QuantizationRule(module_path="upp", weight_qtype="int8"), *W8)


def test_an_exclusion_that_matches_no_site():
    with says(
        PlanError, "QuantizationRule(module_path='head') matches no Site", "'up', 'down'", "strict="
    ):
        plan(QuantizationRule(module_path="head"), *W8)


def test_a_rule_behind_a_general_one():
    with says(
        PlanError,
        "An earlier rule matches first wherever it would: rule 0, "
        "QuantizationRule(weight_qtype='int8')",
        "the more particular rule comes first",
    ):
        plan(*W8, QuantizationRule(module_path="up", weight_qtype="int4"))


def test_a_rule_given_twice():
    with says(PlanError, "matches no Site", "It repeats rule 0. Correct or drop it."):
        plan(*W8, *W8)


def test_a_model_without_sites():
    with says(PlanError, "matches no Site", "no product and no table look-up at all"):
        fewbit.plan(lambda p, x: x + p, W8, X, X)


def test_lenient_plans_warn_once():
    rules = [QuantizationRule(module_path="head"), QuantizationRule(op_names=("eisum",)), *W8]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = plan(*rules, function=tied, params={"w": normal(0, 4, 4)}, strict=False)
    assert made.unmatched_rules == (0, 1)
    (warning,) = caught
    text = str(warning.message)
    assert "2 rules match nothing" in text and "'head'" in text and "'einsum'" in text
    assert "is used by two Sites that want it stored differently" in text
    assert "strict" not in text


def test_an_invalid_regex_when_the_rule_is_made():
    with says(
        ValueError,
        "QuantizationRule: module_path='*up' is not a regular expression",
        "nothing to repeat at position 0",
        "Write '.*up'?",
    ):
        QuantizationRule(module_path="*up")


def test_an_invalid_type_when_the_rule_is_made():
    where = "QuantizationRule(module_path='head'): weight_qtype: data type 'itn8' not understood."
    with says(ValueError, where, "Did you mean 'int8'", "Quantized types: int1, int2"):
        QuantizationRule(module_path="head", weight_qtype="itn8")


def test_an_invalid_calibration_when_the_rule_is_made():
    with says(
        ValueError,
        "QuantizationRule(module_path='.*'): act_calibration_method='absmx'",
        "Unsupported calibration: absmx. Did you mean 'absmax'",
        "Methods: ",
    ):
        QuantizationRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="absmx")


def test_an_op_name_that_matched_nothing():
    with says(
        PlanError,
        "QuantizationRule(op_names=('dot_genral',), weight_qtype='int8') matches no Site",
        "No op is called 'dot_genral' here (there are: dot_general). The nearest is 'dot_general'.",
    ):
        plan(QuantizationRule(op_names=("dot_genral",), weight_qtype="int8"))


def test_an_op_name_misspelt_beside_a_right_one():
    rule = QuantizationRule(op_names=("dot_general", "einsm"), weight_qtype="int8")
    with says(
        PlanError,
        "no op is called 'einsm', and no kernel has asked for get_current_rule('einsm')",
        "The nearest is 'einsum': write that, or drop the name.",
    ):
        plan(rule)


def test_op_names_of_kernels():
    """Rules that several models share name kernels that one of them lacks: a note, no error."""
    shared = QuantizationRule(op_names=("dot_general", "gmm", "conv_general_dilated"), **INT8)
    assert "rule 0 names the op 'gmm', which the model does not have" in plan(shared).notes
    asked = []

    def kernel(params, x):
        asked.append((fewbit.get_current_rule("gmm"), fewbit.get_current_rule("einsm")))
        return mlp(params, x)

    rules = [QuantizationRule(op_names=("gmm", "einsm"), weight_qtype="int4"), *W8]
    made = plan(*rules, function=kernel)
    assert not any("names the op" in note for note in made.notes)
    assert asked == [(rules[0], rules[0])] and not made.unmatched_rules


def with_a_kernel(params, x):
    return zoo.pallas_product(jnp.tanh(x @ params["up"]), params["down"])


def test_a_rule_for_the_weight_of_a_kernel_alone():
    """It is no slip, and nothing it asks for happens: a warning. Others are errors as ever."""
    wanted = QuantizationRule(module_path="down", weight_qtype="int8")
    first = QuantizationRule(module_path="up", weight_qtype="int8")
    said = "reaches weights of opaque kernels alone ('down'): they stay as they are. What"
    with pytest.warns(UserWarning, match=re.escape(f"{wanted!r} {said}")):
        made = plan(first, wanted, function=with_a_kernel)
    stored = {leaf.path: leaf.how is not None for leaf in made.leaves}
    assert made.unmatched_rules == (1,) and stored == {"up": True, "down": False}
    plan(first, QuantizationRule(module_path="down"), function=with_a_kernel)  # asks for nothing
    with says(PlanError, "matches no Site", "It repeats rule 0."):
        plan(*W8, *W8, function=with_a_kernel)
    with says(PlanError, "No op is called 'einsum' here"):
        plan(*W8, QuantizationRule(op_names=("einsum",), **INT8), function=with_a_kernel)
    with says(PlanError, "matches no Site of the model."):
        plan(wanted, function=with_a_kernel)


INT8 = {"weight_qtype": "int8"}


def test_a_tile_that_cannot_fit():
    with says(
        PlanError,
        "up:dot_general0 ((4, 8) parameter 'up'): (4, 8) cannot be tiled as {0: 128}.",
        "That axis has only 4 elements.",
        "QuantizationRule(weight_qtype='int8', tile_size=128)",
        "Give this path a rule of its own with a tile_size that fits (or None)",
    ):
        plan(QuantizationRule(tile_size=128, **INT8))


def tied(params, x):
    return (x @ params["w"]) @ params["w"].T


def test_one_scale_for_all_is_stored_one_way_whatever_is_summed_over():
    rules = [QuantizationRule(weight_qtype="int8", weight_calibration_method="fixed,4")]

    def f(params, x):
        return jnp.tanh(x @ params["w"]) @ params["w"].T

    params, x = {"w": normal(0, 64, 128)}, normal(1, 2, 64)
    qf, qp, _ = quantized(f, rules, params, x)
    stored = {"w": fewbit.dequantize(qp["w"].array)}
    assert relative_error(qf(qp, x), f(stored, x)) < 1e-5


def test_two_leaves_with_one_path():
    params = {"a/b": normal(0, 64, 64), "a": {"b": normal(1, 64, 64)}}
    with says(ValueError, "Two parameters have the path 'a/b'", "Rename one"):
        fewbit.plan(lambda p, x: x @ p["a/b"] @ p["a"]["b"], W8, params, normal(2, 2, 64))


def test_two_activations_with_zero_points():
    rules = [
        QuantizationRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="minmax")
    ]
    x = normal(1, 4, 64)
    with says(ValueError, ":dot_general0", "Only one operand can be asymmetric", "their own"):
        fewbit.plan(lambda p, x: (x @ p["w"]) @ x.T, rules, {"w": normal(0, 64, 64)}, x)


def test_a_plan_is_compared_with_a_plan_and_read_from_text():
    plan = fewbit.plan(mlp, W8, PARAMS, X)
    with says(TypeError, "plan.diff compares with another plan, not a str", "Plan.from_json"):
        plan.diff("a")
    with says(TypeError, "reads the text that plan.to_json() wrote, not a dict"):
        fewbit.Plan.from_json({})


def test_a_leaf_that_two_sites_want_stored_differently():
    with says(
        PlanError,
        "Parameter 'w' is used by two Sites that want it stored differently",
        "w:dot_general0 wants int8",
        "w:dot_general1 wants int8",
        "keep it float with QuantizationRule(module_path='w') before the other rules",
    ):
        fewbit.plan(tied, W8, {"w": normal(0, 4, 4)}, X)


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(bad):
    params = {**PARAMS, "up": PARAMS["up"].at[1, 2].set(bad).at[3, 0].set(bad)}
    with says(
        ValueError,
        "up holds 2 values that are NaN or infinite, the first at index (1, 2)",
        "Check the checkpoint or the training run, or leave this array out with an earlier rule.",
    ):
        fewbit.quantize_params(params, PLAN)


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "nf4"])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_channels_of_zeros_are_defined(qtype, method):
    if method == "minmax" and qtype not in ("int8", "int4"):
        return
    rules = [QuantizationRule(weight_qtype=qtype, weight_calibration_method=method)]
    params = {**PARAMS, "up": PARAMS["up"].at[:, 2].set(0.0)}
    qf, qp, _ = quantized(mlp, rules, params, X)
    assert jnp.array_equal(fewbit.dequantize(qp["up"])[:, 2], jnp.zeros(4))
    assert jnp.isfinite(qp["up"].array.scale).all() and jnp.isfinite(qf(qp, X)).all()


def test_a_parameter_that_holds_no_floats():
    with says(ValueError, "up is int32.", "cast it first", "an earlier rule"):
        fewbit.quantize_params({**PARAMS, "up": PARAMS["up"].astype(jnp.int32)}, PLAN)


def template():
    return jax.eval_shape(lambda p: fewbit.quantize_params(p, PLAN), PARAMS)


def test_a_missing_parameter():
    part = {"up": PARAMS["up"]}
    with says(
        ValueError,
        "1 of the plan's parameters is missing: down.",
        "pass allow_missing_params=True to quantize a part of it",
    ):
        fewbit.quantize_params(part, PLAN)
    assert list(fewbit.quantize_params(part, PLAN, allow_missing_params=True)) == ["up"]
    assert list(fewbit.quantize_params(part, template())) == ["up"]  # streaming


def test_a_renamed_parameter():
    renamed = {"up": PARAMS["up"], "downn": PARAMS["down"]}
    with says(ValueError, "is missing: down. 'downn' is given, which the plan does not know."):
        fewbit.quantize_params(renamed, PLAN, allow_extra_params=True)


@pytest.mark.parametrize("target", [lambda: PLAN, template])
def test_an_extra_parameter(target):
    extra = {**PARAMS, "upp": PARAMS["up"]}
    with says(
        ValueError,
        "upp is not found in the abstract_quantized_params. The nearest are up.",
        "Pass allow_extra_params=True to leave out parameters that the model does not have.",
    ):
        fewbit.quantize_params(extra, target())
    assert set(fewbit.quantize_params(extra, target(), allow_extra_params=True)) == set(PARAMS)


@pytest.mark.parametrize("target", [lambda: PLAN, template])
def test_a_parameter_of_another_shape(target):
    with says(ValueError, "up has shape (3, 8), expected (4, 8).", "make it again with this model"):
        fewbit.quantize_params({**PARAMS, "up": normal(0, 3, 8)}, target())
    with says(
        ValueError, "up has shape (8, 4), expected (4, 8). It looks transposed", "transpose(1, 0)"
    ):
        fewbit.quantize_params({**PARAMS, "up": normal(0, 8, 4)}, target())


def test_a_float_parameter_of_another_shape():
    def f(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": normal(0, 4, 4), "b": jnp.zeros((1, 4))}
    made = fewbit.plan(f, W8, params, X)
    wrong = {**params, "b": jnp.zeros((1, 5))}
    for target in (made, fewbit.quantize_params(params, made)):
        with says(ValueError, "b has shape (1, 5), expected (1, 4)."):
            fewbit.quantize_params(wrong, target)


def test_a_template_reshapes_what_is_stored_flat():
    flat = {"up": PARAMS["up"].reshape(32), "down": PARAMS["down"]}
    assert fewbit.quantize_params(flat, template())["up"].shape == (4, 8)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flat)
    assert fewbit.quantize_params(abstract, template())["up"].shape == (4, 8)
    with says(ValueError, "up has shape (32,), expected (4, 8)."):
        fewbit.quantize_params(flat, PLAN)


@pytest.mark.parametrize("target", [lambda: PLAN, template])
def test_a_leaf_that_is_quantized_already(target):
    done = fewbit.quantize_params(PARAMS, PLAN)
    with says(ValueError, "down is quantized already (QArray(", "fewbit.dequantize(...)"):
        fewbit.quantize_params(done, target())


def test_what_quantize_params_cannot_use():
    for wrong, name in ((W8, "list of QuantizationRule objects"), (PtqProvider(W8), "PtqProvider")):
        with says(TypeError, f"got a {name}.", "fewbit.plan(model, rules, *inputs)"):
            fewbit.quantize_params(PARAMS, wrong)
    with says(TypeError, "got None."):
        fewbit.quantize_params(PARAMS, None)
    with says(TypeError, "takes the parameters first and the plan second"):
        fewbit.quantize_params(PLAN, PARAMS)
    with says(ValueError, "quant_stats of a function is {'<site id>': {'lhs': statistic}}"):
        fewbit.quantize_params(PARAMS, PLAN, {"up": {"count": 1}})
    with says(ValueError, "params is not a pure dict of jax.Array: up is a str"):
        fewbit.quantize_params({**PARAMS, "up": "text"}, PLAN)


# --- running --------------------------------------------------------------------------------------


def test_float_parameters_for_a_quantized_model():
    qf, qp, _ = quantized(mlp, W8, PARAMS, X)
    with says(
        ValueError,
        "It seems you're feeding an unquantized param to a quantized model.",
        "Parameter 'up' is float, but up:dot_general0 wants it as int8.",
        "quantize_params(params, plan)",
    ):
        qf({**qp, "up": PARAMS["up"]}, X)


def test_parameters_stored_in_another_type():
    _, qp, _ = quantized(mlp, W8, PARAMS, X)
    int4 = fewbit.quantize_model(mlp, PtqProvider([QuantizationRule(weight_qtype="int4")]))
    with says(
        ValueError,
        "Parameter 'up' is stored as int8, but the rule for up:dot_general0 says int4.",
        "run the model with the rules they were quantized by",
    ):
        int4(qp, X)


def test_quantized_parameters_where_a_rule_says_float():
    _, qp, _ = quantized(mlp, W8, PARAMS, X)
    rules = [QuantizationRule(module_path="up"), *W8]
    with says(
        ValueError,
        "Parameter 'up' is stored as int8, but QuantizationRule(module_path='up') keeps "
        "up:dot_general0 float.",
        "fewbit.dequantize(...)",
    ):
        fewbit.quantize_model(mlp, PtqProvider(rules))(qp, X)
    lenient = fewbit.quantize_model(mlp, PtqProvider(rules, strict=False))
    assert lenient(qp, X).shape == (2, 4)


def test_static_ranges_without_scales():
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    made = fewbit.plan(mlp, rules, PARAMS, X)
    assert {row.act_mode for row in made.sites} == {"static"}
    qf = fewbit.quantize_model(mlp, PtqProvider(rules))
    qp = fewbit.quantize_params(PARAMS, made, allow_missing_params=True)
    sentences = (
        "up:dot_general0 has act_static_scale=True, but there is no 'up/dot_general0_lhs_scale'",
        "(and 1 more are missing)",
        "quantize_params(params, plan, quant_stats)",
        "measure the range of each batch: act_static_scale=None in QuantizationRule(",
    )
    for call in (qf, jax.jit(qf), lambda p, x: jax.eval_shape(qf, p, x)):
        with says(ValueError, *sentences):
            call(qp, X)
    linen = fewbit.quantize_model(nn.Dense(4), PtqProvider(rules))
    params = linen.init(jax.random.key(0), X)["params"]
    del params["dot_general0_lhs_scale"]
    with says(ValueError, "there is no 'dot_general0_lhs_scale' for it.", *sentences[2:]):
        linen.apply({"params": params}, X)
    fixed = [rules[0].replace(act_static_scale=None, act_calibration_method="fixed,-6,6")]
    qf, qp, _ = quantized(mlp, fixed, PARAMS, X)  # the cure
    assert jnp.isfinite(qf(qp, X)).all()


def test_arithmetic_on_a_quantized_array():
    q = fewbit.quantize(normal(0, 4, 4), "int8")
    how = fewbit.HowToQuantize(qtype="int8")
    sentences = ("QArray(qvalue=int8[4,4]", "fewbit.dot_general", "call fewbit.dequantize(...)")
    for array in (q, fewbit.WithAux(q, how)):
        for use in (lambda a: a + 1.0, lambda a: X @ a, lambda a: np.ones(4) * a, np.asarray):
            with says(TypeError, *sentences):
                use(array)


def test_quantized_parameters_for_a_float_model():
    _, qp, _ = quantized(mlp, W8, PARAMS, X)
    cures = ("is run quantized: fewbit.quantize_model(model, provider).", "method=lambda model, x:")
    with says(TypeError, *cures):
        mlp(qp, X)


# --- models that cannot be traced -----------------------------------------------------------------

CURES = ("1. Pass what the code branches on", "2. Quantize the submodules that can be traced")


def undecided(y):
    return y if y.sum() > 0 else -y


class LinenInner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return undecided(nn.Dense(4, name="up")(x))


class LinenOuter(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenInner(name="inner")(x)


class NnxInner(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return undecided(self.up(x))


class NnxOuter(nnx.Module):
    def __init__(self, rngs):
        self.inner = NnxInner(rngs)

    def __call__(self, x):
        return self.inner(x)


def test_an_untraceable_function():
    def decide(params, x):
        return undecided(mlp(params, x))

    with says(UntraceableModelError, "function decide cannot be traced", *CURES):
        plan(*W8, function=decide)
    qf = fewbit.quantize_model(decide, PtqProvider(W8))
    with says(UntraceableModelError, "function decide cannot be traced", *CURES):
        qf(fewbit.quantize_params(PARAMS, PLAN), X)


@pytest.mark.parametrize("convert", [int, float, np.asarray, bool])
def test_every_way_to_ask_for_a_value(convert):
    def ask(params, x):
        y = mlp(params, x)
        return y * float(np.sum(convert(y if convert is np.asarray else y.sum())))

    with says(UntraceableModelError, "function ask cannot be traced", *CURES):
        plan(*W8, function=ask)


def test_an_untraceable_linen_module():
    where = "Module 'inner' of Linen module LinenOuter cannot be traced"
    with says(UntraceableModelError, where, *CURES):
        fewbit.plan(LinenOuter(), W8, X)
    with says(UntraceableModelError, where, *CURES):
        fewbit.quantize_model(LinenOuter(), PtqProvider(W8)).init(jax.random.key(0), X)


def test_an_untraceable_nnx_module():
    where = "Module 'inner' of NNX module NnxOuter cannot be traced"
    model = NnxOuter(nnx.Rngs(0))
    with says(UntraceableModelError, where, *CURES):
        fewbit.plan(model, W8, X)
    with says(UntraceableModelError, where, *CURES):
        fewbit.quantize_model(model, PtqProvider(W8), X)
    q = fewbit.quantize_model(model.inner.up, PtqProvider(W8), X)  # the second cure
    assert q(X).shape == (2, 4)


# --- gradients ------------------------------------------------------------------------------------


def biased(params, x):
    return mlp(params, x) + params["bias"]


BIASED = {**PARAMS, "bias": jnp.zeros((1, 4))}


def test_gradients_over_a_tree_with_quantized_leaves():
    """JAX itself refuses before any of our code runs; the split is the cure."""
    qf, qp, _ = quantized(biased, W8, BIASED, X)
    with says(TypeError, "grad requires real- or complex-valued inputs", "got int8"):
        jax.grad(lambda p: qf(p, X).sum())(qp)
    floats, rest = fewbit.split_trainable(qp)
    assert rest["bias"] is None and floats["up"] is None
    merged = fewbit.merge_trainable(floats, rest)
    assert jax.tree.structure(merged) == jax.tree.structure(qp)

    def loss(floats, rest, x):
        return jnp.mean((qf(fewbit.merge_trainable(floats, rest), x) - 1.0) ** 2)

    optimizer = optax.sgd(0.1)
    state = optimizer.init(floats)
    first = loss(floats, rest, X)
    for _ in range(20):
        gradients = jax.jit(jax.grad(loss))(floats, rest, X)
        updates, state = optimizer.update(gradients, state, floats)
        floats = optax.apply_updates(floats, updates)
    assert loss(floats, rest, X) < first
    assert floats["up"] is None


def test_codes_that_are_floats_have_no_gradient_either():
    """JAX would take fp8 codes for parameters."""
    qf, qp, _ = quantized(biased, [QuantizationRule(weight_qtype="fp8")], BIASED, X)
    qp = fewbit.unpack(qp)
    sentences = ("Parameter 'down' is quantized (float8_e4m3fn)", "fewbit.split_trainable(params)")
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        with says(TypeError, *sentences, "nnx.DiffState(0, fewbit.float_params())"):
            jax.grad(lambda p, transform=transform: transform(qf)(p, X).sum())(qp)
    assert jax.grad(lambda x: qf(qp, x).sum())(X).shape == X.shape
    floats, rest = fewbit.split_trainable(qp)
    gradients = jax.grad(lambda f: qf(fewbit.merge_trainable(f, rest), X).sum())(floats)
    assert gradients["bias"].tolist() == [[2.0] * 4]


def test_parts_that_do_not_belong_together():
    with says(ValueError, "do not fit together at ['a']: both have a leaf", "split_trainable"):
        fewbit.merge_trainable({"a": 1.0}, {"a": 2.0})
    with says(ValueError, "do not fit together", "split_trainable"):
        fewbit.merge_trainable({"a": 1.0}, {"b": None})


def test_gradients_of_a_quantized_nnx_model():
    q = fewbit.quantize_model(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), PtqProvider(W8), X)

    def loss(model):
        return model(X).sum()

    with says(TypeError, "got int8"):
        nnx.grad(loss)(q)
    gradients = nnx.grad(loss, argnums=nnx.DiffState(0, fewbit.float_params()))(q)
    assert [path for path, _ in nnx.to_flat_state(gradients)] == [("bias",)]


# --- arguments of the wrong kind ------------------------------------------------------------------


def test_unsupported_models():
    takes = "a Flax NNX module, a Keras model or a function f(params, *args)."
    with says(ValueError, "Unsupported model type: <class 'int'>.", takes):
        fewbit.quantize_model(3, PtqProvider(W8))
    with says(ValueError, "Unsupported model type: <class 'type'>.", "instance: Dense(...)"):
        fewbit.quantize_model(nn.Dense, PtqProvider(W8))
    with says(
        ValueError, "Unsupported model type: <class 'dict'>.", "quantize_params(params, plan)"
    ):
        fewbit.plan(PARAMS, W8, X)


def test_rules_where_a_provider_is_expected():
    write = "Write quantize_model(model, PtqProvider(rules), ...)."
    second = "quantize_model takes a provider as its second argument, got a "
    with says(TypeError, second + "list.", write):
        fewbit.quantize_model(mlp, W8)
    with says(TypeError, second + "QuantizationRule.", write):
        fewbit.quantize_model(mlp, W8[0])
    with says(TypeError, "got the class PtqProvider. Make one of it"):
        fewbit.quantize_model(mlp, PtqProvider)
    with says(TypeError, "got a Plan. Write quantize_model(model, PtqProvider(plan.rules), ...)"):
        fewbit.quantize_model(mlp, PLAN)
    with says(TypeError, "The model comes first: quantize_model(model, provider, ...)."):
        fewbit.quantize_model(PtqProvider(W8), mlp)


def test_a_provider_where_rules_are_expected():
    assert fewbit.plan(mlp, PtqProvider(W8), PARAMS, X) == PLAN  # a plan takes both
    with says(TypeError, "got a PtqProvider. It is a provider already: use it as it is"):
        PtqProvider(PtqProvider(W8))
    with says(TypeError, "got the string 'int8'.", "weight_qtype='int8')", "rules_from_yaml"):
        PtqProvider("int8")
    with says(TypeError, "got None.", "QuantizationRule(module_path='.*'"):
        plan_of_none()
    with says(TypeError, "got a dict in it", "Write QuantizationRule(**{'weight_qtype': 'int8'})."):
        PtqProvider([{"weight_qtype": "int8"}])
    with says(TypeError, "got a mapping.", "Write [QuantizationRule(**{'weight_qtype': 'int8'})]."):
        PtqProvider({"weight_qtype": "int8"})
    with says(TypeError, "got 8."):
        PtqProvider(8)


def plan_of_none():
    return fewbit.plan(mlp, None, PARAMS, X)


def test_plans_need_inputs():
    with says(ValueError, "fewbit.plan(f, rules, params, *args) needs the arguments", "abstract"):
        fewbit.plan(mlp, W8A8)
    with says(ValueError, "Model inputs must be provided for nnx models.", "jax.ShapeDtypeStruct"):
        fewbit.quantize_model(NnxOuter(nnx.Rngs(0)), PtqProvider(W8))
    with says(ValueError, "Model inputs must not be provided for linen models.", "quantize_params"):
        fewbit.quantize_model(LinenOuter(), PtqProvider(W8), X)


# --- slips that people make ------------------------------------------------------------------


@pytest.mark.parametrize("qtype,size", [("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)])
def test_a_format_with_its_own_tile_on_an_axis_just_that_long(qtype, size):
    params = {"w": jax.random.normal(jax.random.key(0), (size, 8))}
    x = jnp.ones((2, size))
    plan = fewbit.plan(lambda p, x: x @ p["w"], [QuantizationRule(weight_qtype=qtype)], params, x)
    assert plan.sites[0].granularity == f"tile {size}"
    assert fewbit.quantize_params(params, plan)["w"].array.scale.shape == (1, 8)


def test_a_format_with_its_own_tile_where_it_cannot_fit():
    params, x = {"w": jnp.ones((16, 8))}, jnp.ones((2, 16))
    with pytest.raises(fewbit.PlanError, match="always in tiles of 32: give this path another"):
        fewbit.plan(lambda p, x: x @ p["w"], [QuantizationRule(weight_qtype="mxfp4")], params, x)


TILED_FORMATS = {"mxfp4": 32, "mxfp8": 32, "mxfp8_16": 16, "nvfp4": 16}


@pytest.mark.parametrize("qtype", TILED_FORMATS)
def test_a_format_with_its_own_tile_when_it_is_written(qtype):
    own = TILED_FORMATS[qtype]
    for axes in ((), (0,)):
        with says(
            ValueError,
            f"Format {qtype} requires `tiled_axes` to be specified.",
            f"Pass tiled_axes={{axis: {own}}} with the axis that products sum over.",
        ):
            HowToQuantize(qtype=qtype, channelwise_axes=axes)
    with says(
        ValueError,
        f"Format {qtype} requires a tile size of {own}, but axis 1 got 8.",
        f"Pass tiled_axes={{1: {own}}}",
    ):
        HowToQuantize(qtype=qtype, tiled_axes={1: 8})
    HowToQuantize(qtype=qtype, tiled_axes={0: 1 / 2})  # a share is told by the shape
    only = dict(op_names=("conv_general_dilated",))
    for fields in (
        dict(weight_qtype=qtype),
        dict(weight_qtype="int8", act_qtype=qtype),
        dict(weight_qtype="int8", bwd_qtype=qtype),
    ):
        cls = fewbit.QtRule if "bwd_qtype" in fields else QuantizationRule
        field = list(fields)[-1]
        with says(
            ValueError,
            f"{field}={qtype} has a scale for every {own} values of what a product sums over",
            "a convolution, the one op in op_names, has one scale per image and per output feature",
            "Use a type without tiles, such as 'int8' or 'float8_e4m3fn'.",
        ):
            cls(**fields, **only)
        assert cls(**fields).op_names == ()  # a default tile applies where it may


@pytest.mark.parametrize("qtype", TILED_FORMATS)
def test_a_format_with_its_own_tile_in_additional_qt_config(qtype):
    own, int8 = TILED_FORMATS[qtype], dict(weight_qtype="int8", act_qtype="int8")
    rule = fewbit.QtRule(**int8, additional_qt_config={"rhs_qtype": qtype})
    assert rule.tile_size == own
    with says(ValueError, f"Format {qtype} requires a tile size of {own}, but tile_size is 8."):
        fewbit.QtRule(**int8, tile_size=8, additional_qt_config={"lhs_qtype": qtype})
    with says(
        ValueError,
        f"Format {qtype} requires a tile size of {own}",
        "but additional_qt_config['drhs_tile_size'] is 8.",
    ):
        more = {"drhs_grad_qtype": qtype, "drhs_tile_size": 8}
        fewbit.QtRule(**int8, additional_qt_config=more)


def test_a_mapping_of_tiles_that_names_other_axes():
    rule = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    with says(
        fewbit.PlanError,
        "drhs_tile_size={1: 2} names axis 1, but this gradient product of dot_general_qt sums over "
        "axis 0 of lhs, which has 2 axes.",
        "A mapping names axes of lhs that the gradient sums over: write drhs_tile_size={0: 2}",
    ):
        fewbit.plan(
            lambda p, x: x @ p["up"],
            fewbit.QtProvider([rule.replace(bwd_weight_grad_tile_size={1: 2})]),
            {"up": PARAMS["up"]},
            X,
        )
    with says(
        ValueError,
        "names axes of a weight on the right in a config, and here the weight stands on the left",
        "Give tile_size as one length.",
    ):
        fewbit.training.config_from_rule(rule.replace(tile_size={0: 2}), weight=0)


def test_a_parameter_stored_in_another_shape_than_it_is_used_in():
    """Its scale would have as many numbers as itself, so it is refused in every front end."""
    flat, x = normal(3, 16 * 8), normal(4, 2, 16)

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.normal(), (128,)).reshape(16, 8)

    class Nnx(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(flat)

        def __call__(self, x):
            return x @ self.w[...].reshape(16, 8)

    def f(params, x):
        return x @ params["w"].reshape(16, 8)

    provider = PtqProvider(W8)
    for way in (
        lambda: fewbit.plan(f, W8, {"w": flat}, x),
        lambda: fewbit.plan(f, fewbit.QtProvider(W8), {"w": flat}, x),
        lambda: fewbit.plan(Linen(), W8, x),
        lambda: fewbit.quantize_model(Linen(), provider).init(jax.random.key(0), x),
        lambda: fewbit.quantize_model(Nnx(), provider, x),
    ):
        with says(
            PlanError,
            "dot_general0 reads parameter 'w' (128) as (16, 8).",
            "there would be one for every value, which is no smaller than float.",
            "Store the parameter in the shape it is used in, (16, 8), and leave the reshape out",
            "in Linen self.param('w', init, (16, 8))",
            "or keep it float with QuantizationRule(module_path=",
        ):
            way()
    with says(PlanError, "one for every 2 values"):
        fewbit.plan(lambda p, x: x @ p["w"].reshape(16, 8), W8, {"w": normal(3, 2, 64)}, x[:, :16])


def test_stored_parameters_that_no_rule_reaches():
    f = lambda p, x: x @ p["w"]  # noqa: E731
    params, x = {"w": jnp.eye(4)}, jnp.ones((2, 4))
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    stored = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    typo = [QuantizationRule(module_path="W", weight_qtype="int8", act_qtype="int8")]
    with pytest.raises(ValueError, match="no rule of this provider matches w:dot_general0"):
        fewbit.quantize_model(f, fewbit.PtqProvider(typo))(stored, x)
    fewbit.quantize_model(f, fewbit.PtqProvider(typo, strict=False))(stored, x)


def test_float16_scales_that_do_not_fit_are_told():
    f = lambda p, x: x @ p["w"]  # noqa: E731
    params, x = {"w": jnp.full((32, 4), 1e-6)}, jnp.ones((2, 32))
    rules = [QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")]
    plan = fewbit.plan(f, rules, params, x)
    with pytest.warns(UserWarning, match="w: 4 of 4 scales do not fit float16"):
        fewbit.quantize_params(params, plan)


def test_a_weight_that_cannot_be_stored_is_said_where_it_is_quantized_on_the_fly():
    params, x = {"w": jnp.eye(4)}, jnp.ones((2, 4))
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(lambda p, x: x @ (p["w"] / 2), rules, params, x)
    assert plan.sites[0].notes == (
        "weight w is changed by div before the product: quantized on the fly, not stored",
    )


@pytest.mark.parametrize(
    "act,said", [(None, "stays float"), ("int8", "is quantized on the fly, not stored")]
)
def test_a_product_of_two_parameters_says_what_becomes_of_the_other(act, said):
    params, x = {"a": jnp.eye(4), "b": jnp.eye(4)}, jnp.ones((2, 4))
    rules = [QuantizationRule(weight_qtype="int8", act_qtype=act)]
    plan = fewbit.plan(lambda p, x: x @ (p["a"] @ p["b"]), rules, params, x)
    assert plan.sites[0].notes == (f"a product of two parameters: a {said}",)
    both = fewbit.plan(lambda p, x: x @ p["a"] + x @ (p["a"] @ p["b"]), rules, params, x)
    assert [leaf.how is None for leaf in both.leaves] == [False, False]
    assert not any("two parameters" in note for row in both.sites for note in row.notes)


def test_a_callable_that_holds_its_parameters():
    import equinox as eqx

    model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="holds its parameters itself, as a pytree"):
        fewbit.plan(model, [QuantizationRule(weight_qtype="int8")], jnp.ones(4))


def test_leaves_that_are_no_arrays_go_through():
    params, x = {"w": jnp.eye(4), "activation": jnp.tanh, "steps": 3}, jnp.ones((2, 4))
    f = lambda p, x: p["activation"](x @ p["w"]) * p["steps"]  # noqa: E731
    rules = [QuantizationRule(weight_qtype="int8")]
    stored = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    assert stored["steps"] == 3 and stored["activation"] is jnp.tanh
    assert fewbit.quantize_model(f, fewbit.PtqProvider(rules))(stored, x).shape == (2, 4)


def test_two_asymmetric_operands_name_the_site_and_the_rule():
    method = dict(weight_calibration_method="minmax", act_calibration_method="minmax")
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8", **method)]
    with pytest.raises(
        fewbit.PlanError, match=r"w:dot_general0: Only one operand can be.*The rule"
    ):
        fewbit.plan(lambda p, x: x @ p["w"], rules, {"w": jnp.eye(4)}, jnp.ones((2, 4)))


def test_an_op_that_exists_but_not_in_this_model():
    rules = [QuantizationRule(weight_qtype="int8", op_names=("einsum",))]
    with pytest.raises(fewbit.PlanError) as caught:
        fewbit.plan(lambda p, x: x @ p["w"], rules, {"w": jnp.eye(4)}, jnp.ones((2, 4)))
    assert "No op is called 'einsum' here (there are: dot_general)." in str(caught.value)
    assert "The nearest is 'einsum'" not in str(caught.value)


def test_a_linen_model_is_planned_without_its_variables():
    import flax.linen as nn

    variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 4)))
    with pytest.raises(ValueError, match="planned without its variables"):
        fewbit.plan(
            nn.Dense(2), [QuantizationRule(weight_qtype="int8")], variables, jnp.ones((1, 4))
        )
