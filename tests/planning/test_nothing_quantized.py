"""Rules that ask for something and reach nothing are an error, when planned and when called."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import W8, W8A8, normal, says

import fewbit
from fewbit import LoraProvider, PtqProvider, QtProvider, QtRule, QuantizationRule

IDS = jnp.array([[1, 2, 3], [4, 5, 6]])
X = normal(0, 4, 8)
PARAMS = {"w": normal(1, 8, 8)}
ACT_ALONE = [QuantizationRule(act_qtype="int8")]
QAT = [QtRule(weight_qtype="int8", act_qtype="int8")]


def product(params, x):
    return x @ params["w"]


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(16, 8, name="table")(ids)
        return nn.Dense(4, name="head")(nn.tanh(nn.Dense(8, name="up")(x)))


class FlaxPreTrained:
    """As Hugging Face's: a plain object that closes over its parameters unless it is given some."""

    def __init__(self, module, *inputs):
        self._module = module
        self._params = module.init(jax.random.key(0), *inputs)["params"]

    @property
    def module(self):
        return self._module

    @property
    def params(self):
        return self._params

    def __call__(self, ids, params=None, train=False):
        return self.module.apply({"params": self.params if params is None else params}, ids)


@pytest.fixture(scope="module")
def model():
    return FlaxPreTrained(Encoder(), IDS)


CURE = (
    "A FlaxPreTrained has its parameters in .params and its Linen module in .module.",
    "fewbit.plan(f, rules, model.params, *inputs)",
    "fewbit.plan(model.module, rules, *inputs) and quantize_params(model.params, plan)",
)


@pytest.mark.parametrize("rules", [W8, W8A8], ids=["W8", "W8A8"])
def test_an_object_that_holds_its_parameters(model, rules):
    sentences = (
        "The weights at Encoder/up:dot_general0, Encoder/head:dot_general0 are constants",
        *CURE,
    )
    anew = "each would be quantized anew at every call"
    with says(ValueError, "Nothing of the model would be quantized.", *sentences):
        fewbit.plan(model, rules, IDS)
    with pytest.raises(ValueError) as found:
        fewbit.plan(model, rules, IDS)
    assert (anew in str(found.value)) == (rules is W8A8)
    for provider in (PtqProvider(rules), QtProvider(QAT)):
        with says(ValueError, *sentences):
            fewbit.quantize_model(model, provider, IDS)
        q = fewbit.quantize_model(model, provider)
        for call in (q, jax.jit(q)):
            with says(ValueError, "Nothing in this call", *CURE):
                call(IDS)
    with pytest.warns(UserWarning, match=r"constants of the function.*\.params"):
        plan = fewbit.plan(model, rules, IDS, strict=False)
    assert plan.totals.quantized_parameters == 0
    lenient = fewbit.quantize_model(model, PtqProvider(rules, strict=False))
    assert jnp.allclose(lenient(IDS), model(IDS), atol=0.1)


def test_the_cures_of_such_an_object(model):
    plan = fewbit.plan(model.module, W8A8, IDS)
    params = fewbit.quantize_params(model.params, plan)
    q = fewbit.quantize_model(model.module, PtqProvider(W8A8))
    assert jnp.allclose(q.apply({"params": params}, IDS), model(IDS), atol=0.1)
    f = lambda params, *inputs: model(*inputs, params=params)  # noqa: E731
    plan = fewbit.plan(f, W8A8, model.params, IDS)
    params = fewbit.quantize_params(model.params, plan)
    assert plan.totals.quantized_parameters == 8 * 8 + 8 * 4
    assert jnp.allclose(
        fewbit.quantize_model(f, PtqProvider(W8A8))(params, IDS), model(IDS), atol=0.1
    )


