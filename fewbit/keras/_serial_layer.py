"""What quantized layers, and layers that hold some, do when Keras saves and loads them."""

import functools
import warnings
from typing import Any

import keras

from fewbit.keras._legacy_files import refuse_legacy
from fewbit.keras._serial_config import KEY, record_of
from fewbit.keras._serial_store import load_variables, save_variables

SHARED_NAME = "QuantizedLayer"
_DERIVED = frozenset(("w_scale", "a_scale", "a_zero_point"))


class Saveable:
    """Saved with its decisions, and made again from them."""

    _fewbit_original: type[keras.Layer]

    def __dir__(self) -> list[str]:
        # Keras reads every listed attribute when it saves or loads, and these unpack weights.
        return [name for name in super().__dir__() if name not in _DERIVED]

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        from fewbit.keras._serial_restore import restored  # which makes classes of this one

        if not custom_objects:  # a scope of none would hide those that Keras opened
            return restored(config)
        with keras.saving.custom_object_scope(custom_objects):
            return restored(config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if hasattr(self, "_fewbit_waiting"):
            self._fewbit_waiting.called(outs)
        return outs

    def load_own_variables(self, store: Any) -> None:
        _settle(self)
        if hasattr(self, "_fewbit_waiting"):
            self._fewbit_waiting.check()
        state = getattr(self, "_fewbit", None)
        if state is None:
            return super().load_own_variables(store)  # type: ignore[misc]
        return load_variables(self, state, store)

    def save_own_variables(self, store: Any) -> None:
        state = getattr(self, "_fewbit", None)
        if state is None:
            return super().save_own_variables(store)  # type: ignore[misc]
        return save_variables(self, state, store)


def methods(original: type[keras.Layer]) -> dict[str, Any]:
    """Methods that wrap those of the original class, for a class made of both.

    `functools.wraps` also copies the mark by which Keras knows that a class did not write a method
    itself, so that configs and builds which Keras works out are still worked out.
    """

    @functools.wraps(original.get_config)
    def get_config(self: Any) -> dict[str, Any]:
        refuse_legacy(f"{original.__name__} '{self.name}'")
        config = original.get_config(self)
        if "dtype" in config and isinstance(self, keras.Model):
            config[f"{KEY}_dtype"] = config["dtype"]
        return {**config, KEY: record_of(self)}

    @functools.wraps(original.build)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original.build(self, *args, **kwargs)
        _settle(self, built=True)

    @functools.wraps(original.build_from_config)
    def build_from_config(self: Any, config: Any) -> None:
        with warnings.catch_warnings():
            # Of a layer without a build(): what is inside is built when the model calls it, and
            # `load_own_variables` sees to it that it was.
            warnings.filterwarnings("ignore", r"`build\(\)` was called on layer", UserWarning)
            original.build_from_config(self, config)
        _settle(self)

    @functools.wraps(original.add_weight)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, "_fewbit", None)
        if state is None or kwargs.get("name") not in state.awaited:
            return original.add_weight(self, *args, **kwargs)
        with keras.StatelessScope(initialize_variables=False):  # no floats for what is loaded
            return original.add_weight(self, *args, **kwargs)

    # Not by __name__, which is that of the wrapped one: a class may have written `build = other`.
    return dict(
        get_config=get_config,
        build=build,
        build_from_config=build_from_config,
        add_weight=add_weight,
    )


def register(cls: type, name: str = SHARED_NAME) -> None:
    """Let Keras write `cls` under a name of ours."""
    keras.saving.register_keras_serializable(package="fewbit", name=name)(cls)


def _settle(layer: Any, built: bool = False) -> None:
    """Do what waited for the layer's variables and sublayers."""
    waiting = getattr(layer, "_fewbit_waiting", None)
    if waiting is not None:
        waiting(layer, built)
