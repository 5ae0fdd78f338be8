"""Training with fewer bits: the forward product quantized (QAT), the two gradients too if asked.

Weights stay float and get gradients; each is quantized once per step, as it will be stored after
training. Products are those of `fewbit.ops`, configured per operand from the Site's rule.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from fewbit import ops
from fewbit.interpreter import current_site, straight_through
from fewbit.numerics import format_of, qtype_name, should_quantize
from fewbit.ops import (
    Paired,
    clip_gradient,
    conv_general_qt,
    dot_general_qt,
    einsum_qt,
    granularity,
    pair,
    ragged_dot_qt,
)
from fewbit.planning import Request, activation_fields, activation_how, weight_operand
from fewbit.providers import QuantizationProvider, describe_einsum
from fewbit.qarray import dequantize, parse_method, quantize_static
from fewbit.rules import (
    ConvGeneralQtConfig,
    DotGeneralQtConfig,
    QtRule,
    QuantizationRule,
    RaggedDotQtConfig,
    upgrade,
)
from fewbit.tracing import TracedSite
from fewbit.training._delayed import Prepared, prepared
from fewbit.training._noise import get_noise_fn

# --- What the plan of a model that trains says of the two gradient products of a Site -------------


def gradient_products(ts: TracedSite, rule: QtRule, stored: Request | None) -> tuple[str, str]:
    """The types of (incoming gradient, residual) for the gradients of lhs and of rhs."""
    return _product(ts, rule, stored, 0), _product(ts, rule, stored, 1)


def _product(ts: TracedSite, rule: QtRule, stored: Request | None, side: int) -> str:
    own, name = dict(rule.additional_qt_config or {}), ("dlhs", "drhs")[side]
    if not should_quantize((ts.site.lhs, ts.site.rhs)[side].dtype):
        return "-"
    gradient = own.get(f"{name}_grad_qtype", rule.bwd_qtype)
    if gradient is None:
        return "float"
    residual = own.get(f"{name}_residual_qtype")
    codes = None if own.get("use_original_residuals") else _codes(ts, rule, stored, 1 - side)
    text = f"{qtype_name(gradient)} x {codes or (qtype_name(residual) if residual else 'float')}"
    is_weight = stored is not None and side == weight_operand(ts)
    tile = own.get(f"{name}_tile_size", rule.bwd_weight_grad_tile_size if is_weight else None)
    if isinstance(tile, Mapping):
        text += " tile " + "x".join(f"{size:g}" for size in tile.values())
    elif tile is not None:
        text += f" tile {tile:g}"
    return text + (" stochastic" if rule.bwd_stochastic_rounding is not None else "")


def _codes(ts: TracedSite, rule: QtRule, stored: Request | None, side: int) -> str | None:
    """The type of an operand whose forward codes serve a gradient product; None if they do not."""
    if stored is not None and side == weight_operand(ts):
        qtype, method = stored.how.qtype, stored.how.calibration_method
        tiled = bool(stored.how.tiled_axes)
    else:
        how = activation_how(ts, side, rule)
        if how is None:
            return None
        qtype, method, tiled = how.qtype, how.calibration_method, bool(how.tiled_axes)
    if tiled or parse_method(method).asymmetric:
        return None
    form = format_of(qtype)
    return None if form.kind == "table" or form.tile is not None else qtype_name(qtype)


def idle_settings(number: int, rule: QuantizationRule) -> list[str]:
    """Notes on what a rule sets for gradients that it leaves float.

    >>> print(*idle_settings(0, QtRule(weight_qtype='int8', bwd_stochastic_rounding='uniform')))
    rule 0: bwd_stochastic_rounding='uniform' acts on nothing, gradients are float (bwd_qtype=None)
    """
    if not isinstance(rule, QtRule) or rule.quantizes_gradients:
        return []
    idle = ("bwd_stochastic_rounding", "bwd_weight_grad_tile_size")
    return [
        f"rule {number}: {name}={value!r} acts on nothing, gradients are float (bwd_qtype=None)"
        for name in idle
        if (value := getattr(rule, name)) is not None
    ]


# --- From a rule for training to the config of its three products at one Site ---------------------

Config = TypeVar("Config")
Axes = Sequence[Sequence[int]]
_NOISE_FIELDS = tuple(f"{side}_stochastic_rounding_noise_fn" for side in ("dlhs", "drhs"))

_MSG_NO_KEY = (
    "{where} rounds its gradients stochastically (bwd_stochastic_rounding={method!r}), which needs "
    "a key. Linen: model.apply(variables, x, rngs={{'stochastic_rounding': key}}); NNX: "
    "model.set_attributes(qwix_rngs=nnx.Rngs(stochastic_rounding=0)); a function: "
    "f(params, x, stochastic_rounding=key). Pass another key at every step."
)


def qt_config(
    kind: type[Config], rule: Any, operands: Sequence[Any], summed: Axes = ((), ())
) -> Config:
    """The config of a Site: what its rule says of each operand of each product.

    `summed` are the axes of both that are summed over. A rule's mapping of tiles names the weight's
    axes, that of a config those of rhs.
    """
    fields: dict[str, Any] = {}
    here = current_site()
    if here is not None and "grad" in here.delayed:
        fields["grad_delayed_range"] = here.delayed["grad"]
    for side, (name, operand) in enumerate(zip(("lhs", "rhs"), operands, strict=True)):
        if not isinstance(operand, Paired):  # a weight comes with its codes
            own = activation_fields(rule, side)
            fields[f"{name}_qtype"] = own["qtype"]
            fields[f"{name}_calibration_method"] = own["calibration_method"]
            fields[f"{name}_disable_channelwise_axes"] = own.get("disable_channelwise_axes", False)
        gradient = f"d{name}"
        fields[f"{gradient}_grad_qtype"] = rule.bwd_qtype
        fields[f"{gradient}_grad_calibration_method"] = rule.bwd_calibration_method
        fields[f"{gradient}_grad_disable_channelwise_axes"] = rule.disable_channelwise_axes
        is_weight = isinstance(operand, Paired) and (here is None or here.weight == side)
        if is_weight and rule.bwd_qtype is not None:
            fields[f"{gradient}_tile_size"] = rule.bwd_weight_grad_tile_size
    fields["tile_size"] = rule.tile_size
    fields |= _noise(rule)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    fields |= dict(rule.additional_qt_config or {})
    if "tile_size" not in known:  # a convolution, whose rule was refused if it has one
        fields.pop("tile_size")
    elif isinstance(fields["tile_size"], Mapping):
        weight = here.weight if here is not None else _paired(operands)
        fields["tile_size"] = _on_rhs(fields["tile_size"], operands, summed, weight)
    for name, operand in zip(("lhs", "rhs"), operands, strict=True):
        if isinstance(operand, Paired):
            fields.pop(f"{name}_qtype", None)
    return kind(**fields)


def _paired(operands: Sequence[Any]) -> int | None:
    return next((k for k in (1, 0) if isinstance(operands[k], Paired)), None)


def _on_rhs(tiles: Any, operands: Sequence[Any], summed: Axes, weight: int | None) -> Any:
    """Tiles of the weight's axes as tiles of those of rhs; of two activations nothing is meant."""
    if weight is None:
        return None
    if weight == 1:
        return tiles
    return granularity.beside(tiles, operands[0].ndim, summed[1], summed[0])


