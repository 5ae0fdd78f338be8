"""Rules: which ops get fewer bits, and how. The first rule that matches a Site decides.

A rule is a frozen, hashable value, checked when it is made. It says nothing about models; the
planner asks it about module paths and op names, and a mode reads the types it carries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax

from fewbit._util import compile_pattern
from fewbit.numerics import format_of, qtype_name
from fewbit.qarray import history_length
from fewbit.rules._checks import (
    FrozenMapping,
    check_axes,
    check_bool,
    check_calibration,
    check_choice,
    check_names,
    check_number,
    check_qtype,
    check_regex,
    check_scale_dtype,
    check_tile,
    same_value,
)
from fewbit.rules._training import check_qt_config

_MSG_STATIC_WITHOUT_TYPE = (
    "Invalid rule: act_static_scale is set to {value} but act_qtype is None. Please either unset "
    "act_static_scale, or set act_qtype to the type that the static scale is for, "
    "such as act_qtype='int8'. The rule is {where}."
)

_MSG_NO_PRODUCT = (
    "{where}: bwd_qtype={qtype!s}, but a look-up ('take') has no gradient product that could be "
    "quantized: its gradient is added to the rows that were read. Leave bwd_qtype out, or name the "
    "products it is for: op_names=('dot_general', 'einsum')."
)
_MSG_CONV_FORMAT = (
    "{where}: {field}={name} has a scale for every {tile} values of what a product sums over, and "
    "a convolution, the one op in op_names, has one scale per image and per output feature. Use a "
    "type without tiles, such as 'int8' or 'float8_e4m3fn'."
)
_MSG_DELAYED_TILE = (
    "{where}: {method}={value!r} gives one range for the whole array, but {tile}={size!r} asks for "
    "one per tile. Leave {tile} out, or write {method}='absmax'."
)
_MSG_DELAYED_STATIC = (
    "{where}: act_calibration_method={value!r} makes the scales from the steps before, and "
    "act_static_scale=True from statistics of all of them. Leave act_static_scale out: "
    "fewbit.to_ptq makes a delayed scale static."
)

# One object per name: rules compare, hash and save their initializers by identity.
INITIALIZERS: dict[str, Callable[..., jax.Array]] = {
    "he_uniform": jax.nn.initializers.he_uniform(),
    "he_normal": jax.nn.initializers.he_normal(),
    "lecun_uniform": jax.nn.initializers.lecun_uniform(),
    "lecun_normal": jax.nn.initializers.lecun_normal(),
    "glorot_uniform": jax.nn.initializers.glorot_uniform(),
    "glorot_normal": jax.nn.initializers.glorot_normal(),
    "normal": jax.nn.initializers.normal(),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}


# Equality is written below, not generated: tile_size=1 (a scale per element) and tile_size=1.0
# (one shared scale) are different rules, but 1 == 1.0 to Python.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantizationRule:
    """What happens to the ops whose module path and name match.

    `weight_qtype=None` switches matching ops off, `act_qtype=None` means weight-only. With
    `act_static_scale=True` activations use stored scales, which cover the range that calibration
    saw; `act_static_reduction='mean'` makes them from its average over batches. `tile_size` is the
    length of a tile along what a product sums over (a float: its share), or a mapping from the
    weight's axes to lengths, such as `{0: 128, 1: 128}`.

    >>> rule = QuantizationRule(module_path=".*/mlp/.*", weight_qtype="int4", tile_size=128)
    >>> rule
    QuantizationRule(module_path='.*/mlp/.*', weight_qtype='int4', tile_size=128)
    >>> rule.matches("layers/0/mlp/up", "dot_general"), rule.matches("head", "dot_general")
    (True, False)
    """

    kind: ClassVar[str] = "quantization"
    remembers: ClassVar[bool] = False  # whether 'delayed' is among its calibration methods

    module_path: str = ".*"
    op_names: Collection[str] = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: int | float | Mapping[int, int | float] | None = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: Collection[int] = (0,)
    scale_dtype: str | None = None
    act_static_reduction: str | None = None

    def __post_init__(self) -> None:
        where = self._where()
        self._store("module_path", check_regex, where=type(self).__name__)
        self._store("op_names", check_names)
        self._store("weight_qtype", check_qtype)
        self._store("act_qtype", check_qtype)
        self._store("tile_size", check_tile, (self.weight_qtype, self.act_qtype))
        self._store("act_static_scale", check_bool, True)
        if self.act_static_scale is not None and self.act_qtype is None:
            raise ValueError(
                _MSG_STATIC_WITHOUT_TYPE.format(value=self.act_static_scale, where=where)
            )
        if self.weight_calibration_method is None:
            raise TypeError(f"{where}: weight_calibration_method is None. Write 'absmax'.")
        trains, known = isinstance(self, QtRule), self.remembers
        weight, act = self.weight_qtype, self.act_qtype
        self._store("weight_calibration_method", check_calibration, weight, trains, known)
        self._store("act_calibration_method", check_calibration, act, False, known)
        self._store("act_batch_axes", check_axes)
        self._store("scale_dtype", check_scale_dtype, self.weight_qtype)
        self._store("act_static_reduction", check_choice, ("range", "mean"))
        self._check_convolution("weight_qtype", "act_qtype")

    def _check_convolution(self, *fields: str) -> None:
        if set(self.op_names) != {"conv_general_dilated"}:
            return  # of other ops the plan tells, where the rule meets a convolution
        for field in fields:
            qtype = getattr(self, field)
            if qtype is not None and (tile := format_of(qtype).tile) is not None:
                text = dict(where=self._where(), field=field, name=qtype_name(qtype), tile=tile)
                raise ValueError(_MSG_CONV_FORMAT.format(**text))

    def _where(self) -> str:
        return f"{type(self).__name__}(module_path={self.module_path!r})"

    def _store(
        self, field: str, check: Callable[..., Any], *args: Any, where: str | None = None
    ) -> None:
        value = check(where or self._where(), field, getattr(self, field), *args)
        object.__setattr__(self, field, value)

    @property
    def switched_off(self) -> bool:
        """Whether the rule keeps its ops in float (an earlier rule of this kind is an opt-out).

        >>> QuantizationRule(module_path="head").switched_off
        True
        """
        return self.weight_qtype is None

    def matches(self, module_path: str, op_name: str) -> bool:
        """Whether the whole path matches, and the op is named (or the rule names none).

        >>> QuantizationRule(op_names=("einsum",)).matches("attention", "einsum")
        True
        """
        if self.op_names and op_name not in self.op_names:
            return False
        return compile_pattern(self.module_path).matches(module_path)

    def replace(self, **changes: Any) -> QuantizationRule:
        """A copy with some fields changed, checked again.

        >>> QuantizationRule(weight_qtype="int8").replace(weight_qtype="int4")
        QuantizationRule(weight_qtype='int4')
        """
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        names = (field.name for field in dataclasses.fields(self))
        return all(same_value(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash((type(self), *values))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_show(value)}" for name, value in changed_fields(self).items())
        return f"{type(self).__name__}({shown})"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QtRule(QuantizationRule):
    """A rule for training: what the forward pass quantizes, and the gradients with `bwd_qtype`.

    `bwd_weight_grad_tile_size` is the length of a tile along all that a weight's gradient sums over
    (batch and tokens as one), or a mapping from axes of the activation to lengths, such as
    `{0: 1, 1: 64}`. `additional_qt_config` may change any field of `DotGeneralQtConfig`; a mapping
    in its `tile_size` names the weight's axes, as the rule's own does.

    >>> QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')
    """

    kind: ClassVar[str] = "qt"
    remembers: ClassVar[bool] = True

    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: int | float | Mapping[int, int | float] | None = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: Sequence[int] = (0,)
    additional_qt_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._store("bwd_qtype", check_qtype)
        if self.bwd_qtype is not None and set(self.op_names) == {"take"}:
            raise ValueError(_MSG_NO_PRODUCT.format(where=self._where(), qtype=self.bwd_qtype))
        if self.bwd_calibration_method is None:
            raise TypeError(f"{self._where()}: bwd_calibration_method is None. Write 'absmax'.")
        self._store("bwd_calibration_method", check_calibration, self.bwd_qtype, False, True)
        self._store("bwd_weight_grad_tile_size", check_tile, (self.bwd_qtype,))
        self._check_convolution("bwd_qtype")
        self._store("disable_channelwise_axes", check_bool)
        self._store("bwd_stochastic_rounding", check_choice, ("uniform", "low_bit_uniform"))
        self._store("channelwise_noise_axes", check_axes)
        self._store("additional_qt_config", _check_qt_config)
        self._check_own_tiles()
        self._check_delayed()

    @property
    def quantizes_gradients(self) -> bool:
        """Whether one of its two gradient products is quantized.

        >>> QtRule(weight_qtype="int8", bwd_qtype="int8").quantizes_gradients
        True
        """
        own = self.additional_qt_config or {}
        types = [own.get(f"{side}_grad_qtype", self.bwd_qtype) for side in ("dlhs", "drhs")]
        return types != [None, None]

    @property
    def delays(self) -> bool:
        """Whether one of its ranges comes from a history.

        >>> QtRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="delayed").delays
        True
        """
        methods = (
            self.weight_calibration_method,
            self.act_calibration_method,
            self.bwd_calibration_method,
        )
        return any(history_length(method) is not None for method in methods)

    def _check_own_tiles(self) -> None:
        """Tiles that formats of `additional_qt_config` insist on: there, or filled in."""
        own = dict(self.additional_qt_config or {})
        types = [self.weight_qtype, self.act_qtype, own.get("lhs_qtype"), own.get("rhs_qtype")]
        self._store("tile_size", check_tile, types)
        changes = {}
        for product, forward in {"": types, "dlhs_": (), "drhs_": ()}.items():
            name = f"{product}tile_size"
            if name in own:
                grad = own.get(f"{product}grad_qtype", self.bwd_qtype)
                ones = forward or (grad, own.get(f"{product}residual_qtype"))
                place = f"additional_qt_config[{name!r}]"
                changes[name] = check_tile(self._where(), place, own[name], ones)
        if changes:
            object.__setattr__(self, "additional_qt_config", FrozenMapping({**own, **changes}))

    def _check_delayed(self) -> None:
        tiles = {
            "weight_calibration_method": "tile_size",
            "act_calibration_method": "tile_size",
            "bwd_calibration_method": "bwd_weight_grad_tile_size",
        }
        for method, tile in tiles.items():
            value, size = getattr(self, method), getattr(self, tile)
            if history_length(value) is not None and size is not None:
                where = self._where()
                raise ValueError(
                    _MSG_DELAYED_TILE.format(
                        where=where, method=method, value=value, tile=tile, size=size
                    )
                )
        value = self.act_calibration_method
        if self.act_static_scale and history_length(value) is not None:
            raise ValueError(_MSG_DELAYED_STATIC.format(where=self._where(), value=value))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoraRule(QuantizationRule):
    """A rule for adapters of a given rank; with `weight_qtype` the frozen base is quantized too.

    Initializers are functions, or names from `INITIALIZERS`.

    >>> LoraRule(rank=8, alpha=16.0, weight_qtype="nf4", tile_size=64)
    LoraRule(weight_qtype='nf4', tile_size=64, rank=8, alpha=16.0)
    """

    kind: ClassVar[str] = "lora"

    rank: int
    alpha: float
    dropout: float = 0.0
    lora_a_initializer: Callable[..., jax.Array] | str = INITIALIZERS["he_uniform"]
    lora_b_initializer: Callable[..., jax.Array] | str = INITIALIZERS["zeros"]

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = lambda v: v > 0 and isinstance(v, int)  # noqa: E731
        self._store("rank", check_number, "a positive integer", whole)
        self._store("alpha", check_number, "a finite number", math.isfinite)
        self._store("dropout", check_number, "a share in [0, 1)", lambda v: 0 <= v < 1)
        self._store("lora_a_initializer", _check_initializer)
        self._store("lora_b_initializer", _check_initializer)

    @property
    def switched_off(self) -> bool:
        """Never: without `weight_qtype` the adapter stands over a float base."""
        return False


def _check_qt_config(where: str, field: str, value: Any) -> FrozenMapping | None:
    checked = check_qt_config(where, field, value)
    return None if checked is None else FrozenMapping(checked)


def _check_initializer(where: str, field: str, value: Any) -> Callable[..., jax.Array]:
    if isinstance(value, str):
        check_choice(where, field, value, tuple(INITIALIZERS))
        return INITIALIZERS[value]
    if not callable(value):
        raise TypeError(
            f"{where}: {field} must be a function of (key, shape, dtype) such as "
            f"jax.nn.initializers.normal(), or a name such as 'zeros', got {value!r}."
        )
    return value


def _show(value: Any) -> str:
    for name, function in INITIALIZERS.items():
        if value is function:
            return repr(name)
    return repr(plain_value(value))


def plain_value(value: Any) -> Any:
    """A field's value as text prints it: types by their short name."""
    if isinstance(value, jax.numpy.dtype):
        return qtype_name(value)
    return value


