"""Convolutions with a quantized kernel: fewbit's native code, XLA on the same codes, XLA in float.

ResNet-50's 3x3 convolutions at batch 1, and a few others. Every kernel is called once per round,
the slowest in every fourth; a number is the median over the rounds of how many times as fast as XLA
float32 of the same round it was (above 1 is faster). "all 3x3" weighs each shape by how often
ResNet-50 has it and compares sums of median times. The plan's word "slow" rests on the XLA rows.

    python bench/convolutions.py                    # about 5 minutes
    python bench/convolutions.py --quick --shapes "3x3 56" --only "int8 W8A8"
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any, NamedTuple

import _measure
import _page
import jax
import numpy as np
from products import BASE, RULES, SLOW, compare

import fewbit

NATIVE = ("int8 W8A8", "int8 weight-only")
THROUGH_XLA = ("int8 W8A8", "int8 weight-only")
NAMES = [BASE, *(f"fewbit {n}" for n in NATIVE), *(f"XLA {n}" for n in THROUGH_XLA)]


class Shape(NamedTuple):
    """One image; `often`: how many such 3x3 convolutions ResNet-50 has."""

    name: str
    size: tuple[int, ...]
    channels: int
    features: int
    taps: int
    stride: int = 1
    groups: int = 1
    often: int = 0

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        return (*[self.taps] * len(self.size), self.channels // self.groups, self.features)

    @property
    def operations(self) -> int:
        outputs = np.prod([-(-n // self.stride) for n in self.size])
        return int(2 * outputs * np.prod(self.kernel_shape))


SHAPES = (
    Shape("3x3 56x56x64", (56, 56), 64, 64, 3, often=3),
    Shape("3x3 56x56x128/2", (56, 56), 128, 128, 3, 2, often=1),
    Shape("3x3 28x28x128", (28, 28), 128, 128, 3, often=3),
    Shape("3x3 28x28x256/2", (28, 28), 256, 256, 3, 2, often=1),
    Shape("3x3 14x14x256", (14, 14), 256, 256, 3, often=5),
    Shape("3x3 14x14x512/2", (14, 14), 512, 512, 3, 2, often=1),
    Shape("3x3 7x7x512", (7, 7), 512, 512, 3, often=2),
    Shape("1x1 56x56x64-256", (56, 56), 64, 256, 1),
    Shape("7x7 224x224x3-64/2", (224, 224), 3, 64, 7, 2),
    Shape("depthwise 112x112x32", (112, 112), 32, 32, 3, groups=32),
    Shape("grouped 28x28x256 32g", (28, 28), 256, 256, 3, groups=32),
    Shape("1-D 3000x384 3 taps", (3000,), 384, 384, 3),
)


def forward(shape: Shape, params: Any, x: jax.Array) -> jax.Array:
    letters = "HW"[-len(shape.size) :]
    return jax.lax.conv_general_dilated(
        x,
        params["kernel"],
        (shape.stride,) * len(shape.size),
        "SAME",
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=shape.groups,
    )


def compiled(f: Any, params: Any, x: jax.Array) -> tuple[Any, str]:
    """A call that waits for its result, and what runs it; parameters go in as a flat list."""
    leaves, tree = jax.tree.flatten(params)
    program = jax.jit(lambda leaves, x: f(tree.unflatten(leaves), x))
    text = program.lower(leaves, x).compile().as_text()
    jax.block_until_ready(program(leaves, x))
    runs_on = "native" if "fewbit_conv" in text or "fewbit_channel_conv" in text else "xla"
    return lambda: program(leaves, x).block_until_ready(), runs_on


def kernels_of(shape: Shape, names: list[str]) -> dict[str, tuple[Any, str]]:
    """The named kernels on one weight and one image, their results compared."""
    keys = jax.random.split(jax.random.key(0))
    terms = np.prod(shape.kernel_shape[:-1])
    params = {"kernel": jax.random.normal(keys[0], shape.kernel_shape) * terms**-0.5}
    x = jax.random.normal(keys[1], (1, *shape.size, shape.channels))
    f = functools.partial(forward, shape)
    found = {BASE: compiled(f, params, x)}
    for name in NATIVE:
        ours, xla = f"fewbit {name}", f"XLA {name}"
        plan = fewbit.plan(f, [RULES[name]], params, x)
        stored = fewbit.quantize_params(params, plan)
        model = fewbit.quantize_model(f, fewbit.PtqProvider([RULES[name]]))
        if ours in names:
            found[ours] = compiled(model, stored, x)
        if xla in names:
            plain = compiled(model, fewbit.unpack(stored), x)
            if plain[1] == "native":  # few channels per group: its kernel is stored plain anyway
                continue
            found[xla] = plain
            if ours in names:
                compare(ours, found[ours][0](), plain[0]())
    return found


def measure(shape: Shape, names: list[str], budget: float) -> dict[str, Any]:
    """Every kernel's numbers at one shape."""
    found = kernels_of(shape, names)
    calls = {name: call for name, (call, _) in found.items()}
    warm = _measure.one_round(calls, list(calls))
    warm = _measure.one_round(calls, list(calls))
    slow = {name for name, seconds in warm.items() if seconds > SLOW * warm[BASE]}
    times = _measure.interleave(calls, budget=budget, seldom=slow)
    result = _measure.summary(times, BASE)
    for name, numbers in result.items():
        rate = shape.operations / np.nanmedian(times[name]) / 1e9
        numbers |= {"gop_per_s": round(float(rate), 1), "runs_on": found[name][1]}
    return result