def _noise(rule: QtRule) -> dict[str, Any]:
    """One function for each gradient: their noise is independent."""
    if rule.bwd_stochastic_rounding is None or not rule.quantizes_gradients:
        return {}
    here, method = current_site(), rule.bwd_stochastic_rounding
    key = None if here is None else jax.random.key(0) if here.planning else here.noise

    where = "This product" if here is None else here.site.id

    def missing(shape: Any) -> Any:  # evaluating needs no key; only gradients do
        raise ValueError(_MSG_NO_KEY.format(where=where, method=method))

    made: list[Any] = [missing, missing]
    if key is not None:
        keys = jax.random.split(key)
        made = [get_noise_fn(method, keys[k], rule.channelwise_noise_axes) for k in (0, 1)]
    return dict(zip(_NOISE_FIELDS, made, strict=True))


# --- The provider of training: what it does at each kind of product -------------------------------

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
        options = dict(
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        return self._product(
            (lhs, rhs),
            rule,
            lambda for_lhs, **how: granularity.dot_how(for_lhs=for_lhs, **numbers, **how),
            lambda a, b: ops.describe_dot(a, b, dimension_numbers),
            lambda a, b: super(QtProvider, self).dot_general(a, b, dimension_numbers, **options),
            lambda a, b: dot_general_qt(
                a,
                b,
                dimension_numbers,
                qt_config(DotGeneralQtConfig, rule, (a, b), dimension_numbers[0]),
                **options,
            ),
            dimension_numbers[0],
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
        summed = granularity.summed_axes(**spec)
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
                einsum_str, a, b, qt_config(DotGeneralQtConfig, rule, (a, b), summed), **options
            ),
            summed,
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
                a, b, group_sizes, qt_config(RaggedDotQtConfig, rule, (a, b), ([1], [1])), **options
            ),
            ([1], [1]),
        )

    def _product(
        self,
        operands: Sequence[Any],
        rule: Any,
        how_for: Callable[..., Any],
        describe: Callable[..., str],
        float_product: Callable[..., jax.Array],
        product: Callable[..., jax.Array],
        summed: Axes = ((), ()),
    ) -> jax.Array:
        """The quantized product, or the float one of rounded operands; says which."""
        here = current_site()
        operands = _as_trained(operands, rule, how_for)
        hows = [_how(rule, k, operands, how_for, summed) for k in (0, 1)]
        clip = not (rule.additional_qt_config or {}).get("disable_gradient_clipping", False)
        ready = Prepared(list(operands))
        if here is not None:
            for k, scale in here.static.items():
                x = operands[k]
                q = quantize_static(jax.lax.stop_gradient(x), hows[k], *scale)
                ready.operands[k] = Paired(clip_gradient(x, q) if clip else x, q)
            own = [how and dict(qtype=how.qtype, scale_dtype=how.scale_dtype) for how in hows]
            ready = prepared(ready.operands, here.delayed, own, clip)
            seen = map(_seen, ready.operands, hows)
            here.report("emulated" if self.emulate else describe(*seen))
        if self.emulate:
            pairs = zip(ready.operands, hows, strict=True)
            return ready.told(float_product(*(_rounded(x, how, clip) for x, how in pairs)))
        if here is not None and here.planning:
            # What is wrong with a gradient is known before training.
            jax.eval_shape(functools.partial(_gradients, product), ready.operands)
        return ready.told(product(*ready.operands))


