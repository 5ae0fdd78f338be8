"""Trains two digit classifiers, quantizes each in five ways, prints what that cost and saved.

`int8 static` has its activations' ranges from training images, is saved, and is loaded again before
it is measured. A page about it, with the errors of every Site, is written to demo/report.html. With
`--quick` it trains less and writes no page.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from models import ConvNet, Transformer
from train import Digits, digits, predict, train

import fewbit

FORMATS = ("int8", "int8 static", "int4", "fp8", "int3")
HERE = pathlib.Path(__file__).parent
STEPS = {ConvNet: 600, Transformer: 1200}
QUICK_STEPS = {ConvNet: 150, Transformer: 300}


def rules_for(model: nnx.Module, name: str) -> list[fewbit.QuantizationRule]:
    """The rules of one format; inputs that groups do not divide get a scale per output channel."""
    rule = fewbit.QuantizationRule
    if name == "int8":
        return [rule(weight_qtype="int8", act_qtype="int8")]
    if name == "int8 static":
        return [
            rule(weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=(0,))
        ]
    if name == "fp8":
        return [rule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn")]
    if isinstance(model, ConvNet):
        ungrouped = rule(op_names=("conv_general_dilated",), weight_qtype=name)
    else:
        ungrouped = rule(module_path="rows", weight_qtype=name)
    return [ungrouped, rule(weight_qtype=name, tile_size=32, scale_dtype="float16")]


def quantized(model: nnx.Module, rules, example: jax.Array) -> nnx.Module:
    """`model` under `rules`, every weight stored in its true number of bits."""
    return fewbit.pack(fewbit.quantize_model(model, fewbit.PtqProvider(rules), example))


def calibrated(model: nnx.Module, rules, data: Digits) -> tuple[nnx.Module, fewbit.Statistics]:
    """`model` with static ranges from 512 training images, through a file and back."""
    provider, example = fewbit.PtqProvider(rules), jnp.asarray(data.test_images[:1])
    batches = [jnp.asarray(data.train_images[i : i + 64]) for i in range(0, 512, 64)]
    stats = fewbit.calibrate(model, rules, batches)
    plan = fewbit.plan(model, rules, example)
    params = fewbit.quantize_params(nnx.to_pure_dict(nnx.state(model)), plan, stats)
    path = HERE / "out" / f"{type(model).__name__}-int8-static"
    path.parent.mkdir(exist_ok=True)
    fewbit.save(path, params, plan)
    smaller = fewbit.quantize_model(model, provider, example)
    nnx.update(smaller, fewbit.load(path).params)
    return smaller, stats


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as aligned columns, the first row being the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def measure(model: nnx.Module, data: Digits, *, page: bool) -> list[list[str]]:
    """One row per format: bytes, bits per weight, accuracy, and agreement with the float model.

    With `page`, one about the model with static ranges is written, in which all rows stand.
    """
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
        if label == "int8 static":
            static, stats = calibrated(model, rules, data)
            rows.append(row(label, static))
        else:
            rows.append(row(label, quantized(model, rules, example)))
    if page:
        write_page(model, static, stats, data, rows)
    return rows


def write_page(model: nnx.Module, static: nnx.Module, stats, data: Digits, rows) -> None:
    """demo/report.html: the plan, the errors of every Site, accuracy against bytes."""
    fewbit.debug.html_report(
        HERE / "report.html",
        plan=fewbit.plan(model, rules_for(model, "int8 static"), jnp.asarray(data.test_images[:1])),
        comparison=fewbit.debug.compare(model, static, jnp.asarray(data.test_images[:64])),
        stats=stats,
        curve=[(r[1], int(r[2].replace(",", "")), float(r[4].rstrip("%")) / 100) for r in rows],
        title=f"{type(model).__name__} on digits, int8 with static ranges",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train less, no page")
    parser.add_argument("--only", choices=[m.__name__ for m in STEPS], help="one of the models")
    args = parser.parse_args()

    data = digits()
    rows = [["model", "format", "bytes", "bits/weight", "accuracy", "agreement"]]
    for make, steps in (QUICK_STEPS if args.quick else STEPS).items():
        if args.only not in (None, make.__name__):
            continue
        started = time.perf_counter()
        model = make(nnx.Rngs(0))
        train(model, data, steps=steps, rate=3e-3)
        print(f"trained {make.__name__} in {time.perf_counter() - started:.0f} s")
        rows += measure(model, data, page=make is Transformer and not args.quick)
    print(f"\n{table(rows)}")
    if not args.quick and args.only != ConvNet.__name__:
        print("\nwrote demo/report.html")


if __name__ == "__main__":
    main()
