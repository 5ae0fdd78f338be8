"""Models that draw random numbers while they run: keys among the arguments of every call."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import W8A8, normal, relative_error

import fewbit
from fewbit import LoraProvider, PtqProvider, QtProvider, QtRule, QuantizationRule

X = normal(0, 4, 32)
QAT = [QtRule(weight_qtype="int8", act_qtype="int8")]
STATIC = [QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]


class Classifier(nnx.Module):
    """Flax's MNIST example: dropout that is given its keys when the model is called."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs=None):
        return self.down(self.dropout(nnx.relu(self.up(x)), rngs=rngs))


class Nested(nnx.Module):
    """Keys handed on by position, or by a name of the author's own."""

    def __init__(self, rngs):
        self.inner = Classifier(rngs)

    def __call__(self, x, keys):
        return self.inner(x, keys)


def keys():
    return nnx.Rngs(dropout=7)


def model():
    return Classifier(nnx.Rngs(0))


WAYS = {
    "position": lambda call, x, rngs: call(x, rngs),
    "keyword": lambda call, x, rngs: call(x, rngs=rngs),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def test_nnx_plan_and_call(way):
    floats = model()
    plan = way(lambda *a, **k: fewbit.plan(floats, W8A8, *a, **k), X, keys())
    assert [row.site.path for row in plan.sites if row.weight_qtype] == ["up", "down"]
    given = keys()
    q = way(lambda *a, **k: fewbit.quantize_model(floats, PtqProvider(W8A8), *a, **k), X, given)
    assert given.dropout.count[...] == 0  # looking at the model draws nothing
    rngs, same = keys(), keys()
    first, second = way(q, X, rngs), way(q, X, rngs)
    assert rngs.dropout.count[...] == 2 and not jnp.array_equal(first, second)
    for out in (first, second):
        assert relative_error(out, way(floats, X, same)) < 0.05
    jitted = nnx.jit(lambda m, x, r: way(m, x, r))
    rngs = keys()
    assert jnp.allclose(jitted(q, X, rngs), first, atol=1e-5)
    assert rngs.dropout.count[...] == 1
    q.eval()
    floats.eval()
    assert relative_error(q(X), floats(X)) < 0.05


def test_nnx_streams_and_keys_of_other_kinds():
    for given in (keys().dropout, jax.random.key(1)):
        q = fewbit.quantize_model(model(), PtqProvider(W8A8), X, rngs=given)
        assert q(X, rngs=keys().dropout).shape == (4, 8)
    q = fewbit.quantize_model(Nested(nnx.Rngs(0)), PtqProvider(W8A8), X, keys())
    assert q(X, keys()).shape == (4, 8)
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert fewbit.plan(Nested(nnx.Rngs(0)), W8A8, abstract, keys=keys()).totals.quantized_sites == 2


def test_nnx_calibration(way):
    floats = model()
    batches = [way(fewbit.Batch, X * n, keys()) for n in (1, 2)]
    stats = fewbit.calibrate(floats, STATIC, batches)
    assert stats.batches == 2
    common = fewbit.calibrate(floats, STATIC, [X, 2 * X], rngs=keys())
    assert str(common) == str(stats)
    provider = PtqProvider(STATIC)
    make = lambda *a, **k: fewbit.quantize_model(floats, provider, *a, quant_stats=stats, **k)  # noqa: E731
    q = way(make, X, keys())
    assert relative_error(way(q, X, keys()), way(floats, X, keys())) < 0.05


def test_nnx_training(way):
    q = way(lambda *a, **k: fewbit.quantize_model(model(), QtProvider(QAT), *a, **k), X, keys())
    rngs = keys()

    @nnx.jit
    @nnx.value_and_grad
    def step(m, x, rngs):
        return jnp.mean(way(m, x, rngs) ** 2)

    losses = []
    for _ in range(2):
        loss, gradient = step(q, X, rngs)
        losses.append(float(loss))
        q.up.kernel[...] -= 0.1 * gradient["up"]["kernel"][...]
    assert rngs.dropout.count[...] == 2 and losses[0] != losses[1]
    served = fewbit.to_ptq(q)  # on what it was called with, keys included
    assert jnp.array_equal(way(served, X, keys()), way(q, X, keys()))
    again = way(lambda *a, **k: fewbit.to_ptq(q, None, None, *a, **k), X, keys())
    assert jnp.array_equal(way(again, X, keys()), way(q, X, keys()))


def test_nnx_tools_that_look_inside():
    floats = model()
    q = fewbit.quantize_model(floats, PtqProvider(W8A8), X, rngs=keys())
    found = fewbit.debug.compare(floats, q, X, rngs=keys())
    assert found.output.sqnr > 30 and [site.site for site in found.sites] == [
        "up:dot_general0",
        "down:dot_general0",
    ]
    trained = fewbit.quantize_model(floats, QtProvider(QAT), X, rngs=keys())
    stats = fewbit.debug.training_stats(trained, None, X, rngs=keys())
    assert "down:dot_general0/weight_clipped" in stats


def test_nnx_adapters_start_from_the_same_keys():
    provider = LoraProvider(rank=2, alpha=2.0, weight_qtype="int8")
    q = fewbit.apply_lora_to_model(model(), provider, X, rngs=nnx.Rngs(3))
    assert q.up.kernel_lora_a.shape == (32, 2) and q(X, rngs=keys()).shape == (4, 8)
    with pytest.raises(ValueError, match=r"Rngs must be an nnx\.Rngs instance\. Got PRNGKeyArray"):
        fewbit.apply_lora_to_model(model(), provider, X, rngs=jax.random.key(0))


# --- Linen ----------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, and a stream of its own that `init` does not give by itself."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(32, name="up")(x))
        noise = jax.random.normal(self.make_rng("noise"), x.shape) if self.has_rng("noise") else 0.0
        y = jnp.einsum("bi,bi->b", x, noise) if self.has_rng("noise") else x[:, 0]
        return nn.Dense(8, name="down")(x) + y[:, None]


STREAMS = {"dropout": jax.random.key(1), "noise": jax.random.key(2)}


def test_linen_plan_takes_the_streams_of_apply():
    floats = Noisy()
    assert len(fewbit.plan(floats, W8A8, X).sites) == 2
    plan = fewbit.plan(floats, W8A8, X, rngs=STREAMS)
    assert len(plan.sites) == 3  # what only runs where there is such a stream
    abstract = jax.eval_shape(lambda: STREAMS)
    assert fewbit.plan(floats, W8A8, X, rngs=abstract) == plan
    assert len(fewbit.plan(floats, W8A8, X, rngs=jax.random.key(0)).sites) == 2
    params = floats.init({"params": jax.random.key(0), **STREAMS}, X)["params"]
    q, qparams = (
        fewbit.quantize_model(floats, PtqProvider(W8A8)),
        fewbit.quantize_params(params, plan),
    )
    out = q.apply({"params": qparams}, X, rngs=STREAMS)
    assert relative_error(out, floats.apply({"params": params}, X, rngs=STREAMS)) < 0.05


def test_linen_calibration_and_training():
    floats = Noisy()
    params = floats.init({"params": jax.random.key(0), **STREAMS}, X)["params"]
    stats = fewbit.calibrate(floats, STATIC, params, [X], rngs=STREAMS)
    assert len(stats.entries) == 4  # both sides of the product with the noise too
    plan = fewbit.plan(floats, STATIC, X, rngs=STREAMS)
    qparams = fewbit.quantize_params(params, plan, stats)
    q = fewbit.quantize_model(floats, PtqProvider(STATIC))
    assert q.apply({"params": qparams}, X, rngs=STREAMS).shape == (4, 8)
    trained = fewbit.quantize_model(floats, QtProvider(QAT))
    out = trained.apply({"params": params}, X, rngs=STREAMS)
    for served in (
        fewbit.to_ptq(trained, params),
        fewbit.to_ptq(trained, params, None, X, rngs=STREAMS),
    ):
        assert len(served.plan.sites) == 3
        again = served.model.apply({"params": served.params}, X, rngs=STREAMS)
        assert jnp.array_equal(again, out)
