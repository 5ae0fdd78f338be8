"""Products of two activations: a training step's three, and attention with int8 keys and values.

Every operand is float32 and becomes int8 inside the timed program, one scale per row or column; the
cache of decoding alone is int8 already. Three programs each: XLA float32; fewbit's kernels; and the
same codes multiplied by XLA, which is what other JAX libraries emit. A number is the median over
the rounds of how many times as fast as XLA float32 of the same round it was.

    python bench/training_step.py [--quick] [--budget 30]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import _measure
import _page
import jax
import jax.numpy as jnp
import numpy as np

import fewbit
from fewbit import ops

BASE = "XLA float32"
TOLERANCE = 1e-3  # of the largest result, between the kernels and XLA on the same codes

Product = Callable[[str, Any, Any], jax.Array]


def summed_how(spec: str, side: int, ndim: int) -> fewbit.HowToQuantize:
    """int8 with a scale for everything that the product does not sum over."""
    inputs, out = spec.split("->")
    own = [axis for axis, letter in enumerate(inputs.split(",")[side]) if letter in out]
    assert len(inputs.split(",")[side]) == ndim
    return fewbit.HowToQuantize(qtype="int8", channelwise_axes=own)


def by_kernels(spec: str, *operands: Any) -> jax.Array:
    return ops.einsum(
        spec,
        *(
            x if isinstance(x, fewbit.QArray) else ops.Deferred(x, summed_how(spec, i, x.ndim))
            for i, x in enumerate(operands)
        ),
    )


def by_xla(spec: str, *operands: Any) -> jax.Array:
    """quantize, an int8 product, two scales."""
    quantized = []
    for side, x in enumerate(operands):
        if not isinstance(x, fewbit.QArray):
            own = summed_how(spec, side, x.ndim).channelwise_axes
            x = fewbit.quantize(x, "int8", channelwise_axes=own)
        quantized.append(x)
    codes = [x.qvalue for x in quantized]
    total = jnp.einsum(spec, *codes, preferred_element_type=jnp.int32).astype(jnp.float32)
    inputs, out = spec.split("->")
    for letters, x in zip(inputs.split(","), quantized, strict=True):
        order = [letters.index(c) for c in out if c in letters]
        gone = [axis for axis in range(x.ndim) if axis not in order]
        scale = jnp.transpose(x.scale, (*order, *gone)).reshape(
            [x.scale.shape[letters.index(c)] if c in letters else 1 for c in out]
        )
        total = total * scale
    return total


def training_step(product: Product, x: Any, w: Any, g: Any) -> tuple[jax.Array, ...]:
    y = product("tk,kn->tn", x, w)
    return y, product("tn,kn->tk", g, w), product("tk,tn->kn", x, g)


def attention(product: Product, q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(product("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5)
    return product("bhts,bshd->bthd", weights, v)


def decoding(product: Product, q: Any, k: Any, v: Any) -> jax.Array:
    return attention(product, q, k, v)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def cases() -> dict[str, tuple[Callable[..., Any], list[jax.Array]]]:
    heads = dict(b=1, h=8, d=64)

    def rows(seed: int, count: int) -> jax.Array:
        return normal(seed, heads["b"], count, heads["h"], heads["d"])

    step = [normal(0, 512, 2048), normal(1, 2048, 2048) / 45, normal(2, 512, 2048)]
    return {
        "training step 512x2048x2048": (training_step, step),
        "x · W": (lambda p, x, w, g: p("tk,kn->tn", x, w), step),
        "g · Wᵀ": (lambda p, x, w, g: p("tn,kn->tk", g, w), step),
        "xᵀ · g": (lambda p, x, w, g: p("tk,tn->kn", x, g), step),
        "attention, 512 queries": (attention, [rows(i, 512) for i in range(3)]),
        "attention, 1 query, 4096 keys": (
            decoding, [rows(0, 1), rows(1, 4096), rows(2, 4096)],
        ),
    }  # fmt: skip


def programs(function: Callable[..., Any], args: list[jax.Array]) -> dict[str, Callable[[], Any]]:
    """The three, compiled and compared."""
    cached = args
    if function is decoding:  # a scale per key, and one per channel of the values
        spec = "bhts,bshd->bthd"
        keys = fewbit.quantize(args[1], "int8", channelwise_axes=(0, 1, 2))
        own = summed_how(spec, 1, 4).channelwise_axes
        cached = [args[0], keys, fewbit.quantize(args[2], "int8", channelwise_axes=own)]
    forms = {
        BASE: (jnp.einsum, args),
        "fewbit int8": (by_kernels, cached),
        "XLA int8": (by_xla, cached),
    }
    calls, results = {}, {}
    for name, (product, given) in forms.items():
        leaves, tree = jax.tree.flatten(given)
        program = jax.jit(
            lambda leaves, product=product, tree=tree: function(product, *tree.unflatten(leaves))
        )
        native = "fewbit_codes_dot" in program.lower(leaves).as_text()
        assert native == (name == "fewbit int8" and fewbit.kernels.native_available()), name
        results[name] = jax.tree.map(np.asarray, program(leaves))
        calls[name] = lambda program=program, leaves=leaves: jax.block_until_ready(program(leaves))
    ours, plain = (jax.tree.leaves(results[name]) for name in ("fewbit int8", "XLA int8"))
    for a, b in zip(ours, plain, strict=True):
        error = np.abs(a - b).max() / np.abs(b).max()
        if not error < TOLERANCE:
            raise SystemExit(f"the kernels differ from XLA on the same codes by {error:.2g}")
    return calls


def table(results: dict[str, Any]) -> str:
    lines = [f"{'':32}{'XLA float32':>12}{'fewbit int8':>12}{'XLA int8':>12}"]
    for name, numbers in results.items():
        cells = [f"{numbers[BASE]['ms']:.3g} ms"]
        cells += [f"{numbers[form]['speed']:.2f}x" for form in ("fewbit int8", "XLA int8")]
        lines.append(f"{name:32}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of rounds per row")
    args = parser.parse_args()
    info = fewbit.kernels.info()
    facts = _measure.machine(isa=info.isa, versions=_measure.versions("jax", "jaxlib", "numpy"))
    results: dict[str, Any] = {}
    for name, (function, operands) in cases().items():
        calls = programs(function, operands)
        _measure.one_round(calls, list(calls))
        times = _measure.interleave(calls, budget=3.0 if args.quick else args.budget)
        results[name] = _measure.summary(times, BASE)
    facts["load"].append(_measure.load())
    text = _measure.headline(facts) + "\n\n" + table(results)
    print(text)
    if args.quick:
        return
    name = f"training-{info.isa}"
    path = _measure.write(name, {"machine": facts, "budget_s": args.budget, "rows": results})
    print(f"written: {path.name}; {_page.put(name, text)}")


if __name__ == "__main__":
    main()
