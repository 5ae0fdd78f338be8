"""Keras 3 models with fewer bits (JAX backend)."""

from fewbit.keras.config import DynamicQuantConfig as DynamicQuantConfig
from fewbit.keras.config import JaxBaseConfig as JaxBaseConfig
from fewbit.keras.config import JaxComposableConfig as JaxComposableConfig
from fewbit.keras.config import StaticQuantConfig as StaticQuantConfig
from fewbit.keras.config import get_default_dynamic_config as get_default_dynamic_config
from fewbit.keras.config import get_default_static_config as get_default_static_config