def total(results: dict[str, Any], shapes: list[Shape]) -> dict[str, Any]:
    """ResNet-50's 3x3 convolutions together, from sums of median times."""
    there = [s for s in shapes if s.often]
    names = [n for n in NAMES if all(n in results[s.name] for s in there)]
    ms = {n: sum(s.often * results[s.name][n]["ms"] for s in there) for n in names}
    return {n: {"ms": round(ms[n], 3), "speed": round(ms[BASE] / ms[n], 3)} for n in names}


def table(results: dict[str, Any]) -> str:
    """One line per shape; at most 100 columns."""
    others = [n for n in NAMES if n != BASE]
    short = [n.replace(" weight-only", " w-only").replace("fewbit int8", "fewbit") for n in others]
    short = [n.replace("XLA int8", "XLA") for n in short]
    head = f"{'times as fast as XLA f32':24}{'f32 ms':>7}{'GOP/s':>6}"
    lines = [head + "".join(f"{n:>15}" for n in short)]
    for name, row in results.items():
        base = row[BASE]
        rate = f"{base['gop_per_s']:.0f}" if "gop_per_s" in base else ""
        cells = [
            f"{row[n]['speed']:.2f}"
            + (f" {row[n]['gop_per_s']:>4.0f}" if "gop_per_s" in row[n] else "     ")
            if n in row
            else "-"
            for n in others
        ]
        lines.append(f"{name:24}{base['ms']:>7.3g}{rate:>6}" + "".join(f"{c:>15}" for c in cells))
    lines.append("int8 kernels; the second number of a column: GOP/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="kernels with one of the words")
    parser.add_argument("--shapes", nargs="+", metavar="WORDS", help="shapes beginning so")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of rounds per shape")
    args = parser.parse_args()
    shapes = [s for s in SHAPES if not args.shapes or s.name.startswith(tuple(args.shapes))]
    if not shapes:
        raise SystemExit(f"no shape matches; there are: {', '.join(s.name for s in SHAPES)}")
    names = [n for n in NAMES if n == BASE or any(word in n for word in args.only or [""])]
    info = fewbit.kernels.info()
    if not info.native:
        print(f"no native kernels: {info.missing}", file=sys.stderr)
    facts = _measure.machine(isa=info.isa, versions=_measure.versions("jax", "jaxlib", "numpy"))
    results: dict[str, Any] = {}
    for shape in shapes:
        results[shape.name] = measure(shape, names, 1.5 if args.quick else args.budget)
        print(f"  {shape.name}: done", file=sys.stderr)
    if any(s.often for s in shapes):
        results["all 3x3 of ResNet-50"] = total(results, shapes)
    facts["load"].append(_measure.load())
    text = _measure.headline(facts) + "\n\n" + table(results)
    print(text)
    if args.quick or args.only or args.shapes:
        return
    whole = {"machine": facts, "budget_s": args.budget, "shapes": results}
    name = f"convolutions-{info.isa}"
    print(f"written: {_measure.write(name, whole).name}; {_page.put(name, text)}")


if __name__ == "__main__":
    main()
