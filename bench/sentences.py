"""MiniLM encoding sentences: how near few bits stay to float, and how many sentences a second.

The cosine between the float and the quantized embedding of each of 200 sentences, its mean per row
of the table, beside the bytes of the parameters; then speed at batch 1 and 32, every row called
once per round on the same tokens, as medians of per-round ratios against float32. Static ranges are
collected on other sentences of the text.

    python bench/sentences.py --text wikitext2-valid.txt [--quick] [--only int8]
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import _measure
import _page
import jax
import numpy as np
from flax import nnx

import fewbit

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import data  # noqa: E402
import minilm  # noqa: E402

BASE = "float32"
ROWS = ("int8", "static", "int4")
COUNT = 200


def sentences(text: str) -> list[str]:
    """Sentences of at least five words, headings left out, as one would write them."""
    lines = [line.strip() for line in text.splitlines() if line.strip()[:1] not in ("", "=")]
    found = [s.strip() for line in lines for s in re.split(r"(?<= [.!?]) ", line)]
    found = [re.sub(r" (@)?([-,.;:!?])(@)? ?", _glued, s + " ").strip() for s in found]
    return [s for s in found if len(s.split()) >= 5]


def _glued(match: re.Match[str]) -> str:
    return match[2] if match[1] else f"{match[2]} "


def encode(model: Any, batches: list[jax.Array]) -> np.ndarray:
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    return np.concatenate([np.asarray(run(state, tokens)) for tokens in batches])


def quantized(model: Any, name: str, tokens: jax.Array, calibration: list[jax.Array]) -> Any:
    if name != "static":
        return minilm.quantize(model, name, tokens)
    return minilm.quantize_static(model, tokens, calibration)


def size(model: Any) -> int:
    """Bytes of all parameters as they are stored."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def speed(models: dict[str, Any], tokens: jax.Array, budget: float) -> dict[str, dict[str, Any]]:
    """Per row: ms per call, and how many times as fast as float32."""

    def call(model: Any) -> Callable[[], Any]:
        graph, state = nnx.split(model)
        run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
        run(state, tokens)
        return lambda: run(state, tokens).block_until_ready()

    calls = {name: call(model) for name, model in models.items()}
    return _measure.summary(_measure.interleave(calls, budget=budget), BASE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, help="a file of English text")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing written")
    args = parser.parse_args()
    if args.text is None:
        print("nothing measured: give a file of English text with --text")
        return

    folder = data.locate("minilm")
    tokenizer, model = minilm.Tokenizer(folder), minilm.load(folder)
    text = sentences(args.text.read_text())
    batches = [tokenizer(text[i : i + 20]) for i in range(0, COUNT, 20)]
    calibration = [tokenizer(text[i : i + 20]) for i in range(COUNT, 2 * COUNT, 20)]
    reference = encode(model, batches)
    models = {BASE: model}
    rows: dict[str, dict[str, Any]] = {BASE: {"cosine": 1.0, "lowest": 1.0, "bytes": 1.0}}
    for name in args.only:
        models[name] = quantized(model, name, batches[0], calibration)
        cosine = np.sum(reference * encode(models[name], batches), axis=-1)
        share = size(models[name]) / size(model)
        rows[name] = dict(cosine=float(cosine.mean()), lowest=float(cosine.min()), bytes=share)
    info = fewbit.kernels.info()
    facts = _measure.machine(isa=info.isa)
    for batch in (1, 32):
        tokens = tokenizer(text[:batch])
        found = speed(models, tokens, budget=4.0 if args.quick else 20.0)
        for name, row in found.items():
            row["sentences_per_s"] = round(batch / row["ms"] * 1e3, 1)
            rows[name][f"batch {batch}"] = row
    facts["load"].append(_measure.load())
    lines = [
        _measure.headline(facts),
        f"the first {COUNT} of {len(text)} sentences are compared, the next {COUNT} calibrate",
        f"{'':10}{'cosine':>9}{'lowest':>9}{'bytes':>9}"
        f"{'batch 1: per s':>17}{'x float32':>11}{'batch 32: per s':>18}{'x float32':>11}",
    ]
    for name, row in rows.items():
        one, many = row["batch 1"], row["batch 32"]
        lines.append(
            f"{name:10}{row['cosine']:9.4f}{row['lowest']:9.4f}{row['bytes']:8.3f}x"
            f"{one['sentences_per_s']:17.1f}{one['speed']:11.2f}"
            f"{many['sentences_per_s']:18.1f}{many['speed']:11.2f}"
        )
    table = "\n".join(lines)
    print(table)
    if args.quick or set(args.only) != set(ROWS):
        return
    name = f"sentences-{info.isa}"
    written = _measure.write(name, {"machine": facts, "rows": rows}).name
    print(f"written: {written}; {_page.put(name, table)}")


if __name__ == "__main__":
    main()
