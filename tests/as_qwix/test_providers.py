"""Providers that others derive from Qwix's, as MaxText does; and what they ask while they run."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import normal, says
from qwix_away import qwix as qwix

import fewbit

X = normal(0, 2, 8)


class Block(nnx.Module):
    def __init__(self, use_bias=True):
        self.up = nnx.Linear(8, 16, use_bias=use_bias, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, 8, use_bias=use_bias, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def quantize(qwix, provider_class, rules=None, model=None):
    rules = rules or [qwix.QtRule(module_path="up", weight_qtype="int8", act_qtype="int8")]
    return qwix.quantize_model(model or Block(), provider_class(rules), X)


def test_a_provider_with_products_of_its_own(qwix):
    asked = []

    class Doubling(qwix.QtProvider):
        def dot_general(self, *args, **kwargs):
            asked.append(self._get_current_rule_and_op_id("dot_general"))
            return 2 * jax.lax.dot_general(*args, **kwargs)

        def einsum(self, *args, **kwargs):
            raise AssertionError("no einsum in this model")

    model = Block()
    found = quantize(qwix, Doubling, model=model)(X)
    wanted = model.down(nnx.relu(2 * (X @ model.up.kernel[...]) + model.up.bias[...][None]))
    assert jnp.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert {(rule.module_path, op) for rule, op in asked} == {("up", "dot_general0")}


@pytest.mark.parametrize("times", [1, 2])
def test_a_provider_that_hands_its_operands_on(qwix, times):
    """What it hands on is quantized as it was planned, and gets the gradient."""

    class Handing(qwix.QtProvider):
        def dot_general(self, lhs, rhs, *args, **kwargs):
            assert isinstance(rhs, jax.Array), type(rhs)
            rhs = rhs if times == 1 else rhs * times
            return super().dot_general(lhs, rhs, *args, **kwargs)

    rules = [qwix.QtRule(weight_qtype="int4", act_qtype="int8", weight_calibration_method="rms,3")]

    def loss(model, x):
        return (model(x) ** 2).sum()

    plain, handing = Block(use_bias=False), Block(use_bias=False)
    plain.up.kernel[...] = plain.up.kernel[...] * times
    plain.down.kernel[...] = plain.down.kernel[...] * times
    plain, handing = (
        quantize(qwix, kind, rules, model)
        for kind, model in ((qwix.QtProvider, plain), (Handing, handing))
    )
    assert jnp.allclose(plain(X), handing(X), rtol=1e-5)
    grads = [nnx.grad(loss)(model, X).up.kernel[...] for model in (plain, handing)]
    assert jnp.allclose(grads[0] * times, grads[1], rtol=1e-4) and jnp.abs(grads[0]).max() > 0


def test_rules_and_paths_asked_for_inside_a_product(qwix):
    from qwix._src.qconfig import get_current_rule
    from qwix._src.utils import flax_util

    seen = set()

    class Asking(qwix.QtProvider):
        def dot_general(self, *args, **kwargs):
            rule, none = self._get_current_rule_and_op_id("dot_general", only_rule=True)
            assert none is None and get_current_rule("dot_general") == rule
            again = self._get_current_rule_and_op_id("dot_general", repeated_call=True)[1]
            seen.add((flax_util.get_current_module_path(), again))
            return super().dot_general(*args, **kwargs)

    quantize(qwix, Asking, [qwix.QtRule(weight_qtype="int8", act_qtype="int8")])(X)
    assert seen == {(("up",), "dot_general0"), (("down",), "dot_general0")}
    with says(ValueError, "Current module is not known."):
        flax_util.get_current_module_path()


def test_rules_that_a_provider_changes(qwix):
    class Int4(qwix.QtProvider):
        def _init_rule(self, rule):
            rule = super()._init_rule(rule)
            return rule.replace(weight_qtype="int4", act_qtype=None)

    model = quantize(qwix, Int4)
    assert type(model)._fewbit_provider.rules[0].weight_qtype == jnp.int4


def test_inputs_and_outputs_that_a_provider_changes(qwix):
    class Shifting(qwix.PtqProvider):
        def process_model_inputs(self, model, model_args, model_kwargs):
            given = dict(model=model, model_args=model_args, model_kwargs=model_kwargs)
            model, args, kwargs = super().process_model_inputs(**given)
            return model, (args[0] + 1, *args[1:]), kwargs

        def process_model_output(self, method_name, model_output):
            assert method_name == "__call__"
            given = dict(method_name=method_name, model_output=model_output)
            return super().process_model_output(**given) * 2

    rules = [qwix.QuantizationRule(weight_qtype="int8")]
    plain = qwix.quantize_model(Block(), qwix.PtqProvider(rules), X)
    found = qwix.quantize_model(Block(), Shifting(rules), X)
    assert jnp.allclose(found(X), 2 * plain(X + 1), rtol=1e-5)
    # As MaxText calls it, on the class, to name the modules of a model.
    assert qwix.QtProvider.process_model_inputs(None, plain, None, None) == (plain, None, None)


def test_modules_that_a_product_asks_for_are_refused(qwix):
    """MaxText's fp8_gpu and fp8_nanoo attach Flax's fp8 operations to the layer."""
    from qwix._src.utils import flax_util

    class Attaching(qwix.QtProvider):
        def dot_general(self, *args, **kwargs):
            rule, op_id = self._get_current_rule_and_op_id("dot_general")
            try:
                parent = flax_util.get_current_module()
            except ValueError:
                return nn.Fp8DirectDotGeneralOp(name=op_id)(*args, **kwargs)
            return parent

    with says(
        NotImplementedError,
        "a provider's method runs where the traced program has a product",
        "in module 'up'",
        "QtRule(act_calibration_method='delayed,1024', ...) keeps histories of ranges",
    ):
        quantize(qwix, Attaching)
    with says(NotImplementedError, "outside of a quantized model"):
        flax_util.get_current_module()
    rule = qwix.QtRule(weight_qtype="float8_e4m3fn", act_calibration_method="delayed,1024")
    assert rule.delays  # what the sentence says can be written


def test_methods_that_are_never_called(qwix):
    class Intercepting(qwix.PtqProvider):  # a program may define it, and use another
        def get_intercept_map(self):
            return super().get_intercept_map() | {"jax.numpy.sin": jnp.cos}

    class Configured(qwix.QtProvider):
        def _create_dot_general_qt_config(self, *args):
            raise AssertionError("never called")

    rules = [qwix.QuantizationRule(weight_qtype="int8")]
    with says(TypeError, "Intercepting overrides a method that is never called: get_intercept_map"):
        Intercepting(rules)
    with says(TypeError, "Configured overrides", "_create_dot_general_qt_config has no meaning"):
        Configured(rules)


# --- interception.disable_interceptions -----------------------------------------------------------


class Half(nnx.Module):
    """One product that rules see, one that the program leaves out."""

    def __init__(self, wrap):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(1))
        self.wrap = wrap

    def __call__(self, x):
        return self.wrap(lambda x: self.down(x))(nnx.relu(self.up(x)))


def test_products_that_a_program_leaves_out_stay_float(qwix):
    from qwix._src.interception import disable_interceptions

    rules = [qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(Half(disable_interceptions), rules, X)
    assert {row.site.path: row.quantized for row in plan.sites} == {"up": True, "down": False}
    (left,) = [row for row in plan.sites if not row.quantized]
    assert left.reason == "the program asks to leave it float"
    assert plan.how("down/kernel") is None
    both = fewbit.plan(Half(lambda fn: fn), rules, X)
    assert all(row.quantized for row in both.sites)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, lambda fn: fn])
def test_left_out_products_inside_other_bodies(qwix, around):
    from qwix._src.interception import disable_interceptions

    def wrap(fn):
        return disable_interceptions(lambda x: around(lambda x: x @ (x.T @ x))(fn(x)))

    rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8")]
    model = qwix.quantize_model(Half(wrap), qwix.QtProvider(rules), X)
    plan = fewbit.plan(Half(wrap), qwix.QtProvider(rules), X)
    assert len(plan.sites) == 4
    assert [row.site.path for row in plan.sites if row.quantized] == ["up"]
    assert model(X).shape == (2, 8)


def test_kernels_get_no_rule_where_they_are_left_out(qwix):
    import qwix.pallas as qpl
    from qwix._src.interception import disable_interceptions

    seen = {}

    class Asking(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(normal(3, 8, 8))

        def __call__(self, x):
            seen["outside"] = qpl.get_current_rule("gmm")
            seen["inside"] = disable_interceptions(qpl.get_current_rule)("gmm")
            return x @ self.w[...]

    rules = [qwix.QuantizationRule(weight_qtype="int8", op_names=("gmm", "dot_general"))]
    qwix.quantize_model(Asking(), qwix.PtqProvider(rules), X)
    assert seen == {"outside": rules[0], "inside": None}


def test_models_by_the_inner_functions(qwix):
    from qwix._src import model as qwix_model

    rules = [qwix.QuantizationRule(weight_qtype="int8")]
    made = qwix_model.quantize_nnx_model(Block(), qwix.PtqProvider(rules), X)
    assert made(X).shape == (2, 8)
    linen = qwix_model.quantize_linen_model(nn.Dense(3), qwix.PtqProvider(rules), ["__call__"])
    variables = linen.init(jax.random.key(0), X)
    assert isinstance(variables["params"]["kernel"], qwix._src.providers.ptq.WithAux)
