"""What every Keras quantization config can do: be added, written, read, and asked about a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit._errors import describe
from fewbit.keras import _config_files as files
from fewbit.keras._filters import LayerInfo, class_names, model_layers

if TYPE_CHECKING:
    from fewbit.keras._config_leaf import LeafConfig
    from fewbit.keras.config import JaxComposableConfig

MSG_BASE = (
    "{name} is what configs have in common. Write StaticQuantConfig(...) or "
    "DynamicQuantConfig(...), or read one with JaxBaseConfig.from_dict(...)."
)
_MSG_ADD = (
    "Cannot add {value} to a {where}: a sum is made of StaticQuantConfig and DynamicQuantConfig."
)
_MSG_MODEL_INFO = (
    "to_config_mapping needs the layers: write "
    "config.to_config_mapping(model_info=config.get_model_info(model))."
)


class JaxBaseConfig:
    """What all configs can do: be added, be written and read, and be asked about a model.

    `from_dict`, `from_json_string` and `from_json_file` make the config that the document names,
    whichever class they are called on.

    >>> JaxBaseConfig.from_dict({'quantization_type': 'dynamic_quant', 'config': {}})
    DynamicQuantConfig(weight_dtype='fp8_e4m3', activation_dtype='fp8_e4m3')
    """

    name: ClassVar[str] = "base_config"
    params_list: ClassVar[list[str]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(MSG_BASE.format(name=type(self).__name__))

    @property
    def parts(self) -> list[LeafConfig]:
        """The single configs, in the order of a sum."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The config in the nested dialect, ready for JSON; classes are written by name."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Any:
        """The config of a dict in either dialect; the flat one names no class, so call it on one.

        >>> from fewbit.keras.config import StaticQuantConfig
        >>> StaticQuantConfig.from_dict({'weight_dtype': 'int8'})
        StaticQuantConfig(weight_dtype='int8', activation_dtype='int8')
        """
        from fewbit.keras import config as known

        leaves = {c.name: c for c in (known.StaticQuantConfig, known.DynamicQuantConfig)}
        flat = cls if issubclass(cls, tuple(leaves.values())) else None
        return files.from_document(config_dict, leaves, known.JaxComposableConfig, flat)

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return files.to_text(self.to_dict())

    @classmethod
    def from_json_string(cls, json_string: str) -> Any:
        """The config that a JSON text holds."""
        return cls.from_dict(files.read_text(json_string))

    def to_json_file(self, filename: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to a file, which is never left half written."""
        files.write_file(filename, self.to_json_string())

    @classmethod
    def from_json_file(cls, filename: str | os.PathLike[str]) -> Any:
        """The config that a JSON file holds."""
        return cls.from_dict(files.read_file(filename))

    def get_model_info(self, model: Any) -> list[tuple[str, str]]:
        """(path, class name) of each layer of a model that could be quantized."""
        rotary = any(part.quantize_rotary for part in self.parts)
        return [
            (path, name)
            for path, name in model_layers(model)
            if rotary or "RotaryEmbedding" not in class_names(name)
        ]

    def to_config_mapping(
        self,
        config_list: Iterable[JaxBaseConfig] | None = None,
        model_info: Sequence[LayerInfo] | None = None,
    ) -> dict[tuple[str, Any], LeafConfig]:
        """The config of each selected layer, by (path, class name); the last that matches wins.

        >>> from fewbit.keras.config import StaticQuantConfig
        >>> info = [('net/first', 'Dense'), ('net/second', 'Dense')]
        >>> config = StaticQuantConfig(white_list=['first'])
        >>> list(config.to_config_mapping(model_info=info))
        [('net/first', 'Dense')]
        """
        if model_info is None:
            raise TypeError(_MSG_MODEL_INFO)
        configs = [self] if config_list is None else list(config_list)
        parts = [part for config in configs for part in config.parts]
        mapping = {}
        for path, layer_class in model_info:
            for part in parts:
                found = part.config_for(path, layer_class)
                if found is not None:
                    mapping[path, layer_class] = found
        return mapping

    def __add__(self, other: object) -> JaxComposableConfig:
        if not isinstance(other, JaxBaseConfig):
            where = type(self).__name__
            raise TypeError(_MSG_ADD.format(value=describe(other), where=where))
        from fewbit.keras.config import JaxComposableConfig

        return JaxComposableConfig([self, other])

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, JaxBaseConfig)
        return self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    def _comparable(self) -> Any:
        raise NotImplementedError
