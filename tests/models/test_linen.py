"""What a Linen user does with a quantized module: the flow, ways of calling, ways of holding it."""

import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import DenyList, FrozenDict, freeze
from flax.core.scope import in_filter
from flax.training.train_state import TrainState
from linen_cases import INT8, W8, W8A8, normal, products, quantize, relative_error, stored

import fewbit
from fewbit import PtqProvider, QArray, QuantizationRule, WithAux


class MLP(nn.Module):
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        kinds = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        x = nn.relu(nn.Dense(64, name="up", **kinds)(x))
        self.sow("intermediates", "hidden", x)
        return nn.Dense(64, name="down", **kinds)(x)


class Coder(nn.Module):
    """Several methods, submodules made in setup, batch statistics and dropout."""

    rate: float = 0.5

    def setup(self):
        self.enc = nn.Dense(32)
        self.norm = nn.BatchNorm(momentum=0.5)
        self.dec = nn.Dense(16)
        self.drop = nn.Dropout(self.rate)
        self.calls = self.variable("counts", "calls", lambda: jnp.int32(0))

    def encode(self, x, train: bool = False):
        return self.norm(self.enc(x), use_running_average=not train)

    def __call__(self, x, train: bool = False):
        z = self.drop(self.encode(x, train), deterministic=not train)
        if self.is_mutable_collection("counts"):
            self.calls.value += 1
        return self.dec(z)


X = normal(4, 32)
X16 = normal(4, 16)


@pytest.fixture(scope="module")
def mlp():
    return quantize(MLP(), W8A8, X)


@pytest.fixture(scope="module")
def coder():
    return quantize(Coder(), W8A8, X16)


# --- the flow -------------------------------------------------------------------------------------


