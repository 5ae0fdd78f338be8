"""Models that hold what Python cannot hash (configs, lists, dicts) are traced once, and rightly."""

import copy
import dataclasses
import pickle
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import W8A8, normal

import fewbit
from fewbit import PtqProvider, QtProvider, QtRule, QuantizationRule
from fewbit.interpreter._calls import Content, key_of

X = normal(0, 4, 8)
QAT = [QtRule(weight_qtype="int8", act_qtype="int8")]
STATIC = [QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
traces = []  # one entry for each time that Python runs a forward


def traced(call, *args):
    """The result of a call, and how often a forward ran for it."""
    before = len(traces)
    return call(*args), len(traces) - before


@dataclasses.dataclass
class Config:
    factor: float = 2.0
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    factor: float = 2.0


class Named:
    """A config that is compared by what it holds, as Hugging Face's are."""

    def __init__(self):
        self.factor, self.labels = 2.0, {0: "no", 1: "yes"}

    def __eq__(self, other):
        return vars(self) == vars(other)


class Opaque:
    """Nobody can tell what it holds."""

    __slots__ = ()
    held = {"factor": 2.0}

    def __eq__(self, other):
        return True

    @property
    def factor(self):
        return self.held["factor"]


class Cells:
    """An array of objects, which are not told by the bytes of the array."""

    def __init__(self):
        self.cells = np.array([Config()])

    def __eq__(self, other):
        return (self.cells == other.cells).all()

    @property
    def factor(self):
        return self.cells[0].factor

    @factor.setter
    def factor(self, value):
        self.cells[0].factor = value


HOLDERS = {
    "dataclass": Config,
    "slots": Slots,
    "class": Named,
    "objects": Cells,
    "list": lambda: [2.0, "a"],
    "dict": lambda: {"factor": 2.0, "sizes": [1, 2]},
    "array": lambda: np.array([2.0]),
}


def factor(held):
    if isinstance(held, list | tuple | np.ndarray):  # Linen shows a list as a tuple
        return float(held[0])
    return held["factor"] if isinstance(held, Mapping) else held.factor


def change(held, value):
    if isinstance(held, list | np.ndarray):
        held[0] = value
    elif isinstance(held, dict):
        held["factor"] = value
    else:
        held.factor = value


# --- NNX ------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, held, rngs):
        self.held = held
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x)) * factor(self.held)


class Net(nnx.Module):
    def __init__(self, held, seed=0):
        self.held, rngs = held, nnx.Rngs(seed)
        self.layers = nnx.List([Layer(held, rngs) for _ in range(2)])
        self.eval()

    def __call__(self, x):
        traces.append("Net")
        for layer in self.layers:
            x = layer(x)
        return x


def served(held, seed=0):
    return fewbit.quantize_model(Net(held, seed), PtqProvider(W8A8), X)


@pytest.mark.parametrize("name", [name for name in HOLDERS if name != "array"])  # that is data
def test_nnx_is_traced_once_and_again_when_its_config_changes(name):
    held = HOLDERS[name]()
    q = served(held)
    first = q(X)
    for _ in range(2):
        again, count = traced(q, X)
        assert count == 0 and jnp.array_equal(again, first)
    change(held, 4.0)
    out, count = traced(q, X)
    assert count == 1 and jnp.array_equal(out, 4 * first)
    assert traced(q, X)[1] == 0
    change(held, 2.0)
    out, count = traced(q, X)
    assert count == 0 and jnp.array_equal(out, first)
    for module in (q, *q.layers):  # another object in its place
        module.held = HOLDERS[name]()
        change(module.held, 4.0)
    assert jnp.array_equal(q(X), 4 * first)
    assert traced(q, X)[1] == 0


@pytest.mark.parametrize("name", ["dataclass", "list"])
def test_a_program_is_not_shared_with_a_config_that_has_changed(name):
    """What was traced for one config is another's as long as both are as they were."""
    a, b = HOLDERS[name](), HOLDERS[name]()
    q, other = served(a, seed=1), served(b, seed=1)
    wanted, wide = q(X), jnp.concatenate([X, X])
    out, count = traced(other, X)
    assert count == 0 and jnp.array_equal(out, wanted)
    change(a, 8.0)
    assert jnp.array_equal(other(X), wanted)
    # Other shapes are traced from what the program was made with, which must not be `a`.
    assert jnp.array_equal(other(wide)[:4], wanted)
    assert jnp.array_equal(q(wide)[:4], 16 * wanted)


