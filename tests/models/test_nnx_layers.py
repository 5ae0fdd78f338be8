"""Layers of a quantized NNX model in lists and dicts, and methods that move them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fewbit


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.list = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.dict = nnx.Dict(down=nnx.Linear(8, 8, rngs=rngs), up=nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x):
        for layer in (self.a, self.b, *self.list, *self.dict.values()):
            x = layer(x)
        return x / float(len(self.dict))

    def stream(self, x, times):
        for _ in range(times):
            x = self(x)
            yield x

    def tie(self):
        self.b = self.a

    def share(self):
        self.a.kernel = self.b.kernel

    def drop(self):
        del self.list[0]

    def swap(self):
        self.a, self.b = self.b, self.a


LAYERED = {
    "ptq": fewbit.PtqProvider([fewbit.QuantizationRule(weight_qtype="int8")]),
    "packed": fewbit.PtqProvider([fewbit.QuantizationRule(weight_qtype="int8")]),
    "qt": fewbit.QtProvider([fewbit.QtRule(weight_qtype="int8")]),
}


@pytest.fixture(params=LAYERED)
def layers(request):
    x = jax.random.normal(jax.random.key(0), (2, 8))
    model = Layers(nnx.Rngs(0))
    quantized = fewbit.quantize_model(model, LAYERED[request.param], x)
    return model, fewbit.pack(quantized) if request.param == "packed" else quantized, x


def near(quantized, model, x):
    expected = model(x)
    assert jnp.abs(quantized(x) - expected).max() < 0.05 * jnp.abs(expected).max()


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers.pop(0),
        lambda layers: layers.insert(0, layers[2]),
        lambda layers: layers.remove(layers[0]),
        lambda layers: layers.reverse(),
    ],
    ids=["pop", "insert", "remove", "reverse"],
)
def test_a_list_of_layers_changes_as_the_float_one(layers, change):
    model, quantized, x = layers
    before = quantized(x)
    for each in (model, quantized):
        change(each.list)
    near(quantized, model, x)
    assert not jnp.allclose(quantized(x), before)


def test_a_dict_of_layers_has_its_own_entries_alone(layers):
    model, quantized, x = layers
    near(quantized, model, x)
    for each in (quantized, nnx.clone(quantized), nnx.merge(*nnx.split(quantized))):
        assert sorted(each.dict) == ["down", "up"] and len(each.dict) == 2
        near(each, model, x)
    assert quantized.dict.pop("up") is not None and list(quantized.dict) == ["down"]


def test_a_generator_yields_at_every_call(layers):
    model, quantized, x = layers
    for _ in range(2):
        outs = list(quantized.stream(x, 2))
        assert len(outs) == 2
        assert jnp.array_equal(outs[0], quantized(x)) and jnp.array_equal(
            outs[1], quantized(outs[0])
        )


@pytest.mark.parametrize("method", ["tie", "share", "drop"])
def test_a_method_that_moves_weights_is_refused(layers, method):
    model, quantized, x = layers
    before = quantized(x)
    with pytest.raises(
        ValueError, match=f"{method} of Layers takes the parameter '.*outside of me"
    ):
        getattr(quantized, method)()
    assert jnp.array_equal(quantized(x), before)
    model.swap()
    quantized.swap()
    near(quantized, model, x)
    model.b, quantized.b = model.a, quantized.a
    near(quantized, model, x)


class Heads(nnx.Dict):
    def __call__(self, x):
        return sum(self[name](x) for name in self)


def test_a_dict_that_is_called_tells_a_wrong_shape():
    heads = Heads(a=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), b=nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    x = jnp.ones((2, 8))
    quantized = fewbit.quantize_model(heads, LAYERED["ptq"], x)
    near(quantized, heads, x)
    with pytest.raises(TypeError, match="contracting dimensions"):
        quantized(jnp.ones((2, 7)))
