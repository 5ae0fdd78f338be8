"""Linen parameters in partitioning boxes, and quantized models on meshes of host devices."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linen_cases import W8A8, normal, relative_error

import fewbit
from fewbit import PtqProvider, QArray, QuantizationRule, WithAux

X = normal(8, 64)
KEY = jax.random.key(0)
LOGICAL = (("embed", None), ("mlp", "model"), ("batch", "data"))


class Boxed(nn.Module):
    """Two layers, sharded the usual way: columns of the first, rows of the second."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        inner, outer = ("mlp", "embed") if self.logical else ("model", None)
        init = nn.initializers.lecun_normal()
        x = nn.Dense(128, kernel_init=wrap(init, (outer, inner)), name="up")(x)
        x = nn.relu(x)
        return nn.Dense(64, kernel_init=wrap(init, (inner, outer)), name="down")(x)


def prepared(model, rules=W8A8):
    ptq = fewbit.quantize_model(model, PtqProvider(rules))
    variables = model.init(KEY, X)
    template = jax.eval_shape(ptq.init, KEY, X)["params"]
    quantized = fewbit.quantize_params(variables["params"], template)
    return ptq, variables, template, quantized


@pytest.mark.parametrize("logical", [False, True], ids=["with_partitioning", "logical"])
def test_boxes_sit_on_the_parts(logical):
    ptq, variables, template, quantized = prepared(Boxed(logical))
    assert jax.tree.structure(template) == jax.tree.structure(quantized)
    box = nn.LogicallyPartitioned if logical else nn.Partitioned
    inner, outer = ("mlp", "embed") if logical else ("model", None)
    for tree in (template, quantized):
        kernel = tree["up"]["kernel"]
        assert isinstance(kernel, WithAux) and isinstance(kernel.array, QArray)
        assert isinstance(kernel.array.qvalue, box) and isinstance(kernel.array.scale, box)
        assert kernel.array.qvalue.names == (outer, inner)
        assert kernel.array.scale.names == (None, inner)
        assert tree["down"]["kernel"].array.qvalue.names == (inner, outer)
        assert tree["down"]["kernel"].array.scale.names == (None, outer)
    specs = nn.get_partition_spec(quantized)
    assert specs["up"]["kernel"].array.scale == P(None, inner)
    assert specs["down"]["kernel"].array.qvalue == P(inner, outer)
    out = ptq.apply({"params": quantized}, X)
    assert 0 < relative_error(out, Boxed(logical).apply(variables, X)) < 0.02


class FewNames(nn.Module):
    """Boxes with fewer names than axes: Flax's own DenseGeneral names a kernel before reshaping."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        init = nn.initializers.lecun_normal()
        first = "embed" if self.logical else "model"
        x = nn.DenseGeneral((4, 16), kernel_init=wrap(init, (first, None)), name="heads")(x)
        x = nn.DenseGeneral(64, (-2, -1), kernel_init=wrap(init, (first,)), name="out")(x)
        return nn.Dense(64, kernel_init=wrap(init, ()), name="last")(x)


@pytest.mark.parametrize("logical", [False, True], ids=["with_partitioning", "logical"])
def test_boxes_with_fewer_names_than_axes(logical):
    model = FewNames(logical)
    ptq, variables, template, quantized = prepared(model)
    assert len(variables["params"]["heads"]["kernel"].names) == 2
    assert jax.tree.structure(template) == jax.tree.structure(quantized)
    first = "embed" if logical else "model"
    heads, out, last = (quantized[n]["kernel"].array for n in ("heads", "out", "last"))
    assert heads.qvalue.unbox().shape == (64, 4, 16)
    assert heads.qvalue.names == (first, None, None) and heads.scale.names == (None, None, None)
    assert out.qvalue.names == (first, None, None) and out.scale.names == (None, None, None)
    assert last.qvalue.names == last.scale.names == (None, None)
    planned = fewbit.quantize_params(variables["params"], fewbit.plan(model, W8A8, X))
    wanted = model.apply(variables, X)
    for params in (quantized, planned):
        assert 0 < relative_error(ptq.apply({"params": params}, X), wanted) < 0.05
    learns = [fewbit.QtRule(weight_qtype="int8", weight_calibration_method="learned")]
    trained = fewbit.quantize_model(model, fewbit.QtProvider(learns)).init(KEY, X)["params"]
    assert trained["heads"]["kernel_qscale"].names == (None, None, None)


def test_tiles_keep_the_axis_of_their_parameter():
    rules = [QuantizationRule(weight_qtype="int4", tile_size=32)]
    _, _, _, quantized = prepared(Boxed(), rules)
    scale = quantized["down"]["kernel"].array.scale
    assert scale.unbox().shape == (4, 64) and scale.names == ("model", None)


def test_the_scale_of_a_whole_array_is_in_a_box_too():
    rules = [QuantizationRule(weight_qtype="nvfp4")]
    ptq, variables, template, quantized = prepared(Boxed(), rules)
    assert jax.tree.structure(template) == jax.tree.structure(quantized)
    assert quantized["down"]["kernel"].array.tensor_scale.names == (None, None)
    again = fewbit.process_prequantized_params(nn.unbox(quantized), template)
    assert jax.tree.structure(again) == jax.tree.structure(quantized)
    assert jnp.array_equal(ptq.apply({"params": again}, X), ptq.apply({"params": quantized}, X))


def unboxed(tree):
    """What is in the boxes, as it is: under a mesh Flax's own would place it."""
    is_box = lambda value: isinstance(value, nn.Partitioned)  # noqa: E731
    return jax.tree.map(lambda box: box.value, tree, is_leaf=is_box)