def test_the_documented_flow():
    model, key = MLP(), jax.random.key(0)
    fp_params = model.init(key, X)["params"]
    rules = [QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    ptq_model = fewbit.quantize_model(model, PtqProvider(rules))

    abs_params = jax.eval_shape(ptq_model.init, key, X)["params"]
    for name in ("up", "down"):
        kernel, bias = abs_params[name]["kernel"], abs_params[name]["bias"]
        assert isinstance(kernel, WithAux) and isinstance(kernel.array, QArray)
        assert (kernel.array.qvalue.dtype, kernel.array.scale.dtype) == (jnp.int8, jnp.float32)
        assert kernel.array.scale.shape == (1, 64) and kernel.array.zero_point is None
        assert isinstance(bias, jax.ShapeDtypeStruct) and bias.dtype == jnp.float32

    ptq_params = fewbit.quantize_params(fp_params, abs_params)
    assert jax.tree.structure(ptq_params) == jax.tree.structure(abs_params)
    out = ptq_model.apply({"params": ptq_params}, X)
    assert relative_error(out, model.apply({"params": fp_params}, X)) < 0.02
    assert products(ptq_model.apply, {"params": ptq_params}, X) == {INT8: 2}


@pytest.mark.parametrize(
    "rule, scale, bound",
    [
        (dict(weight_qtype="int4", tile_size=32), (2, 64), 0.15),
        (dict(weight_qtype="nf4", tile_size=64), (1, 64), 0.15),
        (dict(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"), (1, 64), 0.06),
        (dict(weight_qtype="int8", weight_calibration_method="minmax"), (1, 64), 0.02),
        (
            dict(weight_qtype="int8", act_qtype="int8", act_calibration_method="minmax"),
            (1, 64),
            0.02,
        ),
    ],
    ids=["int4 tile 32", "nf4 tile 64", "fp8", "minmax weights", "minmax activations"],
)
def test_formats(rule, scale, bound):
    x = normal(4, 64)
    ptq, variables, quantized = quantize(MLP(), [QuantizationRule(**rule)], x)
    dtype = str(jnp.dtype(rule["weight_qtype"])) if rule["weight_qtype"] != "nf4" else "nf4"
    assert set(stored(quantized["params"]).values()) == {(dtype, scale)}
    minmax = rule.get("weight_calibration_method") == "minmax"
    assert (quantized["params"]["up"]["kernel"].array.zero_point is not None) == minmax
    assert 0 < relative_error(ptq.apply(quantized, x), MLP().apply(variables, x)) < bound


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16_models(param_dtype):
    model, x = MLP(jnp.bfloat16, param_dtype), normal(4, 32, dtype=jnp.bfloat16)
    ptq, variables, quantized = quantize(model, W8A8, x)
    scale = quantized["params"]["up"]["kernel"].array.scale
    assert scale.dtype == param_dtype and scale.shape == (1, 64)
    out = ptq.apply(quantized, x)
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, model.apply(variables, x)) < 0.03
    assert products(ptq.apply, quantized, x) == {INT8: 2}


def test_init_really_quantizes(mlp):
    ptq, _, _ = mlp
    key = jax.random.key(1)
    out, made = ptq.init_with_output(key, X)
    assert stored(made["params"]) == {f"{n}/kernel": ("int8", (1, 64)) for n in ("up", "down")}
    again = ptq.init(rngs={"params": key}, x=X)
    assert jnp.array_equal(out, ptq.apply(again, X))


def test_plan_needs_no_parameters():
    plan = fewbit.plan(MLP(), W8A8, jax.ShapeDtypeStruct((4, 32), jnp.float32))
    assert [row.site.id for row in plan.sites] == ["up:dot_general0", "down:dot_general0"]
    variables = MLP().init(jax.random.key(1), X)
    quantized = fewbit.quantize_params(variables["params"], plan)
    assert set(stored(quantized)) == {"up/kernel", "down/kernel"}


# --- ways of calling ------------------------------------------------------------------------------


def test_collections_and_rngs(coder):
    ptq, variables, quantized = coder
    out, changed = ptq.apply(
        quantized,
        X16,
        train=True,
        rngs={"dropout": jax.random.key(3)},
        mutable=["batch_stats", "counts"],
    )
    wanted, expected = Coder().apply(
        variables,
        X16,
        train=True,
        rngs={"dropout": jax.random.key(3)},
        mutable=["batch_stats", "counts"],
    )
    assert set(changed) == {"batch_stats", "counts"}
    assert int(changed["counts"]["calls"]) == int(expected["counts"]["calls"])
    mean, wanted_mean = (c["batch_stats"]["norm"]["mean"] for c in (changed, expected))
    assert relative_error(mean, wanted_mean) < 0.05
    assert relative_error(out, wanted) < 0.05  # the same units dropped
    again = ptq.apply(quantized, X16, train=False)
    assert jnp.array_equal(again, ptq.apply(quantized, X16))


def test_params_handed_back_stay_quantized(coder):
    ptq, _, quantized = coder
    _, changed = ptq.apply(quantized, X16, mutable=True)
    assert stored(changed["params"]) == stored(quantized["params"])


def encode(module, x):
    return module.encode(x) * 2.0


def test_method_as_name_function_or_bound_method(coder):
    ptq, variables, quantized = coder
    wanted = Coder().apply(variables, X16, method="encode")
    first = ptq.apply(quantized, X16, method="encode")
    assert relative_error(first, wanted) < 0.02
    both = fewbit.quantize_model(Coder(), PtqProvider(W8A8), methods=("__call__", "encode"))
    for model, method in [
        (ptq, ptq.encode),
        (ptq, Coder.encode),
        (ptq, Coder().encode),
        (both, "encode"),
        (both, both.encode),
        (both, type(both).encode),
        (both, both.clone().encode),
    ]:
        assert jnp.array_equal(model.apply(quantized, X16, method=method), first)
    assert jnp.array_equal(ptq.apply(quantized, X16, method=encode), first * 2.0)


def test_intermediates(mlp):
    ptq, variables, quantized = mlp
    _, sown = ptq.apply(quantized, X, mutable=["intermediates"])
    _, wanted = MLP().apply(variables, X, mutable=["intermediates"])
    (hidden,), (wanted_hidden,) = (s["intermediates"]["hidden"] for s in (sown, wanted))
    assert relative_error(hidden, wanted_hidden) < 0.02
    _, captured = ptq.apply(
        quantized,
        X,
        mutable=["intermediates"],
        capture_intermediates=lambda module, name: module.name == "up",
    )
    assert set(captured["intermediates"]) == {"up", "hidden"}
    assert captured["intermediates"]["up"]["__call__"][0].shape == (4, 64)


def test_bind_and_nn_apply(mlp, coder):
    ptq, _, quantized = mlp
    wanted = ptq.apply(quantized, X)
    assert jnp.array_equal(ptq.bind(quantized)(X), wanted)
    assert jnp.array_equal(nn.apply(lambda m, x: m(x) + 1.0, ptq)(quantized, X), wanted + 1.0)
    ptq, _, quantized = coder
    bound = ptq.bind(quantized, mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)})
    before = quantized["batch_stats"]["norm"]["mean"]
    bound(X16, train=True)
    assert not jnp.array_equal(bound.variables["batch_stats"]["norm"]["mean"], before)


