"""How a Keras model shall be quantized: the configs, under the names people know.

    config = StaticQuantConfig(weight_dtype="int8") + DynamicQuantConfig(
        weight_dtype="int4", group_size=32, white_list=["decoder/.*"]
    )

Where several configs of a sum select a layer, the last one decides. `white_list` selects layers,
`exclude_list` takes some out again, and `set_local` gives some a config of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from fewbit._util import describe
from fewbit.keras.config import _documents
from fewbit.keras.config._fields import (
    DEFAULTS,
    FILTERS,
    KNOWN,
    PARAMS,
    Entry,
    Follows,
    LayerInfo,
    check_entry,
    check_names,
    class_names,
    default_act_method,
    entry_name,
    first_entry,
    following_granularity,
    in_white_list,
    matches_class,
    matches_path,
    model_layers,
    settle,
    unknown_field,
)
from fewbit.numerics import format_of, qtype_name

# --- What every config can do ---------------------------------------------------------------------

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

        >>> from fewbit.keras import StaticQuantConfig
        >>> StaticQuantConfig.from_dict({'weight_dtype': 'int8'})
        StaticQuantConfig(weight_dtype='int8', activation_dtype='int8')
        """
        leaves = {c.name: c for c in (StaticQuantConfig, DynamicQuantConfig)}
        flat = cls if issubclass(cls, tuple(leaves.values())) else None
        return _documents.from_document(config_dict, leaves, JaxComposableConfig, flat)

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return _documents.to_text(self.to_dict())

    @classmethod
    def from_json_string(cls, json_string: str) -> Any:
        """The config that a JSON text holds."""
        return cls.from_dict(_documents.read_text(json_string))

    def to_json_file(self, filename: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to a file, which is never left half written."""
        _documents.write_file(filename, self.to_json_string())

    @classmethod
    def from_json_file(cls, filename: str | os.PathLike[str]) -> Any:
        """The config that a JSON file holds."""
        return cls.from_dict(_documents.read_file(filename))

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

        >>> from fewbit.keras import StaticQuantConfig
        >>> info = [('net/first', 'Dense'), ('net/second', 'Dense')]
        >>> config = StaticQuantConfig(white_list=['first'])
        >>> list(config.to_config_mapping(model_info=info))
        [('net/first', 'Dense')]
        """
        if model_info is None:
            raise TypeError(_MSG_MODEL_INFO)
        configs = [self] if config_list is None else list(config_list)
        parts = [part for config in configs for part in config.parts]
        for part in parts:
            part.check()
        return {
            (path, layer_class): found
            for path, layer_class in model_info
            for part in parts
            if (found := part.config_for(path, layer_class)) is not None
        }

    def __add__(self, other: object) -> JaxComposableConfig:
        if not isinstance(other, JaxBaseConfig):
            where = type(self).__name__
            raise TypeError(_MSG_ADD.format(value=describe(other), where=where))
        return JaxComposableConfig([self, other])

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, JaxBaseConfig)
        return self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    def _comparable(self) -> Any:
        raise NotImplementedError


# --- A single config: its fields, its filters, and what `set_local` adds --------------------------

_MSG_LOCAL = "{where}.set_local({entry!r}, ...): {problem}. {fix}"


