"""What every name of Qwix is here: ours, or a sentence that is said when it is used.

By module, then by name. A text is the full name of what stands for it. `Refused` names can be
imported, named in annotations, asked for by `isinstance` and derived from; using one says what it
is in Qwix and what comes nearest here. A `Fixed` name has one value and takes no other.
"""

from dataclasses import dataclass
from typing import Any

from fewbit._util import Fixed


@dataclass(frozen=True)
class Refused:
    """A name that can be imported: what it does in Qwix, and what to do here."""

    what: str
    instead: str
    kind: str = "function"


Entry = str | Refused | Fixed

# --- Pieces of the table --------------------------------------------------------------------------


def _from(home: str, names: str) -> dict[str, Entry]:
    """Names that are the same in one of our modules."""
    return {name: f"{home}.{name}" for name in names.split()}


def _refused(what: str, instead: str, functions: str = "", classes: str = "") -> dict[str, Entry]:
    found: dict[str, Entry] = {name: Refused(what, instead) for name in functions.split()}
    return found | {name: Refused(what, instead, "class") for name in classes.split()}


_OWN = "fewbit.as_qwix._own"
_ANY = Fixed(Any, "it is a name for annotations")
_VERSION = Fixed("0.1.8", "it tells which version of Qwix has these names")
_NO_MODULE = (
    "it reads or changes the Flax module that runs at the moment",
    "a provider's method runs where the traced program has a product, where no module is. Its "
    "operands say what they are (a stored weight is a fewbit.QArray), and what belongs beside "
    "parameters is planned: fewbit.plan(model, provider, *inputs)",
)
_INTERCEPTION = (
    "it replaces functions of JAX and Flax while a model runs",
    "fewbit replaces none: the provider's own methods are called. Override dot_general, einsum, "
    "conv_general_dilated or ragged_dot in a subclass of a provider",
)
_HALVES = (
    "it is one half of a product with its own derivative",
    "jax.vjp of dot_general_qt, conv_general_qt or ragged_dot_qt gives both halves",
)
_WEIGHTS = (
    "fewbit.quantize_params with a smaller tile_size or weight_calibration_method='mse', which "
    "lower the error without data"
)
_GPTQ = ("it quantizes weights with second-order statistics of their inputs (GPTQ)", _WEIGHTS)
_AWQ = ("it scales weights by statistics of their inputs (AWQ)", _WEIGHTS)
_SMOOTH = ("it moves outliers of activations into the weights (SmoothQuant)", _WEIGHTS)
_QEP = ("it propagates quantization errors from layer to layer (QEP)", _WEIGHTS)
_HADAMARD = ("it rotates outliers away with Hadamard matrices", _WEIGHTS)
_CALIBRATING = (
    "it collects what GPTQ, AWQ and SmoothQuant want to know of activations",
    "fewbit.calibrate(model, rules, *inputs), with observers of your own by "
    "fewbit.register_observer",
)
_SPARSE = ("it prunes weights in N:M patterns", "prune the float weights before quantize_params")
_HIJAX = ("it makes quantized arrays values of JAX itself", "fewbit.QArray, an ordinary pytree")
_HIJAX_NAMES = _refused(
    *_HIJAX,
    "as_hiqarray to_hiqarray from_hiqarray permute_dims transpose matmul",
    "HiQArray HiQArrayTy AsHiQArray ToHiQArray FromHiQArray PermuteDims MatmulFwdBwdConfig "
    "OpConfig BwdNullMatmulConfig BwdDequantizeMatmulConfig BwdStaticQuantizeMatmulConfig "
    "BwdDynamicQuantizeMatmulConfig",
)
_KERNELS = (
    "it is a Pallas kernel for one generation of TPUs",
    "fewbit.dot_general, or fewbit.pallas.pallas_call with a kernel of your own",
)
_PADDED = (
    "it pads arrays whose axes their tiles do not divide",
    "fewbit takes uneven tiles as they are: fewbit.quantize, dequantize, dot_general, einsum, "
    "quantize_params and PtqProvider",
)
_ODML = (
    "it is part of the training for export to LiteRT",
    "train with fewbit.QtProvider, and quantize the exported model there",
)
_AUX = (
    "it keeps values beside objects in a table of its own",
    "what belongs to a Site is in its plan: fewbit.plan(model, rules, *inputs).sites",
)
_ON_CODES = (
    "it is one way of computing a product",
    "fewbit.dot_general chooses it, and fewbit.ops.describe_dot(lhs, rhs, dimension_numbers) says "
    "which runs",
)

_OPERATIONS = "dot_general dot einsum conv_general_dilated ragged_dot"
_PROVIDERS = _from(
    "fewbit",
    "QuantizationProvider BoxedParamProvider PtqProvider QtProvider LoraProvider OdmlQatProvider "
    "OdmlConversionProvider",
)