class TwoParts(nn.Module):
    width: int = 8
    act: Callable = lambda x: nn.relu(x)

    def setup(self):
        self.inner, self.norm = self.make("inner"), nn.BatchNorm(use_running_average=False)

    def make(self, name):  # public, but a part of setting up
        return nn.Dense(self.width, name=name)

    def encode(self, x, factor=1.0):
        return self.act(self.norm(self.inner(x))) * factor

    def describe(self):
        return {"name": "two parts", "width": self.width, "flag": True}

    def part(self):
        return self.inner

    def __call__(self, x):
        return self.encode(x)


def test_other_methods_of_a_bound_model_that_trains():
    variables = TwoParts().init(jax.random.key(0), X)
    rules = [fewbit.QtRule(weight_qtype="int4", act_qtype="int8")]
    trained = fewbit.quantize_model(TwoParts(), fewbit.QtProvider(rules))
    wanted, _ = trained.apply(variables, X, 2.0, method="encode", mutable=["batch_stats"])
    bound = trained.bind(variables, mutable=["batch_stats"])
    assert jnp.array_equal(bound.encode(X, 2.0), wanted)
    plain = TwoParts().bind(variables, mutable=["batch_stats"]).encode(X, 2.0)
    assert not jnp.array_equal(wanted, plain)
    assert bound.describe()["width"] == 8 and isinstance(bound.part(), nn.Dense)


def test_other_methods_of_a_bound_model():
    variables = TwoParts().init(jax.random.key(0), X)
    ptq = fewbit.quantize_model(TwoParts(), PtqProvider(W8A8))
    params = fewbit.quantize_params(variables["params"], fewbit.plan(TwoParts(), W8A8, X))
    stored = {**variables, "params": params}
    wanted, changed = ptq.apply(stored, X, 2.0, method="encode", mutable=["batch_stats"])
    bound = ptq.bind(stored, mutable=["batch_stats"])
    assert jnp.array_equal(bound.encode(X, factor=2.0), wanted)
    norms = bound.variables["batch_stats"], changed["batch_stats"]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *norms))
    bound = ptq.bind(stored, mutable=["batch_stats"])
    assert jnp.array_equal(2.0 * bound(X), wanted)
    plain = {"name": "two parts", "width": 8, "flag": True}
    assert bound.describe() == ptq.apply(stored, method="describe") == plain
    assert type(bound.describe()["width"]) is int and bound.describe()["flag"] is True
    assert bound.part().name == "inner" and isinstance(bound.part().variables["params"], Mapping)

    class Outer(nn.Module):
        part: nn.Module

        def __call__(self, x):
            return self.part.encode(x, 2.0)

    outer = {name: {"part": part} for name, part in stored.items()}
    assert jnp.array_equal(Outer(ptq).apply(outer, X, mutable=["batch_stats"])[0], wanted)


def test_jit_vmap_and_frozen_params(mlp, coder):
    ptq, _, quantized = mlp
    wanted = ptq.apply(quantized, X)
    assert jnp.allclose(jax.jit(ptq.apply)(quantized, X), wanted, atol=1e-6)
    frozen = freeze(quantized)
    assert isinstance(frozen["params"], FrozenDict)
    assert jnp.array_equal(ptq.apply(frozen, X), wanted)
    each = jax.vmap(lambda x: ptq.apply(quantized, x[None])[0])(X)
    assert jnp.allclose(each, wanted, atol=1e-5)
    ptq, _, quantized = coder
    run = jax.jit(ptq.apply, static_argnames="train")
    assert jnp.allclose(run(quantized, X16, train=False), ptq.apply(quantized, X16), atol=1e-6)


def test_frozen_float_params_are_quantized(mlp):
    ptq, variables, quantized = mlp
    template = jax.eval_shape(ptq.init, jax.random.key(0), X)["params"]
    frozen = fewbit.quantize_params(freeze(variables["params"]), template)
    assert isinstance(frozen, FrozenDict) and stored(frozen) == stored(quantized["params"])


