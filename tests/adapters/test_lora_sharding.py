"""Adapters on eight devices: where they lie, and that nothing but speed depends on it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lora_cases import lora, normal
from tolerances import LORA_SHARDED

import fewbit


def mlp(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, params)[0]


def mesh_of(*kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=kind * 2)


SPECS = {"up": PartitionSpec(None, "data", "model"), "down": PartitionSpec(None, "model", "data")}
PARAMS = {"up": normal(2, 32, 64), "down": normal(2, 64, 32, seed=1)}
X, Y = normal(8, 32, seed=2), normal(8, 32, seed=3)


def train(run, params, x, y, steps=5):
    trained, frozen = fewbit.lora.split(params)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(trained)

    @jax.jit
    def step(trained, state, frozen, x, y):
        def loss(trained):
            return ((run(fewbit.merge_trainable(trained, frozen), x) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(trained)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(trained, updates), state, value

    for _ in range(steps):
        trained, state, value = step(trained, state, frozen, x, y)
    return float(value), trained


@pytest.mark.parametrize("rule", [{}, {"weight_qtype": "int8"}], ids=["float", "int8"])
def test_eight_devices_train_as_one(rule):
    run, single, _ = lora(mlp, PARAMS, X, **rule)
    wanted, _ = train(run, single, X, Y)
    mesh = mesh_of(AxisType.Auto)
    placed = {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in PARAMS.items()}
    run, params, _ = lora(mlp, placed, X, **rule)
    if not rule:  # factors lie like their weight: first contracted axis, first remaining axis
        assert params["up_lora_a"].sharding.spec == PartitionSpec(None, "data", None)
        assert params["up_lora_b"].sharding.spec == PartitionSpec(None, None, "model")
    assert params["up_lora_a"].sharding.device_set == set(mesh.devices.flat)
    assert (np.asarray(params["up_lora_a"]) == np.asarray(single["up_lora_a"])).all()
    x, y = (jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))) for v in (X, Y))
    got, trained = train(run, params, x, y)
    assert abs(got - wanted) < LORA_SHARDED * wanted
    if not rule:
        assert trained["up_lora_b"].sharding.spec[-1] == "model"


def test_an_explicit_mesh_with_split_sums():
    mesh = mesh_of(AxisType.Explicit)
    out = PartitionSpec("data", None)

    def f(params, x):
        return jnp.dot(x, params["w"], out_sharding=NamedSharding(mesh, out))

    base, x = {"w": normal(32, 64)}, normal(8, 32, seed=1)
    single, wanted, _ = lora(lambda params, x: x @ params["w"], base, x)
    with jax.set_mesh(mesh):
        placed = {"w": jax.device_put(base["w"], NamedSharding(mesh, PartitionSpec("model")))}
        x_placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "model")))
        run, params, _ = lora(f, placed, x_placed)
        assert params["w_lora_a"].sharding.spec == PartitionSpec("model", None)
        got = run(params, x_placed)
        assert got.sharding.spec == out
        grads = jax.grad(lambda p: run(p, x_placed).sum())(params)
    assert np.allclose(got, single(wanted, x), atol=1e-4)
    expected = jax.grad(lambda p: single(p, x).sum())(wanted)
    assert np.allclose(grads["w_lora_b"], expected["w_lora_b"], atol=1e-3)


def test_a_weight_split_by_shard_map_is_refused_and_a_whole_one_runs():
    mesh = mesh_of(AxisType.Auto)

    def model(spec):
        def f(params, x):
            inner = lambda w, x: x @ w  # noqa: E731
            out = PartitionSpec("data", *spec[1:])
            return jax.shard_map(
                inner, mesh=mesh, in_specs=(spec, PartitionSpec("data")), out_specs=out
            )(params["w"], x)

        return f

    params = {"w": normal(32, 64)}
    with pytest.raises(ValueError, match="it is split over a mesh by shard_map"):
        lora(model(PartitionSpec(None, "model")), params, X)
    run, adapted, _ = lora(model(PartitionSpec(None, None)), params, X)
    merged = params["w"] + jnp.float32(2.0) * adapted["w_lora_a"] @ adapted["w_lora_b"]
    assert np.allclose(run(adapted, X), X @ merged, atol=1e-4)
    grads = jax.grad(lambda p: (run(p, X) ** 2).sum())(adapted)
    wanted = jax.grad(lambda a: ((X @ (params["w"] + 2.0 * a @ adapted["w_lora_b"])) ** 2).sum())
    assert np.allclose(grads["w_lora_a"], wanted(adapted["w_lora_a"]), rtol=1e-3, atol=1e-2)
