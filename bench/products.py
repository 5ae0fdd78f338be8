"""Products with a quantized weight: fewbit's kernels, XLA on the same numbers, XLA in float.

Every kernel is called once per round, the slowest in every fourth. A number is the median over the
rounds of how many times as fast as XLA float32 of the same round it was (above 1 is faster). Below
the ratios stand rates: GB/s of the weight as stored for few rows, with the share of the read
bandwidth measured beside it, and GOP/s for many rows. The plan's word "slow" rests on the XLA rows.

    python bench/products.py                              # all shapes, about 10 minutes
    python bench/products.py --quick --only "int8" --shapes 1x2048
    python bench/products.py --back --only "weight-only"  # gradients g · Wᵀ, nothing written
    python bench/products.py --peers .venv-bench-peers/bin/python   # `make bench-peers`
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import _measure
import _page
import _roofline
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Shape
from _remote import Remote
from _roof import BUFFER_BYTES, Roof

import fewbit

BASE = "XLA float32"
READ = "read"
FEW_ROWS = 8  # up to here the weight's bytes are what a product waits for
SLOW = 4  # times as long as float32: called in fewer rounds, which would else be few for all
TOLERANCE = 1e-2  # of the largest result, between the kernels and XLA on the same codes

rule = functools.partial(fewbit.QuantizationRule, scale_dtype=None)
grouped = functools.partial(fewbit.QuantizationRule, scale_dtype="float16")

RULES = {
    "int8 W8A8": rule(weight_qtype="int8", act_qtype="int8"),
    "int4 g32 A8": grouped(weight_qtype="int4", tile_size=32, act_qtype="int8"),
    "int4 g128 A8": grouped(weight_qtype="int4", tile_size=128, act_qtype="int8"),
    "int8 weight-only": rule(weight_qtype="int8"),
    "int4 g32 weight-only": grouped(weight_qtype="int4", tile_size=32),
    "fp8 weight-only": rule(weight_qtype="fp8"),
    "nf4 g64 weight-only": grouped(weight_qtype="nf4", tile_size=64),
    "int3 g32 weight-only": grouped(weight_qtype="int3", tile_size=32),
}
# Those whose XLA form is measured too; the others say nothing new about XLA.
THROUGH_XLA = (
    "int8 W8A8", "int4 g32 A8", "int8 weight-only", "int4 g32 weight-only", "fp8 weight-only",
    "nf4 g64 weight-only",
)  # fmt: skip
NAMES = [BASE, "XLA bf16", *(f"fewbit {n}" for n in RULES), *(f"XLA {n}" for n in THROUGH_XLA)]


class Kernel(NamedTuple):
    """A compiled product, the bytes of its weight as stored, and what runs it."""

    call: Callable[[], jax.Array]
    weight_bytes: int
    runs_on: str


def forward(shape: Shape, params: Any, x: jax.Array) -> jax.Array:
    return x @ (params["w"].T if shape.tied else params["w"])


def compiled(f: Callable[..., jax.Array], shape: Shape, params: Any, x: jax.Array) -> Kernel:
    """The product or, for a shape that goes back, the gradient of x.

    The parameters go in as a flat list, because walking their tree in Python takes longer than a
    small product; inside a jitted model nobody walks it.
    """
    leaves, tree = jax.tree.flatten(params)

    def run(leaves, x):
        params = tree.unflatten(leaves)
        if not shape.back:
            return f(params, x)
        start = jnp.zeros((shape.rows, shape.k), x.dtype)
        return jax.vjp(lambda start: f(params, start), start)[1](x)[0]

    program = jax.jit(run).lower(leaves, x).compile()  # for the backend that is asked for here
    native = 'custom_call_target="fewbit_' in program.as_text()
    jax.block_until_ready(program(leaves, x))
    size = sum(leaf.nbytes for leaf in leaves)
    return Kernel(
        lambda: program(leaves, x).block_until_ready(), size, "native" if native else "xla"
    )


def kernels_of(shape: Shape, names: list[str]) -> dict[str, Kernel]:
    """The named kernels on one weight and one input, their results compared."""
    keys = jax.random.split(jax.random.key(0))
    w_shape = (shape.n, shape.k) if shape.tied else (shape.k, shape.n)
    params = {"w": jax.random.normal(keys[0], w_shape) * shape.k**-0.5}
    x = jax.random.normal(keys[1], (shape.rows, shape.n if shape.back else shape.k))
    f = functools.partial(forward, shape)
    kernels = {}
    if BASE in names:
        kernels[BASE] = compiled(f, shape, params, x)
    if "XLA bf16" in names:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        kernels["XLA bf16"] = compiled(f, shape, half, x.astype(jnp.bfloat16))
    example = jnp.zeros((shape.rows, shape.k))
    for name, quantization in RULES.items():
        ours, xla = f"fewbit {name}", f"XLA {name}"
        if ours not in names and xla not in names:
            continue
        plan = fewbit.plan(f, [quantization], params, example)
        stored = fewbit.quantize_params(params, plan)
        model = fewbit.quantize_model(f, fewbit.PtqProvider([quantization]))
        first = compiled(model, shape, stored, x)
        if ours in names:
            kernels[ours] = first
        if xla in names:
            with fewbit.kernels.backend("xla"):  # plain codes have a native product too
                plain = compiled(model, shape, fewbit.unpack(stored), x)
            if plain.runs_on != "xla":
                raise SystemExit(f"{xla} calls a native kernel")
            kernels[xla] = plain._replace(weight_bytes=first.weight_bytes)
            compare(ours, first.call(), plain.call())
    return kernels


def compare(name: str, ours: jax.Array, plain: jax.Array) -> None:
    ours, plain = np.asarray(ours, np.float64), np.asarray(plain, np.float64)
    error = np.abs(ours - plain).max() / np.abs(plain).max()
    if not error < TOLERANCE:
        raise SystemExit(f"{name} differs from XLA on the same codes by {error:.2g} of its largest")


def measure(shape: Shape, names: list[str], remotes: list[Remote], roof: Roof, budget: float):
    """Every kernel's numbers at one shape."""
    kernels = kernels_of(shape, names)
    calls: dict[str, Callable[[], Any]] = {name: kernel.call for name, kernel in kernels.items()}
    sizes = {name: kernel.weight_bytes for name, kernel in kernels.items()}
    for remote in remotes:
        for name, size in remote.prepare(shape).items():
            calls[name], sizes[name] = functools.partial(remote.call, name), size
    # A pass over the buffer empties the caches, which only weights beyond them do not notice.
    beyond_cache = 4 * shape.k * shape.n >= 2**26
    if beyond_cache:
        calls[READ] = roof.read_seconds
    before = [roof.read_seconds() for _ in range(5)]
    # A warm-up: every page, buffer and thread has been there once.
    warm = _measure.one_round(calls, list(calls))
    slow = {name for name, seconds in warm.items() if seconds > SLOW * warm[BASE]} - {READ}
    times = _measure.interleave(calls, budget=budget, seldom=slow)
    reads = times.get(READ) or before + [roof.read_seconds() for _ in range(5)]
    bandwidth = BUFFER_BYTES / np.median(reads) / 1e9
    result = _measure.summary(times, BASE)
    result.pop(READ, None)
    for name, numbers in result.items():
        moved = sizes[name] + shape.io_bytes
        seconds = np.asarray(times[name])
        rate = np.nanmedian(moved / seconds / 1e9)
        if beyond_cache:
            share = np.nanmedian(moved / seconds / (BUFFER_BYTES / np.asarray(times[READ])))
        else:
            share = rate / bandwidth
        numbers |= {
            "weight_mb": round(sizes[name] / 1e6, 2),
            "gb_per_s": round(float(rate), 2),
            "of_bandwidth": round(float(share), 3),
            "gop_per_s": round(float(np.nanmedian(shape.operations / seconds)) / 1e9, 1),
            "runs_on": kernels[name].runs_on if name in kernels else "peer",
        }
    return {"read_gb_per_s": round(float(bandwidth), 1), "kernels": result}


