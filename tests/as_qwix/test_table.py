"""Every name that Qwix has is ours, or refused with a sentence when it is used; none is a guess."""

import importlib
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from qwix_away import qwix as qwix

import fewbit
from fewbit.as_qwix import TABLE
from fewbit.as_qwix._table import SHORT, Fixed, Refused

# What its documentation names, by module.
DOCUMENTED = {
    "qwix": """
        QArray quantize dequantize dot_general dot einsum conv_general_dilated ragged_dot
        ragged_dot_general quantize_model apply_lora_to_model quantize_params QuantizationRule
        QtRule LoraRule QuantizationProvider BoxedParamProvider PtqProvider QtProvider LoraProvider
        OdmlQatProvider OdmlConversionProvider process_prequantized_params
        restore_quantization_rules QuantStat contrib __version__""",
    "qwix.pallas": "QArray quantize dequantize get_current_rule pallas_call dot_general dot einsum",
    "qwix._src.core.qarray": """
        reshape rewriting_take validate_qarray sparsify get_scale_shape transpose_array split_axis
        get_tiled_axes call_with_generic_broadcast broadcast_to calibrate compute_scale_zero_point
        quantize_with_scale_zero_point quantize quantize_api dequantize clip_to_calibration
        clip_gradient_to_calibration get_accumulator_and_result_type
        USE_RECIPROCAL_FOR_QUANTIZATION HowToQuantize QArray""",
    "qwix._src.core.numerics": """
        should_quantize can_dequant_on_output get_asymmetric_bound get_symmetric_bound convert_to
        convert_from get_nf4_buckets fp_to_nf4 nf4_to_fp""",
    "qwix._src.core.stochastic_rounding": """
        low_bit_uniform_noise uniform_noise NoiseFn get_noise_fn""",
    "qwix._src.interception": """
        Interceptor wrap_func_intercepted disable_interceptions interception_manager has_attribute
        get_attribute PRIMITIVE_BIND_KEY""",
    "qwix._src.utils.flax_util": """
        QuantStat should_update_quant_stats get_current_module get_current_module_path
        get_or_create_variable get_and_delete_variable get_or_create_param find_param unbox
        update_sharding update_boxed make_rng get_value_from_path""",
    "qwix.contrib.calibration": """
        CalibrationProvider SinglePassCalibrationProvider normalize_weight CalibratedQuantContext
        extract_calibrated_quant_context quantize_params_with_calibration""",
    "qwix.contrib.gptq": "GptqRule GptqCalibrationProvider quantize_params",
    "qwix.contrib.gptq_core": """
        quantize_weight compute_hessian cholesky_inverse find_params quantize""",
    "qwix.contrib.awq": """
        AwqRule AwqCalibrationProvider quantize_params AwqInferenceProvider WithAwqScale""",
    "qwix.contrib.awq_core": "compute_act_scale search_optimal_scales quantize_weight",
    "qwix.contrib.smooth_quant": """
        SqRule SqCalibrationProvider quantize_params SqInferenceProvider WithSqScale
        compute_scales_ratio""",
    "qwix.contrib.qep": "QepRule QepStage QepResult quantize quantize_params",
    "qwix.contrib.qep_core": "compute_qep_stats weight_correct",
    "qwix.contrib.hadamard_rot": "hadamard_rotate_inputs",
    "qwix.contrib.padded_ptq": """
        PaddedPtqProvider PaddedQArray quantize dequantize dot_general einsum quantize_params
        pad_to_shape get_padded_shape""",
    "qwix.contrib.hijax.hiqarray": """
        HiQArray HiQArrayTy AsHiQArray ToHiQArray FromHiQArray PermuteDims as_hiqarray to_hiqarray
        from_hiqarray permute_dims transpose matmul MatmulFwdBwdConfig OpConfig
        BwdNullMatmulConfig BwdDequantizeMatmulConfig BwdStaticQuantizeMatmulConfig
        BwdDynamicQuantizeMatmulConfig""",
    "qwix.contrib.kernels.quantized_matmul": "quantized_matmul can_use_qmm",
    "qwix.contrib.kernels.lhs_fused_quantized_matmul": "lhs_fused_quantized_matmul",
    "qwix.contrib.kernels.fused_hadamard_quantize": """
        fused_hadamard_quantize hadamard_quantize_multiply hadamard_transform_rhs""",
    "qwix.contrib.sparsity.sparsity_module": "SparsityModule",
    "qwix._src.core.sparsity": """
        SparsityRule get_sparsity_mask apply_sparsity get_sparsity_mask_unstructured
        prune_inputs_n_m""",
    # What programs import besides: MaxText, Tunix, tokamax, tpu-inference.
    "qwix._src.core.dot_general_qt": "DotGeneralQtConfig dot_general_qt",
    "qwix._src.core.dot_general": "_fast_dot_general dot_general get_how_to_quantize",
    "qwix._src.core.conv_general_qt": "ConvGeneralQtConfig conv_general_qt",
    "qwix._src.core.ragged_dot_qt": "RaggedDotQtConfig ragged_dot_qt",
    "qwix._src.providers.ptq": "WithAux quantize_act create_quantized_param qarray PtqProvider",
    "qwix._src.averaging": "SimpleMovingAverage",
    "qwix._src": "flax_util interception",
}
PAIRS = [(module, name) for module, text in DOCUMENTED.items() for name in text.split()]


