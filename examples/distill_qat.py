"""QAT with distillation: a 2-bit student learns what the float model says, in ten lines of loop.

The teacher is a float model. The student has the same parameters to start with and 2-bit weights in
every product; its loss is the divergence from the teacher's distribution, which says more about a
step than one right character does. Printed: the divergence on held-out text, before and after.

    python examples/distill_qat.py [--steps 300]
"""

from __future__ import annotations

import argparse

import char_lm
import jax
import jax.numpy as jnp
import optax

import fewbit

SIZE = char_lm.Size(layers=2, width=64, heads=2, context=64, batch=16, steps=300)
RULES = [
    fewbit.QtRule(module_path="head", weight_qtype="int8"),
    fewbit.QtRule(module_path=r"block_\d+/\w+", weight_qtype="int2", tile_size=64),
]


def divergence(teacher_logits: jax.Array, student_logits: jax.Array) -> jax.Array:
    """Mean of KL(teacher || student), in nats per character."""
    teacher, student = (jax.nn.log_softmax(x) for x in (teacher_logits, student_logits))
    return jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=SIZE.steps)
    parser.add_argument("--text", help="a text to use instead of tinyshakespeare")
    args = parser.parse_args()
    size, text = SIZE._replace(steps=args.steps), char_lm.find_text(args.text)
    teacher = char_lm.Decoder(len(text.characters), size)
    variables = char_lm.train(teacher, text, size, seed=0)
    held_out = text.validation[: 64 * size.context].reshape(64, size.context)

    student = fewbit.quantize_model(teacher, fewbit.QtProvider(RULES))
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, size.steps))
    learned, state = variables, optimizer.init(variables)

    @jax.jit
    def step(learned, state, ids):
        said = teacher.apply(variables, ids)
        gradient = jax.grad(lambda v: divergence(said, student.apply(v, ids)))(learned)
        update, state = optimizer.update(gradient, state)
        return optax.apply_updates(learned, update), state

    for ids in char_lm.batches(text, size, seed=1):
        learned, state = step(learned, state, ids[:, :-1])

    said = teacher.apply(variables, held_out)
    for name, params in (("rounded", variables["params"]), ("distilled", learned["params"])):
        served = fewbit.to_ptq(student, params, None, held_out)
        far = divergence(said, served.model.apply({"params": served.params}, held_out))
        print(f"2-bit {name}: {far:.4f} nats per character from the float model")


if __name__ == "__main__":
    main()
