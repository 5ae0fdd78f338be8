"""A quantized NNX model as an object: state, transforms around it, copies, devices, and errors."""

import copy
import pickle
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nnx_checks import W8, W8A8, error, int8_products, normal, quantize, scales, stored
from tolerances import NNX_INT8, NNX_RECURRENT

import fewbit
from fewbit.models.nnx import float_params

x8 = normal(4, 8)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def floats():
    return Model(nnx.Rngs(0))


@pytest.fixture(scope="module")
def shared(floats):
    """One quantized model for the tests that do not change it."""
    return quantize(floats, x8)


@pytest.fixture
def q(shared):
    return nnx.clone(shared)


def arrays(model):
    return jax.tree.leaves(nnx.state(model))


# --- the float model -----------------------------------------------------------------------------


def test_the_float_model_is_untouched():
    model = Model(nnx.Rngs(0))
    before, classes = arrays(model), [type(m) for _, m in nnx.iter_modules(model)]
    graphdef, wanted = nnx.graphdef(model), model(x8)
    q = quantize(model, x8)
    q(x8)
    assert all(a is b for a, b in zip(arrays(model), before, strict=True))
    assert [type(m) for _, m in nnx.iter_modules(model)] == classes
    assert nnx.graphdef(model) == graphdef
    assert jnp.array_equal(model(x8), wanted)
    assert int8_products(model, x8) == 0
    assert q.head.bias.get_value() is model.head.bias.get_value(), "what stays float is shared"
    assert isinstance(q, Model) and isinstance(q.head, nnx.Linear)