def get(module, name):
    return getattr(importlib.import_module(module), name)


def test_every_documented_name_is_there():
    for module, name in PAIRS:
        get(module, name)
        home, _, last = module.rpartition(".")
        known = name in TABLE[module] or f"{module}.{name}" in TABLE or name in SHORT
        assert known, f"{module}.{name}"
        assert not home or getattr(importlib.import_module(home), last)


def test_every_name_of_the_table_is_ours_or_refuses():
    for module, names in TABLE.items():
        for name, entry in names.items():
            check(f"{module}.{name}", entry, get(module, name))


def check(full, entry, found):
    if isinstance(entry, Fixed):
        assert found is entry.value, full
    elif isinstance(entry, Refused):
        assert isinstance(found, type) == (entry.kind == "class"), full
        with pytest.raises(NotImplementedError) as error:
            found(1, 2, key=3)
        text = f"{full} is not in fewbit: {entry.what}. Instead: {entry.instead}."
        assert str(error.value) == text
    else:
        home, _, there = entry.rpartition(".")
        assert found is getattr(importlib.import_module(home), there), full
        assert home.startswith("fewbit") and callable(found), full


def test_what_is_said_instead_of_a_refused_name_names_things_that_are_there():
    """`fewbit.a.b` in a sentence is a name of fewbit's."""
    import re

    texts = {entry.instead for names in TABLE.values() for entry in names.values()
             if isinstance(entry, Refused)}  # fmt: skip
    texts |= {e.why for names in TABLE.values() for e in names.values() if isinstance(e, Fixed)}
    named = {full for text in texts for full in re.findall(r"fewbit((?:\.[A-Za-z_]\w*)+)", text)}
    assert len(named) > 8
    for full in named:
        value = fewbit
        for part in full[1:].split("."):
            value = getattr(value, part)


def test_refused_names_can_be_imported_named_asked_for_and_derived_from():
    from qwix.contrib.awq import WithAwqScale
    from qwix.contrib.gptq import GptqRule, quantize_params

    class Mine(GptqRule):
        extra: int = 3

        def __init__(self, **kwargs):
            self.kwargs = kwargs

    def annotated(x: WithAwqScale | GptqRule) -> GptqRule: ...

    assert not isinstance(fewbit.QArray, WithAwqScale) and issubclass(Mine, GptqRule)
    assert (
        quantize_params.__module__ == "qwix.contrib.gptq"
        and "second-order" in Mine.__mro__[1].__doc__
    )
    with pytest.raises(NotImplementedError, match="qwix.contrib.gptq.GptqRule is not in fewbit"):
        Mine(weight_qtype="int8")
    with pytest.raises(NotImplementedError, match="AWQ"):
        WithAwqScale.from_something  # noqa: B018