def test_nnx_eval_and_train():
    q = served(Config())
    q(X)
    q.train()
    assert traced(q, X)[1] == 1
    for mode in (q.eval, q.train, q.eval):
        mode()
        assert traced(q, X)[1] == 0


def test_nnx_parts_clones_and_merged_models():
    held = Config()
    q = served(held)
    wanted, part = q(X), q.layers[0](X)
    graph, state = nnx.split(q)
    for twin in (nnx.clone(q), nnx.merge(graph, state), copy.deepcopy(q), served(Config())):
        out, count = traced(twin, X)
        assert count == 0 and jnp.array_equal(out, wanted)
    assert jnp.array_equal(pickle.loads(pickle.dumps(q))(X), wanted)
    change(held, 4.0)
    assert jnp.array_equal(q.layers[0](X), 2 * part)
    assert jnp.array_equal(q(X), 4 * wanted)


def test_nnx_what_cannot_be_told_is_traced_every_time():
    q = served(Opaque())
    first = q(X)
    Opaque.held["factor"] = 4.0
    try:
        out, count = traced(q, X)
        assert count == 1 and jnp.array_equal(out, 4 * first)
    finally:
        Opaque.held["factor"] = 2.0


def test_nnx_what_refuses_a_hash_in_its_own_way():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model.held = memoryview(bytearray(b"a"))  # hash() of it is a ValueError
    q = fewbit.quantize_model(model, PtqProvider(W8A8), X)
    assert jnp.array_equal(q(X), q(X))


@pytest.mark.parametrize("name", ["dataclass", "dict"])
def test_nnx_calibration_compiles_once(name):
    batches = [X, 2 * X, 3 * X]
    model = Net(HOLDERS[name]())
    _, once = traced(fewbit.calibrate, model, STATIC, batches[:1])
    stats, count = traced(fewbit.calibrate, model, STATIC, batches)
    assert stats.batches == 3 and count <= once


class Shifted(Net):
    def __call__(self, x, shift=0.0):
        return self.layers[0](x) + shift


@pytest.mark.parametrize("held", [Config, Opaque, Frozen])
def test_nnx_to_ptq_knows_what_the_model_is_called_on(held):
    model = Shifted(held())
    never = fewbit.quantize_model(model, QtProvider(QAT), X)
    assert jnp.array_equal(fewbit.to_ptq(never)(X), never(X))  # given with the model
    wide = jnp.concatenate([X, X])
    never(wide, shift=1.0)
    never.eval()
    args, kwargs = fewbit.models.front_end(never).last_call(never)
    assert args[0].shape == (8, 8) and kwargs == {"shift": 1.0}
    assert jnp.array_equal(fewbit.to_ptq(never)(X), never(X))
    inside = fewbit.quantize_model(model, QtProvider(QAT), X)
    jax.jit(lambda x: inside(x, shift=2.0))(X)  # a call in somebody's trace is a call
    assert fewbit.models.front_end(inside).last_call(inside)[1] == {"shift": 2.0}
    bare = fewbit.quantize_model(model, QtProvider(QAT), skip_nnx_init=True)
    with pytest.raises(ValueError, match="it has not been called in this process"):
        fewbit.to_ptq(bare)
    assert pickle.loads(pickle.dumps(inside))  # what was called need not be pickled with it


# --- Linen ----------------------------------------------------------------------------------------


class LinenNet(nn.Module):
    held: object

    @nn.compact
    def __call__(self, x):
        traces.append("LinenNet")
        return nn.Dense(8)(x) * factor(self.held)


class Outer(nn.Module):
    """The config one module further in, and beside a list of modules."""

    parts: list
    inner: nn.Module

    def __call__(self, x):
        return self.inner(self.parts[0](x))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", HOLDERS)