_FLAX_UTIL: dict[str, Entry] = {
    "QuantStat": "fewbit.QuantStat",
    "get_current_module": f"{_OWN}.current_module",
    "get_current_module_path": f"{_OWN}.current_path",
    "get_value_from_path": f"{_OWN}.value_at",
    **_refused(
        *_NO_MODULE,
        "should_update_quant_stats get_or_create_variable get_and_delete_variable "
        "get_or_create_param find_param",
    ),
    **_refused(
        "it makes a key of the module that runs at the moment",
        "a call takes its keys as arguments: rngs={'stochastic_rounding': key} for Linen, "
        "model.set_attributes(qwix_rngs=nnx.Rngs(0)) for NNX",
        "make_rng",
    ),
    **_refused(
        "it takes arrays out of the boxes of Flax, or exchanges them there",
        "flax.core.meta.unbox and replace_boxed for Linen, Variable.get_value and set_value "
        "for NNX. Boxes and shardings of quantized parameters are kept by fewbit itself",
        "unbox update_sharding update_boxed",
    ),
}

# --- The table ------------------------------------------------------------------------------------

TABLE: dict[str, dict[str, Entry]] = {
    "qwix": {
        **_from("fewbit", f"QArray quantize dequantize {_OPERATIONS} quantize_model"),
        **_from("fewbit", "apply_lora_to_model quantize_params QuantizationRule QtRule LoraRule"),
        **_from("fewbit", "process_prequantized_params restore_quantization_rules QuantStat"),
        **_PROVIDERS,
        "ragged_dot_general": f"{_OWN}.ragged_general",
        "__version__": _VERSION,
    },
    "qwix.version": {"__version__": _VERSION},
    "qwix.pallas": _from(
        "fewbit.pallas",
        "QArray quantize dequantize get_current_rule pallas_call dot_general dot einsum",
    ),
    "qwix._src": {},
    "qwix._src.aux_data": _refused(*_AUX, "set get clear"),
    "qwix._src.averaging": {
        "SimpleMovingAverage": f"{_OWN}.MovingAverage",
        "QuantStat": _ANY,
        "Calibration": _ANY,
    },
    "qwix._src.interception": {
        "disable_interceptions": f"{_OWN}.not_intercepted",
        "Function": _ANY,
        "PRIMITIVE_BIND_KEY": Refused(*_INTERCEPTION),
        **_refused(
            *_INTERCEPTION,
            "wrap_func_intercepted interception_manager has_attribute get_attribute",
            "Interceptor",
        ),
    },
    "qwix._src.model": {
        "quantize_model": "fewbit.quantize_model",
        "quantize_linen_model": f"{_OWN}.linen_model",
        "quantize_nnx_model": f"{_OWN}.nnx_model",
        "ModelType": _ANY,
    },
    "qwix._src.qconfig": _from("fewbit", "QuantizationRule QuantizationProvider get_current_rule"),
    "qwix._src.core": {},
    "qwix._src.core.conv_general": {
        "conv_general_dilated": "fewbit.conv_general_dilated",
        "get_how_to_quantize": "fewbit.ops.conv_how",
        **_refused(*_ON_CODES, "get_transpose"),
    },
    "qwix._src.core.conv_general_qt": {
        **_from("fewbit", "conv_general_qt ConvGeneralQtConfig"),
        **_refused(*_HALVES, "conv_general_qt_fwd conv_general_qt_bwd"),
    },
    "qwix._src.core.dot": {"dot": "fewbit.dot"},
    "qwix._src.core.dot_general": {
        "dot_general": "fewbit.dot_general",
        "get_how_to_quantize": "fewbit.ops.dot_how",
        "loop_dot_general": "fewbit.pallas.dot_general",
        "MIN_TILE_SIZE_TO_DEQUANT_ON_OUTPUT": Fixed(
            128, "fewbit.ops.describe_dot(lhs, rhs, dimension_numbers) says what will run"
        ),
        **_refused(*_ON_CODES, "_fast_dot_general _slow_dot_general"),
    },
    "qwix._src.core.dot_general_qt": {
        **_from("fewbit", "dot_general_qt DotGeneralQtConfig"),
        **_refused(*_HALVES, "dot_general_qt_fwd dot_general_qt_bwd dot_general_qt_fwd_bwd"),
    },
    "qwix._src.core.einsum": {
        "einsum": "fewbit.einsum",
        "get_how_to_quantize": "fewbit.ops.einsum_how",
    },
    "qwix._src.core.einsum_info": _refused(
        "it takes the subscripts of an einsum apart",
        "fewbit.ops.granularity.split_subscripts(einsum_str, ndims)",
        "sanitize_shape broadcast_operands",
        "EinsumInfo",
    ),
    "qwix._src.core.mxfp_dot": {"mxfp_dot_general": f"{_OWN}.mx_product"},
    "qwix._src.core.numerics": {
        **_from("fewbit.numerics", "should_quantize get_asymmetric_bound get_symmetric_bound"),
        **_from("fewbit.numerics", "convert_to get_nf4_buckets fp_to_nf4 NoiseFn"),
        "convert_from": f"{_OWN}.numbers_of",
        "nf4_to_fp": f"{_OWN}.nf4_numbers",
        "can_dequant_on_output": f"{_OWN}.has_linear_codes",
    },
    "qwix._src.core.pallas": {
        "pallas_call": "fewbit.pallas.pallas_call",
        **_refused(
            "it is one step of pallas_call",
            "fewbit.pallas.pallas_call, which makes the specs of QArrays",
            "update_block_specs_for_qarray transform_block_specs_for_tpu",
        ),
    },
    "qwix._src.core.qarray": {
        **_from("fewbit", "QArray HowToQuantize dequantize"),
        **_from("fewbit.qarray", "validate_qarray get_scale_shape calibrate"),
        **_from("fewbit.qarray", "compute_scale_zero_point"),
        "quantize": "fewbit.qarray.quantize_with",
        "quantize_api": "fewbit.quantize",
        "quantize_with_scale_zero_point": f"{_OWN}.with_scale_zero_point",
        "reshape": f"{_OWN}.reshaped",
        "rewriting_take": f"{_OWN}.taken",
        "get_tiled_axes": f"{_OWN}.tiled_axes",
        "split_axis": f"{_OWN}.split_axes",
        "transpose_array": f"{_OWN}.axes_ordered",
        "call_with_generic_broadcast": f"{_OWN}.by_tiles",
        "MaybeQArray": _ANY,
        "ShapeT": _ANY,
        "USE_RECIPROCAL_FOR_QUANTIZATION": Fixed(
            False, "fewbit divides by the scale, and has no form that multiplies by its reciprocal"
        ),
        **_refused(*_SPARSE, "sparsify"),
        **_refused(
            "it repeats a QArray along its axes",
            "jnp.broadcast_to(fewbit.dequantize(q), shape)",
            "broadcast_to",
        ),
        **_refused(
            "it cuts an array, or its gradient, at the range of a calibration",
            "fewbit.training.clip_gradient(array, q)",
            "clip_to_calibration clip_gradient_to_calibration",
        ),
        **_refused(*_ON_CODES, "get_accumulator_and_result_type"),
    },
    "qwix._src.core.ragged_dot": {
        "ragged_dot": "fewbit.ragged_dot",
        "ragged_dot_general": f"{_OWN}.ragged_general",
    },
    "qwix._src.core.ragged_dot_qt": {
        **_from("fewbit", "ragged_dot_qt RaggedDotQtConfig"),
        **_refused(*_HALVES, "ragged_dot_qt_fwd ragged_dot_qt_bwd"),
    },
    "qwix._src.core.sparsity": {
        "SparsityRule": "fewbit.SparsityRule",
        **_refused(
            *_SPARSE,
            "apply_sparsity get_sparsity_mask get_sparsity_mask_unstructured prune_inputs_n_m",
        ),
    },
    "qwix._src.core.stochastic_rounding": _from(
        "fewbit.training", "low_bit_uniform_noise uniform_noise NoiseFn get_noise_fn"
    ),
    "qwix._src.providers": {},
    "qwix._src.providers.boxed_param": _from("fewbit", "BoxedParamProvider WithAux"),
    "qwix._src.providers.lora": _from("fewbit", "apply_lora_to_model LoraRule LoraProvider"),
    "qwix._src.providers.odml": _from("fewbit", "OdmlQatProvider OdmlConversionProvider"),
    "qwix._src.providers.odml_ops": {
        "GetRuleAndOpIdFn": _ANY,
        "FakeQuantFn": _ANY,
        **_refused(
            *_ODML,
            "get_all_ops NotAnActivationError",
            "AuxDataKey QuantizedOp OnlyInputOp OnlyOutputOp NoQuantOp ModelInput FinalOutput "
            "Dropout PrimitiveBindOp BatchNorm Softmax Tanh UfuncCall Concatenate Take Silu "
            "DotEinsumConv CustomJvpCall",
        ),
    },
    "qwix._src.providers.ptq": {
        **_from("fewbit", "WithAux PtqProvider BoxedParamProvider quantize_params"),
        "quantize_act": f"{_OWN}.quantize_activation",
        "create_quantized_param": "fewbit.create_quantized_param",
        "ArrayTypeVar": _ANY,
    },
    "qwix._src.providers.qt": _from("fewbit", "QtRule QtProvider"),
    "qwix._src.utils": {},
    "qwix._src.utils.checkpoint_util": _from(
        "fewbit", "process_prequantized_params restore_quantization_rules"
    ),
    "qwix._src.utils.flax_util": _FLAX_UTIL,
    "qwix._src.flax_util": _FLAX_UTIL,  # where older versions have it
    "qwix.contrib": {},
    "qwix.contrib.awq": _refused(
        *_AWQ, "quantize_params", "AwqRule AwqCalibrationProvider AwqInferenceProvider WithAwqScale"
    ),
    "qwix.contrib.awq_core": _refused(
        *_AWQ, "compute_act_scale search_optimal_scales quantize_weight"
    ),
    "qwix.contrib.calibration": _refused(
        *_CALIBRATING,
        "normalize_weight extract_calibrated_quant_context quantize_params_with_calibration",
        "CalibrationProvider SinglePassCalibrationProvider CalibratedQuantContext",
    ),
    "qwix.contrib.gptq": _refused(*_GPTQ, "quantize_params", "GptqRule GptqCalibrationProvider"),
    "qwix.contrib.gptq_core": _refused(
        *_GPTQ, "cholesky_inverse find_params quantize quantize_weight compute_hessian"
    ),
    "qwix.contrib.hadamard_rot": _refused(*_HADAMARD, "hadamard_rotate_inputs"),
    "qwix.contrib.hijax": {},
    # Where each lies has changed from one version of Qwix to the next.
    **{f"qwix.contrib.hijax.{name}": _HIJAX_NAMES for name in ("hiqarray", "convert", "matmul")},
    "qwix.contrib.hijax.hiqarray_common": _refused(*_HIJAX, "", "QuantizationMetadata"),
    "qwix.contrib.hijax.hiquant_utils": _refused(
        *_HIJAX, "get_bitwidth get_accumulation_dtype is_integer_dtype is_float_dtype"
    ),
    "qwix.contrib.kernels": {},
    "qwix.contrib.kernels.quantized_matmul": _refused(
        *_KERNELS,
        "can_use_qmm can_use_qmm_in_dot_general quantized_matmul_kernel quantized_matmul",
        "QuantizedMatmulConfig",
    ),
    "qwix.contrib.kernels.lhs_fused_quantized_matmul": _refused(
        *_KERNELS, "quantize_a_tile lhs_fused_qmm_kernel lhs_fused_quantized_matmul"
    ),
    "qwix.contrib.kernels.fused_hadamard_quantize": _refused(
        *_KERNELS,
        "fused_hadamard_quantize hadamard_quantize_multiply hadamard_transform_rhs",
    ),
    "qwix.contrib.padded_ptq": {
        "PtqProvider": "fewbit.PtqProvider",
        "HowToQuantize": "fewbit.HowToQuantize",
        "calibrate": "fewbit.qarray.calibrate",
        "PaddedPtqProvider": Refused(*_PADDED, "class"),
        "QARRAY_KEEP_PADDED_SHAPE": Fixed(False, "fewbit pads nothing"),
        "MaybeQArray": _ANY,
        **_refused(
            *_PADDED,
            "quantize dequantize dot_general einsum quantize_params pad_to_shape get_padded_shape "
            "quantize_act create_quantized_param",
            "PaddedQArray",
        ),
    },
    "qwix.contrib.qep": _refused(*_QEP, "quantize quantize_params", "QepRule QepStage QepResult"),
    "qwix.contrib.qep_core": _refused(*_QEP, "compute_qep_stats weight_correct"),
    "qwix.contrib.smooth_quant": _refused(
        *_SMOOTH,
        "quantize_params compute_scales_ratio",
        "SqRule SqCalibrationProvider SqInferenceProvider WithSqScale",
    ),
    "qwix.contrib.sparsity": {},
    "qwix.contrib.sparsity.sparsity_module": _refused(*_SPARSE, "", "SparsityModule"),
}

# Qwix's modules import each other, and programs go through them: `ptq.qarray.HowToQuantize`.
SHORT = {name.rpartition(".")[2]: name for name in TABLE if name.startswith("qwix._src.")}
SHORT |= {"flax_util": "qwix._src.utils.flax_util"}  # not its older place
SHORT |= {"qwix_model": "qwix._src.model", "qwix_dot": "qwix._src.core.dot"}
SHORT |= {
    "qwix_einsum": "qwix._src.core.einsum",
    "qwix_dot_general": "qwix._src.core.dot_general",
    "gptq_core": "qwix.contrib.gptq_core",
}
