"""Every block of docs/from-qwix.md runs, prints what the page says, and holds what it claims.

What Qwix makes of the same blocks is compared in tests/compared/test_peers_page.py.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from peers import page
from tolerances import NNX_INT8, NOISE, PEER_PAGE

import fewbit
from fewbit.numerics import qtype_name

# Of the layers of the page.
CODES = {"linear1": (16, 64), "linear2": (64, 16)}
SCALES = {"linear1": (1, 64), "linear2": (1, 16)}
P = jax.sharding.PartitionSpec

# What fewbit says where Qwix is silent.
WARNED = {"A quantized checkpoint into a layer of your own": "reaches weights of opaque kernels"}

CLAIMS = {}


def of(*headings):
    """What the page claims of the blocks under these headings."""

    def put(claim):
        CLAIMS.update(dict.fromkeys(headings, claim))
        return claim

    return put


def close(a, b, bound=PEER_PAGE):
    return float(jnp.abs(a - b).max()) <= bound * float(jnp.abs(b).max())


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x[...] == y[...]).all()), a, b)))


def pure(model, *filters):
    return nnx.to_pure_dict(nnx.state(model, *filters))


def on_the_mesh(array, spec):
    return array.sharding.spec == spec and len(array.sharding.device_set) == 8


def has_parts(kernel, qvalue, scale, code="int8"):
    """A weight in a pure dict: codes and scales, and nothing beside them."""
    assert set(kernel) == {"array"} and set(kernel["array"]) == {"qvalue", "scale"}
    found = kernel["array"]
    assert (found["qvalue"].shape, found["scale"].shape) == (qvalue, scale)
    assert (found["qvalue"].dtype, found["scale"].dtype) == (code, "float32")


def has_codes_of(state, floats):
    for layer, shape in CODES.items():
        has_parts(state[layer]["kernel"], shape, SCALES[layer])
        wanted = fewbit.quantize(floats[layer]["kernel"], "int8", channelwise_axes=(1,))
        assert same(state[layer]["kernel"]["array"], vars_of(wanted))


def vars_of(array):
    return {"qvalue": array.qvalue[...], "scale": array.scale[...]}


@of("Linen parameters")
def _(kernel, output, **_):
    assert isinstance(kernel, fewbit.WithAux) and isinstance(kernel.array, fewbit.QArray)
    assert output.shape == (8, 16)


@of("NNX state")
def _(model, ptq_model, model_input, output, **_):
    parts = ptq_model.linear1.kernel.array
    assert type(parts.qvalue) is type(parts.scale) is nnx.Param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flax, of what used to be written
        assert parts.qvalue.value.shape == (16, 64) and parts.scale.value.shape == (1, 64)
    has_codes_of(pure(ptq_model), pure(model))
    assert close(output, model(model_input), NNX_INT8) and not same(output, model(model_input))


@of("An NNX model made inside `jit`")
def _(ptq_model, NnxMLP, model_input, output, **_):
    model = NnxMLP(rngs=nnx.Rngs(0))
    # The compiler may round what the initializer draws otherwise inside of a larger program.
    for layer, float_layer in pure(model).items():
        found = pure(ptq_model)[layer]["kernel"]["array"]
        wanted = fewbit.quantize(float_layer["kernel"], "int8", channelwise_axes=(1,))
        apart = np.abs(found["qvalue"].astype(int) - np.asarray(wanted.qvalue).astype(int))
        assert apart.max() <= 1 and apart.mean() < 0.01
        np.testing.assert_allclose(found["scale"], wanted.scale, rtol=1e-6)
    assert close(output, model(model_input), NNX_INT8)


@of("Quantize Linen parameters")
def _(fp_params, ptq_params, some, model, model_input, output, **_):
    wanted = fewbit.quantize(fp_params["Dense_0"]["kernel"], "int8", channelwise_axes=(1,))
    assert same(vars_of(ptq_params["Dense_0"]["kernel"].array), vars_of(wanted))
    assert list(some) == ["Dense_1"] and same(some["Dense_1"], ptq_params["Dense_1"])
    assert close(output, model.apply({"params": fp_params}, model_input), NNX_INT8)


@of(
    "Quantize NNX parameters, model made inside `eval_shape`",
    "Quantize NNX parameters, model made outside",
)
def _(fp_params, ptq_params, abs_ptq_model, NnxMLP, model_input, output, **_):
    has_codes_of(ptq_params, fp_params)
    has_codes_of(pure(abs_ptq_model), fp_params)
    assert close(output, NnxMLP(rngs=nnx.Rngs(0))(model_input), NNX_INT8)


@of("Quantize NNX parameters under a mesh")
def _(model, abs_ptq_model, model_input, output, **_):
    parts = abs_ptq_model.kernel.array
    assert on_the_mesh(parts.qvalue[...], P("data", "model"))
    assert on_the_mesh(parts.scale[...], P("data", "model")) and parts.scale.shape == (2, 64)
    assert close(output, model(model_input), NNX_INT8)


@of("Shard a quantized NNX model")
def _(model, ptq_model, state, model_input, output, **_):
    parts, specs = ptq_model.kernel.array, nnx.to_pure_dict(nnx.get_partition_spec(state))
    assert on_the_mesh(parts.qvalue[...], P("data", "model"))
    assert on_the_mesh(parts.scale[...], P(None, "model"))
    assert specs["kernel"]["array"] == {"qvalue": P("data", "model"), "scale": P(None, "model")}
    assert close(output, model(model_input), NNX_INT8)


def is_a_statistic(stat, count):
    assert int(stat["count"]) == count and stat["sum_of_absmax"].shape == (1, 1)


@of("Static ranges, Linen")
def _(qt_variables, quant_stats, ptq_params, qt_output, output, **_):
    assert set(qt_variables) == {"params", "quant_stats"}
    for layer in ("Dense_0", "Dense_1"):
        is_a_statistic(qt_variables["quant_stats"][layer]["dot_general0_lhs"], 0)
        is_a_statistic(quant_stats[layer]["dot_general0_lhs"], 1)
        assert ptq_params[layer]["dot_general0_lhs_scale"].array.shape == (1, 1)
    assert close(output, qt_output)


@of("Static ranges, NNX")
def _(qt_model, quant_stats, ptq_model, ptq_params, qt_output, output, same_output, **_):
    for layer in CODES:
        is_a_statistic(quant_stats[layer]["dot_general0_lhs"], 1)
        is_a_statistic(getattr(qt_model, layer).dot_general0_lhs.get_value(), 1)
        assert not hasattr(getattr(ptq_model, layer), "dot_general0_lhs"), "statistics are used up"
    assert same(pure(ptq_model), ptq_params)
    assert close(output, qt_output) and same(output, same_output)


@of("Quantized training, Linen", "Quantization-aware training, Linen")
def _(params, loss_fn, grads, **_):
    for gradient, weight in zip(*map(jax.tree.leaves, (grads, params)), strict=True):
        assert gradient.dtype == weight.dtype == jnp.float32 and gradient.shape == weight.shape
        assert float(jnp.abs(gradient).max()) > 0
    few_bits = str(jax.make_jaxpr(jax.grad(loss_fn))(params)).count("preferred_element_type=int32")
    assert few_bits >= 2, "products of two layers"


def test_training_has_the_forward_pass_of_quantization_aware_training_and_other_gradients():
    training = page.run("Quantized training, Linen", "fewbit").names
    aware = page.run("Quantization-aware training, Linen", "fewbit").names
    assert same(training["loss"], aware["loss"]) and not same(training["grads"], aware["grads"])


@of("A training step, NNX")
def _(train_step, qt_model, optimizer, model, model_input, loss, **_):
    before, after = pure(model), pure(qt_model, nnx.Param)
    assert not any(same(before[layer], after[layer]) for layer in CODES)
    assert float(train_step(qt_model, optimizer, model_input, jnp.ones((8, 16)))) < float(loss)


@of("Statistics, NNX")
def _(qt_model, **_):
    for layer in (qt_model.linear1, qt_model.linear2):
        assert type(layer.dot_general0_lhs) is fewbit.QuantStat
        is_a_statistic(layer.dot_general0_lhs.get_value(), 2)


@of("Random numbers of an NNX model")
def _(grads, other_grads, **_):
    for layer in CODES:
        a, b = grads[layer]["kernel"], other_grads[layer]["kernel"]
        assert not same(a, b) and close(a, b, NOISE)


@of("QLoRA, Linen")
def _(params, **_):
    kernel = params["Dense_0"]["kernel"].array
    assert qtype_name(kernel.qtype) == "nf4" and kernel.qvalue.dtype == jnp.uint4
    assert not params["Dense_0"]["kernel_lora_b"].any()


@of("QLoRA, NNX")
def _(lora_model, adapters, **_):
    assert type(lora_model.linear1.kernel_lora_a) is nnx.LoRAParam
    assert set(adapters["linear1"]) == {"kernel_lora_a", "kernel_lora_b"}
    has_parts(pure(lora_model)["linear1"]["kernel"], (16, 64), (1, 64), "uint4")


def has_checkpoint(weight, given):
    parts = weight["array"] if isinstance(weight, Mapping) else vars_of(weight.array)
    for name in ("qvalue", "scale"):
        np.testing.assert_array_equal(parts[name][...], given["array"][name])


@of("A quantized checkpoint into an abstract NNX model")
def _(checkpoint, restored, abstract_model, output, **_):
    for layer in CODES:
        has_checkpoint(getattr(abstract_model, layer).kernel, checkpoint[layer]["kernel"])
    assert {(rule.weight_qtype, rule.tile_size) for rule in restored} == {(jnp.dtype("int8"), 8)}
    assert output.shape == (8, 16)


@of("A quantized checkpoint into a float NNX model")
def _(checkpoint, abstract_model, output, **_):
    for layer in CODES:
        parts, found = checkpoint[layer]["kernel"]["array"], getattr(abstract_model, layer).kernel
        assert type(found) is nnx.Param and found.dtype == jnp.float32
        wanted = parts["qvalue"] * np.repeat(parts["scale"], 8, axis=0)
        np.testing.assert_array_equal(found[...], wanted)
    quantized = page.run("A quantized checkpoint into an abstract NNX model", "fewbit").names
    assert close(output, quantized["output"], NNX_INT8)


@of("A quantized checkpoint under a mesh")
def _(checkpoint, restored, abstract_model, **_):
    has_checkpoint(abstract_model.kernel, checkpoint["kernel"])
    parts = abstract_model.kernel.array
    assert on_the_mesh(parts.qvalue[...], P("data", "model"))
    assert on_the_mesh(parts.scale[...], P("data", "model"))


@of("A quantized checkpoint into a layer of your own")
def _(checkpoint, abstract_model, **_):
    has_checkpoint(abstract_model.experts.weight, checkpoint["experts"]["weight"])
    has_checkpoint(abstract_model.linear.kernel, checkpoint["linear"]["kernel"])


@of("The core API")
def _(lhs, rhs, tiled_rhs, near_rhs, product, same_product, weight_only, **names):
    assert close(product, lhs @ rhs, 0.02) and close(same_product, product)
    assert close(weight_only, lhs @ near_rhs) and close(near_rhs, rhs, 0.1)
    assert tiled_rhs.scale.shape == (4, 16)
    window = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    images = jax.lax.conv_general_dilated(names["image"], names["window"], (1, 1), "SAME", **window)
    assert close(names["convolved"], images, 0.02)
    groups = jax.lax.ragged_dot(lhs, names["experts"], jnp.array([3, 0, 5]))
    assert close(names["grouped"], groups, 0.02)


def test_the_page_has_the_flows_of_the_guide():
    assert len(page.BLOCKS) == 22 and list(page.BLOCKS) == list(CLAIMS)
    assert set(WARNED) <= set(CLAIMS)


def run(heading, **sizes):
    with contextlib.ExitStack() as stack:
        if heading in WARNED:
            stack.enter_context(pytest.warns(UserWarning, match=WARNED[heading]))
        return page.run(heading, "fewbit", **sizes)


@pytest.mark.parametrize("heading", CLAIMS)
def test_a_block_prints_and_does_what_the_page_says(heading):
    ran = run(heading)
    assert ran.printed == (page.BLOCKS[heading].printed or "")
    CLAIMS[heading](**ran.names)


def test_a_rule_that_matches_nothing_is_an_error_or_when_asked_for_a_warning():
    names = run("NNX state").names
    rules = [*names["rules"], fewbit.QuantizationRule(module_path="head", weight_qtype="int8")]
    given = names["model"], names["model_input"]
    with pytest.raises(fewbit.PlanError, match="matches no Site .* Pass strict=False"):
        fewbit.quantize_model(given[0], fewbit.PtqProvider(rules), given[1])
    with pytest.warns(UserWarning, match="matches no Site"):
        provider = fewbit.PtqProvider(rules, strict=False)
        model = fewbit.quantize_model(given[0], provider, given[1])
    assert same(pure(model), pure(names["ptq_model"]))


@pytest.mark.parametrize(("heading", "code"), [("NNX state", "int8"), ("QLoRA, NNX", "uint4")])
def test_a_packed_weight_shows_the_weight_s_own_shapes_and_types(heading, code):
    names = run(heading, wide=True).names
    model = names["ptq_model" if "ptq_model" in names else "lora_model"]
    packed = fewbit.pack(model)
    for layer, (rows, columns) in {"linear1": (64, 128), "linear2": (128, 64)}.items():
        kernel, plain = (getattr(m, layer).kernel.array for m in (packed, model))
        assert (kernel.layout, plain.layout) == ("panels", "plain")
        for array in (kernel, plain):
            assert (array.qvalue.shape, array.qvalue.dtype) == ((rows, columns), code)
            assert (array.scale.shape, array.scale.dtype) == ((1, columns), jnp.float32)
        assert same(vars_of(kernel), vars_of(plain)), "the same numbers, read through the packing"
        has_parts(pure(fewbit.unpack(packed))[layer]["kernel"], (rows, columns), (1, columns), code)
    assert close(packed(names["model_input"]), names["output"])


def test_dataclasses_replace_and_the_array_s_own_do_the_same():
    array = run("The core API").names["tiled_rhs"]
    twice = dataclasses.replace(array, scale=2 * array.scale)
    assert twice == array.replace(scale=2 * array.scale) and twice.qtype == array.qtype
    assert same(fewbit.dequantize(twice), 2 * fewbit.dequantize(array))
