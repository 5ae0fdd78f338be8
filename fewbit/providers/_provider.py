"""The provider: rules plus what happens at a Site. Subclass it to change an op.

The interpreter calls `provider.dot_general(...)`, `.einsum(...)`, `.conv_general_dilated(...)`,
`.ragged_dot(...)` or `.take(...)` for each Site, with the weight as a `QArray` when it is stored
quantized. Inside such a method `_get_current_rule_and_op_id(op)` tells the rule and the Site's
number.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import describe
from fewbit.interpreter import current
from fewbit.ops import as_float
from fewbit.planning import Plan
from fewbit.qarray import parse_method
from fewbit.rules import LoraRule, QuantizationRule, changed_fields, first_match

_MSG_NOT_TRACED = (
    "Quantization is not completed yet. Please call `quantize_model` before calling "
    "`get_unused_rules`. A Linen model or a plain function is traced at its first `init`, `apply` "
    "or call; `fewbit.plan(model, rules, *inputs)` tells at once which rules match nothing."
)
_MSG_NO_MODULE = (
    "Current module is not known. `_get_current_rule_and_op_id` answers only while a quantized "
    "model is traced or run; outside of one `fewbit.get_current_rule(op_name)` returns None."
)
_MSG_RULES = "A provider takes a list of QuantizationRule objects, got {found}. {fix}"
_WRITE_RULE = (
    "Write QuantizationRule(module_path='.*', weight_qtype='int8'), or read rules from a file with "
    "fewbit.rules_from_yaml(path)."
)
_MSG_NOTHING_PATCHED = (
    "{where}{name} has no meaning in fewbit: no function of JAX or Flax is replaced while a model "
    "runs, so there is nothing to intercept. The interpreter calls the provider's own methods: "
    "override dot_general, einsum, conv_general_dilated or ragged_dot in a subclass."
)
_MSG_REFUSED = (
    "{provider} makes no adapters, so it would ignore the rank and alpha of {rule!r}. Give the "
    "rule to a LoraProvider; without adapters, {instead}."
)
_MSG_DELAYED = (
    "{provider} does not train, so it has no steps to take the ranges of {rule!r} from. Train with "
    "a QtProvider; fewbit.to_ptq(model, params, amax_history=...) makes the model that serves."
)
# Qwix's providers have these. What it hangs on them is done by the interpreter here.
_INTERCEPTION = (
    *("get_intercept_map", "get_interceptors", "nn_param", "promote_dtype", "asarray", "dot"),
    *("_create_dot_general_qt_config", "_create_conv_general_qt_config"),
    *("_create_ragged_dot_qt_config", "_update_and_get_quant_stat"),
)


class QuantizationProvider:
    """Rules, and the float ops: the base that modes build on.

    >>> from fewbit import QuantizationRule
    >>> provider = QuantizationProvider([QuantizationRule(module_path='up', weight_qtype='int8')])
    >>> provider.rule_for('up', 'dot_general')[0], provider.rule_for('down', 'dot_general')[0]
    (0, None)
    """

    quantizes_params = False  # whether weights are stored quantized (PTQ) or stay float
    trains = False  # whether float weights are quantized while the model runs, for gradients
    collects = False  # whether it collects ranges of activations while it trains
    delays = False  # whether it makes scales from histories, so that calls need these
    draws_noise = False  # whether it rounds stochastically, so that calls need a key
    learns = False  # whether scales of weights are parameters, or were while it trained
    adapts = False  # whether weights may have low-rank adapters beside them
    idle: tuple[str, ...] = ()  # what its rules set and nothing reads, for the plan
    refuses: tuple[type[QuantizationRule], ...] = (LoraRule,)  # kinds of rules it cannot carry out

    def __init__(
        self,
        rules: Iterable[QuantizationRule],
        *,
        disable_jit: bool = False,
        strict: bool = True,
    ):
        self._check_methods()
        if isinstance(rules, QuantizationRule):
            rules = [rules]
        _check_rules(rules)
        self.rules: tuple[QuantizationRule, ...] = tuple(self._init_rule(rule) for rule in rules)
        self.disable_jit = disable_jit
        self.strict = strict
        self.learns = any(
            parse_method(rule.weight_calibration_method).learned for rule in self.rules
        )
        self._used_rules: set[int] | None = None
        self._kernel_rules: set[int] = set()
        self._kernel_ops: set[str] = set()

    def _check_methods(self) -> None:
        """Raise if a subclass overrides what is never called: its quantization would be missing.

        Not where the class is made: a program may define it and use another.
        """
        for cls in type(self).__mro__:
            for name in _INTERCEPTION:
                if name in vars(cls):
                    where = f"{cls.__name__} overrides a method that is never called: "
                    raise TypeError(_MSG_NOTHING_PATCHED.format(where=where, name=name))

    def __getattr__(self, name: str) -> Any:
        if name in _INTERCEPTION:
            where = f"{type(self).__name__}."
            raise AttributeError(_MSG_NOTHING_PATCHED.format(where=where, name=name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _init_rule(self, rule: Any) -> QuantizationRule:
        if not isinstance(rule, QuantizationRule):
            fields = _rule_fields(rule)
            found = describe(rule) if fields is None else f"a {type(rule).__name__}"
            fix = _WRITE_RULE if fields is None else f"Write QuantizationRule(**{fields!r})."
            raise TypeError(_MSG_RULES.format(found=f"{found} in it", fix=fix))
        if isinstance(rule, self.refuses):
            plain = QuantizationRule(**_common_fields(rule))
            instead = "leave it out" if rule.weight_qtype is None else f"write {plain!r}"
            name = type(self).__name__
            raise TypeError(_MSG_REFUSED.format(provider=name, rule=rule, instead=instead))
        if getattr(rule, "delays", False) and not self.trains:
            raise ValueError(_MSG_DELAYED.format(provider=type(self).__name__, rule=rule))
        return rule

    # Two providers made alike are alike, so that models quantized alike share classes and jit
    # caches. A subclass may hold state of its own: it is only itself.
    def _key(self) -> Any:
        if type(self).__module__.startswith("fewbit."):
            return (type(self), self.rules, self.disable_jit, self.strict)
        return None

    def __eq__(self, other: object) -> bool:
        if self is other or self._key() is None:
            return self is other
        return isinstance(other, QuantizationProvider) and self._key() == other._key()

    def __hash__(self) -> int:
        key = self._key()
        return object.__hash__(self) if key is None else hash(key)

    def rule_for(self, path: str, op: str) -> tuple[int | None, QuantizationRule | None]:
        """The first rule that matches, with its number."""
        return first_match(self.rules, path, op)

    def rule_for_kernel(self, path: str, op: str) -> QuantizationRule | None:
        """As `rule_for`, for a kernel that asks by its own op name; counts as a use of the rule."""
        index, rule = self.rule_for(path, op)
        if index is not None:
            self._kernel_rules.add(index)
            self._kernel_ops.add(op)
        return rule

    def asked_by_kernel(self, index: int) -> bool:
        """Whether a kernel has asked for this rule by its own op name."""
        return index in self._kernel_rules

    def kernel_op_names(self) -> frozenset[str]:
        """The names by which kernels have asked for rules."""
        return frozenset(self._kernel_ops)

    def check_ready(self, rules: Mapping[str, QuantizationRule]) -> None:
        """A hook before Sites (by id) run under these rules: raise if this mode cannot run one."""

    def gradient_products(
        self, ts: Any, rule: QuantizationRule, stored: Any
    ) -> tuple[str | None, str | None]:
        """What the plan says of the two gradient products of a Site; a mode that trains does."""
        return None, None

    def mark_used(self, indices: Iterable[int]) -> None:
        self._used_rules = (self._used_rules or set()) | set(indices)

    def get_unused_rules(self) -> Sequence[QuantizationRule]:
        """Rules that have matched no Site in what was traced so far."""
        if self._used_rules is None:
            raise ValueError(_MSG_NOT_TRACED)
        return [
            rule
            for i, rule in enumerate(self.rules)
            if i not in self._used_rules | self._kernel_rules
        ]

    def process_model_inputs(
        self, model: Any, model_args: tuple, model_kwargs: dict
    ) -> tuple[Any, tuple, dict]:
        """A hook before a quantized model is called; returns what to call it with."""
        return model, model_args, model_kwargs

    def process_model_output(self, method_name: str, model_output: Any) -> Any:
        """A hook after a quantized model was called."""
        return model_output

    def _get_current_rule_and_op_id(
        self, op_name: str, *, only_rule: bool = False, repeated_call: bool = False
    ) -> tuple[QuantizationRule | None, str | None]:
        here = current.current_site()
        if here is not None:
            return here.rule, None if only_rule else here.site.op_id
        if not current.is_tracing():
            raise ValueError(_MSG_NO_MODULE)
        return current.get_current_rule(op_name), None

    # --- the ops, in float: a weight stored quantized is dequantized first ------------------------

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
        return jax.lax.dot_general(
            as_float(lhs),
            as_float(rhs),
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )

    def einsum(
        self,
        einsum_str: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        _dot_general: Callable[..., Any] = jax.lax.dot_general,
        out_sharding: Any = None,
    ) -> jax.Array:
        floats = [as_float(x) for x in operands]
        return jnp.einsum(
            einsum_str,
            *floats,
            precision=precision,
            preferred_element_type=preferred_element_type,
            _dot_general=_dot_general,
            out_sharding=out_sharding,
        )

    def conv_general_dilated(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        return jax.lax.conv_general_dilated(as_float(lhs), as_float(rhs), *args, **kwargs)

    def ragged_dot(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: Any = None,
    ) -> jax.Array:
        return jax.lax.ragged_dot(
            as_float(lhs),
            as_float(rhs),
            group_sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
            group_offset=group_offset,
        )

    def ragged_dot_general(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        ragged_dot_dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: Any = None,
    ) -> jax.Array:
        return jax.lax.ragged_dot_general(
            as_float(lhs),
            as_float(rhs),
            group_sizes,
            ragged_dot_dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            group_offset=group_offset,
        )


def _check_rules(rules: Any) -> None:
    found, fix = describe(rules), _WRITE_RULE
    if isinstance(rules, QuantizationProvider):
        name = type(rules).__name__
        fix = f"It is a provider already: use it as it is, or {name}(provider.rules)."
    elif isinstance(rules, type) and issubclass(rules, QuantizationProvider):
        fix = f"Make a provider of it: {rules.__name__}(rules)."
    elif isinstance(rules, Plan):
        fix = "Its rules are plan.rules."
    elif isinstance(rules, Mapping):
        fields = _rule_fields(rules)
        if fields is not None:
            found, fix = "a mapping", f"Write [QuantizationRule(**{fields!r})]."
    elif isinstance(rules, int | float):
        found = repr(rules)
    elif isinstance(rules, Iterable) and not isinstance(rules, str) and not hasattr(rules, "dtype"):
        return
    raise TypeError(_MSG_RULES.format(found=found, fix=fix))


def _rule_fields(value: Any) -> dict[str, Any] | None:
    """A mapping of nothing but fields of a rule, as a dict; None for any other value."""
    names = {field.name for field in dataclasses.fields(QuantizationRule)}
    is_rule = isinstance(value, Mapping) and value and set(value) <= names
    return dict(value) if is_rule else None


def _common_fields(rule: QuantizationRule) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(QuantizationRule)}
    return {name: value for name, value in changed_fields(rule).items() if name in names}
