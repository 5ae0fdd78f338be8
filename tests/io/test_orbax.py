"""Quantized parameters through Orbax, as an ordinary pytree."""

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from checkpoints import PARAMS, W4, X, assert_same, mlp, quantized_mlp, static_mlp, weight
from flax import nnx

import fewbit
from fewbit import PtqProvider, QuantizationRule


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def through_orbax(path, tree, template=None):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, abstract(tree) if template is None else template)


NF4 = [QuantizationRule(weight_qtype="nf4")]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def nnx_model(rngs=0):
    return fewbit.quantize_model(Net(nnx.Rngs(rngs)), PtqProvider(W4), X)


TREES = {
    "as quantize_params gives it": lambda: quantized_mlp()[0],
    "plain": lambda: fewbit.unpack(quantized_mlp()[0]),
    "static scales": lambda: static_mlp()[0],
    "NNX pure dict": lambda: nnx.to_pure_dict(nnx.state(nnx_model())),
    "uneven, packed": lambda: fewbit.pack({"w": weight("int3", (50, 7), 24)}),
    "zero points": lambda: {"w": weight("int4", method="minmax"), "none": None},
    "second level": lambda: {"w": weight("nvfp4")},
    # Orbax has no uint4, the storage of nf4: as bytes it goes through, large or small.
    "nf4, packed": lambda: fewbit.pack({"w": weight("nf4", (64, 64))}),
    "nf4, as bytes": lambda: fewbit.pack(quantized_mlp(NF4)[0], layout="bits"),
}


@pytest.mark.parametrize("case", TREES)
def test_trees_come_back(tmp_path, case):
    tree = TREES[case]()
    found = through_orbax(tmp_path / "o", tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert_same(found, tree)


def test_an_nnx_state_into_another_model(tmp_path):
    model, other = nnx_model(), nnx_model(1)
    nnx.update(other, through_orbax(tmp_path / "o", nnx.state(model)))
    assert (other(X) == model(X)).all()


def test_into_a_template_that_was_never_computed(tmp_path):
    """Templates are plain, and so is what is saved for them."""
    rules = [QuantizationRule(weight_qtype="int8")]
    params, plan = quantized_mlp(rules)
    shapes = jax.eval_shape(lambda: PARAMS)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        fewbit.unpack(fewbit.quantize_params(shapes, plan)),
    )
    found = fewbit.pack(through_orbax(tmp_path / "o", fewbit.unpack(params), template))
    assert_same(found, params)
    qf = fewbit.quantize_model(mlp, PtqProvider(rules))
    assert (qf(found, X) == qf(params, X)).all() and jnp.isfinite(qf(found, X)).all()


def test_bytes_of_weights_that_no_kernel_reads(tmp_path):
    """An nf4 weight of a few numbers: its storage type is one that Orbax does not know."""
    f = lambda params, x: x @ params["w"]  # noqa: E731
    params = {"w": jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)}
    plan = fewbit.plan(f, NF4, params, jnp.ones((2, 5)))
    qparams = fewbit.quantize_params(params, plan)
    assert qparams["w"].array.layout == "plain"
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = fewbit.quantize_params(jax.eval_shape(lambda: params), plan)
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        fewbit.pack(shapes, layout="bits"),
    )
    stored = fewbit.pack(qparams, layout="bits")
    assert stored["w"].array.data.dtype == jnp.uint8
    found = through_orbax(tmp_path / "o", stored, template)
    assert_same(found, stored)
    assert_same(fewbit.unpack(found), qparams)
    qf, x = fewbit.quantize_model(f, PtqProvider(NF4)), jnp.ones((2, 5))
    assert (qf(found, x) == qf(qparams, x)).all()
    with pytest.raises(ValueError, match="layout='panels'.* is not known: 'native'.*'bits'"):
        fewbit.pack(qparams, layout="panels")


def test_fewbit_says_whose_folder_it_is(tmp_path):
    through_orbax(tmp_path / "o", {"w": jnp.ones(3)})
    with pytest.raises(fewbit.CheckpointError, match="It looks like an Orbax checkpoint"):
        fewbit.load(tmp_path / "o")
