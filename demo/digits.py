"""Trains two digit classifiers, quantizes each in four formats, prints what that cost and saved.

With `--quick` it trains less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from models import ConvNet, Transformer
from train import Digits, digits, predict, train

import fewbit

FORMATS = ("int8", "int4", "fp8", "int3")
STEPS = {ConvNet: 600, Transformer: 1200}
QUICK_STEPS = {ConvNet: 150, Transformer: 300}


def rules_for(model: nnx.Module, name: str) -> list[fewbit.QuantizationRule]:
    """The rules of one format; inputs that groups do not divide get a scale per output channel."""
    rule = fewbit.QuantizationRule
    if name == "int8":
        return [rule(weight_qtype="int8", act_qtype="int8")]
    if name == "fp8":
        return [rule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn")]
    if isinstance(model, ConvNet):
        ungrouped = rule(op_names=("conv_general_dilated",), weight_qtype=name)
    else:
        ungrouped = rule(module_path="rows", weight_qtype=name)
    return [ungrouped, rule(weight_qtype=name, tile_size=32, scale_dtype="float16")]


def quantized(model: nnx.Module, rules, example: jax.Array) -> nnx.Module:
    """`model` under `rules`, every weight stored in its true number of bits."""
    smaller = fewbit.quantize_model(model, fewbit.PtqProvider(rules), example)
    nnx.update(smaller, fewbit.pack(nnx.state(smaller, nnx.Param)))
    return smaller


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as aligned columns, the first row being the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def measure(model: nnx.Module, data: Digits) -> list[list[str]]:
    """One row per format: bytes, bits per weight, accuracy, and agreement with the float model."""
    name = type(model).__name__
    float_says = predict(model, data.test_images)

    def row(label: str, stored: nnx.Module) -> list[str]:
        says = predict(stored, data.test_images)
        kept = fewbit.report(stored)
        accuracy, agreement = np.mean(says == data.test_labels), np.mean(says == float_says)
        bits = f"{kept.bits_per_weight or 32:.2f}"
        return [name, label, f"{kept.bytes:,}", bits, f"{accuracy:.2%}", f"{agreement:.2%}"]

    rows = [row("float32", model)]
    example = jnp.asarray(data.test_images[:1])
    for label in FORMATS:
        rules = rules_for(model, label)
        if label == "int8":
            print(f"\n{name}, the plan for int8:\n{fewbit.plan(model, rules, example)}")
        rows.append(row(label, quantized(model, rules, example)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train less; accuracy is lower")
    args = parser.parse_args()

    data = digits()
    rows = [["model", "format", "bytes", "bits/weight", "accuracy", "agreement"]]
    for make, steps in (QUICK_STEPS if args.quick else STEPS).items():
        started = time.perf_counter()
        model = make(nnx.Rngs(0))
        train(model, data, steps=steps, rate=3e-3)
        print(f"trained {make.__name__} in {time.perf_counter() - started:.0f} s")
        rows += measure(model, data)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
