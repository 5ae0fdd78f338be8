"""Products to put into a single layer: `nn.Dense(dot_general=...)`, `nnx.Einsum(einsum_op=...)`.

In a layer lhs is the activation and rhs the weight. Where rounding is stochastic each call needs a
fresh key; Linen modules draw theirs with `fewbit.QtDotGeneral` and `fewbit.QtEinsum`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fewbit.numerics import should_quantize
from fewbit.ops import Paired, dot_general_qt, einsum_qt
from fewbit.qarray import history_length
from fewbit.rules import (
    ConvGeneralQtConfig,
    DotGeneralQtConfig,
    QtRule,
    QuantizationRule,
    RaggedDotQtConfig,
    upgrade,
)
from fewbit.training._delayed import SUFFIX, Prepared, delayed_range, empty_history, prepared
from fewbit.training._noise import get_noise_fn

# --- The amax histories of a single layer's product ----------------------------------------------

_MSG_HISTORIES = (
    "{who} got amax histories of the shapes {found}, but its rule needs {wanted}. Begin with "
    "fewbit.training.rule_histories(rule), and differentiate with respect to them: their gradient "
    "is what they are after the step."
)


def history_lengths(rule: QtRule) -> dict[str, int]:
    """How long the history of each side is that has one; lhs is the activation, rhs the weight.

    >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_calibration_method='delayed,16')
    >>> history_lengths(rule)
    {'lhs': 16}
    """
    own = rule.additional_qt_config or {}
    sides = {
        "lhs": (own.get("lhs_qtype", rule.act_qtype), rule.act_calibration_method),
        "rhs": (own.get("rhs_qtype", rule.weight_qtype), rule.weight_calibration_method),
        "grad": (rule.bwd_qtype, rule.bwd_calibration_method),
    }
    return {
        side: length
        for side, (qtype, method) in sides.items()
        if qtype is not None and f"{side}_calibration_method" not in own
        if (length := history_length(method)) is not None
    }


def rule_histories(rule: QtRule) -> dict[str, jax.Array]:
    """The histories that a single layer with this rule begins with: of no steps.

    >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_calibration_method='delayed,2')
    >>> rule_histories(rule)
    {'lhs_amax_history': Array([0., 0.], dtype=float32)}
    """
    return {side + SUFFIX: empty_history(n) for side, n in history_lengths(rule).items()}


def measured(rule: QtRule, gradients: bool = False) -> Any:
    """The rule with ranges that are measured, where operands or (if told) gradients delay them."""
    fields = ["weight_calibration_method", "act_calibration_method"]
    fields += ["bwd_calibration_method"] if gradients else []
    delayed = [name for name in fields if history_length(getattr(rule, name)) is not None]
    return rule.replace(**dict.fromkeys(delayed, "absmax"))


def check_histories(who: str, rule: Any, histories: Mapping[str, Any]) -> None:
    """Raise unless these are the histories of the rule."""
    delays = isinstance(rule, QtRule) and rule.delays
    wanted = {side + SUFFIX: (n,) for side, n in history_lengths(rule).items()} if delays else {}
    found = {name: tuple(value.shape) for name, value in histories.items()}
    if found != wanted:
        raise ValueError(_MSG_HISTORIES.format(who=who, found=found, wanted=wanted))


# --- The products --------------------------------------------------------------------------------

CONFIGS: dict[str, type[DotGeneralQtConfig]] = {
    "dot_general": DotGeneralQtConfig,
    "einsum": DotGeneralQtConfig,
    "conv_general_dilated": ConvGeneralQtConfig,
    "ragged_dot": RaggedDotQtConfig,
}

_MSG_WANTED = (
    "{who} takes a QtRule, a QuantizationRule or a DotGeneralQtConfig, got {value!r}. Write "
    "{who}(fewbit.QtRule(weight_qtype='int8', act_qtype='int8'))."
)
_MSG_NO_KEY = (
    "{who}: the rule asks for bwd_stochastic_rounding={method!r}, which needs a key. Give "
    "key=a_key, or key=a function that returns a fresh one at each call; in Linen use "
    "functools.partial(fewbit.QtDotGeneral, rule) as dot_general_cls, which draws from the stream "
    "'stochastic_rounding'."
)
_MSG_STATIC = (
    "{who}: act_static_scale=True needs ranges collected over steps, which a single layer does not "
    "keep. Use quantize_model(model, QtProvider(rules)), or leave act_static_scale out."
)
_MSG_SCALES = (
    "{who}: scale_dtype={value!r} is for weights as they are stored; the scales of a single layer "
    "have the type of its operands. Use quantize_model(model, QtProvider(rules)), or leave it out."
)
_MSG_DELAYED = (
    "{who}: the rule takes ranges from the steps before ('delayed'), and a function keeps nothing. "
    "Use what holds amax histories: in Linen nn.Dense(dot_general_cls=functools.partial("
    "fewbit.QtDotGeneral, rule)) or fewbit.QtEinsum, in NNX nnx.Linear(dot_general="
    "fewbit.NnxQtDotGeneral(rule)) or fewbit.NnxQtEinsum. Or hold them yourself: "
    "{who}(rule, histories=fewbit.training.rule_histories(rule))."
)
_MSG_TILES_LEFT = (
    "{rule!r}: a mapping of tiles (tile_size={tiles}) names axes of a weight on the right in a "
    "config, and here the weight stands on the left (weight=0). Give tile_size as one length."
)
_MSG_OPERANDS = "{who} multiplies two operands, got {count}. Split the einsum into pairs."


def config_from_rule(
    rule: QuantizationRule,
    key: jax.Array | None = None,
    *,
    weight: int | None = 1,
    op_name: str = "dot_general",
    grad_delayed_range: Any = None,
) -> Any:
    """The config that a rule stands for; operand number `weight` is the weight (None: neither).

    `key` is for `bwd_stochastic_rounding`; both gradients get noise of their own from it.
    `grad_delayed_range` is the range of a gradient with a 'delayed' scale.

    >>> rule = QtRule(weight_qtype='int4', act_qtype='int8', bwd_qtype='int8')
    >>> config = config_from_rule(rule)
    >>> config.lhs_qtype, config.rhs_qtype, config.drhs_grad_qtype
    (dtype('int8'), dtype(int4), dtype('int8'))
    """
    rule = upgrade(rule, QtRule)
    cls = CONFIGS[op_name]
    tiles = cls is not ConvGeneralQtConfig
    noise = get_noise_fn(rule.bwd_stochastic_rounding, key, rule.channelwise_noise_axes)
    fields: dict[str, Any] = dict(tile_size=rule.tile_size) if tiles else {}
    fields["grad_delayed_range"] = grad_delayed_range
    for side, name in enumerate(("lhs", "rhs")):
        is_weight = side == weight
        act_method = rule.act_calibration_method or "absmax"
        fields |= {
            f"{name}_qtype": rule.weight_qtype if is_weight else rule.act_qtype,
            f"{name}_calibration_method": (
                rule.weight_calibration_method if is_weight else act_method
            ),
            f"{name}_disable_channelwise_axes": rule.disable_channelwise_axes,
            f"d{name}_grad_qtype": rule.bwd_qtype,
            f"d{name}_grad_calibration_method": rule.bwd_calibration_method,
            f"d{name}_grad_disable_channelwise_axes": rule.disable_channelwise_axes,
            f"d{name}_stochastic_rounding_noise_fn": noise and noise.fold_in(side),
        }
        if tiles and is_weight:
            fields[f"d{name}_tile_size"] = rule.bwd_weight_grad_tile_size
    fields |= rule.additional_qt_config or {}
    if isinstance(fields.get("tile_size"), Mapping) and weight != 1:
        if weight == 0:
            mapping = dict(fields["tile_size"])
            raise ValueError(_MSG_TILES_LEFT.format(rule=rule, tiles=mapping))
        fields["tile_size"] = None  # of two activations nothing is meant, as in serving
    return cls(**fields)


@dataclasses.dataclass(frozen=True)
class _DropIn:
    """What a product of one layer is made from, and how it makes a call ready."""

    config_or_rule: Any
    key: Any = None
    histories: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        who, has_key = type(self).__name__, self.key is not None
        check_drop_in(who, self.config_or_rule, has_key, self.histories is not None)
        if self.histories is not None:
            check_histories(who, self.config_or_rule, self.histories)

    def _ready(self, lhs: Any, rhs: Any) -> tuple[Prepared, Any]:
        """The operands and the config of one call."""
        given, key = self.config_or_rule, self.key
        if isinstance(given, DotGeneralQtConfig):
            return Prepared([lhs, rhs]), given
        key = key() if callable(key) else key
        rule = upgrade(given, QtRule)
        if self.histories is None:
            return Prepared([lhs, rhs]), config_from_rule(rule, key)
        config = config_from_rule(_plain(rule))
        ranges = {
            name: delayed_range(self.histories[name + SUFFIX]) for name in history_lengths(rule)
        }
        hows = [
            None if isinstance(x, Paired) or not should_quantize(x.dtype) else dict(qtype=qtype)
            for x, qtype in ((lhs, config.lhs_qtype), (rhs, config.rhs_qtype))
        ]
        ready = prepared((lhs, rhs), ranges, hows, not config.disable_gradient_clipping)
        return ready, config_from_rule(measured(rule), key, grad_delayed_range=ranges.get("grad"))


@dataclasses.dataclass(frozen=True)
class DotGeneral(_DropIn):
    """A `dot_general` for one layer, from a rule or a config.

    `key` is a key, or a function that gives a fresh one at each call; it is needed for stochastic
    rounding only. A key that stays the same gives the same noise at every step. `histories`, for
    rules with 'delayed' scales, begin as `rule_histories(rule)`; their gradient is the next value.

    >>> import jax.numpy as jnp
    >>> dot_general = DotGeneral(QtRule(weight_qtype='int8', act_qtype='int8'))
    >>> dot_general(jnp.ones((2, 4)), jnp.ones((4, 3)), (((1,), (0,)), ((), ()))).shape
    (2, 3)
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        ready, config = self._ready(lhs, rhs)
        settings = (dimension_numbers, config, precision, preferred_element_type)
        a, b = ready.operands
        return ready.told(dot_general_qt(a, b, *settings, out_sharding=out_sharding))