def test_quantizing_needs_memory_for_the_quantized_weights_and_one_leaf():
    code = """
        import jax, jax.numpy as jnp
        from flax import nnx
        import fewbit

        class Big(nnx.Module):
            def __init__(self, rngs):
                self.layers = nnx.List([nnx.Linear(1024, 1024, rngs=rngs) for _ in range(48)])
            def __call__(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        def status(name):
            with open("/proc/self/status") as f:
                line = next(line for line in f if line.startswith(name))
            return int(line.split()[1]) * 1024

        def live():
            return sum(a.nbytes for a in jax.live_arrays())

        model, x = Big(nnx.Rngs(0)), jnp.ones((1, 1024))
        rules = [fewbit.QuantizationRule(weight_qtype="int8")]
        warm = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        fewbit.quantize_model(warm, fewbit.PtqProvider(rules), x)
        before, resident = live(), status("VmRSS")
        q = fewbit.quantize_model(model, fewbit.PtqProvider(rules), x)
        print(before, live() - before, status("VmHWM") - resident)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    weights, grown, rss = map(int, done.stdout.split())
    leaf = 1024 * 1024 * 4
    assert weights > 48 * leaf
    assert grown < weights / 4 + leaf
    assert rss < weights / 4 + 8 * leaf, "at its peak: the quantized size and a few temporaries"


def test_abstract_model_is_a_template_for_quantize_params(floats, shared):
    q = quantize(
        nnx.eval_shape(lambda: Model(nnx.Rngs(0))), jax.ShapeDtypeStruct((4, 8), "float32")
    )
    assert all(isinstance(a.qvalue, jax.ShapeDtypeStruct) for a in stored(q).values())
    assert scales(q) == scales(shared)
    params = fewbit.quantize_params(nnx.to_pure_dict(nnx.state(floats)), q)
    nnx.update(q, params)
    assert jnp.array_equal(q(x8), shared(x8))


def test_rngs_and_skip_nnx_init(floats, shared):
    q = quantize(floats, x8, rngs=nnx.Rngs(1))
    assert jnp.array_equal(q(x8), shared(x8))
    q = quantize(floats, skip_nnx_init=True)
    assert not stored(q)
    with pytest.raises(ValueError, match="feeding an unquantized param"):
        q(x8)
    nnx.update(q, nnx.state(shared))
    with pytest.raises(ValueError, match=r"blocks/0/up/kernel.*qvalue, scale.*that is quantized"):
        q(x8)
    q = quantize(floats, x8)
    nnx.update(q, nnx.state(shared))
    assert jnp.array_equal(q(x8), shared(x8))


# --- NNX functions on a quantized model ----------------------------------------------------------


def test_split_merge_clone_state_update(q, shared):
    wanted = shared(x8)
    graphdef, params, rest = nnx.split(q, nnx.Param, ...)
    assert jnp.array_equal(nnx.merge(graphdef, params, rest)(x8), wanted)
    assert jnp.array_equal(nnx.clone(q)(x8), wanted)
    assert graphdef == nnx.graphdef(shared)
    nnx.update(q, jax.tree.map(lambda x: x, nnx.state(shared)))
    assert jnp.array_equal(q(x8), wanted)
    q.head.bias[...] += 1
    assert jnp.allclose(q(x8), wanted + 1, atol=1e-5)
    assert jnp.array_equal(shared(x8), wanted)


def test_jit_around_it(q, shared):
    wanted = shared(x8)
    assert jnp.allclose(nnx.jit(lambda m, x: m(x))(q, x8), wanted, rtol=1e-5)
    assert jnp.allclose(jax.jit(lambda m, x: m(x))(q, x8), wanted, rtol=1e-5)
    graphdef, state = nnx.split(q)
    f = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    assert jnp.allclose(f(state, x8), wanted, rtol=1e-5)
    assert int8_products(f, state, x8) == 3


def test_closed_over_in_another_trace(q, shared):
    wanted = shared(x8)
    assert nnx.eval_shape(lambda: q(x8)).shape == wanted.shape
    assert jnp.allclose(jax.jit(lambda x: q(x))(x8), wanted, rtol=1e-5)
    assert jnp.allclose(jax.vmap(q)(x8[:, None])[:, 0], wanted, rtol=1e-5)
    assert jax.grad(lambda x: q(x).sum())(x8).shape == x8.shape


def test_quantizing_inside_jit(floats, shared):
    wanted = shared(x8)
    found = nnx.jit(lambda m, x: quantize(m, x)(x))(floats, x8)
    assert error(found, wanted) < 1e-5
    graphdef, state = nnx.split(floats)
    f = jax.jit(lambda state, x: nnx.state(quantize(nnx.merge(graphdef, state), x)))
    assert scales_of_state(f(state, x8)) == scales(shared)


def scales_of_state(state):
    return {
        "/".join(map(str, path[:-2])): v.shape
        for path, v in nnx.to_flat_state(state)
        if path[-2:] == ("array", "scale")
    }


def test_gradients_are_straight_through(floats, q):
    def loss(model, x):
        return (model(x) ** 2).sum()

    found = nnx.grad(loss, argnums=1)(q, x8)
    assert error(found, nnx.grad(loss, argnums=1)(floats, x8)) < NNX_RECURRENT
    wrt = nnx.DiffState(0, float_params())
    found = nnx.to_pure_dict(nnx.grad(loss, argnums=wrt)(q, x8))
    wanted = nnx.to_pure_dict(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(floats, x8))
    assert "kernel" not in found["head"]
    assert error(found["head"]["bias"], wanted["head"]["bias"]) < NNX_RECURRENT
    with pytest.raises(TypeError, match="int8"):
        nnx.grad(loss)(q, x8)


def test_optimizer_with_the_filter(q):
    wrt = float_params()
    optimizer = nnx.Optimizer(q, optax.sgd(1e-2, momentum=0.9), wrt=wrt)
    kernels = {path: a.qvalue for path, a in stored(q).items()}

    def loss(model):
        return (model(x8) ** 2).mean()

    losses = []
    for _ in range(3):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(q)
        optimizer.update(q, grads)
        losses.append(float(value))
    assert losses[2] < losses[0]
    assert all(kernels[path] is a.qvalue for path, a in stored(q).items())


def test_blocks_stack_and_scan(q):
    wanted = x8
    for block in q.blocks:
        wanted = block(wanted)
    stack = jax.tree.map(lambda *a: jnp.stack(a), *q.blocks)
    assert stack.up.kernel.array.scale.shape == (2, 1, 8)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def go(x, block):
        return block(x)

    assert error(go(x8, stack), wanted) < 1e-5
    assert int8_products(go, x8, stack) == 1


def test_a_submodule_follows_the_rules_of_its_path(floats):
    off = fewbit.QuantizationRule(module_path="head")
    q = quantize(floats, x8, rules=[off, W8A8])
    assert int8_products(q, x8) == 2
    assert int8_products(q.head, x8) == 0 and jnp.array_equal(q.head(x8), floats.head(x8))
    assert int8_products(q.blocks[1], x8) == 1


class Scores(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.einsum("bi,ci->bc", self.lin(x), x)


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = Scores(rngs), Scores(rngs)

    def __call__(self, x):
        return self.a(x) + self.b(x)


def test_products_of_activations_in_a_submodule_follow_its_path_too():
    rules = [fewbit.QuantizationRule(module_path="a", op_names=("einsum",)), W8A8]
    q = quantize(Outer(nnx.Rngs(0)), x8, rules=rules)
    assert int8_products(q, x8) == 3
    assert int8_products(q.a, x8) == 1
    assert int8_products(q.b, x8) == 2
    assert jnp.allclose(q.a(x8) + q.b(x8), q(x8), rtol=1e-5)


class Answers(nnx.Module):
    """Methods that return other things than arrays."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.lin(x)

    def describe(self):
        return {"name": "answers", "width": 8, "flag": True, "nothing": None}

    def parts(self, x):
        return self.lin, [self.lin.kernel], self.lin(x)

    def repeat(self, x, bound):
        while float(jnp.abs(x).max()) > bound:
            x = jnp.tanh(self(x)) / 2
        return x


