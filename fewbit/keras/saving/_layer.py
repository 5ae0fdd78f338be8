"""What quantized layers, and layers that hold some, do when Keras saves and loads them."""

import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import keras

from fewbit.keras.saving._format import KEY, record_of
from fewbit.keras.saving._store import load_variables, save_variables
from fewbit.keras.saving._whole import refuse_legacy

SHARED_NAME = "QuantizedLayer"
_DERIVED = frozenset(("w_scale", "a_scale", "a_zero_point"))


class Saveable:
    """Saved with its decisions, and made again from them."""

    _fewbit_original: type[keras.Layer]
    # It stands on this class, so it is made known to it (at the end of `_restore`).
    _restored: ClassVar[Callable[[Any], Any]]

    def __dir__(self) -> list[str]:
        # Keras reads every listed attribute when it saves or loads, and these unpack weights.
        return [name for name in super().__dir__() if name not in _DERIVED]

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        if not custom_objects:  # a scope of none would hide those that Keras opened
            return cls._restored(config)
        with keras.saving.custom_object_scope(custom_objects):
            return cls._restored(config)

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


# --- What KerasHub finds for a quantized preset: a stand-in that it compares with classes ---------

_PREFIX = "Quantized"


class Door:
    """Stands for the quantized form of one model class of KerasHub.

    `issubclass` asks an object that is no class for its `__bases__`; KerasHub's search for the task
    or tokenizer of a backbone compares with `==`.
    """

    def __init__(self, name: str):
        self.__name__, self._name = f"{_PREFIX}{name}", name

    @property
    def original(self) -> type | None:
        hub = sys.modules.get("keras_hub")
        return getattr(getattr(hub, "models", None), self._name, None)

    @property
    def __bases__(self) -> tuple[type, ...]:
        original = self.original
        return () if original is None else (original,)

    def __eq__(self, other: object) -> bool:
        return other is self or (other is not None and other is self.original)

    def __hash__(self) -> int:
        # Unlike that of the class it equals: KerasHub makes a set of all that is registered, and
        # the door must not take the place of the class there.
        return id(self)

    def __repr__(self) -> str:
        return f"<the quantized {self._name} of keras_hub>"

    def from_config(self, config: Any) -> Any:
        return Saveable._restored(config)


def hub_name(original: type) -> str | None:
    """The name that a quantized model class of KerasHub is registered under; None for others."""
    if original.__module__.partition(".")[0] != "keras_hub" or not issubclass(
        original, keras.Model
    ):
        return None
    hub = sys.modules.get("keras_hub")
    public = getattr(getattr(hub, "models", None), original.__name__, None) is original
    return f"{_PREFIX}{original.__name__}" if public else None


def let_hub_find(*names: str) -> None:
    """Put a door where Keras looks for the quantized form of these classes."""
    keras.saving.get_custom_objects().update(
        {f"fewbit>{_PREFIX}{name}": Door(name) for name in names}
    )


def let_hub_find_all() -> None:
    """Doors for every model class of an installed KerasHub, read from its list of public names."""
    spec = importlib.util.find_spec("keras_hub")
    if spec is None or spec.origin is None:
        return
    listing = Path(spec.origin).parent / "models" / "__init__.py"
    if listing.exists():
        let_hub_find(*re.findall(r"\bas (\w+)", listing.read_text(encoding="utf-8")))