def changed_fields(rule: QuantizationRule) -> dict[str, Any]:
    """The fields of a rule that differ from their defaults, in order.

    >>> changed_fields(QuantizationRule(tile_size=32))
    {'tile_size': 32}
    """
    values = {field.name: (getattr(rule, field.name), field) for field in dataclasses.fields(rule)}
    return {
        name: value
        for name, (value, field) in values.items()
        if field.default is dataclasses.MISSING or not same_value(value, field.default)
    }


Rule = TypeVar("Rule", bound=QuantizationRule)


def first_match(
    rules: Iterable[QuantizationRule], module_path: str, op_name: str
) -> tuple[int, QuantizationRule] | tuple[None, None]:
    """The first rule that matches and its place in the list, or (None, None).

    >>> rules = [QuantizationRule(module_path="head"), QuantizationRule(weight_qtype="int8")]
    >>> first_match(rules, "mlp", "dot_general")
    (1, QuantizationRule(weight_qtype='int8'))
    >>> first_match(rules[:1], "mlp", "dot_general")
    (None, None)
    """
    for index, rule in enumerate(rules):
        if rule.matches(module_path, op_name):
            return index, rule
    return None, None


def upgrade(rule: QuantizationRule, cls: type[Rule], **extra: Any) -> Rule:
    """The rule as a `cls`, which must add fields to the rule's class; `extra` gives those fields.

    >>> upgrade(QuantizationRule(weight_qtype="int8"), QtRule)
    QtRule(weight_qtype='int8')
    """
    if isinstance(rule, cls):
        return dataclasses.replace(rule, **extra) if extra else rule
    if not issubclass(cls, type(rule)):
        raise TypeError(
            f"{rule!r} cannot become a {cls.__name__}: a {type(rule).__name__} has fields that a "
            f"{cls.__name__} does not have. Write a {cls.__name__} or a QuantizationRule instead."
        )
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    return cls(**{**fields, **extra})


def with_defaults(
    rule: Rule, *, act_static_scale: bool = False, act_calibration_method: str = "absmax"
) -> Rule:
    """The rule with its open activation fields (None) decided by the mode that runs it.

    A rule without `act_qtype` has nothing to decide and comes back as it is.

    >>> with_defaults(QuantizationRule(weight_qtype="int8", act_qtype="int8")).act_static_scale
    False
    """
    if rule.act_qtype is None:
        return rule
    method, static = rule.act_calibration_method, rule.act_static_scale
    return dataclasses.replace(
        rule,
        act_calibration_method=act_calibration_method if method is None else method,
        act_static_scale=act_static_scale if static is None else static,
    )