def test_methods_may_return_modules_and_variables():
    q = quantize(Answers(nnx.Rngs(0)), x8)
    lin, (kernel,), out = q.parts(x8)
    assert lin is q.lin and kernel is q.lin.kernel
    assert jnp.array_equal(out, q(x8))


def test_a_loop_around_the_model_that_asks_for_values_runs_as_python():
    model = Answers(nnx.Rngs(0))
    q = quantize(model, x8)
    with pytest.warns(UserWarning, match="Answers.repeat cannot be traced"):
        found = q.repeat(x8, 0.4)
    assert error(found, model.repeat(x8, 0.4)) < NNX_RECURRENT
    assert jnp.array_equal(q.repeat(x8, 0.4), found)


def test_methods_may_return_plain_python():
    q = quantize(Answers(nnx.Rngs(0)), x8)
    assert q.describe() == {"name": "answers", "width": 8, "flag": True, "nothing": None}
    assert type(q.describe()["width"]) is int and q.describe()["flag"] is True


# --- copies --------------------------------------------------------------------------------------


def test_copies_and_pictures(q, shared):
    wanted = shared(x8)
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert jnp.array_equal(again(x8), wanted)
        assert type(again) is type(q) and again.head.kernel is not q.head.kernel
        assert int8_products(again.blocks[0], x8) == 1
    block = pickle.loads(pickle.dumps(q.blocks[1]))
    assert jnp.array_equal(block(x8), q.blocks[1](x8))
    assert "int8" in repr(q) and "Linear" in repr(q)
    nnx.display(q)


def test_pickle_into_a_new_process(tmp_path):
    model = nnx.Linear(8, 5, rngs=nnx.Rngs(0))
    q = quantize(model, x8)
    (tmp_path / "q.pickle").write_bytes(pickle.dumps((q, np.asarray(x8), np.asarray(q(x8)))))
    code = """
        import pickle, sys, jax.numpy as jnp
        q, x, wanted = pickle.load(open(sys.argv[1], "rb"))
        assert jnp.allclose(q(jnp.asarray(x)), wanted, rtol=1e-6), "another result"
        print(type(q).__name__, q.kernel.array.qtype)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "q.pickle")],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["Linear", "int8"], done.stderr


# --- more than one model -------------------------------------------------------------------------


@jax.jit
def project(x, w):
    return x @ w


class Helped(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(normal(8, 8, seed=5))

    def __call__(self, x):
        return project(x, self.w[...])


def test_two_models_and_float_code_do_not_touch_each_other():
    model = Helped(nnx.Rngs(0))
    wanted, compiled = project(x8, model.w[...]), project._cache_size()
    one = quantize(model, x8)
    two = quantize(model, x8, rules=[fewbit.QuantizationRule(weight_qtype="int4")])
    first, second = one(x8), two(x8)
    assert int8_products(one, x8) == 1 and int8_products(two, x8) == 0
    assert int8_products(project, x8, model.w[...]) == 0
    assert jnp.array_equal(project(x8, model.w[...]), wanted)
    assert project._cache_size() == compiled
    assert error(first, wanted) < NNX_INT8 < error(second, wanted)
    assert jnp.array_equal(one(x8), first) and jnp.array_equal(two(x8), second)
    assert type(one) is not type(two)


# --- devices -------------------------------------------------------------------------------------


class Wide(nnx.Module):
    def __init__(self, rngs, named=False):
        def init(*axes):
            plain = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(plain, axes) if named else plain

        self.up = nnx.Linear(8, 16, kernel_init=init(None, "m"), rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=init("m", None), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_parameters_made_with_partitioning():
    plain = quantize(Wide(nnx.Rngs(0)), x8)
    wanted = plain(x8)
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = Wide(nnx.Rngs(0), named=True)
        assert model.up.kernel[...].sharding.spec == P(None, "m")
        q = quantize(model, x8)
        assert stored(q)["up/kernel"].qvalue.sharding.spec == P(None, "m")
        assert error(q(x8), wanted) < 1e-5
        assert error(nnx.jit(lambda m, x: m(x))(q, x8), wanted) < 1e-5


def test_state_placed_by_hand():
    model = Wide(nnx.Rngs(0))
    wanted = quantize(model, x8)(x8)
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "up": {"kernel": P(None, "m"), "bias": P("m")},
        "down": {"kernel": P("m", None), "bias": P()},
    }
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    nnx.update(model, jax.device_put(nnx.to_pure_dict(nnx.state(model)), places))
    x = jax.device_put(x8, NamedSharding(mesh, P("d", None)))
    q = quantize(model, x)
    for name, spec in (("up/kernel", P(None, "m")), ("down/kernel", P("m", None))):
        assert stored(q)[name].qvalue.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert error(q(x), wanted) < 1e-5


def is_spec(value):
    return isinstance(value, P)


class Columns(nnx.Module):
    """Sharded on output columns only, which needs no reduction across devices."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.up(x))


