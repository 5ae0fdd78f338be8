"""LoRA and QLoRA of NNX models: LoRAParams, training of these alone, scan, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lora_cases import close, float_base, normal
from tolerances import LORA_F32

import fewbit
from fewbit import LoraProvider

X = normal(4, 16)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


def adapted(model=None, rngs=None, inputs=(X,), **rule):
    rule = {"rank": 4, "alpha": 8.0, "lora_b_initializer": "normal", **rule}
    model = Mlp(nnx.Rngs(0)) if model is None else model
    rngs = nnx.Rngs(1) if rngs is None else rngs
    return model, fewbit.apply_lora_to_model(model, LoraProvider(**rule), *inputs, rngs=rngs)


def values(weight):
    """A weight of arrays, of one of Params or of one Param."""
    return jax.tree.map(lambda p: p.get_value(), weight, is_leaf=lambda x: isinstance(x, nnx.Param))


def written_out(model, lora, paths, scale=2.0):
    """The float model with the adapters in its kernels."""
    twin = nnx.clone(model)
    for path in paths:
        mine, theirs = getattr(twin, path), getattr(lora, path)
        base = jnp.asarray(float_base(values(theirs.kernel), np.float32))
        update = theirs.kernel_lora_a[...] @ theirs.kernel_lora_b[...]
        mine.kernel.set_value(base + scale * update)
    return twin


@pytest.mark.parametrize(
    "rule", [{}, {"weight_qtype": "nf4", "tile_size": 16}], ids=["float", "nf4"]
)
def test_adapters_are_lora_params_beside_the_weight(rule):
    model, lora = adapted(**rule)
    assert isinstance(lora.up.kernel_lora_a, nnx.LoRAParam)
    assert lora.up.kernel_lora_a.shape == (16, 4) and lora.up.kernel_lora_b.shape == (4, 32)
    close(lora(X), written_out(model, lora, ("up", "down"))(X), 2 * LORA_F32)
    close(lora.up(X), written_out(model, lora, ("up", "down")).up(X), LORA_F32)  # on its own
    assert not hasattr(model.up, "kernel_lora_a")


def test_training_changes_the_adapters_and_nothing_else():
    _, lora = adapted(weight_qtype="int8", lora_b_initializer="zeros")
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(lora)))
    optimizer = nnx.Optimizer(lora, optax.adam(1e-2), wrt=nnx.LoRAParam)
    assert len(jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))) == 2 * 4 + 2
    y = normal(4, 16, seed=9)

    @nnx.jit
    def step(lora, optimizer):
        loss = lambda model: ((model(X) - y) ** 2).mean()  # noqa: E731
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(lora)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            optimizer.update(lora, grads)
        return value

    losses = [float(step(lora, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(lora)))
    changed = jax.tree_util.tree_map_with_path(
        lambda path, a, b: ("_lora_" in str(path[-1]), not np.array_equal(a, b)), before, after
    )
    for is_adapter, moved in jax.tree.leaves(changed, is_leaf=lambda v: isinstance(v, tuple)):
        assert is_adapter == moved


def test_without_rngs_a_warning_and_the_same_weights_each_time():
    with pytest.warns(UserWarning, match="rngs must be provided for NNX models to initialize LoRA"):
        one = fewbit.apply_lora_to_model(Mlp(nnx.Rngs(0)), LoraProvider(rank=2, alpha=4.0), X)
    two = adapted(rngs=nnx.Rngs(10003), rank=2, alpha=4.0, lora_b_initializer="zeros")[1]
    assert (one.up.kernel_lora_a[...] == two.up.kernel_lora_a[...]).all()


def test_dropout_follows_train_and_eval():
    _, lora = adapted(dropout=0.5)
    first, second = lora(X), lora(X)
    assert not np.allclose(first, second)
    lora.eval()
    quiet = lora(X)
    assert (quiet == lora(X)).all() and not np.allclose(quiet, first)
    lora.train()
    assert not np.allclose(lora(X), quiet)
    again = nnx.jit(lambda model, x: model(x))
    assert not np.allclose(again(lora, X), again(lora, X))  # the stream moves on inside jit too


def test_a_stack_of_blocks_under_scan():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.inner(x))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(Block, in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(3))

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, block):
                return block(x)

            return run(x, self.blocks)

    model = Stack(nnx.Rngs(0))
    _, lora = adapted(model, weight_qtype="int8")
    inner = lora.blocks.inner
    assert inner.kernel_lora_a.shape == (3, 16, 4) and inner.kernel_lora_b.shape == (3, 4, 16)
    out = lora(X)
    merged, report = fewbit.merge_lora(lora, requantize=False)
    assert type(merged) is Stack and report.worst.error < 1e-6
    close(out, merged(X), 1e-5)
    grads = nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(lora)
    assert all(jnp.abs(g).min(axis=(1, 2)).shape == (3,) for g in jax.tree.leaves(grads))
    assert all((jnp.abs(g).max(axis=(1, 2)) > 0).all() for g in jax.tree.leaves(grads))


def test_merged_models_run_without_adapters():
    model, lora = adapted(weight_qtype="int8")
    out = lora(X)
    merged, report = fewbit.merge_lora(lora)
    assert not hasattr(merged.up, "kernel_lora_a") and isinstance(merged.up.kernel, fewbit.WithAux)
    assert [leaf.stored for leaf in report.leaves] == ["int8", "int8"]
    assert 0 < report.worst.error < 0.01
    assert np.abs(np.asarray(merged(X) - out)).max() < 0.05 * np.abs(np.asarray(out)).max()
    assert hasattr(lora.up, "kernel_lora_a")  # the model itself is as it was
    with pytest.raises(ValueError, match="has no adapters to merge"):
        fewbit.merge_lora(merged)
    float_model, _ = fewbit.merge_lora(adapted()[1])
    assert type(float_model) is Mlp


def test_several_adapters_over_one_base():
    _, one = adapted(weight_qtype="int8")
    two = fewbit.lora.with_adapters(one, fewbit.lora.adapters(adapted(rngs=nnx.Rngs(7))[1]))
    assert one.up.kernel.array.scale[...] is two.up.kernel.array.scale[...]
    assert not np.allclose(one(X), two(X))
    back = fewbit.lora.with_adapters(two, fewbit.lora.adapters(one))
    assert (back(X) == one(X)).all()
    with pytest.raises(ValueError, match="The model has no adapter 'nose_lora_a'"):
        fewbit.lora.with_adapters(one, {"nose_lora_a": X})


def test_abstract_models_get_abstract_adapters():
    model = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    _, lora = adapted(model, weight_qtype="int8")
    value = lora.up.kernel_lora_a.get_value()
    assert isinstance(value, jax.ShapeDtypeStruct) and value.shape == (16, 4)


def test_names_of_mesh_axes_follow_the_weight():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(16, 32, kernel_init=init, rngs=nnx.Rngs(0))
        _, lora = adapted(model)
    metadata = model.kernel.get_metadata()
    (key,) = [name for name in ("out_sharding", "sharding_names", "sharding") if metadata.get(name)]
    assert tuple(lora.kernel_lora_a.get_metadata()[key]) == (None, None)
    assert tuple(lora.kernel_lora_b.get_metadata()[key]) == (None, "model")
    assert lora.kernel_lora_b[...].sharding.spec == jax.P(None, "model")


def test_pickled_models_keep_their_adapters(tmp_path):
    import copy

    _, lora = adapted(weight_qtype="int8")
    twin = copy.deepcopy(lora)
    assert (twin(X) == lora(X)).all()
    assert fewbit.merge_lora(twin)[1].leaves == fewbit.merge_lora(lora)[1].leaves
