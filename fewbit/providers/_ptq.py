"""Post-training quantization: weights stored quantized, activations float or quantized too.

An activation's scale is measured on the batch, or the stored one if the Site has one.
Gradients are straight-through: the value of a product with quantized activations is the quantized
one, its derivative that of the float product with the dequantized weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fewbit import ops
from fewbit.interpreter import current
from fewbit.numerics import should_quantize
from fewbit.ops import as_float, granularity, with_derivative
from fewbit.planning import activation_fields
from fewbit.providers._provider import QuantizationProvider
from fewbit.qarray import HowToQuantize, PanelArray, QArray, with_tiles_within
from fewbit.rules import QuantizationRule

Hows = Sequence[HowToQuantize | None]


def _finishes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method that does what `wanted_finish()` says after its product.

    The mark is on the function: a subclass that overrides the method does not inherit it.
    """
    method.finishes = True  # type: ignore[attr-defined]
    return method


class BoxedParamProvider(QuantizationProvider):
    """Parameters live as `WithAux(QArray)`; the common base of PTQ and LoRA."""

    quantizes_params = True

    @_finishes
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
        bias, activation = current.wanted_finish()
        numbers = dict(dimension_numbers=dimension_numbers, ndims=(lhs.ndim, rhs.ndim))

        def product(lhs, rhs, bias):
            return ops.dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                out_sharding=out_sharding,
                bias=bias,
                activation=activation,
            )

        hows = activation_hows(
            rule,
            (lhs, rhs),
            lambda for_lhs, **how: granularity.dot_how(for_lhs=for_lhs, **numbers, **how),
            dimension_numbers[0],
        )
        return quantized_product(
            product,
            (lhs, rhs),
            hows,
            lambda a, b: ops.describe_dot(a, b, dimension_numbers, bias, activation),
            (bias,),
        )

    @_finishes
    def einsum(
        self,
        einsum_str: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        _dot_general: Callable[..., Any] | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        rule, _ = self._get_current_rule_and_op_id("einsum")
        bias, activation = current.wanted_finish()
        spec: dict[str, Any] = dict(einsum_str=einsum_str, ndims=tuple(x.ndim for x in operands))

        def product(*operands_and_bias):
            *operands, bias = operands_and_bias
            return ops.einsum(
                einsum_str,
                *operands,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
                bias=bias,
                activation=activation,
            )

        hows = activation_hows(
            rule,
            operands,
            lambda for_lhs, **how: granularity.einsum_how(for_lhs=for_lhs, **spec, **how),
            granularity.summed_axes(**spec),
        )
        return quantized_product(
            product,
            operands,
            hows,
            lambda *q: describe_einsum(einsum_str, *q, bias=bias, activation=activation),
            (bias,),
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

        def product(lhs, rhs):
            return ops.conv_general_dilated(
                lhs,
                rhs,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
                **settings,
            )

        def how(for_lhs, tile_size=None, **fields):
            return granularity.conv_how(dimension_numbers=numbers, for_lhs=for_lhs, **fields)

        hows = activation_hows(rule, (lhs, rhs), how)
        return quantized_product(
            product,
            (lhs, rhs),
            hows,
            lambda a, b: ops.describe_conv(a, b, **settings),
        )

    @_finishes
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
        bias, activation = current.wanted_finish()

        def product(lhs, rhs, group_sizes, group_offset, bias):
            return ops.ragged_dot(
                lhs,
                rhs,
                group_sizes,
                precision,
                preferred_element_type,
                group_offset,
                bias=bias,
                activation=activation,
            )

        hows = activation_hows(
            rule,
            (lhs, rhs),
            lambda for_lhs, **how: granularity.ragged_dot_how(for_lhs=for_lhs, **how),
            ([1], [1]),
        )
        return quantized_product(
            product,
            (lhs, rhs),
            hows,
            lambda a, b: ops.describe_ragged_dot(a, b, bias=bias, activation=activation),
            (group_sizes, group_offset, bias),
        )


class PtqProvider(BoxedParamProvider):
    """Post-training quantization with the given rules.

    >>> import fewbit, jax.numpy as jnp
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8', act_qtype='int8')]
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(3)}, jnp.ones((2, 3))
    >>> qparams = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    >>> fewbit.quantize_model(f, PtqProvider(rules))(qparams, x).shape
    (2, 3)
    """


def describe_einsum(einsum_str: str, *operands: Any, **finish: Any) -> str:
    """What runs a two-operand einsum: the product it is."""
    (a, b), out = granularity.split_subscripts(einsum_str, [x.ndim for x in operands])
    shared = [(a.index(c), b.index(c), c in out) for c in a if c in b]
    contracting = tuple(zip(*[(i, j) for i, j, kept in shared if not kept], strict=True)) or (
        (),
        (),
    )
    batch = tuple(zip(*[(i, j) for i, j, kept in shared if kept], strict=True)) or ((), ())
    lhs, rhs = operands
    return ops.describe_dot(lhs, rhs, (contracting, batch), **finish)


def activation_hows(
    rule: QuantizationRule | None,
    operands: Sequence[Any],
    how_for: Callable[..., HowToQuantize],
    summed: Sequence[Sequence[int]] = (),
) -> Hows:
    """How to quantize each operand that is not a stored weight; None leaves it as it is.

    `summed` are the axes of both operands that the product sums over. Between two activations a
    tile longer than these is one tile: the length of a sequence is no mistake in a rule.
    """
    if rule is None or rule.weight_qtype is None:
        return (None,) * len(operands)
    fields = [activation_fields(rule, i) for i in range(len(operands))]
    ways = [summed, summed[::-1]] if summed else []
    for own, other, (here, there) in zip(fields, operands[::-1], ways, strict=False):
        ndim = other.ndim if isinstance(other, QArray) else None
        own["tile_size"] = granularity.beside(own["tile_size"], ndim, here, there, own["qtype"])
    hows = [
        None
        if own["qtype"] is None or isinstance(x, QArray) or not should_quantize(x.dtype)
        else how_for(i == 0, **own)
        for i, (x, own) in enumerate(zip(operands, fields, strict=True))
    ]
    if any(isinstance(x, QArray) for x in operands):
        return tuple(hows)
    return tuple(
        how and with_tiles_within(how, x.shape) for how, x in zip(hows, operands, strict=True)
    )


def _float_side(x: Any) -> Any:
    """A constant operand of the float product; a kernel reads a weight in panels as it is."""
    return x if isinstance(x, PanelArray) else as_float(x)


def _varying(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[dict, dict]:
    """The operands that are differentiated, by number, and their tangents without symbols."""

    def is_zero(t):
        return isinstance(t, SymbolicZero)

    def plain_tangent(t):
        return jnp.zeros(t.shape, t.dtype) if is_zero(t) else t

    moving = {
        k: operand
        for k, (operand, t) in enumerate(zip(operands, tangents, strict=True))
        if not all(map(is_zero, jax.tree.leaves(t, is_leaf=is_zero)))
    }
    directions = {k: jax.tree.map(plain_tangent, tangents[k], is_leaf=is_zero) for k in moving}
    return moving, directions


def quantized_product(
    product: Callable[..., jax.Array],
    operands: Sequence[Any],
    hows: Hows,
    describe: Callable[..., str],
    rest: tuple[Any, ...] = (),
) -> jax.Array:
    """The product with operands quantized as `hows` say, differentiated as the float product.

    Operands reach the product as `ops.Deferred`: a kernel that can quantizes them on the way.

    `rest` are the product's other arguments: whatever is traced has to be an operand of the
    custom derivative, which may not close over it.
    """
    here = current.current_site()

    def quantized(k, x, static):
        how = hows[k]
        return x if how is None else ops.Deferred(x, how, *static.get(k, ()))

    def value(operands, static, rest):
        quantized_operands = [quantized(k, x, static) for k, x in enumerate(operands)]
        if here is not None:
            here.report(describe(*quantized_operands))
        return product(*quantized_operands, *rest)

    static = {} if here is None else dict(here.static)
    if all(how is None for how in hows):
        return value(operands, static, rest)

    @jax.custom_jvp
    def straight(operands, static, rest):
        return with_derivative(value(operands, static, rest), straight, operands, static, rest)

    def derivative(primals, tangents):
        operands, _, rest = primals
        moving, directions = _varying(operands, tangents[0])

        def float_product(moving):
            filled = [
                _float_side(x) if k not in moving else as_float(moving[k])
                for k, x in enumerate(operands)
            ]
            return product(*filled, *rest)

        _, tangent = jax.jvp(float_product, (moving,), (directions,))
        return straight(*primals), tangent

    straight.defjvp(derivative, symbolic_zeros=True)

    return straight(tuple(operands), static, rest)
