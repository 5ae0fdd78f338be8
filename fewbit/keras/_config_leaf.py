"""A single config: its fields, its filters, and what `set_local` adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fewbit._errors import describe
from fewbit.keras import _config_files as files
from fewbit.keras._config_base import MSG_BASE, JaxBaseConfig
from fewbit.keras._config_checks import (
    DEFAULTS,
    FILTERS,
    KNOWN,
    PARAMS,
    Follows,
    check_names,
    default_act_method,
    following_granularity,
    settle,
    unknown_field,
)
from fewbit.keras._filters import (
    Entry,
    check_entry,
    entry_name,
    first_entry,
    in_white_list,
    matches_class,
    matches_path,
)
from fewbit.numerics import format_of, qtype_name

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

        >>> from fewbit.keras.config import StaticQuantConfig
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

        >>> from fewbit.keras.config import StaticQuantConfig
        >>> StaticQuantConfig('int8', emulate=True).effective_act_method
        'minmax'
        """
        given = self.act_calibration_method
        return given if given else default_act_method(self.activation_dtype, self.emulate)

    @property
    def quantizes_attention(self) -> bool:
        """Whether the products inside attention are quantized.

        >>> from fewbit.keras.config import StaticQuantConfig
        >>> [StaticQuantConfig(emulate=emulate).quantizes_attention for emulate in (False, True)]
        [False, True]
        """
        asked = self.quantize_attention
        return self.activation_dtype is not None and (self.emulate if asked is None else asked)

    def set_local(self, operator_name_or_list: Any, config: LeafConfig) -> Any:
        """Give the layers that an entry, or each of a list of entries, names a config of their own.

        Entries are those of `white_list`. They add to it; an entry that matches a path is stronger
        than one that matches a class, and the last one set is stronger than earlier ones.

        >>> from fewbit.keras.config import StaticQuantConfig
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
        problem = fix = ""
        if not isinstance(config, LeafConfig):
            problem = f"a StaticQuantConfig or DynamicQuantConfig is needed, got {describe(config)}"
            fix = "Layers that shall stay float are named in exclude_list=[...]."
        elif config is self:
            problem, fix = "the config is this config itself", "Give another one: config.replace()."
        elif config._local:
            problem = "the config has settings of its own for some layers"
            fix = "Call set_local on the outer config for each of them."
        elif config.white_list != "*" or config.exclude_list is not None:
            problem = "the config has a white_list or an exclude_list"
            fix = "Leave them out: set_local names the layers."
        if problem:
            where, shown = type(self).__name__, entry_name(entry)
            kind = ValueError if isinstance(config, LeafConfig) else TypeError
            raise kind(_MSG_LOCAL.format(where=where, entry=shown, problem=problem, fix=fix))

    @property
    def local_config(self) -> dict[str, LeafConfig]:
        """What `set_local` was told, by entry.

        >>> from fewbit.keras.config import StaticQuantConfig
        >>> StaticQuantConfig().local_config
        {}
        """
        return {name: config for name, (_, config) in self._local.items()}

    def local_entries(self) -> list[tuple[Entry, LeafConfig]]:
        """What `set_local` was told, entries as they were given."""
        return list(self._local.values())

    def config_for(self, path: str, layer_class: type | str) -> LeafConfig | None:
        """The config of a layer: this one, one of `set_local`, or None for a layer left alone.

        >>> from fewbit.keras.config import StaticQuantConfig
        >>> StaticQuantConfig(exclude_list=['head']).config_for('net/head', 'Dense') is None
        True
        """
        if first_entry(self.exclude_list or (), path, layer_class) is not None:
            return None
        by_class = by_path = None
        for entry, config in self._local.values():
            if matches_path(entry, path):
                by_path = config
            elif matches_class(entry, layer_class):
                by_class = config
        local = by_path or by_class
        if local is None and in_white_list(self.white_list, path, layer_class):
            return self
        return local

    def _layer_matches_filters(self, layer_id: str, class_name: type | str) -> bool:
        excluded = first_entry(self.exclude_list or (), layer_id, class_name) is not None
        return not excluded and in_white_list(self.white_list, layer_id, class_name)

    def get_params_dict(self) -> dict[str, Any]:
        """The fields of `params_list` with their values.

        >>> from fewbit.keras.config import DynamicQuantConfig
        >>> DynamicQuantConfig('int4').get_params_dict()['weight_dtype']
        'int4'
        """
        return {name: getattr(self, name) for name in self.params_list}

    def to_dict(self, nested: bool = True) -> dict[str, Any]:
        """The config as a dict for JSON: nested as it is written today, or the flat fields.

        Fields that the reference does not have are there when they differ from their defaults, so
        that it reads what it can.

        >>> from fewbit.keras.config import DynamicQuantConfig
        >>> DynamicQuantConfig('int4', group_size=32).to_dict()['config']['group_size']
        32
        """
        self.check()
        fields = {name: getattr(self, name) for name in DEFAULTS}
        shown = {
            name: [entry_name(e) for e in value] if isinstance(value, list) else value
            for name, value in fields.items()
            if (name in KNOWN and name not in FILTERS) or value != DEFAULTS[name]
        }
        local = {name: config.to_dict() for name, config in self.local_config.items()}
        if not nested:
            return {**shown, **({files.LOCAL: local} if local else {})}
        document: dict[str, Any] = {files.KIND: self.name, files.FIELDS: shown}
        return {**document, **({files.LOCAL: local} if local else {})}

    def _comparable(self) -> Any:
        document = self.to_dict()
        for field in ("weight_dtype", "activation_dtype"):  # 'fp8' and 'fp8_e4m3' are one type
            value = document["config"][field]
            document["config"][field] = value and qtype_name(value)
        document["local"] = [(n, config._comparable()) for n, config in self.local_config.items()]
        return document

    def __repr__(self) -> str:
        shown: dict[str, Any] = {
            "weight_dtype": self.weight_dtype,
            "activation_dtype": self.activation_dtype,
        }
        follows = following_granularity(format_of(self.weight_dtype), self.group_size)
        for name, default in {**DEFAULTS, "weight_scale_granularity": follows}.items():
            value = getattr(self, name)
            if name not in shown and value != default:
                names = [entry_name(entry) for entry in value] if isinstance(value, list) else value
                shown[name] = names
        text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        local = "".join(f".set_local({n!r}, {c!r})" for n, c in self.local_config.items())
        return f"{type(self).__name__}({text}){local}"
