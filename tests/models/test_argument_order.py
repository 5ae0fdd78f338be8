"""Arguments of a wrong kind or in a wrong order: told by name, and never by printing arrays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import W8, normal

import fewbit
from fewbit import HowToQuantize, LoraRule, PtqProvider, QtRule, QuantizationRule, WithAux
from fewbit.providers._provider import QuantizationProvider

PARAMS = {"up": normal(0, 32, 64), "down": normal(1, 64, 8)}
X = normal(2, 4, 32)
PROVIDER = PtqProvider(W8)


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def message(call, *args, kind=TypeError, **kwargs):
    """What a failing call says, with its notes; short, and without the numbers of any array."""
    with pytest.raises(kind) as info:
        call(*args, **kwargs)
    text = " ".join([str(info.value), *getattr(info.value, "__notes__", ())])
    assert "Array([" not in text and "array([" not in text, text
    assert len(text) < 900, text
    return text


# --- plan and quantize_model ----------------------------------------------------------------------

ORDER = "fewbit.plan takes the model first, its rules second and the inputs after them"


@pytest.mark.parametrize(
    ("args", "place", "found"),
    [
        ((mlp, PARAMS, X, W8), 4, "a dict with the keys 'up', 'down'"),
        ((mlp, PARAMS, W8, X), 3, "a dict with the keys 'up', 'down'"),
        ((mlp, X, W8, PARAMS), 3, "a float32[4,32] array"),
        ((mlp, PARAMS, X, PROVIDER), 4, "a dict with the keys 'up', 'down'"),
        ((W8, mlp, PARAMS, X), 1, "the function mlp"),
        ((PROVIDER, mlp, PARAMS, X), 1, "the function mlp"),
        ((W8[0], mlp, PARAMS, X), 1, "the function mlp"),
    ],
)
def test_rules_in_another_place(args, place, found):
    text = message(fewbit.plan, *args)
    assert ORDER in text and f"the rules are argument {place}, and argument 2 is {found}." in text
    fixed = "(model, rules, *inputs)" if place == 1 else "(mlp, rules, params, *inputs)"
    assert f"Write fewbit.plan{fixed}." in text


@pytest.mark.parametrize("abstract", [False, True])
def test_the_input_before_the_parameters(abstract):
    params, x = (PARAMS, X) if not abstract else jax.eval_shape(lambda: (PARAMS, X))
    text = message(fewbit.plan, mlp, W8, x, params)
    assert "mlp could not be run on these inputs: TypeError: JAX does not support string" in text
    assert "its parameters, here a float32[4,32] array; input 2 is a dict with the keys" in text
    assert "write fewbit.plan(mlp, rules, params, x)" in text
    text = message(fewbit.quantize_model, mlp, PROVIDER, x, params)
    assert "write fewbit.quantize_model(mlp, provider, params, x)" in text


def test_errors_that_have_nothing_to_do_with_the_order_stay():
    def scaled(w, batch):
        if batch["x"].sum() > 0:
            return batch["x"] @ w
        return batch["x"]

    with pytest.raises(fewbit.UntraceableModelError) as info:
        fewbit.plan(scaled, W8, PARAMS["up"], {"x": X})
    assert "input 2 is a dict with the key 'x'" in info.value.__notes__[-1]
    with pytest.raises(KeyError, match="'side'"):  # the parameters come first already
        fewbit.plan(lambda p, x: x @ p["side"], W8, PARAMS, X)
    with pytest.raises(fewbit.PlanError):
        fewbit.plan(mlp, [QuantizationRule(module_path="no", weight_qtype="int8")], PARAMS, X)
    assert fewbit.plan(lambda w, b: b["x"] @ w, W8, PARAMS["up"], {"x": X}).sites


def test_parameters_among_the_inputs_of_a_flax_module():
    dense = nn.Dense(8)
    variables = dense.init(jax.random.key(0), X)
    brings = "brings its own parameters, and input 1 is a dict with the keys"
    text = message(fewbit.plan, dense, W8, variables["params"], X)
    assert f"Dense (a Flax module) {brings}" in text
    assert "leave them out: fewbit.plan(model, rules, x)." in text
    linear = nnx.Linear(32, 8, rngs=nnx.Rngs(0))
    text = message(fewbit.plan, linear, W8, nnx.state(linear), X)
    assert "Linear (a Flax module) brings its own parameters, and input 1 is a State" in text
    text = message(fewbit.plan, dense, X, W8)
    assert "Write fewbit.plan(model, rules, *inputs)." in text


@pytest.mark.parametrize(
    ("args", "sentences"),
    [
        ((PROVIDER, mlp), ["got the function mlp. The model comes first: quantize_model(model, p"]),
        ((W8, mlp), ["The model comes first: quantize_model(model, PtqProvider(rules), ...)."]),
        ((mlp, X, PROVIDER), ["got a float32[4,32] array. The inputs come after it"]),
        ((mlp, PARAMS, X), ["got a dict with the keys 'up', 'down'. Write quantize_model(model"]),
    ],
)
def test_a_provider_in_another_place(args, sentences):
    text = message(fewbit.quantize_model, *args)
    assert text.startswith("quantize_model takes a provider as its second argument, got")
    assert all(sentence in text for sentence in sentences), text


# --- rules of a provider --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "sentences"),
    [
        (PARAMS, ["got a dict with the keys 'up', 'down'. Write QuantizationRule(module_path"]),
        (X, ["got a float32[4,32] array."]),
        ([X], ["got a float32[4,32] array in it."]),
        (mlp, ["got the function mlp."]),
        (PtqProvider, ["got the class PtqProvider. Make a provider of it: PtqProvider(rules)."]),
        ({"weight_qtype": "int8"}, ["Write [QuantizationRule(**{'weight_qtype': 'int8'})]."]),
        ([{"weight_qtype": "int8"}], ["Write QuantizationRule(**{'weight_qtype': 'int8'})."]),
    ],
)
def test_what_is_no_list_of_rules(rules, sentences):
    text = message(PtqProvider, rules)
    assert text.startswith("A provider takes a list of QuantizationRule objects, got")
    assert all(sentence in text for sentence in sentences), text


def test_a_plan_where_rules_are_expected():
    plan = fewbit.plan(mlp, W8, PARAMS, X)
    assert "got a Plan. Its rules are plan.rules." in message(PtqProvider, plan)
    assert PtqProvider(plan.rules) == PROVIDER


def test_rules_for_adapters_are_refused_where_none_are_made():
    rule = LoraRule(rank=4, alpha=8.0, module_path="up", weight_qtype="nf4", tile_size=32)
    for refuse in (PtqProvider, QuantizationProvider):
        text = message(refuse, [rule])
        assert f"{refuse.__name__} makes no adapters, so it would ignore the rank and alpha" in text
        instead = "QuantizationRule(module_path='up', weight_qtype='nf4', tile_size=32)"
        assert f"Give the rule to a LoraProvider; without adapters, write {instead}." in text
    assert "leave it out." in message(fewbit.plan, mlp, [LoraRule(rank=4, alpha=8.0)], PARAMS, X)

    class Adapters(PtqProvider):
        refuses = ()

    assert Adapters([rule]).rules == (rule,)


def test_rules_of_training_serve_where_they_mean_the_same():
    training = [
        QtRule(module_path="down"),
        QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform"),
    ]
    serving = [QuantizationRule(module_path="down"), *W8]
    plans = [fewbit.plan(mlp, rules, PARAMS, X) for rules in (training, serving)]
    assert plans[0].totals == plans[1].totals
    rule = QtRule(weight_qtype="int8", disable_channelwise_axes=True)
    (planned,) = {row.granularity for row in fewbit.plan(mlp, [rule], PARAMS, X).sites}
    assert planned == "per-tensor"  # what training did is what is served


# --- arrays and trees -----------------------------------------------------------------------------

Q = fewbit.quantize(PARAMS["up"], "int4", channelwise_axes=(1,))
BOXED = WithAux(Q, HowToQuantize(qtype="int4", channelwise_axes=(1,)))


def test_dequantize_takes_quantized_arrays():
    np.testing.assert_array_equal(fewbit.dequantize(BOXED), fewbit.dequantize(Q))
    takes = "fewbit.dequantize takes a QArray or a WithAux of one, got"
    text = message(fewbit.dequantize, jnp.ones(3))
    assert f"{takes} a float32[3] array. It is not quantized, so it can be used as it is." in text
    text = message(fewbit.dequantize, {"up": BOXED})
    assert f"{takes} a dict with the key 'up'. For a tree: is_q = lambda" in text
    assert f"{takes} the int 3." in message(fewbit.dequantize, 3)

    is_q = lambda x: isinstance(x, fewbit.QArray | fewbit.WithAux)  # noqa: E731 (as the text says)
    tree = {"up": BOXED, "bias": X}
    floats = jax.tree.map(lambda x: fewbit.dequantize(x) if is_q(x) else x, tree, is_leaf=is_q)
    np.testing.assert_array_equal(floats["up"], fewbit.dequantize(Q))
    assert floats["bias"] is X


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((Q, "int8"), "a QArray that stands for float32[32,64]. It is quantized already"),
        ((BOXED, "int8"), "a WithAux that stands for float32[32,64]. It is quantized already"),
        ((PARAMS, "int8"), "a dict with the keys 'up', 'down'. A tree is quantized by fewbit.quan"),
        (("int8", X), "The array comes first: fewbit.quantize(array, 'int8')."),
        ((None, "int8"), "got None."),
        ((mlp, "int8"), "got the function mlp."),
    ],
)
def test_quantize_takes_an_array(args, sentence):
    text = message(fewbit.quantize, *args)
    assert "fewbit.quantize(array, qtype) takes an array of floats, got" in text
    assert sentence in text


def test_quantize_still_takes_what_becomes_an_array():
    assert fewbit.quantize([1.0, 2.0], "int8").shape == (2,)
    assert fewbit.quantize(nnx.Param(X), "int8").shape == X.shape


NO_TREES = [
    (3, "the int 3"),
    ("x", "the string 'x'"),
    (None, "None"),
    (mlp, "the function mlp"),
    (W8[0], "a QuantizationRule"),
    ({"f": mlp}, "a dict with the key 'f'"),
    (nn.Dense(4), "a Dense"),
]


@pytest.mark.parametrize(("value", "found"), NO_TREES)
@pytest.mark.parametrize("name", ["pack", "unpack", "trainable", "split_trainable"])
def test_what_is_no_tree_of_parameters(name, value, found):
    if value == 3 and "trainable" in name:  # a number is a leaf like any other
        assert fewbit.trainable(3) is False
        return
    text = message(getattr(fewbit, name), value)
    assert text.startswith(f"fewbit.{name} takes parameters (a ") and f", got {found}." in text


def test_trees_that_hold_nothing_quantized_pass_through():
    for tree in ({}, [], PARAMS):
        assert jax.tree.leaves(fewbit.pack(tree)) == jax.tree.leaves(fewbit.unpack(tree))
    assert fewbit.pack({"q": Q, "activation": mlp})["activation"] is mlp


def test_one_packed_array_at_a_time():
    for name in ("pack", "unpack"):
        one = getattr(fewbit.qarray, name)
        assert "Take what is in it: .array." in message(one, BOXED)
        assert f"For a tree: fewbit.{name}(tree)." in message(one, PARAMS)


def test_functions_among_the_leaves_are_not_trained():
    tree = {"w": X, "q": Q, "activation": jnp.tanh, "name": "layer"}
    assert fewbit.trainable(tree) == {"w": True, "q": False, "activation": False, "name": False}
    floats, rest = fewbit.split_trainable(tree)
    assert rest["activation"] is jnp.tanh and floats["activation"] is None
    assert fewbit.merge_trainable(floats, rest)["name"] == "layer"


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        (({"a": X}, {"b": None}), "at ['a']: only the first has it."),
        (({"a": X}, {"a": None, "b": X}), "at ['b']: only the second has it."),
        ((PARAMS, X), "at the top: the first is a dict with the keys 'up', 'down', the second a f"),
        (([X, X], [None]), "at [1]: only the first has it."),
        (({"a": X}, {"a": X}), "at ['a']: both have a leaf there."),
    ],
)
def test_parts_that_do_not_fit(parts, where):
    text = message(fewbit.merge_trainable, *parts, kind=ValueError)
    assert f"The two parts do not fit together {where}" in text