def test_gradient_of_inputs_is_straight_through(mlp):
    ptq, variables, quantized = mlp
    got = jax.grad(lambda x: (ptq.apply(quantized, x) ** 2).sum())(X)
    wanted = jax.grad(lambda x: (MLP().apply(variables, x) ** 2).sum())(X)
    assert relative_error(got, wanted) < 0.03


def test_train_state_on_the_float_leaves(mlp):
    ptq, variables, quantized = mlp
    params = quantized["params"]
    mask = fewbit.trainable(params)
    assert mask == {name: {"bias": True, "kernel": False} for name in ("up", "down")}
    is_q = lambda x: isinstance(x, WithAux)  # noqa: E731
    trained = jax.tree.map(lambda m, p: p if m else None, mask, params, is_leaf=is_q)

    def join(part):
        return jax.tree.map(
            lambda m, a, b: a if m else b,
            mask,
            part,
            params,
            is_leaf=lambda x: x is None or is_q(x),
        )

    state = TrainState.create(apply_fn=ptq.apply, params=trained, tx=optax.sgd(0.1))

    def loss(part):
        return (state.apply_fn({"params": join(part)}, X) ** 2).mean()

    state = state.apply_gradients(grads=jax.grad(loss)(state.params))
    assert loss(state.params) < loss(trained)
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda p: ptq.apply({"params": p}, X).sum())(params)
    grads = jax.grad(lambda p: ptq.apply({"params": p}, X).sum(), allow_int=True)(params)
    wanted = jax.grad(lambda p: MLP().apply({"params": p}, X).sum())(variables["params"])
    assert relative_error(grads["up"]["bias"], wanted["up"]["bias"]) < 0.05


@pytest.mark.parametrize("how", ["module", "nn"])
def test_tabulate(mlp, how):
    ptq, _, _ = mlp
    key = jax.random.key(0)
    text = ptq.tabulate(key, X) if how == "module" else nn.tabulate(ptq, key)(X)
    assert "int8" in text and "[32,64]" in text and "scale" in text


# --- modules in modules ---------------------------------------------------------------------------


class Outer(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x, **kwargs):
        return nn.Dense(4, name="head")(self.inner(x, **kwargs))


def test_quantized_submodule_of_a_float_model():
    key = jax.random.key(1)
    outer = Outer(MLP())
    ptq = Outer(fewbit.quantize_model(MLP(), PtqProvider(W8A8)))
    variables = outer.init(key, X)
    template = jax.eval_shape(ptq.init, key, X)["params"]
    kernels = {f"inner/{n}/kernel": ("int8", (1, 64)) for n in ("up", "down")}
    assert stored(template) == kernels
    quantized = {"params": fewbit.quantize_params(variables["params"], template)}
    assert stored(quantized["params"]) == kernels
    assert relative_error(ptq.apply(quantized, X), outer.apply(variables, X)) < 0.02
    run = products(ptq.apply, quantized, X)
    assert run == {INT8: 2, ("float32", "float32"): 1}
    assert stored(ptq.init(key, X)["params"]) == kernels


def test_quantized_submodule_with_state():
    key = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    outer = Outer(Coder(rate=0.0))
    ptq = Outer(fewbit.quantize_model(Coder(rate=0.0), PtqProvider(W8A8)))
    variables, made = outer.init(key, X16), ptq.init(key, X16)
    assert set(made) == set(variables)
    assert jnp.array_equal(
        made["batch_stats"]["inner"]["norm"]["mean"],
        variables["batch_stats"]["inner"]["norm"]["mean"],
    )
    quantized = fewbit.quantize_params(variables["params"], made["params"])
    collections = dict(mutable=["batch_stats", "counts"], rngs={"dropout": key["dropout"]})
    out, changed = ptq.apply({**variables, "params": quantized}, X16, train=True, **collections)
    wanted, expected = outer.apply(variables, X16, train=True, **collections)
    assert relative_error(out, wanted) < 0.03
    assert jax.tree.structure(changed) == jax.tree.structure(expected)
    means = [c["batch_stats"]["inner"]["norm"]["mean"] for c in (changed, expected)]
    assert relative_error(*means) < 0.05