class Uneven(nn.Module):
    """96 rows in tiles of 32: three, which no mesh axis of 2 or 4 divides."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("mlp", "embed") if self.logical else ("model", None)
        init = wrap(nn.initializers.lecun_normal(), names)
        return nn.Dense(64, kernel_init=init, name="down")(x)


@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("logical", [False, True], ids=["with_partitioning", "logical"])
def test_tiles_that_the_mesh_does_not_divide_are_on_all_of_it(logical, kind, method):
    model, x = Uneven(logical), normal(8, 96)
    rules = [QuantizationRule(weight_qtype="int4", tile_size=32, weight_calibration_method=method)]
    ptq, variables = fewbit.quantize_model(model, PtqProvider(rules)), model.init(KEY, x)
    plan, template = fewbit.plan(model, rules, x), jax.eval_shape(ptq.init, KEY, x)["params"]
    name = "mlp" if logical else "model"
    outer = "embed" if logical else None
    bare = fewbit.quantize_params(variables["params"], plan)["down"]["kernel"].array
    assert bare.scale.names == (name, outer)  # no mesh is known that would not divide it
    assert bare.scale.unbox().shape == (3, 64)
    for shape in ((2, 4), (8, 1)):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))
        fits = shape[1] == 1
        with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL):
            if kind == AxisType.Auto:
                inside = jax.eval_shape(ptq.init, KEY, x)["params"]
                assert inside["down"]["kernel"].array.scale.names == (name if fits else None, outer)
            for target in (plan, template):
                array = fewbit.quantize_params(variables["params"], target)["down"]["kernel"].array
                assert array.qvalue.names == (name, outer)
                assert array.scale.names == (name if fits else None, outer)
                specs = nn.get_partition_spec(array)
                if logical:
                    specs = nn.logical_to_mesh(specs)
                placed = place(unboxed(array), specs, mesh)
                assert placed.qvalue.sharding.spec[0] == "model"
                parts = [array.scale] + [array.zero_point] * (method == "minmax")
                assert all(part.names == array.scale.names for part in parts)


def outside(leaf):
    """The other place for a box: around the whole."""
    if not isinstance(leaf, WithAux):
        return leaf
    parts = jax.tree.map(
        lambda b: b.unbox(), leaf.array, is_leaf=lambda x: isinstance(x, nn.Partitioned)
    )
    return leaf.array.qvalue.replace_boxed(WithAux(parts, leaf.how))


def test_box_inside_outside_or_none():
    ptq, _, _, quantized = prepared(Boxed())
    wanted = ptq.apply({"params": quantized}, X)
    around = jax.tree.map(outside, quantized, is_leaf=lambda x: isinstance(x, WithAux))
    assert isinstance(around["up"]["kernel"], nn.Partitioned)
    assert jnp.array_equal(ptq.apply({"params": around}, X), wanted)
    assert jnp.array_equal(ptq.apply({"params": nn.unbox(quantized)}, X), wanted)
    _, changed = ptq.apply({"params": quantized}, X, mutable=True)
    assert jax.tree.structure(changed["params"]) == jax.tree.structure(quantized)


@pytest.mark.parametrize("logical", [False, True], ids=["with_partitioning", "logical"])
def test_a_tree_without_boxes_stays_without_them(logical):
    model = Boxed(logical)
    ptq, variables, template, quantized = prepared(model)
    bare = fewbit.quantize_params(nn.unbox(variables["params"]), template)
    assert jax.tree.structure(bare) == jax.tree.structure(nn.unbox(quantized))
    assert isinstance(bare["up"]["kernel"].array.qvalue, jax.Array)
    wanted = ptq.apply({"params": quantized}, X)
    assert jnp.array_equal(ptq.apply({"params": bare}, X), wanted)
    part = {"up": {"kernel": nn.unbox(variables["params"])["up"]["kernel"]}}
    mixed = fewbit.quantize_params({**part, "down": variables["params"]["down"]}, template)
    assert isinstance(mixed["up"]["kernel"].array.scale, jax.Array)
    assert isinstance(mixed["down"]["kernel"].array.scale, nn.Partitioned)


def test_scanned_boxes():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.tanh(nn.Dense(64, kernel_init=init, name="d")(x)), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(name="stack")(x, None)[0]

    ptq, variables, _, quantized = prepared(Layers())
    array = quantized["stack"]["d"]["kernel"].array
    assert array.qvalue.names == ("layers", None, "model")
    assert array.scale.names == ("layers", None, "model") and array.scale.unbox().shape == (
        3,
        1,
        64,
    )
    out = ptq.apply({"params": quantized}, X)
    assert 0 < relative_error(out, Layers().apply(variables, X)) < 0.03


# --- on a mesh ------------------------------------------------------------------------------------


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def place(tree, specs, mesh):
    def put(value, spec):
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree, specs)


def weights_gathered_in_float(text):
    """Float all-gathers of a weight's full shape in compiled HLO."""
    return re.findall(r"(?:f32|bf16|f16)\[(?:64,128|128,64)\]\S* all-gather", text)


