"""Keras 3 models on the JAX backend, quantized layer by layer.

>>> import keras, numpy as np, fewbit.keras
>>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
>>> config = fewbit.keras.StaticQuantConfig(weight_dtype='int8')
>>> x = np.ones((2, 64), 'float32')
>>> model = fewbit.keras.quantize_model(model, config, lambda model: model(x))
>>> type(model.layers[0]).__name__
'QStaticDense'
"""

from typing import Any as _Any

import keras as _keras

from fewbit.keras.config import DynamicQuantConfig as DynamicQuantConfig
from fewbit.keras.config import JaxBaseConfig as JaxBaseConfig
from fewbit.keras.config import JaxComposableConfig as JaxComposableConfig
from fewbit.keras.config import StaticQuantConfig as StaticQuantConfig
from fewbit.keras.config import get_default_dynamic_config as get_default_dynamic_config
from fewbit.keras.config import get_default_static_config as get_default_static_config

if _keras.config.backend() != "jax":
    raise ImportError(
        f"fewbit.keras only supports the JAX backend, but the current Keras backend is "
        f"{_keras.config.backend()!r}. Set KERAS_BACKEND=jax in the environment before Keras is "
        'first imported, or write "backend": "jax" in ~/.keras/keras.json.'
    )

from fewbit.keras._calibration import CalibrationError as CalibrationError
from fewbit.keras._checking import check_saved as check_saved
from fewbit.keras._checking import load_model as load_model
from fewbit.keras._classes import let_keras_find as _let_keras_find
from fewbit.keras._cloning import clone_model as clone_model
from fewbit.keras._converting import to_ptq as to_ptq
from fewbit.keras._examples import register_calls as register_calls
from fewbit.keras._printing import print_model as print_model
from fewbit.keras._quantize import plan as plan
from fewbit.keras._quantize import quantize_model as quantize_model
from fewbit.keras._saving import save_model as save_model
from fewbit.keras._saving import save_to_preset as save_to_preset

_let_keras_find()

# Familiar, and rarely wanted.
_FAMILIAR = {
    **dict.fromkeys(("StaticQDQLayer", "DynamicQDQLayer"), "qdq"),
    **dict.fromkeys(("dtype_mapping", "check_backend", "iterate_over_layers"), "utility"),
    **dict.fromkeys(("get_quantize_fun", "get_dequantize_fun"), "utility"),
    **dict.fromkeys(("get_scale", "get_q_params"), "utility"),
    **dict.fromkeys(("register_algo", "algos_mapping", "verify_api"), "utility"),
    **dict.fromkeys(("static_quantize", "dynamic_quantize"), "utility"),
    "causal_lm_make_replace_generate_function": "utility",
}
# KerasHub takes seconds to import, and not every Keras user has it.
_FOR_KERAS_HUB = {
    "GreedySampler": "samplers",
    "TopKSampler": "samplers",
    "quantize_kv_cache": "kv_cache",
}


def __getattr__(name: str) -> _Any:
    home = _FOR_KERAS_HUB.get(name) or _FAMILIAR.get(name)
    if home is not None:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
