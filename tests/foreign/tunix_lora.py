"""LoRA and QLoRA of Tunix' own models, by Tunix' own functions: the losses of a few steps.

    python tunix_lora.py FAMILY [QTYPE]                         with Qwix
    python -m fewbit.as_qwix tunix_lora.py FAMILY [QTYPE]       with fewbit

Prints one line of JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.cli.utils.model import apply_lora_to_model
from tunix.sft import hooks, peft_trainer

STEPS, VOCABULARY, LENGTH = 4, 64, 16
SHAPE = dict(num_layers=2, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2)


def make(family):
    """A model of two layers, and the modules that get adapters."""
    rngs = nnx.Rngs(0)
    if family in ("llama3", "qwen2", "qwen3"):
        model = __import__(f"tunix.models.{family}.model", fromlist=["model"])
        config = model.ModelConfig(vocab_size=VOCABULARY, norm_eps=1e-6, rope_theta=10_000, **SHAPE)
        cls = {"llama3": "Llama3", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
        return getattr(model, cls)(config, rngs=rngs)
    from tunix.models.gemma3 import model

    config = model.ModelConfig(
        num_embed=VOCABULARY, param_dtype=jnp.float32, sliding_window_size=8, **SHAPE
    )
    return model.Gemma3(config, rngs=rngs)


def batch():
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (4, LENGTH))
    return peft_trainer.TrainingInput(
        input_tokens=tokens.astype(np.int32), input_mask=np.ones((4, LENGTH), np.int32)
    )


def as_inputs(given):
    """What the trainer hands to the model: causal attention over the whole batch."""
    rows, length = given.input_tokens.shape
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), bool))[None], (rows, length, length)
    )
    positions = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
    return {
        "input_tokens": given.input_tokens,
        "input_mask": given.input_mask,
        "positions": positions,
        "attention_mask": mask,
    }


class Losses(hooks.TrainingHooks):
    """Remembers the loss of each step."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer): ...

    def on_train_end(self, trainer): ...

    def on_train_step_start(self, trainer): ...

    def on_train_step_end(self, trainer, train_step, train_loss, *rest):
        self.seen.append(float(train_loss))

    def on_eval_step_start(self, trainer): ...

    def on_eval_step_end(self, trainer, eval_loss, *rest): ...


def main(family, qtype=None):
    model = make(family)
    settings = {"module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 8.0}
    if qtype is not None:
        settings |= {"weight_qtype": qtype, "tile_size": 16}
    model = apply_lora_to_model(model, None, settings)
    adapters = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=STEPS)
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), config)
    trainer = trainer.with_gen_model_input_fn(as_inputs)
    losses = Losses()
    trainer.with_training_hooks(losses)
    trainer.train([batch()] * STEPS)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(json.dumps({"losses": losses.seen, "adapters": len(adapters), "bytes": stored}))


if __name__ == "__main__":
    main(*sys.argv[1:])