def test_a_gathered_weight_would_be_seen():
    mesh = mesh_of(AxisType.Auto)
    split = NamedSharding(mesh, P(None, "model"))
    gather = jax.jit(lambda w: w * 2.0, in_shardings=split, out_shardings=NamedSharding(mesh, P()))
    assert weights_gathered_in_float(gather.lower(jnp.ones((64, 128))).compile().as_text())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("weight_only", [False, True], ids=["w8a8", "w8"])
def test_sharded_result_is_the_single_device_result(kind, weight_only):
    rules = [QuantizationRule(weight_qtype="int8", act_qtype=None if weight_only else "int8")]
    ptq, _, _, quantized = prepared(Boxed(), rules)
    wanted = ptq.apply({"params": quantized}, X)
    specs = nn.get_partition_spec(quantized)
    values = nn.unbox(quantized)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        params = place(values, specs, mesh)
        assert params["up"]["kernel"].array.scale.sharding.spec == P(None, "model")
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        if kind == AxisType.Explicit:
            ptq = fewbit.quantize_model(Explicit(), PtqProvider(rules))
        run = jax.jit(ptq.apply).lower({"params": params}, x).compile()
        out = run({"params": params}, x)
        eager = ptq.apply({"params": params}, x)
    assert jnp.allclose(jax.device_get(out), wanted, atol=1e-4)
    assert jnp.allclose(jax.device_get(eager), wanted, atol=1e-4)
    assert not weights_gathered_in_float(run.as_text())


class Explicit(nn.Module):
    """The same model for a mesh with explicit axes, where the contraction says its own sharding."""

    @nn.compact
    def __call__(self, x):
        def dot(x, w, dimension_numbers, precision=None, preferred_element_type=None):
            return jax.lax.dot_general(
                x,
                w,
                dimension_numbers,
                precision,
                preferred_element_type,
                out_sharding=P("data", None),
            )

        x = nn.relu(nn.Dense(128, name="up")(x))
        return nn.Dense(64, name="down", dot_general=dot)(x)


@pytest.mark.parametrize("logical", [False, True], ids=["with_partitioning", "logical"])
def test_boxed_params_under_a_mesh(logical):
    """Flax places boxed parameters while the model is traced: the weight must stay quantized."""
    ptq, _, _, quantized = prepared(Boxed(logical))
    wanted = ptq.apply({"params": quantized}, X)
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL):
        template = jax.eval_shape(ptq.init, KEY, X)["params"]
        variables = jax.jit(Boxed(logical).init)(KEY, X)
        again = fewbit.quantize_params(variables["params"], template)
        assert jax.tree.structure(again) == jax.tree.structure(quantized)
        run = jax.jit(ptq.apply).lower({"params": quantized}, X).compile()
        out = run({"params": quantized}, X)
        boxes = jax.jit(ptq.init)(KEY, X)["params"]
    assert jax.tree.structure(boxes) == jax.tree.structure(quantized)
    assert jnp.allclose(jax.device_get(out), wanted, atol=1e-4)
    assert not weights_gathered_in_float(run.as_text())
    assert "s8[" in run.as_text()
