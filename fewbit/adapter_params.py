"""Parameters with adapters beside them, for trees that have no room for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class LoraParams:
    """Parameters of a plain function with the adapters that their tree has no room for.

    It takes the place of the parameters: `lora_function(LoraParams(params, adapters), x)`.
    `adapters` maps full names such as `'0_lora_a'` to arrays.

    >>> import jax.numpy as jnp
    >>> LoraParams([jnp.ones((4, 4))], {'0_lora_a': jnp.ones((4, 2))}).adapters['0_lora_a'].shape
    (4, 2)
    """

    params: Any
    adapters: Mapping[str, Any] = field(default_factory=dict)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keys = map(jax.tree_util.GetAttrKey, ("params", "adapters"))
        return tuple(zip(keys, (self.params, dict(self.adapters)), strict=True)), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "LoraParams":
        return cls(*children)
