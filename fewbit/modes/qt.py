"""Training with fewer bits: the forward product quantized (QAT), the two gradients too if asked.

Weights stay float and get gradients; each is quantized once per step, as it will be stored after
training. Products are those of `fewbit.training`, configured per operand from the Site's rule.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from fewbit import ops
from fewbit._qarray_static import quantize_static
from fewbit.calibration import parse_method
from fewbit.current import current_site
from fewbit.decisions import activation_fields
from fewbit.modes.provider import QuantizationProvider
from fewbit.modes.ptq import describe_einsum
from fewbit.modes.qt_config import qt_config
from fewbit.modes.qt_described import gradient_products, idle_settings
from fewbit.numerics import should_quantize
from fewbit.ops import granularity
from fewbit.qarray import HowToQuantize, dequantize
from fewbit.rules import QtRule, QuantizationRule, upgrade
from fewbit.training import (
    ConvGeneralQtConfig,
    DotGeneralQtConfig,
    Paired,
    RaggedDotQtConfig,
    clip_gradient,
    dot_general_qt,
    einsum_qt,
    pair,
)
from fewbit.training.conv_products import conv_general_qt
from fewbit.training.delayed import quantize_delayed, seen
from fewbit.training.ragged_products import ragged_dot_qt
from fewbit.weight import straight_through

_MSG_HISTOGRAM = (
    "{rule!r}: training keeps the range of each batch, from which {method!r} over all batches "
    "cannot be told. Write act_static_reduction='mean' to average it over batches, or make static "
    "scales after training: fewbit.calibrate."
)
_MSG_EMULATED = (
    "{rule!r}: with emulate=True rounded floats are multiplied, and their gradients are float, but "
    "this rule quantizes gradients. Leave emulate out, or bwd_qtype (and the types of gradients in "
    "additional_qt_config)."
)


class QtProvider(QuantizationProvider):
    """Quantize a model while it trains, as `QtRule`s say.

    `emulate=True` rounds the operands and multiplies floats (fake quantization), with float
    gradients; otherwise the forward pass runs the very op that serves after training.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> rules = [fewbit.QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')]
    >>> f = fewbit.quantize_model(lambda params, x: x @ params['w'], QtProvider(rules))
    >>> params, x = {'w': jnp.eye(3)}, jnp.ones((2, 3))
    >>> jax.grad(lambda params: f(params, x).sum())(params)['w'].round(1)[0]
    Array([2., 2., 2.], dtype=float32)
    """

    trains = True

    def __init__(
        self,
        rules: Iterable[QuantizationRule],
        *,
        disable_jit: bool = False,
        strict: bool = True,
        emulate: bool = False,
    ):
        self.emulate = emulate
        super().__init__(rules, disable_jit=disable_jit, strict=strict)
        self.collects = any(rule.act_static_scale for rule in self.rules)
        self.delays = any(getattr(rule, "delays", False) for rule in self.rules)
        self.draws_noise = any(
            getattr(rule, "bwd_stochastic_rounding", None) is not None for rule in self.rules
        )

        self.idle = tuple(
            text for k, rule in enumerate(self.rules) for text in idle_settings(k, rule)
        )

    def _init_rule(self, rule: Any) -> QuantizationRule:
        rule = upgrade(super()._init_rule(rule), QtRule)
        if self.emulate and rule.quantizes_gradients:
            raise ValueError(_MSG_EMULATED.format(rule=rule))
        method = rule.act_calibration_method
        if rule.act_static_scale and rule.act_static_reduction != "mean" and method is not None:
            if parse_method(method).name in ("percentile", "mse"):
                raise ValueError(_MSG_HISTOGRAM.format(rule=rule, method=method))
        return rule

    def gradient_products(
        self, ts: Any, rule: QuantizationRule, stored: Any
    ) -> tuple[str | None, str | None]:
        return gradient_products(ts, upgrade(rule, QtRule), stored)

    def _key(self) -> Any:
        key = super()._key()
        return None if key is None else (*key, self.emulate)

    def dot_general(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        rule, _ = self._get_current_rule_and_op_id("dot_general")
        numbers = dict(dimension_numbers=dimension_numbers, ndims=(lhs.ndim, rhs.ndim))
        options = (precision, preferred_element_type)
        return self._product(
            (lhs, rhs),
            rule,
            lambda for_lhs, **how: granularity.dot_how(for_lhs=for_lhs, **numbers, **how),
            lambda a, b: ops.describe_dot(a, b, dimension_numbers),
            lambda a, b: super(QtProvider, self).dot_general(
                a, b, dimension_numbers, *options, out_sharding=out_sharding
            ),
            lambda a, b: dot_general_qt(
                a,
                b,
                dimension_numbers,
                qt_config(DotGeneralQtConfig, rule, (a, b)),
                *options,
                out_sharding=out_sharding,
            ),
        )

    def einsum(
        self,
        einsum_str: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        _dot_general: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        rule, _ = self._get_current_rule_and_op_id("einsum")
        spec: dict[str, Any] = dict(einsum_str=einsum_str, ndims=tuple(x.ndim for x in operands))
        options = dict(
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        return self._product(
            operands,
            rule,
            lambda for_lhs, **how: granularity.einsum_how(for_lhs=for_lhs, **spec, **how),
            lambda a, b: describe_einsum(einsum_str, a, b),
            lambda a, b: super(QtProvider, self).einsum(einsum_str, a, b, **options),
            lambda a, b: einsum_qt(
                einsum_str, a, b, qt_config(DotGeneralQtConfig, rule, (a, b)), **options
            ),
        )

    def conv_general_dilated(
        self,
        lhs: Any,
        rhs: Any,
        window_strides: Any,
        padding: Any,
        lhs_dilation: Any = None,
        rhs_dilation: Any = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        rule, _ = self._get_current_rule_and_op_id("conv_general_dilated")
        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        settings: dict[str, Any] = dict(
            dimension_numbers=numbers,
            window_strides=window_strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
        )
        options = dict(precision=precision, preferred_element_type=preferred_element_type)

        def how(for_lhs, tile_size=None, **fields):
            return granularity.conv_how(dimension_numbers=numbers, for_lhs=for_lhs, **fields)

        return self._product(
            (lhs, rhs),
            rule,
            how,
            lambda a, b: ops.describe_conv(a, b, **settings),
            lambda a, b: super(QtProvider, self).conv_general_dilated(a, b, **settings, **options),
            lambda a, b: conv_general_qt(
                a, b, qt_config(ConvGeneralQtConfig, rule, (a, b)), **settings, **options
            ),
        )

    def ragged_dot(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: Any = None,
    ) -> jax.Array:
        rule, _ = self._get_current_rule_and_op_id("ragged_dot")
        options = dict(
            precision=precision,
            preferred_element_type=preferred_element_type,
            group_offset=group_offset,
        )
        return self._product(
            (lhs, rhs),
            rule,
            lambda for_lhs, **how: granularity.ragged_dot_how(for_lhs=for_lhs, **how),
            ops.describe_ragged_dot,
            lambda a, b: super(QtProvider, self).ragged_dot(a, b, group_sizes, **options),
            lambda a, b: ragged_dot_qt(
                a, b, group_sizes, qt_config(RaggedDotQtConfig, rule, (a, b)), **options
            ),
        )

    def _product(
        self,
        operands: Sequence[Any],
        rule: Any,
        how_for: Callable[..., Any],
        describe: Callable[..., str],
        float_product: Callable[..., jax.Array],
        product: Callable[..., jax.Array],
    ) -> jax.Array:
        """The quantized product, or the float one of rounded operands; says which."""
        here = current_site()
        hows = [_how(rule, x, k, how_for) for k, x in enumerate(operands)]
        clip = not (rule.additional_qt_config or {}).get("disable_gradient_clipping", False)
        for k, scale in here.static.items() if here is not None else ():
            x = operands[k]
            q = quantize_static(jax.lax.stop_gradient(x), hows[k], *scale)
            made = Paired(clip_gradient(x, q) if clip else x, q)
            operands = [made if j == k else x for j, x in enumerate(operands)]
        operands, told = _delayed(operands, hows, clip)
        if self.emulate:
            if here is not None:
                here.report("emulated")
            pairs = zip(operands, hows, strict=True)
            out = float_product(*(_rounded(x, how, clip) for x, how in pairs))
        else:
            if here is not None:
                here.report(describe(*map(_seen, operands, hows)))
                if here.planning:  # what is wrong with a gradient is known before training
                    jax.eval_shape(functools.partial(_gradients, product), list(operands))
            out = product(*operands)
        return seen(out, *told) if told[0] else out


def _delayed(
    operands: Sequence[Any], hows: Sequence[Any], clip: bool
) -> tuple[Sequence[Any], tuple[dict[str, Any], dict[str, Any]]]:
    """Operands with delayed scales as pairs; the ranges of these, and what this step has seen."""
    here, result = current_site(), list(operands)
    ranges: dict[str, Any] = {}
    amax: dict[str, Any] = {}
    for k, name in enumerate(("lhs", "rhs")):
        if here is None or name not in here.delayed or hows[k] is None:
            continue
        x, how = operands[k], hows[k]
        own = HowToQuantize(qtype=how.qtype, scale_dtype=how.scale_dtype)
        q, amax[name] = quantize_delayed(x, here.delayed[name], own)
        result[k] = Paired(clip_gradient(x, q) if clip else x, q)
        ranges[name] = here.delayed[name]
    return result, (ranges, amax)


def _gradients(product: Callable[..., jax.Array], operands: Sequence[Any]) -> Any:
    """Both gradients of a product, in some direction."""

    def of_arrays(*arrays: Any) -> jax.Array:
        pairs = zip(operands, arrays, strict=True)
        return product(*(Paired(a, x.quantized) if isinstance(x, Paired) else a for x, a in pairs))

    arrays = [x.array if isinstance(x, Paired) else x for x in operands]
    out, pull = jax.vjp(of_arrays, *arrays)
    return pull(out)


def _how(rule: QtRule, operand: Any, side: int, how_for: Callable[..., Any]) -> Any:
    """How an operand that is not a weight is quantized; None if it stays as it is."""
    if isinstance(operand, Paired) or not should_quantize(operand.dtype):
        return None
    fields = activation_fields(rule, side)
    return None if fields["qtype"] is None else how_for(side == 0, **fields)


def _rounded(operand: Any, how: Any, clip: bool) -> jax.Array:
    if not isinstance(operand, Paired):
        if how is None:
            return operand
        operand = pair(operand, how, clip=clip)
    array = operand.array
    return straight_through(dequantize(operand.quantized, array.dtype), array)


def _seen(operand: Any, how: Any) -> Any:
    """What the product sees, to be described."""
    if isinstance(operand, Paired):
        return operand.quantized
    return operand if how is None else ops.Deferred(operand, how)