class Shared(nn.Module):
    """One submodule given twice: parameters are shared."""

    a: nn.Module
    b: nn.Module

    def __call__(self, x):
        return self.b(nn.tanh(self.a(x)))


def test_module_fields_shared_or_not():
    dense = nn.Dense(32)
    for model, n in [(Shared(dense, dense), 1), (Shared(nn.Dense(32), nn.Dense(32)), 2)]:
        ptq, variables, quantized = quantize(model, W8A8, X)
        assert len(stored(quantized["params"])) == n
        assert relative_error(ptq.apply(quantized, X), model.apply(variables, X)) < 0.02
        assert jnp.array_equal(ptq.bind(quantized)(X), ptq.apply(quantized, X))


def test_sequential_holds_a_list():
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8)])
    ptq, variables, quantized = quantize(model, W8A8, X)
    assert relative_error(ptq.apply(quantized, X), model.apply(variables, X)) < 0.03
    assert products(ptq.apply, quantized, X) == {INT8: 2}


def test_a_quantized_model_inside_a_quantized_model_follows_the_outer_rules():
    inner = fewbit.quantize_model(MLP(), PtqProvider(W8A8))
    rules = [QuantizationRule(module_path="inner/up", weight_qtype="int4")]
    _, _, quantized = quantize(
        Outer(inner), rules, X, variables=Outer(MLP()).init(jax.random.key(0), X)
    )
    assert stored(quantized["params"]) == {"inner/up/kernel": ("int4", (1, 64))}


# --- ways of holding ------------------------------------------------------------------------------


def test_equality_hash_clone_and_class():
    a, b = (fewbit.quantize_model(MLP(), PtqProvider(W8A8)) for _ in range(2))
    other = fewbit.quantize_model(MLP(), PtqProvider(W8))
    assert a == b and hash(a) == hash(b) and type(a) is type(b)
    assert a != other and a != MLP()
    assert isinstance(a, MLP) and type(a).__name__ == "MLP"
    clone = a.clone(dtype=jnp.bfloat16)
    assert type(clone) is type(a) and clone.dtype == jnp.bfloat16
    assert a.clone() == a


def test_quantizing_again_replaces_the_mode(mlp):
    ptq, variables, _ = mlp
    again, _, quantized = quantize(ptq, W8, X, variables=variables)
    assert type(again)._unquantized_type is MLP
    assert products(again.apply, quantized, X) == {("float32", "float32"): 2}


PICKLED = """
import flax.linen as nn

class Small(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)
"""

MAKE = """
import pickle, jax, jax.numpy as jnp, fewbit, small_model
ptq = fewbit.quantize_model(small_model.Small(), fewbit.PtqProvider(
    [fewbit.QuantizationRule(weight_qtype='int8', act_qtype='int8')]))
x = jnp.linspace(-1, 1, 16).reshape(2, 8)
variables = ptq.init(jax.random.key(0), x)
with open('model.pickle', 'wb') as file:
    pickle.dump((ptq, jax.device_get(variables), jax.device_get(ptq.apply(variables, x))), file)
"""

USE = """
import pickle, jax.numpy as jnp, numpy as np
with open('model.pickle', 'rb') as file:
    ptq, variables, wanted = pickle.load(file)
x = jnp.linspace(-1, 1, 16).reshape(2, 8)
np.testing.assert_array_equal(ptq.apply(variables, x), wanted)
"""


