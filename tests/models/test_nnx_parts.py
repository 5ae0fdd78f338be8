"""Quantized weights of NNX models: parts that are Params of their own, through every flow."""

import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nnx_checks import W8A8, error, normal, quantize
from safetensors.numpy import load_file, save_file

import fewbit
from fewbit import PtqProvider, QtProvider, QtRule, QuantizationRule
from fewbit.qarray import part_values

X = normal(4, 64)
FORMATS = {
    "int8": W8A8,
    "int4": QuantizationRule(weight_qtype="int4", tile_size=32),
    "int3": QuantizationRule(weight_qtype="int3"),
    "uint4": QuantizationRule(weight_qtype="uint4", weight_calibration_method="minmax"),
    "nf4": QuantizationRule(weight_qtype="nf4", tile_size=32),
    "nvfp4": QuantizationRule(weight_qtype="nvfp4", tile_size=16),
}


OTHER_PARTS = {"uint4": ("zero_point",), "nvfp4": ("tensor_scale",)}


class Mlp(nnx.Module):
    """Two layers; with `axes` their kernels say how a mesh splits them."""

    def __init__(self, rngs, axes=None):
        init = nnx.initializers.lecun_normal()
        init = init if axes is None else nnx.with_partitioning(init, axes)
        self.up = nnx.Linear(64, 128, rngs=rngs, kernel_init=init)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def floats(seed=0):
    return nnx.to_pure_dict(nnx.state(Mlp(nnx.Rngs(seed))))


def parts(model):
    return nnx.to_pure_dict(nnx.state(model))["up"]["kernel"]["array"]


def how_of(how):
    names = ("qtype", "channelwise_axes", "tiled_axes", "calibration_method")
    return {name: getattr(how, name) for name in names}


def bits(array):
    return np.asarray(array.astype(jnp.float32))


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


# --- What a quantized weight is -------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_codes_and_scales_each_a_param(name):
    q = quantize(Mlp(nnx.Rngs(0)), X, rules=[FORMATS[name]])
    array = q.up.kernel.array
    assert isinstance(q.up.kernel, fewbit.WithAux) and isinstance(array, fewbit.QArray)
    assert type(array.qvalue) is nnx.Param and type(array.scale) is nnx.Param
    wanted = fewbit.quantize(Mlp(nnx.Rngs(0)).up.kernel[...], **how_of(q.up.kernel.how))
    names = {"qvalue", "scale", *OTHER_PARTS.get(name, ())}
    assert set(parts(q)) == names
    for part in names:
        found = getattr(array, part)[...]
        assert found.dtype == getattr(wanted, part).dtype
        np.testing.assert_array_equal(bits(found), bits(getattr(wanted, part)))
    assert array.shape == (64, 128) and q.up.kernel.dtype == jnp.float32


def test_operators_take_weights_of_a_model():
    q = quantize(Mlp(nnx.Rngs(0)), X, rules=[FORMATS["int4"]])
    kernel = q.up.kernel
    wanted = X @ fewbit.dequantize(kernel)
    assert error(fewbit.dot_general(X, kernel, (((1,), (0,)), ((), ()))), wanted) < 1e-5
    assert error(fewbit.einsum("ab,bc->ac", X, kernel.array), wanted) < 1e-5
    with pytest.raises(TypeError, match=r"cannot be used as an array in arithmetic"):
        X @ kernel


def test_packed_weights_hold_bytes_and_show_codes():
    q = quantize(Mlp(nnx.Rngs(0)), X, rules=[FORMATS["int3"]])
    for layout in ("native", "bits"):
        packed = fewbit.pack(q, layout=layout)
        array = packed.up.kernel.array
        assert array.layout != "plain" and parts(packed)["qvalue"].dtype == jnp.uint8
        assert array.shape == (64, 128) and array.qvalue.dtype == jnp.int4
        assert array.scale_tile_shape == array.tile_shape == (64, 1)
        np.testing.assert_array_equal(array.qvalue[...], q.up.kernel.array.qvalue[...])
        np.testing.assert_array_equal(array.scale[...], q.up.kernel.array.scale[...])
        with pytest.raises(AttributeError, match=r"a copy of codes.*fewbit\.unpack\(model\)"):
            array.qvalue[...] = jnp.zeros((64, 128), jnp.int4)
        assert error(packed(X), q(X)) < 1e-5
        same(parts(fewbit.unpack(packed)), parts(q))
        # A packed model is a template of packed weights.
        again = fewbit.quantize_params(floats(), packed)
        same(again["up"]["kernel"]["array"], parts(packed))
        found = fewbit.process_prequantized_params({"up": {"kernel": {"array": parts(q)}}}, packed)
        same(found["up"]["kernel"]["array"], parts(packed))


