"""The names of `neural_compressor.jax`, and where fewbit has them.

    python -m fewbit.as_neural_compressor SCRIPT.py ARGS
    python -m fewbit.as_neural_compressor -m MODULE ARGS

runs a program that was written for Neural Compressor's JAX backend as it is. Nothing of Keras is
imported before the program does: it may still choose its backend.
"""

import logging
from typing import Any

from fewbit._util import stand_in_for

NAME, RUNNER = "neural_compressor", "fewbit.as_neural_compressor"
VERSION = "3.10"  # whose names these are
_KERAS, _COMPAT = "fewbit.keras", "fewbit.keras._compat"


def _from(home: str, names: str) -> dict[str, Any]:
    return {name: f"{home}.{name}" for name in names.split()}


_CONFIGS = _from(_KERAS, "DynamicQuantConfig StaticQuantConfig JaxBaseConfig JaxComposableConfig")
_DEFAULTS = _from(_KERAS, "get_default_dynamic_config get_default_static_config")
_FUNCTIONS = _from(_KERAS, "dynamic_quantize static_quantize")
_UTILS = _from(_KERAS, "algos_mapping register_algo check_backend")
_UTILITY = _from(
    _KERAS,
    "print_model dtype_mapping get_quantize_fun get_dequantize_fun get_scale get_q_params "
    "iterate_over_layers verify_api causal_lm_make_replace_generate_function",
)
_QUANTIZE = _from(_KERAS, "quantize_model")
_COMMON = {"logger": logging.getLogger("fewbit")}
_ITS_VERSION = {"__version__": f"{__name__}.VERSION"}

# {module: {name: the full name of what it is}}
MODULES: dict[str, dict[str, Any]] = {
    "": _ITS_VERSION,
    "common": {**_COMMON, **_ITS_VERSION},
    "common.utils": _COMMON,
    "common.version": _ITS_VERSION,
    "jax": {**_QUANTIZE, **_CONFIGS, **_from(_KERAS, "register_algo")},
    "jax.quantization": {**_QUANTIZE, **_CONFIGS, **_DEFAULTS, **_FUNCTIONS},
    "jax.quantization.quantize": _QUANTIZE,
    "jax.quantization.clone_model": _from(_KERAS, "clone_model"),
    "jax.quantization.config": {**_CONFIGS, **_DEFAULTS, **_from(_KERAS, "dtype_mapping")},
    "jax.quantization.layers_static": {
        **_from(_KERAS, "StaticQDQLayer"),
        **_from(_COMPAT, "QStaticDense QStaticEinsumDense QStaticConv2d"),
        **_from(_COMPAT, "QStaticMultiHeadAttention QStaticReversibleEmbedding"),
    },
    "jax.quantization.layers_dynamic": {
        **_from(_KERAS, "DynamicQDQLayer"),
        **_from(_COMPAT, "QDynamicDense QDynamicEinsumDense QDynamicConv2D"),
        **_from(_COMPAT, "QDynamicMultiHeadAttention QDynamicReversibleEmbedding"),
    },
    "jax.algorithms": {},
    "jax.algorithms.static": _from(_KERAS, "static_quantize"),
    "jax.algorithms.dynamic": _from(_KERAS, "dynamic_quantize"),
    "jax.utils": _UTILS,
    "jax.utils.utility": {**_UTILS, **_UTILITY},
}

_OTHERS = "it is not for models of JAX. Import it in a process of its own, without fewbit"
_MADE = (
    "the class of a quantized layer is made from that of the float one when it is first needed. "
    "Compare type(layer).__name__, or ask isinstance of the float class"
)
_WRAPPED = (
    "a quantized model keeps its class, isinstance(model, Gemma3CausalLM) as ever, and Keras' own "
    "save, load_model and from_preset read and write it"
)
_TUNING = "the JAX backend has no tuning: write the config that you want"
_LOGGING = "write logging.getLogger('fewbit')"
_WRITE = "write fewbit.keras.quantize_model(model, config, calib_function)"

# {module: {name: why it is not there}}; '' for a whole module.
REFUSED: dict[str, dict[str, str]] = {
    **{each: {"": _OTHERS} for each in ("torch", "tensorflow", "transformers", "evaluation")},
    "common": dict.fromkeys(
        ("options", "set_workspace", "set_resume_from", "set_tensorboard", "TuningLogger"), _TUNING
    )
    | dict.fromkeys(("Logger", "level", "level_name", "log_process"), _LOGGING)
    | {"set_random_seed": "write keras.utils.set_random_seed(seed)"},
    "common.base_config": {"": "write StaticQuantConfig or DynamicQuantConfig"},
    "common.base_tuning": {"": _TUNING},
    "jax.quantization.quantize": {"need_apply": _WRITE},
    "jax.quantization.config": dict.fromkeys(
        ("OperatorConfig", "get_all_registered_configs"), _TUNING
    ),
    "jax.quantization.layers_static": dict.fromkeys(
        ("QStaticCachedGemma3Attention", "QStaticGemma3VisionAttention", "QStaticRotaryEmbedding"),
        _MADE,
    )
    | {
        "static_quant_mapping": _MADE,
        "MinMaxObserver": "calibration reads layers while your calib_function runs the model",
    },
    "jax.quantization.layers_dynamic": dict.fromkeys(
        ("QDynamicCachedGemma3Attention", "QDynamicGemma3VisionAttention", "dynamic_quant_mapping"),
        _MADE,
    ),
    "jax.quantization.saving": {"": _WRAPPED},
    "jax.utils.utility": {"add_fp8_support": "Keras stays as it is, and codes are saved without"},
}


def install() -> None:
    """Make `import neural_compressor.jax`, and what is below it, fewbit's from now on.

    Call it before anything imports Neural Compressor, which need not be installed. What a program
    imports is then `fewbit.keras` under the names it knows; names that are not there say so when
    they are used. `fewbit.keras.install_as_neural_compressor` is this function.

    >>> import fewbit.keras
    >>> fewbit.keras.install_as_neural_compressor()
    >>> from neural_compressor.jax import StaticQuantConfig
    >>> StaticQuantConfig is fewbit.keras.StaticQuantConfig
    True
    """
    stand_in_for(NAME, MODULES, REFUSED, runner=RUNNER, loads=_KERAS)
