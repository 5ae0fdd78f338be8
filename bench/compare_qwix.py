"""The same 12-layer transformer quantized by fewbit and by Qwix: what a user waits for.

Each library runs in its own process and environment, several times in turn, so that a busy machine
slows both; the numbers are the medians and their ratios (below 1: fewbit is faster). W8A8 with
dynamic scales.

    python bench/compare_qwix.py [--layers 12] [--width 128] [--rounds 3] [--peers PYTHON]
"""

import argparse
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURES = {
    "quantize": "abstract init + quantize_params",
    "trace": "trace of the quantized apply",
    "lower": "lowering of the trace",
    "compile": "compilation",
    "eager": "eager call, after the first",
    "jitted": "jitted call, after the first",
}


def model_of(layers: int, width: int):
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
            y = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
            return x + nn.Dense(width)(y)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(layers):
                x = Block()(x)
            return nn.Dense(width)(x)

    return Transformer()


def measure(name: str, layers: int, width: int) -> dict[str, float]:
    """One library's times in this process, in seconds."""
    import jax
    import jax.numpy as jnp

    library = importlib.import_module(name)
    model, x, key = model_of(layers, width), jnp.ones((2, 16, width)), jax.random.key(0)
    params = jax.jit(model.init)(key, x)["params"]
    jax.block_until_ready(params)
    times: dict[str, float] = {}

    def timed(measure, fn):
        start = time.perf_counter()
        result = jax.block_until_ready(fn())
        times[measure] = time.perf_counter() - start
        return result

    rules = [library.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    ptq = library.quantize_model(model, library.PtqProvider(rules))

    def quantize():
        template = jax.eval_shape(ptq.init, key, x)["params"]
        return library.quantize_params(params, template)

    variables = {"params": timed("quantize", quantize)}
    jax.clear_caches()
    traced = timed("trace", lambda: jax.jit(ptq.apply).trace(variables, x))
    lowered = timed("lower", traced.lower)
    compiled = timed("compile", lowered.compile)
    for measure_name, call in (("eager", ptq.apply), ("jitted", compiled)):
        jax.block_until_ready(call(variables, x))
        runs = []
        for _ in range(7):
            timed(measure_name, lambda call=call: call(variables, x))
            runs.append(times[measure_name])
        times[measure_name] = statistics.median(runs)
    return times


def run(python: str, name: str, options: argparse.Namespace) -> dict[str, float]:
    command = [python, __file__, "--measure", name]
    command += ["--layers", str(options.layers), "--width", str(options.width)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT) if name == "fewbit" else ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument(
        "--measure", choices=["fewbit", "qwix"], help="one library, in this process"
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.layers, options.width)))
        return
    if not pathlib.Path(options.peers).exists():
        print(f"Qwix is not installed in {options.peers}: `make .venv-peers`, then again.")
        return
    rounds = []
    for _ in range(options.rounds):
        rounds.append((run(sys.executable, "fewbit", options), run(options.peers, "qwix", options)))
    print(f"{options.layers} layers of width {options.width}, W8A8, {options.rounds} rounds")
    print(f"{'':52}{'fewbit':>10}{'Qwix':>10}{'ratio':>8}  (range)")
    for key, words in MEASURES.items():
        mine, theirs = ([pair[i][key] for pair in rounds] for i in (0, 1))
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        row = [f"{1e3 * statistics.median(column):.1f} ms" for column in (mine, theirs)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{words:52}{row[0]:>10}{row[1]:>10}{statistics.median(ratios):>8.2f}  {spread}")


if __name__ == "__main__":
    main()