def test_parts_of_another_layout_are_told():
    q = quantize(Mlp(nnx.Rngs(0)), X, rules=[FORMATS["int8"]])
    packed = fewbit.pack(q)
    for change in (fewbit.pack, fewbit.unpack):
        with pytest.raises(TypeError, match=r"Give the model: nnx.state\(fewbit.pack\(model\)\)"):
            change(nnx.state(q))
    for model, other, sentence in (
        (q, packed, r"'(up|down)/kernel' is not packed .*fewbit\.pack\(model\)"),
        (packed, q, r"'(up|down)/kernel' is packed .*fewbit\.unpack\(model\)"),
    ):
        mixed = nnx.clone(model)
        nnx.update(mixed, nnx.state(other))
        with pytest.raises(ValueError, match=sentence):
            mixed(X)


@pytest.mark.parametrize("name", ["int4", "int3", "nf4"])
def test_parts_in_bytes_are_told_from_others(name):
    q = quantize(Mlp(nnx.Rngs(0)), X, rules=[FORMATS[name]])
    makes = {"unpack(model)": q, "pack(model)": fewbit.pack(q)}
    makes["pack(model, layout='bits')"] = fewbit.pack(q, layout="bits")
    for model, (fix, other) in itertools.product(makes.values(), makes.items()):
        if model.up.kernel.array.layout == other.up.kernel.array.layout:
            continue
        mixed = nnx.clone(model)
        nnx.update(mixed, nnx.state(other))
        wanted = re.escape(f"model = fewbit.{fix}, then nnx.update(model, state)")
        with pytest.raises(ValueError, match=f"are not so .*{wanted}"):
            mixed(X)
    # What fewbit.load gives is plain.
    mixed = fewbit.pack(q, layout="bits")
    loaded = {name: {"kernel": part_values(getattr(q, name).kernel)} for name in ("up", "down")}
    nnx.update(mixed, loaded)
    with pytest.raises(ValueError, match=r"kernel' is packed in bytes, .*fewbit\.unpack\(model\)"):
        mixed(X)


@pytest.mark.parametrize("layout", ["native", "bits"])
def test_packed_models_are_split_merged_copied_and_saved(layout, tmp_path):
    q = fewbit.pack(quantize(Mlp(nnx.Rngs(0)), X, rules=[FORMATS["nf4"]]), layout=layout)
    wanted = q(X)
    graphdef, state = nnx.split(q)
    for twin in (nnx.merge(graphdef, state), nnx.clone(q), pickle.loads(pickle.dumps(q))):
        same(parts(twin), parts(q))
        assert twin.up.kernel.array.layout == q.up.kernel.array.layout
        assert jnp.array_equal(twin(X), wanted)
    assert error(nnx.jit(lambda m, x: m(x))(q, X), wanted) < 1e-6
    other = fewbit.pack(quantize(Mlp(nnx.Rngs(1)), X, rules=[FORMATS["nf4"]]), layout=layout)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(q))
        checkpointer.wait_until_finished()
        raw = checkpointer.restore(tmp_path / "state")
        nnx.update(other, checkpointer.restore(tmp_path / "state", nnx.state(other)))
    assert jnp.array_equal(other(X), wanted)
    other = nnx.clone(other)
    nnx.update(other, jax.tree.map(jnp.zeros_like, nnx.state(other)))
    nnx.update(other, fewbit.process_prequantized_params(raw, other))
    assert jnp.array_equal(other(X), wanted)


def test_parts_of_a_state_are_no_trainable_leaves():
    state = nnx.state(quantize(Mlp(nnx.Rngs(0)), X))
    floats, rest = fewbit.split_trainable(state)
    assert {leaf.shape for leaf in jax.tree.leaves(floats)} == {(128,), (64,)}
    assert len(jax.tree.leaves(rest)) == 4
    mask = fewbit.trainable(state)
    assert mask["up"]["kernel"]["array"]["scale"] is False
    same(nnx.to_pure_dict(fewbit.merge_trainable(floats, rest)), nnx.to_pure_dict(state))


def test_a_state_is_no_template():
    q = quantize(Mlp(nnx.Rngs(0)), X)
    with pytest.raises(
        TypeError, match=r"Give the model: fewbit\.quantize_params\(params, model\)"
    ):
        fewbit.quantize_params(floats(), nnx.state(q))