def test_explicit_mesh():
    model = Columns(nnx.Rngs(0))
    wanted = quantize(model, x8)(x8)
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for leaf, spec in ((model.up.kernel, P(None, "m")), (model.up.bias, P("m"))):
            leaf.set_value(jax.device_put(leaf.get_value(), NamedSharding(mesh, spec)))
        x = jax.device_put(x8, NamedSharding(mesh, P("d", None)))
        q = quantize(model, x)
        out = q(x)
        assert jax.typeof(out).sharding.spec == jax.typeof(model(x)).sharding.spec == P("d", "m")
        assert jax.typeof(stored(q)["up/kernel"].qvalue).sharding.spec == P(None, "m")
        assert error(jax.device_get(out), wanted) < 1e-5


# --- errors --------------------------------------------------------------------------------------


def refused(match, model, *inputs, kind=ValueError, **kwargs):
    with pytest.raises(kind, match=match) as caught:
        quantize(model, *inputs, **kwargs)
    return str(caught.value)


def test_errors_about_the_call(floats, shared):
    refused(r"^Model inputs must be provided for nnx models\.", floats)
    refused(r"^Only one method is supported for nnx models\.", floats, x8, methods=("a", "b"))
    refused(r"^Rngs must be an nnx.Rngs instance\.", floats, x8, rngs=jax.random.key(0))
    refused(r"This Model is quantized already", shared, x8)
    outer = Outer(nnx.Rngs(0))
    outer.a.lin = quantize(outer.a.lin, x8)
    refused(r"submodule 'a/lin' is quantized already", outer, x8)
    assert outer(x8).shape == (4, 4), "a quantized module inside a float model"


def test_rule_that_matches_nothing_names_the_nearest(floats):
    rules = [fewbit.QuantizationRule(module_path="blocks/0/upp", weight_qtype="int8"), W8]
    text = refused("matches nothing", floats, x8, rules=rules)
    assert "'blocks/0/up'" in text and "strict=False" in text
    with pytest.warns(UserWarning, match="matches nothing"):
        fewbit.quantize_model(floats, fewbit.PtqProvider(rules, strict=False), x8)


class Asks(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)
        self.gate = Gate(rngs)

    def __call__(self, x):
        return self.gate(self.lin(x))


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.lin(x) if x.sum() > 0 else x


def test_untraceable_module_is_named_with_two_cures():
    model = Asks(nnx.Rngs(0))
    text = refused("cannot be traced", model, x8, kind=fewbit.UntraceableModelError)
    assert "Module 'gate' of NNX module Asks" in text
    assert "1. Pass" in text and "2. Quantize the submodules" in text
    model.lin = quantize(model.lin, x8)
    model.gate.lin = quantize(model.gate.lin, x8)
    assert model(x8).shape == x8.shape


def test_nan_weight_is_named():
    model = Model(nnx.Rngs(0))
    model.head.kernel[...] = model.head.kernel[...].at[3, 2].set(jnp.nan)
    text = refused("head/kernel", model, x8)
    assert "nan" in text.lower() and "(3, 2)" in text


class BothWays(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(normal(8, 8))

    def __call__(self, x):
        return (x @ self.w[...]) @ self.w[...].T


def test_two_sites_that_want_one_leaf_differently():
    text = refused("stored differently", BothWays(nnx.Rngs(0)), x8, kind=fewbit.PlanError)
    assert "'w'" in text and ":dot_general0" in text and ":dot_general1" in text


class Writes(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        self.lin.kernel[...] = self.lin.kernel[...] / jnp.abs(self.lin.kernel[...]).max()
        return self.lin(x)


def test_a_forward_that_assigns_to_its_weight():
    model = Writes(nnx.Rngs(0))

    class Late(Writes):
        def __call__(self, x):
            out = self.lin(x)
            self.lin.kernel[...] = self.lin.kernel[...] * jnp.float32(0.5)
            return out

    refused("assigns to it", Late(nnx.Rngs(0)), x8, kind=fewbit.PlanError)
    plan = fewbit.plan(model, [W8A8], x8)
    assert all(leaf.how is None for leaf in plan.leaves)
