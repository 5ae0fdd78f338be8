"""QLoRA against LoRA: stories15M learns Shakespeare with its weights frozen, in float and in nf4.

Only low-rank adapters are trained. The base is stored once in float32 and once as nf4 in groups of
64 with float16 scales, the embedding that is tied to the logits included; the two runs see the same
batches and start from the same adapters.

    python examples/qlora_stories.py stories15M.bin tokenizer.bin --text tinyshakespeare.txt

Without `--text` a few lines of Hamlet stand in for it, to see that everything runs.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import struct
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fewbit

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import llama

# No quantization of products of two activations, and no adapters for them.
OFF = fewbit.QuantizationRule(op_names=("einsum",))
NF4 = dict(weight_qtype="nf4", tile_size=64, scale_dtype="float16")

HAMLET = """
To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles
And by opposing end them. To die: to sleep;
No more; and by a sleep to say we end
The heart-ache and the thousand natural shocks
That flesh is heir to, 'tis a consummation
Devoutly to be wish'd. To die, to sleep;
To sleep: perchance to dream: ay, there's the rub;
For in that sleep of death what dreams may come
When we have shuffled off this mortal coil,
Must give us pause: there's the respect
That makes calamity of so long life.
"""


class Encoder:
    """Byte-pair encoding with the pieces and scores of a llama2.c tokenizer file."""

    def __init__(self, path: str | pathlib.Path, vocab_size: int):
        raw, position = pathlib.Path(path).read_bytes(), 4
        self.ids: dict[bytes, int] = {}
        self.scores: list[float] = []
        for token in range(vocab_size):
            score, length = struct.unpack_from("<fi", raw, position)
            if token >= 3 + 256:  # before: three controls, and a token for each byte
                self.ids.setdefault(raw[position + 8 : position + 8 + length], token)
            self.scores.append(score)
            position += 8 + length
        self.word = functools.lru_cache(maxsize=None)(self._word)

    def _word(self, word: bytes) -> tuple[int, ...]:
        pieces = [c.encode() for c in word.decode()]
        while True:
            pairs = [
                (self.scores[self.ids[a + b]], -k)
                for k, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
                if a + b in self.ids
            ]
            if not pairs:
                known = (
                    [self.ids[p]] if p in self.ids else [3 + byte for byte in p] for p in pieces
                )
                return tuple(token for tokens in known for token in tokens)
            k = -max(pairs)[1]
            pieces[k : k + 2] = [pieces[k] + pieces[k + 1]]

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text; a word carries the space before it."""
        tokens: list[int] = []
        for line in text.splitlines():
            for word in (" " + line).replace(" ", "\0 ").split("\0")[1:]:
                tokens += self.word(word.encode())
            tokens += self.word(b"\n")
        return np.array(tokens, np.int32)


def batches(tokens: np.ndarray, count: int, batch: int, length: int, seed: int) -> np.ndarray:
    """Random windows of a text, `[count, batch, length + 1]`."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, (count, batch))
    return np.stack([[tokens[s : s + length + 1] for s in row] for row in starts])


def loss_of(forward, params, tokens: jax.Array) -> jax.Array:
    """Mean next-token loss in nats of `tokens[batch, time]`."""
    logits = forward(params, tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def fine_tune(forward, params, train, valid, learning_rate: float):
    """Train the adapters of `params` alone; returns them and the validation loss before, after."""
    trained, frozen = fewbit.lora.split(params)
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, len(train)))
    state = optimizer.init(trained)

    @jax.jit
    def step(trained, state, frozen, tokens):
        def loss(trained):
            return loss_of(forward, fewbit.merge_trainable(trained, frozen), tokens)

        value, grads = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(trained, updates), state, value

    validate = jax.jit(lambda params, tokens: loss_of(forward, params, tokens))

    def validation(trained) -> float:
        whole = fewbit.merge_trainable(trained, frozen)
        return float(np.mean([validate(whole, tokens) for tokens in valid]))

    before, begin = validation(trained), time.perf_counter()
    for number, tokens in enumerate(train):
        trained, state, value = step(trained, state, frozen, tokens)
        if number % 50 == 0:
            spent = time.perf_counter() - begin
            print(f"  step {number:4}: loss {float(value):.3f} ({spent:.0f} s)", flush=True)
    return fewbit.merge_trainable(trained, frozen), before, validation(trained)


def base_bits(params) -> float:
    """Bits that each quantized weight takes in memory, scales and padding included."""
    stored = [leaf for leaf in fewbit.report(params).leaves if leaf.qtype is not None]
    return 8 * sum(leaf.bytes for leaf in stored) / sum(int(np.prod(s.shape)) for s in stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("tokenizer")
    parser.add_argument("--text", help="a text file; the last tenth of it is for validation")
    parser.add_argument("--characters", type=int, default=400_000, help="how much of it to read")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--validation", type=int, default=16, help="batches to validate on")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--embedding", choices=["nf4", "float"], default="nf4")
    parser.add_argument("--save", help="a folder for the trained adapters, in PEFT's naming")
    args = parser.parse_args()

    config, params = llama.load(args.checkpoint)
    text = pathlib.Path(args.text).read_text()[: args.characters] if args.text else HAMLET * 8
    tokens = Encoder(args.tokenizer, config.vocab_size).encode(text)
    cut = len(tokens) * 9 // 10
    train = batches(tokens[:cut], args.steps, args.batch, args.length, seed=1)
    valid = batches(tokens[cut:], args.validation, args.batch, args.length, seed=2)
    print(f"{len(tokens):,} tokens; {args.steps} steps of {args.batch} x {args.length}")

    forward = functools.partial(llama.forward, config=config)
    lora = dict(rank=args.rank, alpha=args.alpha)
    table = fewbit.LoraRule(module_path="embed", **lora, **(NF4 if args.embedding == "nf4" else {}))
    modes = {
        "LoRA, float32 base": [OFF, fewbit.LoraRule(**lora)],
        "QLoRA, nf4 base": [OFF, table, fewbit.LoraRule(**lora, **NF4)],
    }
    results = {}
    for name, rules in modes.items():
        provider = fewbit.LoraProvider(rules)
        plan = fewbit.plan(forward, provider, params, train[0][:, :-1])
        if "nf4" in name:
            print(plan)
        adapted = fewbit.quantize_params(params, plan)
        adapted = fewbit.lora.init(plan, adapted, jax.random.key(0))
        model = fewbit.apply_lora_to_model(forward, provider)
        print(name)
        adapted, before, after = fine_tune(model, adapted, train, valid, args.learning_rate)
        results[name] = after
        print(f"  validation loss {before:.4f} -> {after:.4f}")
        if "nf4" in name:
            print(f"  base: {base_bits(adapted):.2f} bits a weight resident")
            _, report = fewbit.merge_lora(adapted, plan)
            print(f"  merged into nf4 again: worst relative error {report.worst.error:.3f}")
            if args.save:
                fewbit.save_adapters(args.save, adapted, plan)
    plain, quantized = results.values()
    print(f"QLoRA - LoRA: {quantized - plain:+.4f} nats")


if __name__ == "__main__":
    main()