def test_two_names_of_one_thing_are_one_thing(qwix):
    import qwix.pallas as qpl
    from qwix._src import flax_util as old
    from qwix._src.core.qarray import QArray
    from qwix._src.providers import ptq
    from qwix._src.utils import flax_util

    assert QArray is qpl.QArray is qwix.QArray is ptq.qarray.QArray is fewbit.QArray
    assert old.get_current_module is flax_util.get_current_module
    assert ptq.WithAux is fewbit.WithAux and ptq.flax_util is flax_util
    assert qwix.quantize_model is fewbit.quantize_model


def test_star_imports_and_listings(qwix):
    space = {}
    exec("from qwix import *\nfrom qwix.pallas import *", space)
    assert space["quantize_model"] is fewbit.quantize_model and space["pallas_call"]
    assert {"quantize_model", "contrib", "pallas"} <= set(dir(qwix))
    assert isinstance(qwix, types.ModuleType) and "docs/as-qwix.md" in qwix.__doc__


# --- Names with another form here do what Qwix's do -----------------------------------------------


def inner(name):
    return importlib.import_module(f"qwix._src.{name}")


def test_shapes_of_inner_array_functions():
    qarray = inner("core.qarray")
    q = qarray.quantize_api(normal(0, 4, 6), "int8", channelwise_axes=(0,), tiled_axes={1: 3})
    assert qarray.get_tiled_axes(q) == {1: 3}
    per_tensor = qarray.quantize_api(normal(0, 4, 6), "int8")
    assert qarray.get_tiled_axes(per_tensor) == {}
    assert qarray.reshape(q, 2, 2, 6).shape == qarray.reshape(q, (2, 2, 6)).shape == (2, 2, 6)
    assert (qarray.rewriting_take(q, 1).qvalue == q.qvalue[1]).all()
    assert qarray.split_axis(normal(0, 4, 6), {1: 3}).shape == (4, 2, 3)
    assert qarray.split_axis(normal(0, 4, 6), {1: 0.5}).shape == (4, 2, 3)
    with pytest.raises(ValueError, match="cannot be tiled"):
        qarray.split_axis(normal(0, 4, 6), {1: 4})


@pytest.mark.parametrize("order", [(1, 2, None), (2, 1), (None, 2, 1), (0, 2, 1)])
def test_axes_in_another_order(order):
    x = np.arange(6.0).reshape(1, 2, 3)
    kept = [a for a in order if a is not None]
    wanted = x.squeeze(tuple(a for a in range(3) if a not in kept))
    wanted = wanted.transpose(np.argsort(np.argsort(kept)))
    wanted = wanted.reshape([1 if a is None else x.shape[a] for a in order])
    found = inner("core.qarray").transpose_array(jnp.asarray(x, jnp.float32), order)
    assert (found == wanted).all()
    with pytest.raises(ValueError, match="Cannot transpose"):
        inner("core.qarray").transpose_array(jnp.asarray(x, jnp.float32), (0, 1))


def test_the_shorter_axis_is_one_per_tile():
    call = inner("core.qarray").call_with_generic_broadcast
    x, y = jnp.arange(6.0).reshape(1, 6), jnp.array([[10.0, 20.0], [30.0, 40.0]])
    assert call(jnp.add, x, y).tolist() == [
        [10, 11, 12, 23, 24, 25],
        [30, 31, 32, 43, 44, 45],
    ]
    with pytest.raises(ValueError, match="Cannot broadcast"):
        call(jnp.add, jnp.ones((4,)), jnp.ones((3,)))


