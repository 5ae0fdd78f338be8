"""Models with adapters: LoRA and QLoRA through the same front ends as every other mode."""

from collections.abc import Sequence
from typing import Any

from fewbit._errors import describe
from fewbit.models import is_keras, quantize_model

_MSG_PROVIDER = (
    "apply_lora_to_model takes a LoraProvider as its second argument, got {found}. Write "
    "apply_lora_to_model(model, fewbit.LoraProvider(rank=8, alpha=16.0), ...)."
)
_MSG_KERAS = (
    "Keras has adapters of its own: quantize the model with fewbit.keras.quantize_model(model, "
    "config), then layer.enable_lora(rank) on its layers or backbone.enable_lora(rank)."
)


def apply_lora_to_model(
    model: Any,
    provider: Any,
    *model_inputs: Any,
    methods: Sequence[str] = ("__call__",),
    **kwargs: Any,
) -> Any:
    """A model with low-rank adapters over a frozen base, which its rules may also quantize.

    Linen modules take no inputs: their `init` makes the adapters as entries `<w>_lora_a` and
    `<w>_lora_b` of 'params'. For a plain function, or over parameters that are there already,
    `fewbit.lora.init(plan, params, key)` makes them. An NNX model takes example inputs and
    `rngs=nnx.Rngs(seed)`, and gets `nnx.LoRAParam` attributes beside its weights.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(64)}, jnp.ones((1, 64))
    >>> provider = fewbit.LoraProvider(rank=8, alpha=16.0, weight_qtype='nf4', tile_size=64)
    >>> plan = fewbit.plan(f, provider, params, x)
    >>> params = fewbit.lora.init(plan, fewbit.quantize_params(params, plan), jax.random.key(0))
    >>> lora = apply_lora_to_model(f, provider)
    >>> trained, frozen = fewbit.lora.split(params)
    >>> loss = lambda trained: lora(fewbit.merge_trainable(trained, frozen), x).sum()
    >>> {name: g.shape for name, g in jax.grad(loss)(trained).items() if g is not None}
    {'w_lora_a': (64, 8), 'w_lora_b': (8, 64)}
    """
    if is_keras(model):
        raise TypeError(_MSG_KERAS)
    if not getattr(provider, "adapts", False):
        raise TypeError(_MSG_PROVIDER.format(found=describe(provider)))
    return quantize_model(model, provider, *model_inputs, methods=methods, **kwargs)
