"""Where the parts of an NNX model's quantized weights lie on a mesh, packed or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import spmd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nnx_checks import W8A8, error, normal, quantize

import fewbit
from fewbit import QuantizationRule
from fewbit.qarray import in_variables, pack, weight_axes

X = normal(4, 64)
FORMATS = {
    "int8": W8A8,
    "int3": QuantizationRule(weight_qtype="int3"),
    "uint4": QuantizationRule(weight_qtype="uint4", weight_calibration_method="minmax"),
    "nvfp4": QuantizationRule(weight_qtype="nvfp4", tile_size=16),
}


@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(2, 2), (8, 1)])
def test_each_part_has_its_own_sharding(shape, kind, method):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)
    axes, tiled = ("data", "model"), dict(tile_size=32, weight_calibration_method=method)
    rule = QuantizationRule(weight_qtype="int8", **tiled)
    # Two tiles: a mesh of eight ways cannot split them.
    tiles = "data" if shape == (2, 2) else None

    def make():
        return quantize(nnx.Linear(64, 128, rngs=nnx.Rngs(0), kernel_init=init), X, rules=[rule])

    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
    with jax.set_mesh(mesh):
        q = nnx.eval_shape(make)
        state = nnx.state(q)
        specs = nnx.to_pure_dict(nnx.get_partition_spec(state))["kernel"]["array"]
        beside = ["scale", "zero_point"] if method == "minmax" else ["scale"]
        assert specs == {"qvalue": P(*axes), **dict.fromkeys(beside, P(tiles, "model"))}
        shardings = nnx.get_named_sharding(state, mesh)
        tree = nnx.to_pure_dict(nnx.state(nnx.Linear(64, 128, rngs=nnx.Rngs(0))))
        tree = jax.tree.map(np.asarray, tree)
    nnx.update(q, fewbit.quantize_params(tree, q))
    nnx.update(q, jax.device_put(nnx.state(q), shardings))
    array = q.kernel.array
    assert array.qvalue.sharding == NamedSharding(mesh, P("data", "model"))
    for part in beside:
        assert getattr(array, part).sharding == NamedSharding(mesh, P(tiles, "model"))
    plain = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    plain.kernel[...] = jnp.asarray(tree["kernel"])
    if kind == AxisType.Auto:
        with jax.set_mesh(mesh):
            assert error(q(X), quantize(plain, X, rules=[rule])(X)) < 1e-5


class Stack(nnx.Module):
    """Four layers in one array, which names its axes."""

    def __init__(self, *axes, seed=0, **metadata):
        metadata = dict(out_sharding=axes, eager_sharding=False) | metadata
        self.w = nnx.Param(normal(4, 64, 64, seed=seed), **metadata)

    def __call__(self, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.w[...])[0]


def specs_of(model):
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))["w"]["array"]


@pytest.mark.parametrize("name", ["int8", "int3", "uint4", "nvfp4"])
def test_packed_parts_keep_the_axes_that_survive(name):
    axes = ("layers", "data", "model")
    q = quantize(Stack(*axes), X, rules=[FORMATS[name]])
    plain, packed = specs_of(q), fewbit.pack(q)
    assert plain["qvalue"] == P(*axes) and plain["scale"][0] == "layers"
    assert packed.w.array.layout == "panels"
    for part, spec in specs_of(packed).items():
        assert spec[0] == plain[part][0]
        assert not any(spec[1:]), "panels have no axes of the weight's but those of a stack"
    assert tuple(specs_of(fewbit.pack(q, layout="bits"))["qvalue"])[:2] == axes[:2]
    for layout in ("native", "bits"):  # and what packing drops comes back
        again = fewbit.unpack(fewbit.pack(q, layout=layout))
        assert specs_of(again) == plain
        assert nnx.graphdef(again) == nnx.graphdef(q)
        assert specs_of(fewbit.pack(fewbit.pack(q, layout=layout))) == specs_of(packed)


@pytest.mark.parametrize("layout", ["native", "bits"])
@pytest.mark.parametrize("shape", [(2, 2), (8, 1)])
def test_a_packed_state_is_placed_as_its_axes_say(shape, layout):
    mesh = jax.make_mesh(shape, ("layers", "model"), axis_types=(AxisType.Auto,) * 2)
    names = ("layers" if shape == (2, 2) else None, "model", None)
    q = fewbit.pack(quantize(Stack(*names), X, rules=[FORMATS["int3"]]), layout=layout)
    wanted, state = q(X), nnx.state(q)
    nnx.update(q, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    placed = q.w.array.data[...].sharding
    assert len(placed.device_set) == mesh.size and placed.spec[0] == names[0]
    assert error(q(jax.device_put(X, NamedSharding(mesh, P()))), wanted) < 1e-5


def test_names_that_a_transform_changed_are_those_that_count():
    q = pack(fewbit.quantize(normal(64, 64), "int3", channelwise_axes=(1,)))
    part = in_variables(
        q, nnx.Param(jnp.zeros(1), out_sharding=("a", "b"), eager_sharding=False)
    ).data
    assert part.get_metadata("out_sharding") == ("a", None)
    assert weight_axes(part.get_metadata()) == {"out_sharding": ("a", "b")}
    (stacked,) = spmd.add_axis([part], 0, {nnx.PARTITION_NAME: "layers"})
    assert weight_axes(stacked.get_metadata()) == {"out_sharding": ("layers", "a", None)}


@pytest.mark.parametrize("where", ["metadata", "context"])
def test_logical_names_of_tiles_that_a_mesh_does_not_divide_are_dropped(where):
    rules = (("mlp", "model"), ("embed", "data"))
    mine = dict(sharding_rules=rules) if where == "metadata" else {}
    context = rules if where == "context" else ()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rule = QuantizationRule(weight_qtype="int8", tile_size=32)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(context):
        # Two tiles: four devices do not divide them, and two do.
        for names, kept in ((("mlp", "embed"), None), (("embed", "mlp"), "data")):
            q = quantize(Stack(None, *names, **mine), X, rules=[rule])
            state = nnx.state(q)
            assert specs_of(q)["scale"] == P(None, kept, specs_of(q)["qvalue"][2])
            nnx.update(q, jax.device_put(state, nnx.get_named_sharding(state, mesh)))


def test_a_sharding_in_the_place_of_names():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "data", "model"))
    q = quantize(Stack(out_sharding=sharding), X)
    spec = P(None, None, "model")
    assert specs_of(q) == {"qvalue": sharding.spec, "scale": spec}