def test_noise_is_the_last_argument():
    qarray, rounding = inner("core.qarray"), inner("core.stochastic_rounding")
    x, scale = normal(0, 8), jnp.full((1,), 0.01)
    noise = rounding.get_noise_fn("uniform", jax.random.key(1))
    q = qarray.quantize_with_scale_zero_point(x, "int8", scale, None, noise)
    wanted = fewbit.qarray.quantize_with_scale_zero_point(x, "int8", scale, noise_fn=noise)
    assert (q.qvalue == wanted.qvalue).all()


def test_codes_and_numbers():
    numerics = inner("core.numerics")
    codes = jnp.array([3, -4], jnp.int8)
    assert numerics.convert_from(codes, "int8").dtype == jnp.int8
    assert numerics.convert_from(jnp.array([0, 7], jnp.uint4), "nf4").tolist() == [-1.0, 0.0]
    assert numerics.nf4_to_fp(jnp.array([[15]], jnp.uint4)).tolist() == [[1.0]]
    assert [numerics.can_dequant_on_output(t) for t in ("nf4", "int8", jnp.int4)] == [0, 1, 1]


def test_averages_have_a_default():
    average = inner("averaging").SimpleMovingAverage()
    stat = average.init({"absmax": jnp.zeros(1)})
    default = {"absmax": jnp.ones(1)}
    assert average.get_calibration(stat, default) == default
    assert average.get_calibration(stat, default_calibration=default) == default
    stat = average.update(stat, {"absmax": jnp.full(1, 3.0)})
    assert average.get_calibration(stat)["absmax"].tolist() == [3.0]


def test_activations_quantized_by_hand():
    ptq = inner("providers.ptq")
    how = ptq.qarray.HowToQuantize(qtype="int8", channelwise_axes=(0,))
    x, rule = normal(0, 2, 8), fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    q = ptq.quantize_act(x, how, rule, "")
    assert (q.qvalue == fewbit.quantize(x, "int8", channelwise_axes=(0,)).qvalue).all()
    static = rule.replace(act_static_scale=True)
    with pytest.raises(NotImplementedError, match="stored scales belong to Sites of the plan"):
        ptq.quantize_act(x, how, static, "")


def test_ragged_products_by_their_familiar_argument(qwix):
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    x, w, sizes = normal(0, 4, 3), normal(1, 2, 3, 5), jnp.array([1, 3], jnp.int32)
    found = qwix.ragged_dot_general(x, w, sizes, dimension_numbers=numbers)
    assert jnp.allclose(found, jax.lax.ragged_dot(x, w, sizes), rtol=1e-5)


def test_values_at_a_path():
    at = inner("utils.flax_util").get_value_from_path
    tree = types.SimpleNamespace(layers=[{"w": 3}])
    assert at(tree, ("layers", 0, "w")) == 3
    assert at(tree, ("layers", 1, "w")) is at(tree, ("nowhere", 0)) is None


def test_arguments_are_those_of_qwix(qwix):
    """The names and order by which its functions are called, where ours were written first."""
    wanted = {
        "qwix.quantize_model": "model provider *model_inputs methods",
        "qwix.quantize_params": "params abstract_quantized_params quant_stats *allow_extra_params",
        "qwix.quantize": "array qtype *channelwise_axes tiled_axes calibration_method scale_dtype",
        "qwix.dot_general": "lhs rhs dimension_numbers precision preferred_element_type",
        "qwix.ragged_dot": "lhs rhs group_sizes precision preferred_element_type group_offset",
        "qwix._src.model.quantize_nnx_model": "model provider *model_inputs call_method",
        "qwix._src.core.qarray.quantize": "array how",
        "qwix.pallas.dot_general": "lhs rhs dimension_numbers preferred_element_type",
        "qwix._src.core.dot_general_qt.dot_general_qt": "lhs rhs dimension_numbers config",
    }
    for full, arguments in wanted.items():
        module, _, name = full.rpartition(".")
        found = list(inspect.signature(get(module, name)).parameters)
        positional, _, keywords = arguments.partition(" *")
        assert found[: len(positional.split())] == positional.split(), full
        assert {word for word in keywords.split()} <= set(found), full