@dataclasses.dataclass(frozen=True)
class Einsum(_DropIn):
    """An `einsum` of two operands for one layer, from a rule or a config; see `DotGeneral`.

    >>> import jax.numpy as jnp
    >>> einsum = Einsum(QtRule(weight_qtype='int8', act_qtype='int8'))
    >>> einsum('btd,df->btf', jnp.ones((2, 3, 4)), jnp.ones((4, 5))).shape
    (2, 3, 5)
    """

    def __call__(
        self,
        einsum_str: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        if len(operands) != 2:
            raise ValueError(_MSG_OPERANDS.format(who=type(self).__name__, count=len(operands)))
        ready, config = self._ready(*operands)
        settings = (config, precision, preferred_element_type)
        a, b = ready.operands
        return ready.told(einsum_qt(einsum_str, a, b, *settings, out_sharding=out_sharding))


def check_drop_in(
    who: str, config_or_rule: Any, has_key: bool, has_histories: bool = False
) -> None:
    """Raise for what a single layer cannot do, when it is made."""
    if isinstance(config_or_rule, DotGeneralQtConfig):
        return
    if not isinstance(config_or_rule, QuantizationRule):
        raise TypeError(_MSG_WANTED.format(who=who, value=config_or_rule))
    rule = upgrade(config_or_rule, QtRule)
    if rule.act_static_scale:
        raise ValueError(_MSG_STATIC.format(who=who))
    if rule.scale_dtype is not None:
        raise ValueError(_MSG_SCALES.format(who=who, value=rule.scale_dtype))
    if rule.bwd_stochastic_rounding is not None and not has_key:
        raise ValueError(_MSG_NO_KEY.format(who=who, method=rule.bwd_stochastic_rounding))
    if rule.delays and not has_histories:
        raise ValueError(_MSG_DELAYED.format(who=who))
    config_from_rule(_plain(rule))


def _plain(rule: QtRule) -> Any:
    """The rule without what a call has to bring."""
    return measured(rule, gradients=True).replace(bwd_stochastic_rounding=None)


def dot_general_cls(config_or_rule: Any, key: Any = None) -> Callable[[], DotGeneral]:
    """What `nn.Dense(dot_general_cls=...)` calls to get its product.

    >>> make = dot_general_cls(QtRule(weight_qtype='int8'))
    >>> make()
    DotGeneral(config_or_rule=QtRule(weight_qtype='int8'), key=None)
    """
    check_drop_in("dot_general_cls", config_or_rule, key is not None)
    return functools.partial(DotGeneral, config_or_rule, key)


def einsum_cls(config_or_rule: Any, key: Any = None) -> Callable[[], Einsum]:
    """What `nn.MultiHeadAttention(qk_attn_weights_einsum_cls=...)` calls to get its einsum.

    >>> einsum_cls(QtRule(weight_qtype='int8', act_qtype='int8'))().key is None
    True
    """
    check_drop_in("einsum_cls", config_or_rule, key is not None)
    return functools.partial(Einsum, config_or_rule, key)
