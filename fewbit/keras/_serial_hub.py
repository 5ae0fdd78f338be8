"""What KerasHub finds for a quantized preset: its loaders compare classes before they build one.

KerasHub may be imported after fewbit.keras, and brings TensorFlow, so it is not imported here. What
is registered under 'fewbit>QuantizedGemma3Backbone' is a door: it counts as Gemma3Backbone wherever
KerasHub looks for that class, and makes the quantized one from its config.
"""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import keras

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
        from fewbit.keras._serial_restore import restored  # which makes classes that register here

        return restored(config)


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
