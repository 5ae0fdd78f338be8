"""LoRA and QLoRA: a frozen base, float or quantized, with trainable low-rank adapters beside it.

The product with the base runs as in `providers/_ptq.py`; what the adapter adds,
`(alpha / rank) * x A B`, is float. With `act_qtype` the base meets quantized activations
(straight-through gradients), the adapter the float ones.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from fewbit.adapters._run import add_to_conv, add_to_product, add_to_ragged
from fewbit.interpreter import current_site
from fewbit.providers import BoxedParamProvider
from fewbit.rules import LoraRule, QuantizationRule
from fewbit.tracing import product_letters

_MSG_BOTH = (
    "Only one of rules and kwargs should be provided. Write LoraProvider([LoraRule(...), ...]), or "
    "LoraProvider(module_path='.*', rank=8, alpha=16.0) for one rule; got rules and {names}."
)
_MSG_NEITHER = (
    "LoraProvider needs rules: LoraProvider([LoraRule(...), ...]), or the fields of one: "
    "LoraProvider(module_path='.*', rank=8, alpha=16.0, weight_qtype='nf4', tile_size=64)."
)
_MSG_NO_ADAPTERS = (
    "LoraProvider got no LoraRule, so no adapter would be made: {rules}. Write "
    "LoraRule(rank=8, alpha=16.0, ...) for the modules that get one, or use PtqProvider(rules)."
)
_MSG_ACTIVATIONS = (
    "{rule!r} has act_qtype without weight_qtype, which would be unused: a float base meets float "
    "activations. Set weight_qtype too, or leave act_qtype out."
)


class LoraProvider(BoxedParamProvider):
    """Adapters over a frozen base: with rules, or with the fields of one `LoraRule`.

    A `LoraRule` with `weight_qtype=None` is ordinary LoRA on a float base. Plain rules may stand
    beside it: `QuantizationRule(weight_qtype='int8')` quantizes without an adapter.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> provider = LoraProvider(rank=2, alpha=4.0, weight_qtype='int8')
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
    >>> plan = fewbit.plan(f, provider, params, x)
    >>> params = fewbit.lora.init(plan, fewbit.quantize_params(params, plan), jax.random.key(0))
    >>> sorted(params), fewbit.apply_lora_to_model(f, provider)(params, x).shape
    (['w', 'w_lora_a', 'w_lora_b'], (1, 4))
    """

    adapts = True
    refuses = ()

    def __init__(
        self,
        rules: Iterable[QuantizationRule] | None = None,
        *,
        disable_jit: bool = False,
        strict: bool = True,
        **one_rule_kwargs: Any,
    ):
        if rules is not None and one_rule_kwargs:
            raise ValueError(_MSG_BOTH.format(names=", ".join(one_rule_kwargs)))
        if rules is None:
            if not {"rank", "alpha"} <= set(one_rule_kwargs):
                raise ValueError(_MSG_NEITHER)
            rules = [LoraRule(**one_rule_kwargs)]
        super().__init__(rules, disable_jit=disable_jit, strict=strict)
        if not any(isinstance(rule, LoraRule) for rule in self.rules):
            raise ValueError(_MSG_NO_ADAPTERS.format(rules=list(self.rules)))

    def _init_rule(self, rule: Any) -> QuantizationRule:
        rule = super()._init_rule(rule)
        if isinstance(rule, LoraRule) and rule.weight_qtype is None and rule.act_qtype is not None:
            raise ValueError(_MSG_ACTIVATIONS.format(rule=rule))
        return rule

    @property
    def has_dropout(self) -> bool:
        """Whether a rule leaves out a share of the inputs of its adapters while training."""
        return any(isinstance(rule, LoraRule) and rule.dropout > 0 for rule in self.rules)

    def adapter_rule(self, leaf: str, op: str) -> LoraRule | None:
        """The rule of a weight's adapter, for a submodule that is called on its own."""
        rule = self.rule_for(leaf.rpartition("/")[0], op)[1]
        return rule if isinstance(rule, LoraRule) else None

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
        settings = (dimension_numbers, precision, preferred_element_type)
        out = super().dot_general(lhs, rhs, *settings, out_sharding=out_sharding)
        adapter = _adapter()
        if adapter is None:
            return out
        letters = product_letters(dimension_numbers, lhs.ndim, rhs.ndim)
        return add_to_product(adapter, letters, (lhs, rhs), out, precision, out_sharding)

    def einsum(
        self,
        einsum_str: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        _dot_general: Callable[..., Any] | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        out = super().einsum(
            einsum_str,
            *operands,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        adapter = _adapter()
        if adapter is None:
            return out
        return add_to_product(adapter, einsum_str, operands, out, precision, out_sharding)

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
        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        settings: dict[str, Any] = dict(
            window_strides=window_strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
            precision=precision,
        )
        out = super().conv_general_dilated(
            lhs,
            rhs,
            dimension_numbers=numbers,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            **settings,
        )
        adapter = _adapter()
        return out if adapter is None else add_to_conv(adapter, lhs, out, numbers, settings)

    def ragged_dot(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: Any = None,
    ) -> jax.Array:
        settings = dict(precision=precision, group_offset=group_offset)
        out = super().ragged_dot(
            lhs, rhs, group_sizes, preferred_element_type=preferred_element_type, **settings
        )
        adapter = _adapter()
        return out if adapter is None else add_to_ragged(adapter, lhs, out, group_sizes, settings)


def _adapter() -> Any:
    """The adapter of the Site that is being run, if it has one."""
    here = current_site()
    return None if here is None else here.adapter
