"""How a Keras model shall be quantized: the configs, under the names people know.

    config = StaticQuantConfig(weight_dtype="int8") + DynamicQuantConfig(
        weight_dtype="int4", group_size=32, white_list=["decoder/.*"]
    )

Where several configs of a sum select a layer, the last one decides. `white_list` selects layers,
`exclude_list` takes some out again, and `set_local` gives some a config of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from fewbit._errors import describe
from fewbit.keras import _config_files as files
from fewbit.keras._config_base import JaxBaseConfig as JaxBaseConfig
from fewbit.keras._config_leaf import LeafConfig

_MSG_PARTS = (
    "JaxComposableConfig: {problem}. Write JaxComposableConfig([StaticQuantConfig(...), "
    "DynamicQuantConfig(...)]), or add configs: config + config."
)
_MSG_LOCAL_SUM = (
    "A JaxComposableConfig has no settings of its own for some layers. Call set_local on one of "
    "its configs (config_list[0].set_local(...)), or add a config with white_list=[...]."
)
_MSG_FIELD_SUM = (
    "A JaxComposableConfig has no field {name!r}. Set it on one of its configs: "
    "config_list[0].{name} = ..."
)


class StaticQuantConfig(LeafConfig):
    """Weights quantized, activations with stored scales that calibration measured.

    >>> StaticQuantConfig(weight_dtype='int8')
    StaticQuantConfig(weight_dtype='int8', activation_dtype='int8')
    """

    name: ClassVar[str] = "static_quant"
    static: ClassVar[bool] = True


class DynamicQuantConfig(LeafConfig):
    """Weights quantized, activations with scales made at each call, or left alone.

    >>> DynamicQuantConfig(weight_dtype='int4', group_size=32)
    DynamicQuantConfig(weight_dtype='int4', activation_dtype=None, group_size=32)
    """

    name: ClassVar[str] = "dynamic_quant"
    static: ClassVar[bool] = False


class JaxComposableConfig(JaxBaseConfig):
    """Several configs for one model, as `config + config` makes them; the last that matches wins.

    >>> both = StaticQuantConfig() + DynamicQuantConfig(white_list=['head'])
    >>> [config.name for config in both.config_list]
    ['static_quant', 'dynamic_quant']
    """

    name: ClassVar[str] = "composable_config"
    config_list: list[LeafConfig]

    def __init__(self, configs: Iterable[JaxBaseConfig]) -> None:
        self.config_list = configs  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "config_list":
            value = _flattened(value)
        elif not name.startswith("_"):
            raise AttributeError(_MSG_FIELD_SUM.format(name=name))
        object.__setattr__(self, name, value)

    @property
    def parts(self) -> list[LeafConfig]:
        """The single configs, in the order in which they were added."""
        return _flattened(self.config_list)

    @property
    def strict(self) -> bool:
        """Whether every part is strict."""
        return all(part.strict for part in self.parts)

    def check(self) -> None:
        """Check every part again."""
        for part in self.parts:
            part.check()

    def set_local(self, operator_name_or_list: Any, config: Any) -> Any:
        """Refused: a sum has no settings of its own."""
        raise TypeError(_MSG_LOCAL_SUM)

    def to_dict(self) -> dict[str, Any]:
        """The configs of the sum in the nested dialect.

        >>> JaxComposableConfig([StaticQuantConfig()]).to_dict()['quantization_type']
        'composable'
        """
        return {files.KIND: files.COMPOSABLE[0], files.PARTS: [p.to_dict() for p in self.parts]}

    def _comparable(self) -> Any:
        return [(type(part), part._comparable()) for part in self.parts]

    def __repr__(self) -> str:
        return f"JaxComposableConfig({self.config_list!r})"


def _flattened(configs: Any) -> list[LeafConfig]:
    if isinstance(configs, JaxBaseConfig):
        problem = f"one {type(configs).__name__} stands where a list of configs is expected"
        raise TypeError(_MSG_PARTS.format(problem=problem))
    if not isinstance(configs, list | tuple):
        problem = f"a list of configs is expected, got {describe(configs)}"
        raise TypeError(_MSG_PARTS.format(problem=problem))
    if not configs:
        raise ValueError(_MSG_PARTS.format(problem="a list without any config quantizes nothing"))
    for config in configs:
        if not isinstance(config, JaxBaseConfig):
            problem = f"the list has {describe(config)}, which is no config"
            raise TypeError(_MSG_PARTS.format(problem=problem))
    return [part for config in configs for part in config.parts]


def get_default_static_config() -> StaticQuantConfig:
    """A `StaticQuantConfig` as it comes.

    >>> get_default_static_config()
    StaticQuantConfig(weight_dtype='fp8_e4m3', activation_dtype='fp8_e4m3')
    """
    return StaticQuantConfig()


def get_default_dynamic_config() -> DynamicQuantConfig:
    """A `DynamicQuantConfig` as it comes.

    >>> get_default_dynamic_config()
    DynamicQuantConfig(weight_dtype='fp8_e4m3', activation_dtype='fp8_e4m3')
    """
    return DynamicQuantConfig()