class Mixer(nn.Module):
    """As vision and audio models: float inputs, and products of two activations."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="up")(x))
        return nn.Dense(4, name="head")(x @ x.T @ x)


@pytest.mark.parametrize("module", [Mixer, lambda: nn.Dense(4)], ids=["mixer", "dense"])
@pytest.mark.parametrize("rules", [W8, W8A8], ids=["W8", "W8A8"])
def test_float_inputs_of_an_object_that_holds_its_parameters(module, rules):
    model = FlaxPreTrained(module(), X)
    sentences = "The first argument meets nothing but constants", "are constants of the", *CURE
    with says(ValueError, "Nothing of the model would be quantized.", *sentences):
        fewbit.plan(model, rules, X)
    with pytest.raises(ValueError) as found:
        fewbit.plan(model, rules, X)
    assert ("quantized anew at every call" in str(found.value)) == (rules is W8A8)
    assert "in a dict" not in str(found.value)
    for provider in (PtqProvider(rules), QtProvider(QAT)):
        with says(ValueError, *sentences):
            fewbit.quantize_model(model, provider, X)
        q = fewbit.quantize_model(model, provider)
        for call in (q, jax.jit(q)):
            with says(ValueError, "Nothing in this call", *sentences):
                call(X)
    with pytest.warns(UserWarning, match=r"first argument meets nothing but constants.*\.params"):
        fewbit.plan(model, rules, X, strict=False)
    f = lambda params, x: model(x, params=params)  # noqa: E731
    params = fewbit.quantize_params(model.params, fewbit.plan(f, rules, model.params, X))
    q = fewbit.quantize_model(f, PtqProvider(rules))
    assert jnp.allclose(q(params, X), model(X), rtol=0.1, atol=0.1 * jnp.abs(model(X)).max())


def test_integer_inputs_of_an_object_with_products_of_two_activations():
    module = nn.Sequential([nn.Embed(16, 8), lambda x: x[0], Mixer()])
    with says(ValueError, "Nothing of the model would be quantized.", *CURE):
        fewbit.plan(FlaxPreTrained(module, IDS), W8A8, IDS)


@pytest.mark.parametrize("rules", [W8, W8A8], ids=["W8", "W8A8"])
def test_float_inputs_of_a_function_that_closes_over_its_weights(rules):
    w, mask, mixer = PARAMS["w"], jnp.ones((4, 8)), Mixer()
    held = mixer.init(jax.random.key(0), X)
    for f, inputs in (
        (lambda x: jnp.tanh(x @ w) @ w, (X,)),
        (lambda x, mask: jnp.tanh(x @ w * mask) @ w, (X, mask)),
        (lambda x: mixer.apply(held, x), (X,)),
    ):
        with says(
            ValueError,
            "Nothing of the model would be quantized. The first argument meets nothing but",
            "Make them the first argument of the function: f(params, *inputs). If it is the "
            "parameters, pass it in a dict: f({'w': w}, *inputs).",
        ):
            fewbit.plan(f, rules, *inputs)
        with says(ValueError, "Nothing in this call", "Make them the first argument"):
            fewbit.quantize_model(f, PtqProvider(rules))(*inputs)
    in_a_dict = fewbit.plan(lambda p: p["w"] @ w, rules, {"w": X})
    assert in_a_dict.totals.quantized_parameters == X.size


@pytest.mark.parametrize("rules", [W8, W8A8], ids=["W8", "W8A8"])
def test_parameters_that_are_one_bare_array(rules):
    w, constant = PARAMS["w"], normal(2, 8, 8)
    for f, inputs in (
        (lambda w, x: x @ w, (X,)),
        (lambda w, x: w @ x.T, (X,)),
        (lambda w, x: x @ w @ constant, (X,)),
        (lambda w, x: x @ constant @ w, (X,)),
        (lambda w, x: x @ (w @ constant), (X,)),
        (lambda w: X @ w, ()),
        (lambda w: jnp.tanh(X @ w) @ constant, ()),
    ):
        plan = fewbit.plan(f, rules, w, *inputs)
        assert plan.totals.quantized_parameters == w.size
        q = fewbit.quantize_model(f, PtqProvider(rules))
        stored = fewbit.quantize_params(w, plan)
        out = f(w, *inputs)
        assert jnp.allclose(q(stored, *inputs), out, atol=0.05 * jnp.abs(out).max())


def test_weights_that_a_function_closes_over():
    f = lambda params, x: x @ PARAMS["w"]  # noqa: E731
    with says(ValueError, "Make them the first argument of the function: f(params, *inputs)."):
        fewbit.plan(f, W8A8, {}, X)
    both = lambda params, x: x @ PARAMS["w"] @ params["w"]  # noqa: E731
    assert fewbit.plan(both, W8A8, PARAMS, X).totals.quantized_sites == 2
    scores = lambda params, x: x @ x.T @ PARAMS["w"][:4]  # noqa: E731
    assert fewbit.plan(scores, W8A8, {}, X).totals.quantized_sites == 2


@pytest.mark.parametrize("kind", ["function", "linen", "nnx"])
def test_activations_alone(kind):
    fixed = "Write QuantizationRule(weight_qtype='int8', act_qtype='int8')."
    sentences = "Rule 0 has act_qtype without weight_qtype", fixed
    provider = PtqProvider(ACT_ALONE)
    if kind == "function":
        plan = lambda **k: fewbit.plan(product, ACT_ALONE, PARAMS, X, **k)  # noqa: E731
        call = lambda: fewbit.quantize_model(product, provider)(PARAMS, X)  # noqa: E731
    elif kind == "linen":
        params = Encoder().init(jax.random.key(0), IDS)
        plan = lambda **k: fewbit.plan(Encoder(), ACT_ALONE, IDS, **k)  # noqa: E731
        call = lambda: fewbit.quantize_model(Encoder(), provider).apply(params, IDS)  # noqa: E731
    else:
        linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        plan = lambda **k: fewbit.plan(linear, ACT_ALONE, X, **k)  # noqa: E731
        call = lambda: fewbit.quantize_model(linear, provider, X)  # noqa: E731
    with says(ValueError, "Nothing of the model would be quantized.", *sentences, "strict=False"):
        plan()
    with says(ValueError, "Nothing", *sentences):
        call()
    with pytest.warns(UserWarning, match="Nothing of the model would be quantized"):
        assert plan(strict=False).totals.quantized_sites == 0


def test_weights_alone_where_there_are_none():
    f = lambda params, x: x @ x.T + (x @ (2 * params["w"])).sum()  # noqa: E731
    with says(
        ValueError,
        "Nothing of the model would be quantized.",
        "product of two activations; the rule is weight-only",
        "weight w is changed by mul before the product",
    ):
        fewbit.plan(f, W8, PARAMS, X)
    assert fewbit.plan(f, W8A8, PARAMS, X).totals.quantized_sites == 2


def test_what_asks_for_nothing_or_for_something_else_is_no_error():
    for rules in ([], [QuantizationRule()]):
        assert fewbit.plan(product, rules, PARAMS, X).totals.quantized_sites == 0
    adapted = fewbit.plan(product, LoraProvider(rank=2, alpha=2.0), PARAMS, X)
    assert len(adapted.adapters) == 1 and adapted.totals.quantized_sites == 0
    rules = [*ACT_ALONE, *W8]
    with says(ValueError, "matches no Site"):  # the first rule takes all
        fewbit.plan(product, rules, PARAMS, X)
    mixed = [QuantizationRule(module_path="other", act_qtype="int8"), *W8]
    two = lambda params, x: x @ params["w"] @ params["other"]  # noqa: E731
    plan = fewbit.plan(two, mixed, {**PARAMS, "other": PARAMS["w"]}, X)
    assert plan.totals.quantized_sites == 1