def test_a_weight_that_a_method_writes_is_a_param_again():
    class Resets(nnx.Linear):
        def reset(self):
            self.kernel[...] = self.kernel[...] * 0

    q = quantize(Resets(64, 64, rngs=nnx.Rngs(0)), X)
    q.reset()
    assert type(q.kernel) is nnx.Param and not q.kernel[...].any()
    with pytest.raises(ValueError, match=r"feeding an unquantized param.*'kernel' is float"):
        q(X)


def test_shared_weights_stay_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, 64, rngs=rngs)
            self.again = nnx.Linear(64, 64, rngs=rngs)
            self.again.kernel = self.first.kernel
            more = [nnx.Param(normal(64, 64))]
            self.table = nnx.data({"w": nnx.Param(normal(64, 64)), "rest": more})

        def __call__(self, x):
            x = self.again(self.first(x))
            return x @ self.table["w"][...] @ self.table["rest"][0][...]

    model = Tied(nnx.Rngs(0))
    q = quantize(model, X, rules=[FORMATS["int8"]])
    assert q.first.kernel is q.again.kernel
    assert isinstance(q.table["w"], fewbit.WithAux)
    assert isinstance(q.table["rest"][0].array.scale, nnx.Param)
    assert isinstance(model.table["w"], nnx.Param), "the float model is as it was"
    assert error(q(X), model(X)) < 0.05
    q.first.kernel.array.scale[...] *= 2
    assert error(q(X), quantize(model, X)(X)) > 0.1
    twin = nnx.clone(q)
    assert twin.first.kernel.array.scale is twin.again.kernel.array.scale


def test_trainable_parameters_are_those_that_are_no_parts():
    q = quantize(Mlp(nnx.Rngs(0)), X)
    wanted = {("up", "bias"), ("down", "bias")}
    assert set(dict(nnx.to_flat_state(nnx.state(q, fewbit.float_params())))) == wanted
    optimizer = nnx.Optimizer(q, optax.sgd(0.1), wrt=fewbit.float_params())
    before = jax.tree.map(jnp.copy, parts(q))
    wrt = nnx.DiffState(0, fewbit.float_params())
    grads = nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=wrt)(q)
    optimizer.update(q, grads)
    same(parts(q), before)


# --- Abstract models, and the parameters that fill them -------------------------------------------


def abstract_models():
    def make():
        return quantize(Mlp(nnx.Rngs(0)), X)

    concrete = Mlp(nnx.Rngs(1))
    abstract = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    return {
        "made inside": lambda: nnx.eval_shape(make),
        "closed over": lambda: nnx.eval_shape(lambda: quantize(concrete, X)),
        "closed over, abstract": lambda: nnx.eval_shape(lambda: quantize(abstract, X)),
        "an argument": lambda: nnx.eval_shape(lambda m: quantize(m, X), abstract),
        "outside": lambda: quantize(abstract, X),
        "concrete": lambda: quantize(concrete, X),
        "made by nnx.jit": lambda: nnx.jit(make)(),
    }


@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize("kind", abstract_models())
def test_float_parameters_fill_any_quantized_model(kind, with_mesh):
    wanted = quantize(Mlp(nnx.Rngs(0)), X)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh if with_mesh else jax.sharding.get_mesh()):
        model = abstract_models()[kind]()
        params = fewbit.quantize_params(floats(), model)
        assert set(params["up"]["kernel"]["array"]) == {"qvalue", "scale"}
        nnx.update(model, params)
        same(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(wanted)))
        assert error(model(X), wanted(X)) < 1e-6


def test_quantize_params_in_programs():
    q, tree = quantize(Mlp(nnx.Rngs(0)), X), floats()
    wanted = fewbit.quantize_params(tree, q)
    same(jax.jit(lambda: fewbit.quantize_params(tree, q))(), wanted)
    same(jax.jit(lambda tree: fewbit.quantize_params(tree, q))(tree), wanted)
    shapes = jax.eval_shape(lambda: fewbit.quantize_params(tree, q))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, wanted)


