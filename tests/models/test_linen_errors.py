"""Linen: what goes wrong, and what the message says. Rules as kernels and subclasses see them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from linen_cases import W8A8, normal, quantize, stored

import fewbit
from fewbit import PtqProvider, QuantizationProvider, QuantizationRule, UntraceableModelError

X = normal(4, 16)


class Model(nn.Module):
    def setup(self):
        self.block = Block()

    def __call__(self, x):
        return self.block(x)

    def encode(self, x):
        return self.block(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="up")(x)


def test_float_params_given_to_a_quantized_model():
    ptq, variables, _ = quantize(Model(), W8A8, X)
    with pytest.raises(
        ValueError, match="feeding an unquantized param to a quantized model"
    ) as error:
        ptq.apply(variables, X)
    assert "block/up/kernel" in str(error.value) and "quantize_params" in str(error.value)


def test_inputs_given_to_quantize_model():
    with pytest.raises(ValueError, match="Model inputs must not be provided for linen models."):
        fewbit.quantize_model(Model(), PtqProvider(W8A8), X)


def test_unknown_method():
    with pytest.raises(ValueError, match="Model has no method 'encodd'. The nearest are encode"):
        fewbit.quantize_model(Model(), PtqProvider(W8A8), methods=("encodd",))
    with pytest.raises(ValueError, match="Dense has no method 'enc'. The nearest are __call__."):
        fewbit.quantize_model(nn.Dense(3), PtqProvider(W8A8), methods=("enc",))  # not its fields
    ptq, _, quantized = quantize(Model(), W8A8, X)
    with pytest.raises(AttributeError, match="encodd"):
        ptq.apply(quantized, X, method="encodd")


def test_params_that_do_not_fit():
    ptq, variables, quantized = quantize(Model(), W8A8, X)
    template = jax.eval_shape(ptq.init, jax.random.key(0), X)["params"]
    wrong = {"block": {"up": {"kernel": jnp.ones((3, 8)), "bias": jnp.ones(8)}}}
    with pytest.raises(ValueError, match=r"block/up/kernel has shape \(3, 8\), expected \(16, 8\)"):
        fewbit.quantize_params(wrong, template)
    extra = {"block": {**variables["params"]["block"], "upp": {"kernel": jnp.ones((16, 8))}}}
    with pytest.raises(
        ValueError, match="block/upp/kernel is not found .*nearest are block/up/kernel"
    ):
        fewbit.quantize_params(extra, template)
    passed = fewbit.quantize_params(extra, template, allow_extra_params=True)
    assert list(stored(passed)) == ["block/up/kernel"] and "upp" not in passed["block"]
    with pytest.raises(ValueError, match="quantized already"):
        fewbit.quantize_params(quantized["params"], template)
    with pytest.raises(Exception, match="kernel"):
        ptq.apply(quantized, normal(4, 12))


def test_a_rule_that_matches_nothing():
    rules = [QuantizationRule(module_path="blok/.*", weight_qtype="int8"), *W8A8]
    strict = fewbit.quantize_model(Model(), PtqProvider(rules))
    with pytest.raises(fewbit.PlanError, match="matches no Site .*'block/up'.*strict=False"):
        strict.init(jax.random.key(0), X)
    lenient = fewbit.quantize_model(Model(), PtqProvider(rules, strict=False))
    with pytest.warns(UserWarning, match="matches no Site"):
        made = lenient.init(jax.random.key(0), X)
    assert list(stored(made["params"])) == ["block/up/kernel"]


def test_unused_rules():
    unused = QuantizationRule(module_path="none", weight_qtype="int4")
    provider = PtqProvider([*W8A8, unused], strict=False)
    with pytest.raises(ValueError, match="Quantization is not completed yet"):
        provider.get_unused_rules()
    ptq = fewbit.quantize_model(Model(), provider)
    with pytest.warns(UserWarning, match="matches no Site"):
        ptq.init(jax.random.key(0), X)
    assert list(provider.get_unused_rules()) == [unused]


class Undecided(nn.Module):
    @nn.compact
    def __call__(self, x, flag=True):
        y = nn.Dense(8, name="up")(x)
        return y if flag and y.sum() > 0 else -y


class Around(nn.Module):
    @nn.compact
    def __call__(self, x, flag=True):
        return Undecided(name="inner")(x, flag)


def test_a_module_that_cannot_be_traced():
    ptq = fewbit.quantize_model(Around(), PtqProvider(W8A8))
    with pytest.raises(UntraceableModelError) as error:
        ptq.init(jax.random.key(0), X)
    text = str(error.value)
    assert "Module 'inner' of Linen module Around cannot be traced" in text
    assert "1. Pass what the code branches on" in text and "2. Quantize the submodules" in text
    assert stored(ptq.init(jax.random.key(0), X, flag=False)["params"])  # the first cure


def test_an_untraceable_template_says_the_same():
    ptq = fewbit.quantize_model(Around(), PtqProvider(W8A8))
    with pytest.raises(UntraceableModelError, match="Module 'inner' of"):
        jax.eval_shape(ptq.init, jax.random.key(0), X)


# --- rules as kernels and subclasses see them -----------------------------------------------------

seen = []


class Kernel(nn.Module):
    @nn.compact
    def __call__(self, x):
        seen.append((self.name, fewbit.get_current_rule("gmm")))
        return nn.Dense(8, name="up")(x)


class Kernels(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Kernel(name="a")(x) + Kernel(name="b")(x)


def test_get_current_rule_inside_a_module():
    gmm = QuantizationRule(module_path="a", op_names=("gmm",), weight_qtype="int4")
    seen.clear()
    Kernels().init(jax.random.key(0), X)
    assert {rule for _, rule in seen} == {None}
    seen.clear()
    provider = PtqProvider([gmm, QuantizationRule(module_path=".*/up", weight_qtype="int8")])
    ptq = fewbit.quantize_model(Kernels(), provider)
    quantized = ptq.init(jax.random.key(0), X)
    ptq.apply(quantized, X)
    assert dict(seen) == {"a": gmm, "b": None} and len(set(seen)) == 2
    assert list(provider.get_unused_rules()) == []
    assert fewbit.get_current_rule("gmm") is None


class Doubled(PtqProvider):
    """A provider whose products come out doubled, and which remembers where it was called."""

    def __init__(self, rules):
        super().__init__(rules)
        self.called = []

    def dot_general(self, lhs, rhs, dimension_numbers, *args, **kwargs):
        rule, op_id = self._get_current_rule_and_op_id("dot_general")
        self.called.append((rule.weight_qtype, op_id))
        return super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs) * 2.0


class NoBias(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, use_bias=False, name="up")(x)


def test_an_overridden_product_is_called():
    plain, _, quantized = quantize(NoBias(), W8A8, X)
    provider = Doubled(W8A8)
    doubled = fewbit.quantize_model(NoBias(), provider)
    assert jnp.array_equal(doubled.apply(quantized, X), plain.apply(quantized, X) * 2.0)
    assert set(provider.called) == {(jnp.dtype("int8"), "dot_general0")}
    with pytest.raises(ValueError, match="Current module is not known."):
        provider._get_current_rule_and_op_id("dot_general")


class Negated(QuantizationProvider):
    """On the base class: parameters stay float."""

    def dot_general(self, lhs, rhs, dimension_numbers, *args, **kwargs):
        assert isinstance(lhs, jax.Array) and isinstance(rhs, jax.Array)
        assert self._get_current_rule_and_op_id("dot_general")[0] == W8A8[0]
        return -super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)


@pytest.mark.parametrize("disable_jit", [False, True])
def test_a_provider_on_the_base_class(disable_jit):
    model = fewbit.quantize_model(NoBias(), Negated(W8A8, disable_jit=disable_jit))
    variables = model.init(jax.random.key(0), X)
    assert stored(variables["params"]) == {}
    assert jnp.array_equal(model.apply(variables, X), -NoBias().apply(variables, X))