def test_pickle_in_this_and_another_process(mlp, tmp_path, monkeypatch):
    ptq, _, quantized = mlp
    same = pickle.loads(pickle.dumps(ptq))
    assert same == ptq and jnp.array_equal(same.apply(quantized, X), ptq.apply(quantized, X))
    (tmp_path / "small_model.py").write_text(PICKLED)
    root = pathlib.Path(fewbit.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    for code in (MAKE, USE):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr


# --- nothing leaks --------------------------------------------------------------------------------


@jax.jit
def shared_helper(x, w):
    return x @ w


class WithHelper(nn.Module):
    @nn.compact
    def __call__(self, x):
        return shared_helper(x, self.param("w", nn.initializers.normal(1.0), (32, 32)))


def test_two_quantizations_and_float_code_between():
    model, w = WithHelper(), normal(32, 32, seed=5)
    variables = {"params": {"w": w}}
    before = shared_helper(X, w), X @ w, model.apply(variables, X)
    sizes = shared_helper._cache_size()
    first, _, q8 = quantize(model, W8A8, X, variables=variables)
    int8 = first.apply(q8, X)
    assert jnp.array_equal(X @ w, before[1]) and jnp.array_equal(shared_helper(X, w), before[0])
    rules = [QuantizationRule(weight_qtype="int4", tile_size=16)]
    second, _, q4 = quantize(model, rules, X, variables=variables)
    int4 = second.apply(q4, X)
    after = shared_helper(X, w), X @ w, model.apply(variables, X)
    assert all(jnp.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert jnp.array_equal(first.apply(q8, X), int8)
    errors = [relative_error(out, before[0]) for out in (int8, int4)]
    assert 0 < errors[0] < 0.02 < errors[1] < 0.15
    assert shared_helper._cache_size() == sizes
    assert products(first.apply, q8, X) == {INT8: 1}
    assert products(model.apply, variables, X) == {("float32", "float32"): 1}


def test_a_second_call_does_not_trace_again(mlp):
    traced = []

    class Counted(nn.Module):
        parts: list

        @nn.compact
        def __call__(self, x):
            traced.append(1)
            return nn.Dense(self.parts[0])(x)

    ptq, _, quantized = quantize(Counted([8]), W8A8, X)
    ptq.apply(quantized, X)
    before = len(traced)
    ptq.apply(quantized, X)
    ptq.clone().apply(quantized, X + 1.0)
    assert len(traced) == before


MUTABLE = ["quant_stats", ["quant_stats"], ("counter", "quant_stats"), True, DenyList("params"),
           ["params", "counter"], "counter", [], "nothing"]  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True], ids=["dict", "FrozenDict"])
@pytest.mark.parametrize("mutable", MUTABLE, ids=str)
def test_mutable_collections_come_back_as_from_flax(mutable, frozen):
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            counter = self.variable("counter", "n", lambda: jnp.zeros((), jnp.int32))
            if self.is_mutable_collection("counter") and not self.is_initializing():
                counter.value += 1
            return nn.Dense(4, name="up")(x)

    static = [fewbit.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    learns = dict(weight_qtype="int8", weight_calibration_method="learned")
    delayed = dict(weight_qtype="int8", act_qtype="int8", act_calibration_method="delayed")
    collects = fewbit.QtProvider(static)
    providers = [
        collects,
        fewbit.QtProvider([fewbit.QtRule(**learns)]),
        fewbit.QtProvider([static[0].replace(weight_calibration_method="learned")]),
        fewbit.QtProvider([fewbit.QtRule(**delayed)]),
        PtqProvider([QuantizationRule(weight_qtype="int8")]),
    ]
    x, key = normal(3, 8), jax.random.key(0)
    stats = fewbit.quantize_model(Counts(), collects).init(key, x)["quant_stats"]
    for provider in providers:
        model = fewbit.quantize_model(Counts(), provider)
        variables = {**model.init(key, x), "quant_stats": stats}
        given = freeze(variables) if frozen else variables
        out, updated = model.apply(given, x, mutable=mutable)
        assert jnp.array_equal(out, model.apply(given, x))
        wanted = {name: part for name, part in variables.items() if in_filter(mutable, name)}
        assert jax.tree.structure(updated) == jax.tree.structure(wanted)
        for node in (updated, *updated.values(), *updated.get("quant_stats", {}).values()):
            assert type(node) is dict
        if "quant_stats" in wanted:
            count = updated["quant_stats"]["up"]["dot_general0_lhs"]["count"]
            assert count == (1 if provider.collects else 0)


@pytest.mark.parametrize("mutable", MUTABLE, ids=str)
def test_flax_gives_back_collections_in_this_form(mutable):
    """What the test above takes for granted, of Flax itself."""

    class Keeps(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="up")(x)

    x = normal(3, 8)
    rest = {"counter": {"n": jnp.zeros(())}, "quant_stats": {"up": {"seen": jnp.zeros(())}}}
    variables = {**Keeps().init(jax.random.key(0), x), **rest}
    wanted = {name: part for name, part in variables.items() if in_filter(mutable, name)}
    for given in (variables, freeze(variables)):
        updated = Keeps().apply(given, x, mutable=mutable)[1]
        assert jax.tree.structure(updated) == jax.tree.structure(wanted)