def test_parameters_that_the_model_does_not_have():
    q, tree = quantize(Mlp(nnx.Rngs(0)), X), {**floats(), "more": {"kernel": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"more/kernel is not found .*allow_extra_params=True"):
        fewbit.quantize_params(tree, q)
    found = fewbit.quantize_params(tree, q, allow_extra_params=True)
    same(found, fewbit.quantize_params(floats(), q))


@pytest.mark.parametrize("name", ["int8", "int4", "uint4", "nf4", "nvfp4"])
def test_prequantized_parameters_fill_any_model(name):
    rules = [FORMATS[name]]
    wanted = quantize(Mlp(nnx.Rngs(0)), X, rules=rules)
    checkpoint = nnx.to_pure_dict(nnx.state(wanted))
    targets = {
        "concrete": quantize(Mlp(nnx.Rngs(1)), X, rules=rules),
        "abstract": nnx.eval_shape(lambda: quantize(Mlp(nnx.Rngs(1)), X, rules=rules)),
        "packed": fewbit.pack(quantize(Mlp(nnx.Rngs(1)), X, rules=rules)),
    }
    for model in targets.values():
        nnx.update(model, fewbit.process_prequantized_params(checkpoint, model))
        same(parts(fewbit.unpack(model)), parts(wanted))
        assert error(model(X), wanted(X)) < 1e-5
    for model in (Mlp(nnx.Rngs(1)), nnx.eval_shape(lambda: Mlp(nnx.Rngs(1)))):
        nnx.update(model, fewbit.process_prequantized_params(wanted, model))
        np.testing.assert_array_equal(model.up.kernel[...], fewbit.dequantize(wanted.up.kernel))


def test_prequantized_parameters_fill_a_layer_of_its_own():
    """A layer that holds a dict of Params, as one that calls kernels of its own does."""

    class Opaque(nnx.Module):
        def __init__(self):
            codes, scale = jnp.zeros((64, 128), jnp.int8), jnp.ones((1, 128))
            held = {"array": {"qvalue": nnx.Param(codes), "scale": nnx.Param(scale)}}
            self.kernel, self.bias = nnx.data(held), nnx.Param(jnp.zeros(128))

        def __call__(self, x):
            held = self.kernel["array"]
            return (x @ held["qvalue"][...].astype(x.dtype)) * held["scale"][...] + self.bias[None]

    wanted = quantize(Mlp(nnx.Rngs(0)), X, rules=[QuantizationRule(weight_qtype="int8")])
    model = Mlp(nnx.Rngs(1))
    model.up = Opaque()
    found = fewbit.process_prequantized_params(nnx.to_pure_dict(nnx.state(wanted)), model)
    nnx.update(model, found)
    same(parts(model), parts(wanted))
    np.testing.assert_array_equal(model.down.kernel[...], fewbit.dequantize(wanted.down.kernel))
    assert error(model(X), wanted(X)) < 1e-5
    # Arrays go where the layer's own lie, and those of a float layer.
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    columns = NamedSharding(mesh, P(None, "model"))
    weights = [*model.up.kernel["array"].values(), model.down.kernel]
    for weight in weights:
        weight.set_value(jax.device_put(weight[...], columns))
    found = fewbit.process_prequantized_params(nnx.to_pure_dict(nnx.state(wanted)), model)
    nnx.update(model, found)
    assert all(weight[...].sharding == columns for weight in weights)
    same(parts(model), parts(wanted))


# --- Files ----------------------------------------------------------------------------------------


def test_orbax_keeps_a_state_as_it_keeps_float_ones(tmp_path):
    q = quantize(Mlp(nnx.Rngs(0)), X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(q))
        checkpointer.wait_until_finished()
        model = nnx.eval_shape(lambda: quantize(Mlp(nnx.Rngs(1)), X))
        found = checkpointer.restore(tmp_path / "state", nnx.state(model))
    nnx.update(model, found)
    same(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(q)))
    assert jnp.array_equal(model(X), q(X))


def test_safetensors_keep_a_state_as_they_keep_float_ones(tmp_path):
    q = quantize(Mlp(nnx.Rngs(0)), X)
    flat = {"/".join(k): np.asarray(v[...]) for k, v in nnx.to_flat_state(nnx.state(q))}
    save_file(flat, tmp_path / "state.safetensors")
    model = quantize(Mlp(nnx.Rngs(1)), X)
    tree = {}
    for name, array in load_file(tmp_path / "state.safetensors").items():
        *keys, last = name.split("/")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = jnp.asarray(array)
    nnx.update(model, tree)
    assert jnp.array_equal(model(X), q(X))


# --- Training and its statistics ------------------------------------------------------------------

