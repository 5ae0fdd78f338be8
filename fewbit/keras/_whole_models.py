"""What Keras' own calls do on a model that holds quantized layers: whole and checked files."""

import functools
import os
from typing import Any

import keras

from fewbit.keras import _saving as saving
from fewbit.keras._checking import check_weights


class WholeModel:
    """`save` and `save_weights` leave the old file whole; `load_weights` looks at what it reads."""

    def save(
        self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Save the model as a `.keras` file: see `fewbit.keras.save_model`."""
        saving.check_suffix(filepath)
        if saving.is_writing() or not str(filepath).endswith(".keras") and zipped is not False:
            return super().save(filepath, overwrite, zipped, **kwargs)  # type: ignore[misc]
        return saving.save_model(self, filepath, overwrite, zipped, **kwargs)

    def save_weights(
        self, filepath: Any, overwrite: bool = True, max_shard_size: Any = None
    ) -> None:
        """Save the weights as a `.weights.h5` file, which is whole or still the old one."""
        alone = max_shard_size is None and str(filepath).endswith(".weights.h5")
        if saving.is_writing() or not alone or not saving.is_local(filepath):
            return super().save_weights(filepath, overwrite, max_shard_size)  # type: ignore[misc]
        return saving.save_weights(self, filepath, overwrite)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Load the weights of a file, after a look at what it is."""
        check_weights(filepath)
        try:
            return super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            error.add_note(f"This was {os.fspath(filepath)}.")
            raise


class WholePreset(WholeModel):
    """And `save_to_preset` leaves the old folder whole."""

    def save_to_preset(self, preset_dir: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model as a preset: see `fewbit.keras.save_to_preset`."""
        if saving.is_writing() or not saving.is_local(preset_dir):
            return super().save_to_preset(preset_dir, *args, **kwargs)  # type: ignore[misc]
        return saving.save_to_preset(self, preset_dir, *args, **kwargs)


@functools.cache
def whole_bases(original: Any) -> tuple[type, ...]:
    """What stands before a class that saves itself; nothing for a layer.

    >>> whole_bases(keras.layers.Dense)
    ()
    """
    if not issubclass(original, keras.Model):
        return ()
    return (WholePreset,) if hasattr(original, "save_to_preset") else (WholeModel,)