def table(results: dict[str, Any], shapes: list[Shape]) -> str:
    """Ratios, then rates; at most 100 columns."""
    columns = [results[str(shape)] for shape in shapes]
    names = list(dict.fromkeys(name for column in columns for name in column["kernels"]))

    def line(name: str, cells: list[str]) -> str:
        return f"{name:28}" + "".join(f"{cell:>9}" for cell in cells)

    def rows(cell: Callable[[Shape, dict[str, Any]], str], which: list[str]) -> list[str]:
        return [
            line(n, [cell(s, c["kernels"].get(n)) for s, c in zip(shapes, columns, strict=True)])
            for n in which
        ]

    def ratio(_, numbers):
        return f"{numbers['speed']:.2f}" if numbers else "-"

    def rate(shape, numbers):
        if not numbers:
            return "-"
        if shape.rows > FEW_ROWS:
            return f"{numbers['gop_per_s']:.0f}"
        rate, share = numbers["gb_per_s"], 100 * numbers["of_bandwidth"]
        return f"{rate:.{1 if rate < 10 else 0}f} {share:.0f}%"

    heads = [str(s.rows) + "x" for s in shapes], [str(s.k) for s in shapes]
    last = [f"x{s.n}" + "ᵀ" * s.back for s in shapes]
    base = [f"{c['kernels'][BASE]['ms']:.3g}" for c in columns]
    few = [f"{c['read_gb_per_s']:.1f}" for c in columns]
    others = [name for name in names if name != BASE]
    fast = [name for name in names if not name.startswith("XLA") or name == BASE]
    lines = [line("rows", heads[0]), line("k", heads[1]), line("columns", last)]
    lines += [line(f"{BASE}, ms", base), "", "times as fast as XLA float32"]
    lines += rows(ratio, others)
    lines += ["", f"GB/s and share of the read bandwidth (to {FEW_ROWS} rows), GOP/s (more rows)"]
    lines += [line("read bandwidth, GB/s", few), *rows(rate, fast)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="kernels with one of the words")
    parser.add_argument("--shapes", nargs="+", metavar="WORDS", help="shapes beginning so")
    parser.add_argument("--back", action="store_true", help="gradients; nothing written")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds of rounds per shape")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of .venv-bench-peers")
    args = parser.parse_args()
    shapes = _measure.chosen_shapes(args.shapes, back=args.back)
    only = args.only or ([BASE, "fewbit"] if args.peers else [""])
    names = [n for n in NAMES if n == BASE or any(word in n for word in only)]
    info, roof = fewbit.kernels.info(), Roof()
    if not info.native:
        print(f"no native kernels: {info.missing}", file=sys.stderr)
    facts = _measure.machine(isa=info.isa, versions=_measure.versions("jax", "jaxlib", "numpy"))
    remotes = Remote.all_of(args.peers, "products") if args.peers else []
    facts["versions"] |= {k: v for r in remotes for k, v in r.versions.items()}
    results: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    handovers: list[int] = []
    for shape in shapes:
        for name, value in roof.peaks(info.isa).items():  # the best of several moments
            peaks[name] = max(round(value), peaks.get(name, 0))
        there = [] if shape.back else remotes
        budget = 2.0 if args.quick else args.budget
        results[str(shape)] = measure(shape, names, there, roof, budget)
        handovers += [round(ns) for ns in [roof.handover_ns()] if ns is not None]
        print(f"  {shape}: done", file=sys.stderr)
    for remote in remotes:
        remote.close()
    facts["load"].append(_measure.load())
    shown = ", ".join(f"{name} {value}" for name, value in peaks.items()) or "not measured"
    text = _measure.headline(facts) + f"\npeak GOP/s from registers: {shown}\n"
    text += f"ns from core to core, after each shape: {', '.join(map(str, handovers))}\n\n"
    text += table(results, shapes)
    print(text)
    if args.quick or args.only or args.shapes or args.back:
        return
    whole = {"machine": facts, "budget_s": args.budget, "peak_gop_per_s": peaks,
             "core_to_core_ns": handovers, "shapes": results}  # fmt: skip
    name = f"products-{info.isa}" + "-peers" * bool(remotes)
    print(f"written: {_measure.write(name, whole).name}; {_page.put(name, text)}")
    if not remotes:
        print(f"drawn: {_roofline.write(whole).name}")


if __name__ == "__main__":
    main()