def test_linen_is_traced_once_and_again_when_its_config_changes(name, nested):
    held = HOLDERS[name]()
    model = LinenNet(held)
    if nested:
        model = Outer([nn.Dense(8), nn.Dense(8)], LinenNet(held))
    params = model.init(jax.random.key(0), X)["params"]
    q = fewbit.quantize_model(model, PtqProvider(W8A8))
    params = fewbit.quantize_params(params, fewbit.plan(model, W8A8, X))
    call = lambda: q.apply({"params": params}, X)  # noqa: E731
    first = call()
    for _ in range(2):
        again, count = traced(call)
        assert count == 0 and jnp.array_equal(again, first)
    change(held, 4.0)
    out, count = traced(call)
    assert count == 1 and jnp.array_equal(out, 2 * first)
    change(held, 2.0)
    out, count = traced(call)
    assert count == 0 and jnp.array_equal(out, first)
    bound = q.bind({"params": params})  # a clone at every call, with the same config
    assert jnp.array_equal(bound(X), first)
    assert traced(bound, X)[1] == 0


@pytest.mark.parametrize("name", ["dataclass", "list"])
def test_a_linen_program_is_not_shared_with_a_config_that_has_changed(name):
    a, b = HOLDERS[name](), HOLDERS[name]()
    params = LinenNet(a).init(jax.random.key(0), X)["params"]
    params = fewbit.quantize_params(params, fewbit.plan(LinenNet(a), W8A8, X))
    q, other = (fewbit.quantize_model(LinenNet(h), PtqProvider(W8A8)) for h in (a, b))
    wanted, wide = q.apply({"params": params}, X), jnp.concatenate([X, X])
    change(a, 8.0)
    assert jnp.array_equal(other.apply({"params": params}, wide)[:4], wanted)
    assert jnp.array_equal(q.apply({"params": params}, wide)[:4], 4 * wanted)


@pytest.mark.parametrize("name", ["dataclass", "list", "dict"])
def test_linen_to_ptq_knows_what_the_model_is_called_on(name):
    model = LinenNet(HOLDERS[name]())
    q = fewbit.quantize_model(model, QtProvider(QAT))
    params = model.init(jax.random.key(0), X)["params"]
    out = q.apply({"params": params}, X)
    found = fewbit.to_ptq(q, params)
    assert jnp.array_equal(found.model.apply({"params": found.params}, X), out)


# --- functions ------------------------------------------------------------------------------------


def product(params, x, config):
    traces.append("product")
    return x @ params["w"] * factor(config)


@pytest.mark.parametrize("name", ["dataclass", "class"])
def test_a_config_among_the_arguments(name):
    params, held = {"w": normal(1, 8, 8)}, HOLDERS[name]()
    q = fewbit.quantize_model(product, PtqProvider(W8A8))
    params = fewbit.quantize_params(params, fewbit.plan(product, W8A8, params, X, held))
    first = q(params, X, held)
    assert traced(q, params, X, held)[1] == 0
    change(held, 4.0)
    out, count = traced(q, params, X, held)
    assert count == 1 and jnp.array_equal(out, 2 * first)


def test_a_function_remembers_the_inputs_that_it_was_quantized_with():
    params = {"w": normal(1, 8, 8)}
    q = fewbit.quantize_model(product, QtProvider(QAT), params, X, Config())
    found = fewbit.to_ptq(q, params)
    args = X, Config()
    assert jnp.array_equal(found.model(found.params, *args), q(params, *args))


# --- keys -----------------------------------------------------------------------------------------


def test_keys_tell_apart_what_differs():
    circle = []
    circle.append(circle)
    array = jnp.ones(2)
    one = Config()
    values = [
        *([1], [True], [1.0], (1,), [[1]], [(1, 2)], [(True, 2)], {1: 2}, {2: 1}, {1}, {1, 2}),
        *(Config(), Config(1.0), Config(sizes=[1]), Slots(), Named(), circle, [array]),
        *(np.ones(2), np.ones((2, 1)), np.ones(2, "float32"), bytearray(b"a"), [one, one]),
    ]
    keys = [key_of(value) for value in values]
    for i, key in enumerate(keys):
        assert [key == other for other in keys].count(True) == 1
        assert key == key_of(values[i]) and hash(key) == hash(key_of(values[i]))
    assert key_of([array]) != key_of([jnp.ones(2)])  # not worth a look at its numbers
    with pytest.raises(TypeError, match="what a Opaque holds cannot be told"):
        key_of(Opaque())
    assert Content([1]) != [1]
