"""process_prequantized_params and restore_quantization_rules, in every front end."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fewbit
from fewbit import PtqProvider, QuantizationRule

X = normal(1, 3, 64)


def rules(qtype="int8", **fields):
    return [QuantizationRule(weight_qtype=qtype, **fields)]


def as_dicts(tree):
    """Quantized leaves as other tools store them: bare dicts of arrays."""

    def bare(leaf):
        if not isinstance(leaf, fewbit.WithAux):
            return leaf
        q = fewbit.unpack(leaf.array)
        parts = {"qvalue": q.qvalue, "scale": q.scale, "zero_point": q.zero_point}
        return {name: part for name, part in parts.items() if part is not None}

    return jax.tree.map(bare, tree, is_leaf=lambda x: isinstance(x, fewbit.WithAux))


def same_numbers(a, b):
    """Two quantized trees stand for the same numbers, bit for bit."""
    is_q = lambda x: isinstance(x, fewbit.WithAux)  # noqa: E731
    plain = lambda x: fewbit.dequantize(x) if is_q(x) else x  # noqa: E731
    for x, y in zip(
        jax.tree.leaves(a, is_leaf=is_q), jax.tree.leaves(b, is_leaf=is_q), strict=True
    ):
        np.testing.assert_array_equal(plain(x), plain(y))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.relu(nn.Dense(128, name="up")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(64, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


KINDS = [
    ("int8", {}),
    ("int4", {"tile_size": 32}),
    ("int3", {"tile_size": 16, "weight_calibration_method": "minmax"}),
    ("nf4", {"tile_size": 32}),
    ("fp8", {}),
]


@pytest.mark.parametrize(("qtype", "fields"), KINDS)
def test_linen_round_trip(qtype, fields):
    """The logical type (nf4, int3) comes from the template, so bare codes keep their meaning."""
    model = fewbit.quantize_model(Linen(), PtqProvider(rules(qtype, **fields)))
    params = Linen().init(jax.random.key(0), X)["params"]
    template = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    stored = fewbit.quantize_params(params, template)
    found = fewbit.process_prequantized_params(as_dicts(stored), template)
    assert jax.tree.structure(found) == jax.tree.structure(stored)
    assert all(
        bool((a == b).all())
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(stored), strict=True)
    )
    y = model.apply({"params": found}, X)
    np.testing.assert_array_equal(y, model.apply({"params": stored}, X))


@pytest.mark.parametrize(("qtype", "fields"), KINDS[:3])
def test_nnx_round_trip(qtype, fields):
    model = fewbit.quantize_model(Nnx(nnx.Rngs(0)), PtqProvider(rules(qtype, **fields)), X)
    other = fewbit.quantize_model(Nnx(nnx.Rngs(1)), PtqProvider(rules(qtype, **fields)), X)
    checkpoint = as_dicts(nnx.to_pure_dict(nnx.state(other)))
    found = fewbit.process_prequantized_params(checkpoint, model)
    before = model(X)
    nnx.update(model, found)
    np.testing.assert_array_equal(model(X), other(X))
    assert not np.array_equal(before, model(X))
    # The layout is the template's: packed for kernels where those read it.
    layouts = [leaf.layout for leaf in fewbit.report(model).leaves]
    assert layouts == [leaf.layout for leaf in fewbit.report(other).leaves]


def test_nnx_takes_a_part():
    model = fewbit.quantize_model(Nnx(nnx.Rngs(0)), PtqProvider(rules()), X)
    other = fewbit.quantize_model(Nnx(nnx.Rngs(1)), PtqProvider(rules()), X)
    whole = as_dicts(nnx.to_pure_dict(nnx.state(other)))
    part = {"layers": {1: whole["layers"][1]}}
    found = fewbit.process_prequantized_params(part, model)
    assert list(found) == ["layers"] and list(found["layers"]) == [1]
    nnx.update(model, found)
    same_numbers(model.layers[1].kernel, other.layers[1].kernel)


@pytest.mark.parametrize(("qtype", "fields"), KINDS)
def test_a_plan_of_a_function(qtype, fields):
    f = lambda params, x: x @ params["w"] + params["b"]  # noqa: E731
    params = {"w": normal(0, 64, 64), "b": jnp.zeros((1, 64))}
    plan = fewbit.plan(f, rules(qtype, **fields), params, X)
    stored = fewbit.quantize_params(params, plan)
    found = fewbit.process_prequantized_params(as_dicts(stored), plan)
    same_numbers(found, stored)
    assert found["w"].array.layout == stored["w"].array.layout
    model = fewbit.quantize_model(f, PtqProvider(rules(qtype, **fields)))
    np.testing.assert_array_equal(model(found, X), model(stored, X))


def small_plan(qtype="int8", shape=(8, 6), **fields):
    f = lambda params, x: x @ params["w"]  # noqa: E731
    return fewbit.plan(f, rules(qtype, **fields), {"w": jnp.zeros(shape)}, jnp.ones((1, shape[0])))


def leaf(shape=(8, 6), scale=(1, 6), dtype=jnp.int8, **parts):
    return {"qvalue": jnp.ones(shape, dtype), "scale": jnp.full(scale, 0.5), **parts}


def test_block_scales_are_repeated_for_the_templates_tiles():
    scale = jnp.arange(1.0, 5.0).reshape(2, 2)
    block = {"qvalue": jnp.ones((8, 6), jnp.int8), "scale": scale}
    plan = small_plan(tile_size=4)
    found = fewbit.process_prequantized_params({"w": block}, plan)["w"].array
    wanted = np.repeat(np.repeat(np.asarray(scale), 4, 0), 3, 1)
    np.testing.assert_array_equal(fewbit.dequantize(found), wanted)
    assert found.scale.shape == (2, 6)
    whole = {"qvalue": jnp.ones((8, 6), jnp.int8), "scale": jnp.full((1, 1), 2.0)}
    found = fewbit.process_prequantized_params({"w": whole}, plan)["w"].array
    np.testing.assert_array_equal(found.scale, np.full((2, 6), 2.0))


def test_an_array_suffix_is_optional():
    inner = leaf()
    plain = fewbit.process_prequantized_params({"w": inner}, small_plan())
    suffixed = fewbit.process_prequantized_params({"w": {"array": inner}}, small_plan())
    same_numbers(plain, suffixed)


def test_quantized_into_float_is_dequantized_and_float_is_cast():
    template = {"w": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16), "b": jnp.zeros(3, jnp.bfloat16)}
    given = {"w": leaf(), "b": np.arange(3.0)}
    found = fewbit.process_prequantized_params(given, template)
    assert found["w"].dtype == found["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found["w"], np.float32), np.full((8, 6), 0.5))


def test_codes_that_fit_a_narrower_type():
    found = fewbit.process_prequantized_params({"w": leaf()}, small_plan("int3"))
    assert found["w"].array.qtype == "int3"
    q = fewbit.QArray(jnp.ones((8, 6), jnp.int4), jnp.full((1, 6), 0.5))
    wide = fewbit.process_prequantized_params({"w": q}, small_plan("int8"))["w"].array
    assert wide.qtype == jnp.int8 and fewbit.unpack(wide).qvalue.dtype == jnp.int8


def test_a_symmetric_array_fits_an_asymmetric_template():
    """A QArray without a zero point says that it is 0; a bare dict may have lost it."""
    plan = small_plan(weight_calibration_method="minmax")
    q = fewbit.QArray(jnp.ones((8, 6), jnp.int8), jnp.full((1, 6), 0.5))
    found = fewbit.process_prequantized_params({"w": q}, plan)
    np.testing.assert_array_equal(fewbit.dequantize(found["w"]), np.full((8, 6), 0.5))


def test_sharding_of_the_template_and_of_the_checkpoint():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, PartitionSpec(None, "x"))
    q = fewbit.quantize(normal(0, 8, 6), "int8", channelwise_axes=(1,))
    how = fewbit.HowToQuantize(qtype="int8", channelwise_axes=(1,))
    placed = jax.tree.map(lambda part: jax.device_put(part, split), q)
    template = {"w": fewbit.WithAux(placed, how)}
    found = fewbit.process_prequantized_params({"w": q}, template)["w"].array
    assert found.qvalue.sharding == split and found.scale.sharding == split
    kept = fewbit.process_prequantized_params({"w": q}, template, use_checkpoint_sharding=True)
    assert kept["w"].array.qvalue.sharding == q.qvalue.sharding
    abstract = NamedSharding(mesh.abstract_mesh, PartitionSpec(None, "x"))
    struct = lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=abstract)  # noqa: E731
    template = {"w": fewbit.WithAux(jax.tree.map(struct, q), how)}
    with pytest.raises(ValueError, match="w requires an active mesh to place pre-quantized arrays"):
        fewbit.process_prequantized_params({"w": q}, template)
    with jax.set_mesh(mesh):
        found = fewbit.process_prequantized_params({"w": q}, template)["w"].array
    assert found.qvalue.sharding.spec == PartitionSpec(None, "x")


ERRORS = {
    "float into quantized": (
        {"w": jnp.ones((8, 6))},
        {},
        r"w is quantized in the template_params. Expected a dict containing qvalue/scale leaves. "
        r"Got a float32\[8,6\] array; to quantize float parameters call fewbit.quantize_params",
    ),
    "no scale": (
        {"w": {"qvalue": jnp.ones((8, 6), jnp.int8)}},
        {},
        'w is missing required "qvalue" or "scale" in pre-quantized dictionary. It has',
    ),
    "an unknown part": (
        {"w": leaf(bias=jnp.ones(3))},
        {},
        r"w has unsupported quantized leaves \['bias'\]. Expected only \['qvalue', 'scale'",
    ),
    "a zero point too many": (
        {"w": leaf(zero_point=jnp.ones((1, 6), jnp.int8))},
        {},
        'w provided an unexpected "zero_point" for a symmetric quantized param. Make the template',
    ),
    "a zero point too few": (
        {"w": leaf()},
        {"weight_calibration_method": "minmax"},
        'w is missing required quantized leaf "zero_point". The template is asymmetric',
    ),
    "another shape": ({"w": leaf((8, 5))}, {}, r"w has shape \(8, 5\), expected \(8, 6\)\."),
    "transposed": ({"w": leaf((6, 8))}, {}, r"expected \(8, 6\). It looks transposed"),
    "finer tiles": (
        {"w": leaf(scale=(4, 6))},
        {},
        r"w has shape \(4, 6\), expected \(1, 6\) for its scale. The checkpoint has a number for "
        r"each 2x1, the template for each 8x1; make .* fewbit.restore_quantization_rules",
    ),
    "an extra one": (
        {"w": leaf(), "u": jnp.ones(3)},
        {},
        "Found extra parameters in prequantized_params not present in template: u. Pass allow_",
    ),
    "a misspelt one": ({"ww": leaf()}, {}, "not present in template: ww. The nearest are w."),
    "none": ({}, {}, "w is in the template and not in the checkpoint"),
    "codes too large": (
        {"w": {**leaf(), "qvalue": jnp.full((8, 6), 100, jnp.int8)}},
        {"qtype": "int4"},
        "invalid parameter combination for w. The codes go from 100 to 100, those of int4 from -8",
    ),
    "another kind": (
        {"w": fewbit.quantize(jnp.ones((8, 6)), "fp8", channelwise_axes=(1,))},
        {},
        "invalid parameter combination for w. The checkpoint has float8_e4m3fn and the template",
    ),
    "a string": ({"w": "weights"}, {}, "w is quantized in the template_params. .* Got the string"),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_what_does_not_fit_is_said(fault):
    given, fields, sentence = ERRORS[fault]
    with pytest.raises(ValueError, match=sentence):
        fewbit.process_prequantized_params(given, small_plan(**fields))


def test_no_template():
    with pytest.raises(TypeError, match="takes a quantized model, its parameter tree or a Plan"):
        fewbit.process_prequantized_params({"w": leaf()}, [QuantizationRule()])


def test_extra_parameters_are_left_out_when_allowed():
    given = {"w": leaf(), "u": {"v": jnp.ones(3)}}
    found = fewbit.process_prequantized_params(given, small_plan(), allow_extra_params=True)
    assert list(found) == ["w"]


@pytest.mark.parametrize(("qtype", "fields"), KINDS)
def test_rules_of_a_checkpoint_plan_it_again(qtype, fields):
    """From parameters alone to the same storage, through the rules that are read back."""
    model = Nnx(nnx.Rngs(0))
    small = fewbit.quantize_model(model, PtqProvider(rules(qtype, **fields)), X)
    params = nnx.to_pure_dict(nnx.state(small))
    found = fewbit.restore_quantization_rules(small, QuantizationRule, act_qtype=None)
    bare = fewbit.restore_quantization_rules(params, QuantizationRule, act_qtype=None)
    stored_as = {"int3": "int4", "fp8": "float8_e4m3fn"}.get(qtype, qtype)
    assert bare == [dataclasses.replace(found[0], weight_qtype=stored_as)]
    assert len(found) == 1 and found[0].module_path == "layers/[^/]+(/kernel)?"
    assert found[0].tile_size == fields.get("tile_size")
    again = fewbit.quantize_model(model, PtqProvider(found), X)
    same_numbers(nnx.to_pure_dict(nnx.state(again)), params)


def test_rules_of_bare_dicts():
    tree = {
        "up": {"kernel": leaf((64, 8), (2, 8))},
        "down": {"kernel": leaf(zero_point=jnp.zeros((1, 6), jnp.int8))},
        "norm": {"scale": jnp.ones(3), "bias": jnp.ones(3)},
    }
    up, down = sorted(
        fewbit.restore_quantization_rules(tree, QuantizationRule), key=lambda r: r.module_path
    )[::-1]
    assert up == QuantizationRule(
        module_path="up(/kernel)?", weight_qtype="int8", act_qtype="int8", tile_size=32
    )
    assert down.weight_calibration_method == "minmax" and down.tile_size is None
    rule = fewbit.restore_quantization_rules(
        {"up": tree["up"]}, fewbit.QtRule, tile_size=64, act_qtype="fp8", bwd_qtype="int8"
    )[0]
    assert isinstance(rule, fewbit.QtRule) and rule.tile_size == 64
    assert rule.act_qtype == jnp.float8_e4m3fn and rule.bwd_qtype == jnp.int8


def test_rules_of_a_function_match_its_leaves():
    f = lambda params, x: x @ params["mlp"]["w"]  # noqa: E731
    params = {"mlp": {"w": normal(0, 64, 8)}}
    plan = fewbit.plan(f, rules(tile_size=16), params, X)
    stored = fewbit.quantize_params(params, plan)
    found = fewbit.restore_quantization_rules(stored, QuantizationRule, act_qtype=None)
    again = fewbit.plan(f, found, params, X)
    assert again.leaf("mlp/w").how.tiled_axes == plan.leaf("mlp/w").how.tiled_axes


@pytest.mark.parametrize("names", [("kernel",), ("k", "v")])
def test_rules_of_leaves_at_the_root_match_the_model_and_the_leaves(names):
    (found,) = fewbit.restore_quantization_rules(dict.fromkeys(names, leaf()), QuantizationRule)
    matched = ("", *names, "kernels", "a/kernel")
    assert [p for p in matched if found.matches(p, "dot_general")] == ["", *names]
    model = nnx.Linear(64, 6, rngs=nnx.Rngs(0))
    assert fewbit.plan(model, [found], X).sites[0].weight_qtype == "int8"


def test_rules_that_conflict_or_are_none():
    tree = {"a": {"k": leaf(), "v": leaf((64, 8), (2, 8))}}
    with pytest.warns(UserWarning, match="^Conflicting quantization rules reconstructed for a:"):
        found = fewbit.restore_quantization_rules(tree, QuantizationRule)
    assert found[0].tile_size == 32 and found[0].module_path == "a(/(k|v))?"
    with pytest.raises(ValueError, match="found no quantized parameter"):
        fewbit.restore_quantization_rules({"w": jnp.ones(3)}, QuantizationRule)