STATIC = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def test_a_trained_model_is_quantized_with_its_statistics():
    qt = fewbit.quantize_model(Mlp(nnx.Rngs(0)), QtProvider([STATIC]), X)
    for seed in range(3):
        qt(normal(4, 64, seed=seed))
    before = nnx.to_pure_dict(nnx.state(qt))
    served = fewbit.quantize_model(qt, PtqProvider([STATIC]), X)
    same(nnx.to_pure_dict(nnx.state(qt)), before)
    assert not nnx.to_flat_state(nnx.state(served, fewbit.QuantStat))
    assert isinstance(served.up.dot_general0_lhs_scale.array, nnx.Param)
    stats = nnx.to_pure_dict(nnx.state(qt, fewbit.QuantStat))
    other = fewbit.quantize_model(Mlp(nnx.Rngs(0)), PtqProvider([STATIC]), X)
    params = nnx.to_pure_dict(nnx.state(qt, nnx.Param))
    nnx.update(other, fewbit.quantize_params(params, other, stats))
    same(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(served)))
    qt.set_attributes(disable_quant_stats_update=True)
    assert jnp.array_equal(qt(X), served(X))
    with pytest.raises(ValueError, match="Leave out quant_stats"):
        fewbit.quantize_model(qt, PtqProvider([STATIC]), X, quant_stats=stats)


MINMAX = STATIC.replace(act_calibration_method="minmax")


@pytest.mark.parametrize("kind", ["concrete", "outside", "made inside"])
def test_static_scales_and_zero_points_fill_any_model(kind):
    qt = fewbit.quantize_model(Mlp(nnx.Rngs(0)), QtProvider([MINMAX]), X)
    qt(X + 1)
    served = fewbit.quantize_model(qt, PtqProvider([MINMAX]), X)
    assert type(served.up.dot_general0_lhs_zero_point.array) is nnx.Param
    state = nnx.to_pure_dict(nnx.state(served))
    assert state["up"]["dot_general0_lhs_zero_point"]["array"].dtype == jnp.int8

    def make(seed=1):
        return quantize(Mlp(nnx.Rngs(seed)), X, rules=[MINMAX])

    abstract = nnx.eval_shape(lambda: Mlp(nnx.Rngs(1)))
    models = {
        "concrete": make,
        "outside": lambda: quantize(abstract, X, rules=[MINMAX]),
        "made inside": lambda: nnx.eval_shape(make),
    }
    model, stats = models[kind](), nnx.to_pure_dict(nnx.state(qt, fewbit.QuantStat))
    params = nnx.to_pure_dict(nnx.state(qt, nnx.Param))
    nnx.update(model, fewbit.quantize_params(params, model, stats))
    same(nnx.to_pure_dict(nnx.state(model)), state)
    assert jnp.array_equal(model(X), served(X))
    model = models[kind]()
    nnx.update(model, fewbit.process_prequantized_params(state, model))
    same(nnx.to_pure_dict(nnx.state(model)), state)
    assert jnp.array_equal(model(X), served(X))


def test_scales_that_were_learned_are_served():
    learns = QtRule(weight_qtype="int4", weight_calibration_method="learned")
    qt = fewbit.quantize_model(Mlp(nnx.Rngs(0)), QtProvider([learns]), X)
    qt.up.kernel_qscale[...] *= 1.5
    served = fewbit.quantize_model(qt, PtqProvider([learns]), X)
    np.testing.assert_allclose(served.up.kernel.array.scale[...], qt.up.kernel_qscale[...])
    assert "kernel_qscale" not in nnx.to_pure_dict(nnx.state(served))["up"]
    assert jnp.array_equal(served(X), qt(X))


def test_set_attributes_reach_every_submodule():
    qt = fewbit.quantize_model(Mlp(nnx.Rngs(0)), QtProvider([STATIC]), X)
    counts = lambda: [int(m.dot_general0_lhs.get_value()["count"]) for m in (qt.up, qt.down)]  # noqa: E731
    qt(X)
    assert counts() == [1, 1]
    qt.set_attributes(disable_quant_stats_update=True)
    qt(X), qt.up(X)
    assert counts() == [1, 1]
    qt.up.set_attributes(disable_quant_stats_update=False)
    qt(X)
    assert counts() == [2, 1]
    noisy = QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")
    qt = fewbit.quantize_model(Mlp(nnx.Rngs(0)), QtProvider([noisy]), X)
    qt.set_attributes(qwix_rngs=nnx.Rngs(stochastic_rounding=0))
    wrt = nnx.DiffState(0, nnx.Param)
    one, two = (nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=wrt)(qt) for _ in range(2))
    assert not jnp.array_equal(one["up"]["kernel"][...], two["up"]["kernel"][...])