class LeafConfig(JaxBaseConfig):
    """The fields that static and dynamic configs share; each is checked when it is given or set.

    - `weight_dtype`: 'int8', 'int7' .. 'int2', 'nf4', 'fp8_e4m3' and 'fp8' (both float8_e4m3fn),
      'fp8_e5m2', 'mxfp4', 'mxfp8', 'nvfp4', or any name of fewbit's own ('float8_e4m3' is the
      variant with infinities, which the reference calls 'fp8').
    - `activation_dtype`: the same types; None quantizes weights alone. Left out it follows the
      weights: int8 for int8, fp8_e4m3 for fp8. Weights of fewer bits stand alone in a dynamic
      config, and have int8 activations in a static one.
    - `const_scale`, `const_weight`: scales, weights are constants of the program.
    - `weight_scale_granularity`: 'per_tensor' or 'per_channel'. Left out it is 'per_tensor' for
      types of 8 bits, 'per_channel' for fewer bits and for groups.
    - `dot_product_attention_enable`: attention that is quantized may use Keras' fused operation.
    - `white_list`: '*', None, or a list of layer classes, class names, and regular expressions
      that are searched in layer paths. `exclude_list`: a list of the same; it wins.
    - `group_size`: weights of a channel that share a scale.
    - `weight_calibration_method`, `act_calibration_method`, `act_static_reduction`, `scale_dtype`:
      as in `QuantizationRule`.
    - `emulate`: the plain quantize-dequantize graph, with a zero point for integer activations.
    - `quantize_attention`: the products inside attention too; None: only when emulating.
    - `quantize_rotary`, `quantize_embeddings`: rotary tables; look-up tables.
    - `strict`: a filter entry that matches no layer is an error, else a warning.
    """

    static: ClassVar[bool]
    params_list: ClassVar[list[str]] = list(PARAMS)

    weight_dtype: str
    activation_dtype: str | None
    const_scale: bool
    const_weight: bool
    weight_scale_granularity: str
    dot_product_attention_enable: bool
    white_list: Any
    exclude_list: list[Entry] | None
    group_size: int | None
    weight_calibration_method: str
    act_calibration_method: str | None
    act_static_reduction: str | None
    emulate: bool
    quantize_attention: bool | None
    quantize_rotary: bool
    quantize_embeddings: bool
    scale_dtype: str | None
    strict: bool
    _given: dict[str, Any]  # the fields, with a marker in place of those that follow the weights
    _local: dict[str, tuple[Entry, LeafConfig]]

    def __init__(
        self,
        weight_dtype: Any = "fp8_e4m3",
        activation_dtype: Any = Follows.WEIGHTS,
        const_scale: bool = False,
        const_weight: bool = False,
        weight_scale_granularity: Any = Follows.WEIGHTS,
        dot_product_attention_enable: bool = False,
        white_list: Any = "*",
        exclude_list: Any = None,
        *,
        group_size: int | None = None,
        weight_calibration_method: str = "absmax",
        act_calibration_method: str | None = None,
        act_static_reduction: str | None = None,
        emulate: bool = False,
        quantize_attention: bool | None = None,
        quantize_rotary: bool = False,
        quantize_embeddings: bool = True,
        scale_dtype: Any = None,
        strict: bool = True,
        **unknown: Any,
    ) -> None:
        values = dict(locals())
        if type(self) is LeafConfig:
            raise TypeError(MSG_BASE.format(name="LeafConfig"))
        check_names(type(self).__name__, unknown)
        self._local = {}
        self._settle({name: values[name] for name in DEFAULTS})

    def _settle(self, given: Mapping[str, Any]) -> None:
        held = settle(type(self).__name__, self.static, given)
        # What follows the weights goes on following them when they are changed.
        kept = {n: v if v is Follows.WEIGHTS else held[n] for n, v in given.items()}
        self.__dict__.update(held, _given=kept)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DEFAULTS:
            self._settle({**self._given, name: value})
        elif name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(unknown_field(type(self).__name__, name))

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, all checked together.

        >>> from fewbit.keras import StaticQuantConfig
        >>> StaticQuantConfig().replace(weight_dtype='int8', activation_dtype='int8')
        StaticQuantConfig(weight_dtype='int8', activation_dtype='int8')
        """
        check_names(type(self).__name__, changes)
        copy = type(self)(**{**self._given, **changes})
        copy._local.update(self._local)
        return copy

    def check(self) -> None:
        """Check again, for what was changed inside a list or inside a config of `set_local`."""
        settle(type(self).__name__, self.static, self._given)
        for entry, config in self._local.values():
            self._check_local(entry, config)
            config.check()

    @property
    def parts(self) -> list[LeafConfig]:
        """This config alone."""
        return [self]

    @property
    def effective_act_method(self) -> str | None:
        """The activations' calibration method in force; None means the default, 'absmax'.

        >>> from fewbit.keras import StaticQuantConfig
        >>> StaticQuantConfig('int8', emulate=True).effective_act_method
        'minmax'
        """
        default = default_act_method(self.activation_dtype, self.emulate)
        return self.act_calibration_method or default

    @property
    def quantizes_attention(self) -> bool:
        """Whether the products inside attention are quantized.

        >>> from fewbit.keras import StaticQuantConfig
        >>> [StaticQuantConfig(emulate=emulate).quantizes_attention for emulate in (False, True)]
        [False, True]
        """
        asked = self.quantize_attention
        return self.activation_dtype is not None and (self.emulate if asked is None else asked)

    def set_local(self, operator_name_or_list: Any, config: LeafConfig) -> Any:
        """Give the layers that an entry, or each of a list of entries, names a config of their own.

        Entries are those of `white_list`. They add to it; an entry that matches a path is stronger
        than one that matches a class, and the last one set is stronger than earlier ones.

        >>> from fewbit.keras import StaticQuantConfig
        >>> config = StaticQuantConfig().set_local('head', StaticQuantConfig(weight_dtype='int8'))
        >>> config.config_for('net/head', 'Dense').weight_dtype
        'int8'
        """
        several = isinstance(operator_name_or_list, list | tuple | set | frozenset)
        entries = operator_name_or_list if several else [operator_name_or_list]
        where = f"{type(self).__name__}.set_local"
        if several and not entries:
            raise ValueError(f"{where}: an empty list names no layer. Name one, such as ['Dense'].")
        for entry in entries:
            check_entry(where, "the list" if several else "the first argument", entry)
            self._check_local(entry, config)
        for entry in entries:
            self._local.pop(entry_name(entry), None)
            self._local[entry_name(entry)] = (entry, config)
        return self

    def _check_local(self, entry: Entry, config: Any) -> None:
        kind: type[Exception] = ValueError
        if not isinstance(config, LeafConfig):
            kind, fix = TypeError, "Layers that shall stay float are named in exclude_list=[...]."
            problem = f"a StaticQuantConfig or DynamicQuantConfig is needed, got {describe(config)}"
        elif config is self:
            problem, fix = "the config is this config itself", "Give another one: config.replace()."
        elif config._local:
            problem = "the config has settings of its own for some layers"
            fix = "Call set_local on the outer config for each of them."
        elif config.white_list != "*" or config.exclude_list is not None:
            problem = "the config has a white_list or an exclude_list"
            fix = "Leave them out: set_local names the layers."
        else:
            return
        where, shown = type(self).__name__, entry_name(entry)
        raise kind(_MSG_LOCAL.format(where=where, entry=shown, problem=problem, fix=fix))

    @property
    def local_config(self) -> dict[str, LeafConfig]:
        """What `set_local` was told, by entry.

        >>> from fewbit.keras import StaticQuantConfig
        >>> StaticQuantConfig().local_config
        {}
        """
        return {name: config for name, (_, config) in self._local.items()}

    def local_entries(self) -> list[tuple[Entry, LeafConfig]]:
        """What `set_local` was told, entries as they were given."""
        return list(self._local.values())

    def config_for(self, path: str, layer_class: type | str) -> LeafConfig | None:
        """The config of a layer: this one, one of `set_local`, or None for a layer left alone.

        >>> from fewbit.keras import StaticQuantConfig
        >>> StaticQuantConfig(exclude_list=['head']).config_for('net/head', 'Dense') is None
        True
        """
        if first_entry(self.exclude_list or (), path, layer_class) is not None:
            return None
        by_class = self if in_white_list(self.white_list, path, layer_class) else None
        by_path = None
        for entry, config in self._local.values():
            if matches_path(entry, path):
                by_path = config
            elif matches_class(entry, layer_class):
                by_class = config
        return by_path or by_class

    def _layer_matches_filters(self, layer_id: str, class_name: type | str) -> bool:
        excluded = first_entry(self.exclude_list or (), layer_id, class_name) is not None
        return not excluded and in_white_list(self.white_list, layer_id, class_name)

    def get_params_dict(self) -> dict[str, Any]:
        """The fields of `params_list` with their values.

        >>> from fewbit.keras import DynamicQuantConfig
        >>> DynamicQuantConfig('int4').get_params_dict()['weight_dtype']
        'int4'
        """
        return {name: getattr(self, name) for name in self.params_list}

    def to_dict(self, nested: bool = True) -> dict[str, Any]:
        """The config as a dict for JSON: nested as it is written today, or the flat fields.

        Fields that the reference does not have are there when they differ from their defaults, so
        that it reads what it can.

        >>> from fewbit.keras import DynamicQuantConfig
        >>> DynamicQuantConfig('int4', group_size=32).to_dict()['config']['group_size']
        32
        """
        self.check()
        shown = {
            name: _as_plain(getattr(self, name))
            for name, default in DEFAULTS.items()
            if (name in KNOWN and name not in FILTERS) or getattr(self, name) != default
        }
        document: dict[str, Any] = shown
        if nested:
            document = {_documents.KIND: self.name, _documents.FIELDS: shown}
        local = {name: config.to_dict() for name, config in self.local_config.items()}
        return document | ({_documents.LOCAL: local} if local else {})

    def _comparable(self) -> Any:
        document = self.to_dict()
        for field in ("weight_dtype", "activation_dtype"):  # 'fp8' and 'fp8_e4m3' are one type
            value = document["config"][field]
            document["config"][field] = value and qtype_name(value)
        document["local"] = [(n, config._comparable()) for n, config in self.local_config.items()]
        return document

    def __repr__(self) -> str:
        follows = following_granularity(format_of(self.weight_dtype), self.group_size)
        defaults = {**DEFAULTS, "weight_scale_granularity": follows}
        always = ("weight_dtype", "activation_dtype")
        values = {name: getattr(self, name) for name in DEFAULTS}
        shown = {n: v for n, v in values.items() if n in always or v != defaults[n]}
        text = ", ".join(f"{name}={_as_plain(value)!r}" for name, value in shown.items())
        local = "".join(f".set_local({n!r}, {c!r})" for n, c in self.local_config.items())
        return f"{type(self).__name__}({text}){local}"


def _as_plain(value: Any) -> Any:
    """A field's value as files hold it: the entries of a filter by name."""
    return [entry_name(entry) for entry in value] if isinstance(value, list) else value


# --- The configs under the names people know ------------------------------------------------------

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
        parts = [part.to_dict() for part in self.parts]
        return {_documents.KIND: _documents.COMPOSABLE[0], _documents.PARTS: parts}

    def _comparable(self) -> Any:
        return [(type(part), part._comparable()) for part in self.parts]

    def __repr__(self) -> str:
        return f"JaxComposableConfig({self.config_list!r})"


def _flattened(configs: Any) -> list[LeafConfig]:
    listed = isinstance(configs, list | tuple)
    wrong = [each for each in configs if not isinstance(each, JaxBaseConfig)] if listed else []
    if listed and not configs:
        raise ValueError(_MSG_PARTS.format(problem="a list without any config quantizes nothing"))
    if isinstance(configs, JaxBaseConfig):
        problem = f"one {type(configs).__name__} stands where a list of configs is expected"
    elif not listed:
        problem = f"a list of configs is expected, got {describe(configs)}"
    elif wrong:
        problem = f"the list has {describe(wrong[0])}, which is no config"
    else:
        return [part for config in configs for part in config.parts]
    raise TypeError(_MSG_PARTS.format(problem=problem))


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