def _gradients(product: Callable[..., jax.Array], operands: Sequence[Any]) -> Any:
    """Both gradients of a product, in some direction."""

    def of_arrays(*arrays: Any) -> jax.Array:
        pairs = zip(operands, arrays, strict=True)
        return product(*(Paired(a, x.quantized) if isinstance(x, Paired) else a for x, a in pairs))

    arrays = [x.array if isinstance(x, Paired) else x for x in operands]
    out, pull = jax.vjp(of_arrays, *arrays)
    return pull(out)


def _as_trained(operands: Sequence[Any], rule: QtRule, how_for: Callable[..., Any]) -> list[Any]:
    """Operands with the weight's codes, where a subclass was given its floats alone.

    If it hands on something else than what it was given, that is quantized as the weight would be.
    """
    here, found = current_site(), list(operands)
    for k, planned in (here.trained if here is not None else {}).items():
        if found[k] is planned.array:
            found[k] = planned
        elif not isinstance(found[k], Paired):
            method = rule.weight_calibration_method
            as_act = rule.replace(act_qtype=rule.weight_qtype, act_calibration_method=method)
            found[k] = pair(found[k], how_for(k == 0, **activation_fields(as_act, k)))
    return found


def _how(
    rule: QtRule, side: int, operands: Sequence[Any], how_for: Callable[..., Any], summed: Axes
) -> Any:
    """How an operand that is not a weight is quantized; None if it stays as it is."""
    operand, other = operands[side], operands[1 - side]
    if isinstance(operand, Paired) or not should_quantize(operand.dtype):
        return None
    fields = activation_fields(rule, side)
    if fields["qtype"] is None:
        return None
    ndim = other.ndim if isinstance(other, Paired) else None
    fields["tile_size"] = granularity.beside(
        fields["tile_size"], ndim, summed[side], summed[1 - side], fields["qtype"]
    )
    return how_for(side == 0, **fields)


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
