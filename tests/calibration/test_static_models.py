"""Static activation scales in Linen and NNX models."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal, relative_error, says
from test_static_scales import (
    MINMAX,
    REACHES,
    STATIC,
    X,
    absmax,
    close,
    reference,
    stacked,
)

import fewbit
from fewbit import PtqProvider, WithAux
from fewbit.planning._companions import split_scales

KEY = jax.random.key(0)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(8, name="up", use_bias=False)(x))
        return nn.Dense(5, name="down", use_bias=False)(x)


MLP_STATS = {
    "up": {"dot_general0_lhs": absmax(1.5)},
    "down": {"dot_general0_lhs": absmax(0.9)},
}


def mlp_reference(params, x):
    x = np.tanh(reference(x, params["up"]["kernel"], 1.5))
    return reference(np.float32(x), params["down"]["kernel"], 0.9)


def linen_mlp(rules=(STATIC,)):
    params = Mlp().init(KEY, X)["params"]
    ptq = fewbit.quantize_model(Mlp(), PtqProvider(rules))
    return ptq, params, jax.eval_shape(ptq.init, KEY, X)["params"]


# --- Linen ----------------------------------------------------------------------------------------


def test_linen_keeps_scales_beside_the_weight():
    ptq, params, template = linen_mlp()
    entry = template["up"]["dot_general0_lhs_scale"]
    assert isinstance(entry, WithAux) and entry.array == jax.ShapeDtypeStruct((1, 1), "float32")
    assert entry.how.rule == STATIC
    for target in (template, fewbit.plan(Mlp(), [STATIC], X)):
        q = fewbit.quantize_params(params, target, MLP_STATS)
        assert jax.tree.structure(q) == jax.tree.structure(template)
        out = ptq.apply({"params": q}, X)
        assert relative_error(out, mlp_reference(params, X)) < 1e-2
        assert close(jax.jit(ptq.apply)({"params": q}, X), out)
    assert set(q["down"]) == {"kernel", "dot_general0_lhs_scale"}
    again = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, q)))
    assert close(ptq.apply({"params": again}, X), out)


def test_an_uncalibrated_model_is_loud():
    ptq, *_ = linen_mlp()
    variables = ptq.init(KEY, X)
    assert jnp.isnan(variables["params"]["up"]["dot_general0_lhs_scale"].array).all()
    assert jnp.isnan(jax.jit(ptq.apply)(variables, X)).all()  # nobody can look inside
    empty = "/dot_general0_lhs_scale' is empty (and 1 more are)"
    with says(ValueError, empty, "quantize_params(params, plan, stats) for Linen"):
        ptq.apply(variables, X)
    asymmetric = fewbit.quantize_model(Mlp(), PtqProvider([MINMAX]))
    with says(ValueError, empty):
        asymmetric.apply(asymmetric.init(KEY, X), X)
    eager = fewbit.quantize_model(Mlp(), PtqProvider([STATIC], disable_jit=True))
    with says(ValueError, empty):
        eager.apply(variables, X)


def test_a_fixed_range_is_there_from_the_start():
    fixed = STATIC.replace(act_calibration_method="fixed,-2,2")
    ptq = fewbit.quantize_model(Mlp(), PtqProvider([fixed]))
    variables = ptq.init(KEY, X)
    assert close(variables["params"]["up"]["dot_general0_lhs_scale"].array, 2 / 127.5)
    assert jnp.isfinite(ptq.apply(variables, X)).all()
    q = fewbit.quantize_model(NnxMlp(nnx.Rngs(0)), PtqProvider([fixed]), X)
    assert jnp.isfinite(q(X)).all()


def test_linen_takes_a_part_of_the_tree():
    ptq, params, template = linen_mlp()
    parts = [
        fewbit.quantize_params({name: params[name]}, template, MLP_STATS) for name in ("up", "down")
    ]
    assert [set(part) for part in parts] == [{"up"}, {"down"}]
    whole = {**parts[0], **parts[1]}
    expected = ptq.apply({"params": fewbit.quantize_params(params, template, MLP_STATS)}, X)
    assert close(ptq.apply({"params": whole}, X), expected)
    less = fewbit.quantize_params(params, template, {"up": MLP_STATS["up"]})
    with says(ValueError, "down:dot_general0", "no 'down/dot_general0_lhs_scale' for it"):
        ptq.apply({"params": less}, X)


class Attention(nn.Module):
    """A product of two activations, in a module that has no parameters."""

    @nn.compact
    def __call__(self, q, k):
        return jnp.einsum("btd,bsd->bts", q, k)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(6, use_bias=False, name="up")(x)
        scores = Attention(name="scores")(y, x)
        return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), y), None


class Stack(nn.Module):
    axis: int = 0
    wrap: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.wrap else Block
        axes, rngs = {"params": self.axis}, {"params": True}
        layers = nn.scan(block, variable_axes=axes, split_rngs=rngs, length=3)
        return layers(name="layers")(x, None)[0]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wrap", [False, True])
def test_linen_scan_has_a_scale_per_layer(axis, wrap):
    model, x = Stack(axis, wrap), normal(9, 2, 4, 6)
    rules = [STATIC.replace(act_batch_axes=(0, 1))]
    params = model.init(KEY, x)["params"]
    made = fewbit.plan(model, rules, x)
    shapes = {s.name: s.shape for s in made.scales}
    assert shapes["layers/up/dot_general0_lhs"] == (3, 1, 1, 1)
    assert shapes["layers/scores/einsum0_rhs"] == (3, 1, 1, 1)
    assert shapes["layers/einsum0_lhs"] == (3, 1, 1, 1)
    ptq = fewbit.quantize_model(model, PtqProvider(rules))
    template = jax.eval_shape(ptq.init, KEY, x)["params"]
    assert set(template["layers"]["scores"]) == {"einsum0_lhs_scale", "einsum0_rhs_scale"}
    wide = stacked(6.0, 6.0, 6.0, rank=3)
    stats: dict = {}
    for name in shapes:
        *modules, last = name.split("/")
        node = stats
        for part in modules:
            node = node.setdefault(part, {})
        node[last] = wide
    for target in (template, made):
        q = fewbit.quantize_params(params, target, stats)
        out = jax.jit(ptq.apply)({"params": q}, x)
        assert relative_error(out, model.apply({"params": params}, x)) < 0.1
    # One layer with a scale that clips everything away is seen.
    stats["layers"]["up"]["dot_general0_lhs"] = stacked(6.0, 1e-3, 6.0, rank=3)
    narrow = fewbit.quantize_params(params, made, stats)
    assert relative_error(ptq.apply({"params": narrow}, x), out) > 0.02
    gradient = jax.grad(lambda x: ptq.apply({"params": q}, x).sum())(x)
    assert jnp.isfinite(gradient).all()
    _, after = ptq.apply({"params": q}, x, mutable=True)
    for name, value in split_scales(q)[1].items():
        assert split_scales(after["params"])[1][name] is value


def test_a_quantized_module_inside_a_float_one():
    ptq, params, template = linen_mlp()

    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x) + 1

    q = fewbit.quantize_params(params, template, MLP_STATS)
    out = Outer(ptq).apply({"params": {"inner": q}}, X)
    assert close(out, ptq.apply({"params": q}, X) + 1)
    made = jax.eval_shape(Outer(ptq).init, KEY, X)["params"]["inner"]
    assert jax.tree.structure(made) == jax.tree.structure(q)


# --- NNX ------------------------------------------------------------------------------------------


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(6, 8, use_bias=False, rngs=rngs),
                nnx.Linear(8, 5, use_bias=False, rngs=rngs),
            ]
        )

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


NNX_STATS = {"layers": {0: {"dot_general0_lhs": absmax(1.5)}, 1: {"dot_general0_lhs": absmax(0.9)}}}


def filled(model, stats, rules=(STATIC,), x=X):
    q = fewbit.quantize_model(model, PtqProvider(rules), x)
    params = nnx.to_pure_dict(nnx.state(model))
    nnx.update(q, fewbit.quantize_params(params, q, stats))
    return q


def test_nnx_keeps_scales_as_params_of_the_module():
    model = NnxMlp(nnx.Rngs(0))
    q = fewbit.quantize_model(model, PtqProvider([STATIC]), X)
    scale = q.layers[0].dot_general0_lhs_scale
    assert isinstance(scale.array, nnx.Param) and scale.how.rule == STATIC
    assert jnp.isnan(nnx.jit(lambda m, x: m(x))(q, X)).all()  # nothing has filled them
    for call in (q, q.layers[0]):
        with says(
            ValueError,
            "'layers/0/dot_general0_lhs_scale' is empty",
            "quantize_model(model, provider, *inputs, quant_stats=stats) for NNX",
            "act_static_scale=None",
        ):
            call(X)
    q = filled(model, NNX_STATS)
    kernels = {
        name: {"kernel": model.layers[i].kernel[...]} for i, name in enumerate(("up", "down"))
    }
    out = q(X)
    assert relative_error(out, mlp_reference(kernels, X)) < 1e-2
    assert close(nnx.jit(lambda m, x: m(x))(q, X), out)
    graphdef, state = nnx.split(q)
    assert close(jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, X), out)
    assert close(q.layers[0](X), reference(X, kernels["up"]["kernel"], 1.5))  # on its own
    assert close(pickle.loads(pickle.dumps(q))(X), out)
    gradient = nnx.grad(lambda m, x: m(x).sum(), argnums=1)(q, X)
    assert jnp.isfinite(gradient).all()
    wrt = nnx.DiffState(0, fewbit.float_params())
    assert not jax.tree.leaves(nnx.grad(lambda m, x: m(x).sum(), argnums=wrt)(q, X))


def test_nnx_takes_statistics_at_once():
    model = NnxMlp(nnx.Rngs(0))
    provider = PtqProvider([STATIC])
    q = fewbit.quantize_model(model, provider, X, quant_stats=NNX_STATS)
    assert jnp.array_equal(q(X), filled(model, NNX_STATS)(X))
    stats = fewbit.calibrate(model, [STATIC], [X])
    q = fewbit.quantize_model(model, provider, X, quant_stats=stats)
    assert jnp.array_equal(q(X), filled(model, stats)(X))
    less = {"layers": {0: NNX_STATS["layers"][0]}}
    with says(ValueError, "nothing for 1 of the plan's static scales: layers/1/dot_general0_lhs"):
        fewbit.quantize_model(model, provider, X, quant_stats=less)
    with says(ValueError, "quant_stats has 'layers/0/dot_general0_lhs'", "no static scale"):
        dynamic = PtqProvider([STATIC.replace(act_static_scale=None)])
        fewbit.quantize_model(model, dynamic, X, quant_stats=NNX_STATS)
    with says(ValueError, "skip_nnx_init=True makes no scales"):
        fewbit.quantize_model(model, provider, skip_nnx_init=True, quant_stats=stats)
    trains = fewbit.QtProvider([fewbit.QtRule(weight_qtype="int8", act_qtype="int8")])
    with says(ValueError, "one that trains collects its own ranges", "got QtProvider"):
        fewbit.quantize_model(model, trains, X, quant_stats=stats)


def test_statistics_go_where_the_parameters_are():
    for model, kind in ((Mlp(), "Linen module"), (lambda p, x: x @ p["w"], "function")):
        with says(
            TypeError,
            f"quantize_model of a {kind} makes no parameters",
            "quantize_params(params, fewbit.plan(model, rules, ...), quant_stats)",
        ):
            fewbit.quantize_model(model, PtqProvider([STATIC]), quant_stats=MLP_STATS)


def test_nnx_abstract_models_and_plans():
    model = NnxMlp(nnx.Rngs(0))
    made = fewbit.plan(model, [STATIC], X)
    params = nnx.to_pure_dict(nnx.state(model))
    q = fewbit.quantize_model(model, PtqProvider([STATIC]), X)
    nnx.update(q, fewbit.quantize_params(params, made, NNX_STATS))
    assert close(q(X), filled(model, NNX_STATS)(X))
    empty = nnx.eval_shape(lambda: NnxMlp(nnx.Rngs(0)))
    abstract = fewbit.quantize_model(empty, PtqProvider([STATIC]), X)
    value = abstract.layers[0].dot_general0_lhs_scale
    assert value.array == jax.ShapeDtypeStruct((1, 1), "float32")


class NnxStack(nnx.Module):
    def __init__(self, rngs, remat=False):
        make = nnx.vmap(lambda rngs: nnx.Linear(6, 6, use_bias=False, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)
        self.remat = remat

    def __call__(self, x):
        def one(x, layer):
            return jnp.tanh(layer(x))

        one = nnx.remat(one) if self.remat else one
        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.parametrize("remat", [False, True])
def test_nnx_scan_has_a_scale_per_layer(remat):
    model = NnxStack(nnx.Rngs(0), remat)
    q = filled(model, {"layers": {"dot_general0_lhs": stacked(*REACHES)}})
    assert q.layers.dot_general0_lhs_scale.shape == (3, 1, 1)
    x = X
    for i, reach in enumerate(REACHES):
        x = np.tanh(reference(np.float32(x), model.layers.kernel[...][i], reach))
    assert relative_error(q(X), x) < 1e-2


def test_nnx_vmapped_modules_do_not_see_the_scales():
    class Ensemble(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Linear(6, 5, use_bias=False, rngs=rngs))
            self.members = nnx.split_rngs(splits=3)(make)(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x)

    model = Ensemble(nnx.Rngs(0))
    shape = fewbit.plan(model, [STATIC], X).scales[0].shape
    q = filled(model, {"members": {"dot_general0_lhs": absmax(1.5, *shape)}})
    kernel = model.members.kernel[...]
    for i in range(3):
        assert close(q(X)[i], reference(X, kernel[i], 1.5))


class Other(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(6, 5, use_bias=False, rngs=rngs)

    def __call__(self, x, block=None):
        return self.head(x) if block is None else block(x)


def test_nnx_modules_given_as_arguments_bring_their_scales():
    block = filled(NnxMlp(nnx.Rngs(0)), NNX_STATS)
    other = filled(Other(nnx.Rngs(1)), {"head": {"dot_general0_lhs": absmax(1.5)}})
    assert close(other(X, block), block(X))
    with pytest.raises(ValueError, match="a static scale 'head/dot_general0_lhs_scale', as it has"):
        other(X, filled(Other(nnx.Rngs(1)), {"head": {"dot_general0_lhs": absmax(1.5)}}))


def test_nnx_state_that_changes_is_still_written():
    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(6, 5, use_bias=False, rngs=rngs)
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.up(x)

    q = filled(Counting(nnx.Rngs(0)), {"up": {"dot_general0_lhs": absmax(1.5)}})
    q(X)
    q(X)
    assert int(q.calls[...]) == 2
    assert float(q.up.dot_general0_lhs_scale.array[0, 0]) == pytest.approx(1.5 / 127.5)
