"""Products for a single Linen layer, which draws keys and keeps amax histories for them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from fewbit.training import COLLECTION, DotGeneral, Einsum, check_drop_in, rule_histories

STREAM = "stochastic_rounding"
_MSG_STREAM = (
    "{who} in {path!r} rounds gradients stochastically and finds no key. Pass "
    "rngs={{'stochastic_rounding': key}} to apply, with a key that differs from step to step."
)
_MSG_HISTORY = (
    "{who} in {path!r} trains with delayed scales and finds no {name!r} among the variables. Pass "
    "the collection that init made, beside the parameters: model.apply({{'params': params, "
    "'_overwrite_with_gradient': histories}}, x)."
)
_MSG_AGAIN = (
    "{who} in {path!r} is called more than once in a step, and Flax would add up what its calls "
    "make of its amax histories. Use quantize_model(model, QtProvider(rules)), where every call "
    "has histories of its own, or ranges that are measured ('absmax') in this layer's rule."
)


class _Drawing(nn.Module):
    """A parameterless module; its config or rule is its one field."""

    config_or_rule: Any

    def _made(self, kind: Any) -> Any:
        name = type(self).__name__
        check_drop_in(name, self.config_or_rule, has_key=True, has_histories=True)
        histories = self._histories(name)
        if getattr(self.config_or_rule, "bwd_stochastic_rounding", None) is None:
            return kind(self.config_or_rule, histories=histories)
        if not self.has_rng(STREAM):
            if not self.is_initializing():
                raise ValueError(_MSG_STREAM.format(who=name, path="/".join(self.path)))
            rule = self.config_or_rule.replace(bwd_stochastic_rounding=None)
            return kind(rule, histories=histories)
        return kind(self.config_or_rule, self.make_rng(STREAM), histories)

    def _histories(self, who: str) -> dict[str, Any] | None:
        """Those of this layer, in the collection that Flax' TrainState overwrites."""
        if not getattr(self.config_or_rule, "delays", False):
            return None
        found, path = {}, "/".join(self.path)
        for name, value in rule_histories(self.config_or_rule).items():
            known = self.has_variable(COLLECTION, name)
            if known and self.is_initializing():
                raise ValueError(_MSG_AGAIN.format(who=who, path=path))
            if not known and not self.is_mutable_collection(COLLECTION):
                raise ValueError(_MSG_HISTORY.format(who=who, path=path, name=name))
            found[name] = self.variable(COLLECTION, name, lambda value=value: value).value
        return found


class QtDotGeneral(_Drawing):
    """The product of one layer: `nn.Dense(dot_general_cls=functools.partial(QtDotGeneral, rule))`.

    >>> import functools, fewbit, jax.numpy as jnp
    >>> rule = fewbit.QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')
    >>> layer = nn.Dense(3, dot_general_cls=functools.partial(QtDotGeneral, rule))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 4)))[0].shape
    (2, 3)
    """

    @nn.compact
    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kw: Any) -> Any:
        return self._made(DotGeneral)(lhs, rhs, dimension_numbers, *args, **kw)


class QtEinsum(_Drawing):
    """The einsum twin: a module to be called like `jnp.einsum` with two operands.

    >>> import fewbit, jax.numpy as jnp
    >>> rule = fewbit.QtRule(weight_qtype='int8', act_qtype='int8')
    >>> QtEinsum(rule).apply({}, 'ab,bc->ac', jnp.ones((2, 4)), jnp.ones((4, 3))).shape
    (2, 3)
    """

    @nn.compact
    def __call__(self, einsum_str: str, *operands: Any, **kw: Any) -> jax.Array:
        return self._made(Einsum)(einsum_str, *operands, **kw)
