"""Products to put into a single layer: `nn.Dense(dot_general=...)`, `nnx.Einsum(einsum_op=...)`.

In a layer lhs is the activation and rhs the weight. Where rounding is stochastic each call needs a
fresh key; Linen modules draw theirs with `fewbit.QtDotGeneral` and `fewbit.QtEinsum`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from fewbit.rules import QtRule, QuantizationRule, upgrade
from fewbit.training.configs import ConvGeneralQtConfig, DotGeneralQtConfig, RaggedDotQtConfig
from fewbit.training.dot_products import dot_general_qt
from fewbit.training.drop_in_delayed import Prepared, check_histories, measured, prepared
from fewbit.training.einsum_products import einsum_qt
from fewbit.training.noise import get_noise_fn

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
    return cls(**fields)


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """A `dot_general` for one layer, from a rule or a config.

    `key` is a key, or a function that gives a fresh one at each call; it is needed for stochastic
    rounding only. A key that stays the same gives the same noise at every step. `histories`, for
    rules with 'delayed' scales, begin as `rule_histories(rule)`; their gradient is the next value.

    >>> import jax.numpy as jnp
    >>> dot_general = DotGeneral(QtRule(weight_qtype='int8', act_qtype='int8'))
    >>> dot_general(jnp.ones((2, 4)), jnp.ones((4, 3)), (((1,), (0,)), ((), ()))).shape
    (2, 3)
    """

    config_or_rule: Any
    key: Any = None
    histories: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        who, has_key = type(self).__name__, self.key is not None
        check_drop_in(who, self.config_or_rule, has_key, self.histories is not None)
        if self.histories is not None:
            check_histories(who, self.config_or_rule, self.histories)

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
        ready, config = drop_in_ready(self, lhs, rhs)
        out = dot_general_qt(
            *ready.operands,
            dimension_numbers,
            config,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )
        return ready.told(out)


@dataclasses.dataclass(frozen=True)
class Einsum:
    """An `einsum` of two operands for one layer, from a rule or a config; see `DotGeneral`.

    >>> import jax.numpy as jnp
    >>> einsum = Einsum(QtRule(weight_qtype='int8', act_qtype='int8'))
    >>> einsum('btd,df->btf', jnp.ones((2, 3, 4)), jnp.ones((4, 5))).shape
    (2, 3, 5)
    """

    config_or_rule: Any
    key: Any = None
    histories: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        who, has_key = type(self).__name__, self.key is not None
        check_drop_in(who, self.config_or_rule, has_key, self.histories is not None)
        if self.histories is not None:
            check_histories(who, self.config_or_rule, self.histories)

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
        ready, config = drop_in_ready(self, *operands)
        out = einsum_qt(
            einsum_str,
            *ready.operands,
            config,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )
        return ready.told(out)


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


def drop_in_ready(drop_in: Any, lhs: Any, rhs: Any) -> tuple[Prepared, Any]:
    """The operands and the config of one call."""
    given, key = drop_in.config_or_rule, drop_in.key
    if isinstance(given, DotGeneralQtConfig):
        return Prepared((lhs, rhs)), given
    key = key() if callable(key) else key
    rule = upgrade(given, QtRule)
    if drop_in.histories is None:
        return Prepared((lhs, rhs)), config_from_rule(rule, key)
    config = config_from_rule(_plain(rule))
    ready = prepared(rule, config, drop_in.histories, lhs, rhs)
    return ready, config_from_rule(measured(rule), key, grad_delayed_range=ready.grad_range)


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
