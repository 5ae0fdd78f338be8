"""Keras 3 models on the JAX backend, quantized layer by layer.

>>> import keras, numpy as np, fewbit.keras
>>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
>>> config = fewbit.keras.StaticQuantConfig(weight_dtype='int8')
>>> x = np.ones((2, 64), 'float32')
>>> model = fewbit.keras.quantize_model(model, config, lambda model: model(x))
>>> type(model.layers[0]).__name__
'QStaticDense'
"""

import importlib as _importlib
from typing import Any as _Any

import keras as _keras

from fewbit.keras.config._configs import DynamicQuantConfig as DynamicQuantConfig
from fewbit.keras.config._configs import JaxBaseConfig as JaxBaseConfig
from fewbit.keras.config._configs import JaxComposableConfig as JaxComposableConfig
from fewbit.keras.config._configs import StaticQuantConfig as StaticQuantConfig
from fewbit.keras.config._configs import get_default_dynamic_config as get_default_dynamic_config
from fewbit.keras.config._configs import get_default_static_config as get_default_static_config

if _keras.config.backend() != "jax":
    raise ImportError(
        f"fewbit.keras only supports the JAX backend, but the current Keras backend is "
        f"{_keras.config.backend()!r}. Set KERAS_BACKEND=jax in the environment before Keras is "
        'first imported, or write "backend": "jax" in ~/.keras/keras.json.'
    )

from fewbit.as_neural_compressor import install as install_as_neural_compressor
from fewbit.calibration import CalibrationError as CalibrationError
from fewbit.keras import _planning as reading
from fewbit.keras._pairs import clone_model as clone_model
from fewbit.keras._pairs import pair as pair
from fewbit.keras._planning import print_model as print_model
from fewbit.keras._quantize import plan as plan
from fewbit.keras._quantize import quantize_model as quantize_model
from fewbit.keras.layers._calls import register_calls as register_calls
from fewbit.keras.layers._classes import let_keras_find as _let_keras_find
from fewbit.keras.saving._checking import check_saved as check_saved
from fewbit.keras.saving._checking import load_model as load_model
from fewbit.keras.saving._neural_compressor import let_keras_read_them as _let_keras_read_them
from fewbit.keras.saving._whole import save_model as save_model
from fewbit.keras.saving._whole import save_to_preset as save_to_preset
from fewbit.keras.training._convert import to_ptq as to_ptq

_let_keras_find()
_let_keras_read_them()

# Loaded when first used: what is familiar and rarely wanted, and what needs KerasHub, which takes
# seconds to import, and which not every Keras user has.
_LATER = {
    **dict.fromkeys(("StaticQDQLayer", "DynamicQDQLayer"), "_compat"),
    **dict.fromkeys(("dtype_mapping", "check_backend", "iterate_over_layers"), "_compat"),
    **dict.fromkeys(("get_quantize_fun", "get_dequantize_fun"), "_compat"),
    **dict.fromkeys(("get_scale", "get_q_params"), "_compat"),
    **dict.fromkeys(("register_algo", "algos_mapping", "verify_api"), "_compat"),
    **dict.fromkeys(("static_quantize", "dynamic_quantize"), "_compat"),
    "causal_lm_make_replace_generate_function": "_compat",
    **dict.fromkeys(("GreedySampler", "TopKSampler", "quantize_kv_cache"), "generate._kv_cache"),
}


def __getattr__(name: str) -> _Any:
    if name in _LATER:
        return getattr(_importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
