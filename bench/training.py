"""A training step of a small transformer in few bits: its time, its build, its memory.

    python bench/training.py [--quick] [--budget 60] [--peers PYTHON]

Two layers, 512 wide, 8 heads, an MLP 4 times as wide, Adam; 8 sequences of 128 bytes: 1,024 tokens.
fewbit and Qwix run in processes and environments of their own and take turns, step by step and
build by build; a ratio is the median over the rounds of the ratios within them. `build` is what a
user waits for before the first step: quantize_model, trace, lowering and compilation, with JAX's
caches empty. Temporary memory is what `memory_analysis()` says of the compiled step.

Bars: a step of int8 QAT at most 1.15 times float32's; int8 training 1.5 times as fast as float32;
build no longer than Qwix's; temporary memory at most 1.1 times float32's.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "training-results.md"
BASE = "fewbit float32"
VOCABULARY = 256

# Rules by name, for both libraries; `float32` is the model itself.
FORMS: dict[str, dict[str, str] | None] = {
    "float32": None,
    "int8 QAT": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int8 training": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    "int8 training, no attention": {
        "module_path": r"head|block_\d+/\w+",
        "weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8",
    },
    "fp8 training": {
        "weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2",
    },
}  # fmt: skip
OF_PEER = ("int8 QAT", "int8 training")
BARS = {
    "step of int8 QAT / float32": 1.15,
    "step of int8 training / float32": 1 / 1.5,
    "build of int8 QAT / Qwix's": 1.0,
    "build of int8 training / Qwix's": 1.0,
    "memory of int8 QAT / float32's": 1.1,
    "memory of int8 training / float32's": 1.1,
}


class Step:
    """One form of the training step in this process, built on request."""

    def __init__(self, library: str, rule: dict[str, str] | None) -> None:
        import char_lm
        import jax

        size = char_lm.Size(layers=2, width=512, heads=8, context=128, batch=8)
        self._library, self._rule = library, rule
        self._model = char_lm.Decoder(VOCABULARY, size)
        self._optimizer = char_lm.optimizer_of(size)
        self._ids = jax.random.randint(jax.random.key(0), (8, 129), 0, VOCABULARY)
        self._variables = jax.jit(self._model.init)(jax.random.key(1), self._ids[:, :-1])
        self._state = self._optimizer.init(self._variables)

    def _function(self) -> Any:
        import char_lm
        import jax
        import jax.numpy as jnp
        import optax

        model = self._model
        if self._rule is not None:
            library = importlib.import_module(self._library)
            provider = library.QtProvider([library.QtRule(**self._rule)])
            model = library.quantize_model(model, provider)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(variables, state, ids):
            def loss(variables):
                logits = model.apply(variables, ids[:, :-1])
                return jnp.mean(char_lm.token_losses(logits, ids[:, 1:]))

            value, gradient = jax.value_and_grad(loss)(variables)
            update, state = self._optimizer.update(gradient, state, variables)
            return optax.apply_updates(variables, update), state, value

        return step

    def build(self) -> dict[str, float]:
        import jax

        jax.clear_caches()
        marks = [time.perf_counter()]
        traced = self._function().trace(self._variables, self._state, self._ids)
        marks.append(time.perf_counter())
        lowered = traced.lower()
        marks.append(time.perf_counter())
        self._compiled = lowered.compile()
        marks.append(time.perf_counter())
        parts = dict(zip(("trace", "lower", "compile"), map(_minus, marks, marks[1:]), strict=True))
        memory = self._compiled.memory_analysis()
        text = lowered.as_text()
        return parts | {
            "build": marks[-1] - marks[0],
            "temporary_bytes": memory.temp_size_in_bytes,
            "native_calls": text.count("custom_call @fewbit_"),
            "quantized": any(word in text for word in ("xi8>", "xf8E4M3", "@fewbit_")),
        }

    def call(self) -> float:
        import jax

        start = time.perf_counter()
        done = self._compiled(self._variables, self._state, self._ids)
        self._variables, self._state, self.loss = jax.block_until_ready(done)
        return time.perf_counter() - start


def _minus(before: float, after: float) -> float:
    return after - before


def serve(library: str, forms: list[str]) -> None:
    """Answers lines of JSON: ["build" or "call", form]."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print; the pipe is for answers alone
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT / "examples"))
    steps = {name: Step(library, FORMS[name]) for name in forms}
    for line in sys.stdin:
        what, form = json.loads(line)
        answer = getattr(steps[form], what)()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Library:
    """One library in its own process."""

    def __init__(self, name: str, python: str, forms: list[str]) -> None:
        self.name = name
        env = os.environ | {"PYTHONPATH": str(ROOT) if name == "fewbit" else ""}
        self._process = subprocess.Popen(
            [python, __file__, "--serve", name, "--forms", *forms],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=env | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    def ask(self, what: str, form: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, form]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended at {what} of {form}; its message is above")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def judge(rows: dict[str, dict[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """The ratios that have bars, with the peer's where it is there."""
    found: dict[str, float] = {}
    for form in ("int8 QAT", "int8 training"):
        ours, theirs = rows.get(f"fewbit {form}"), rows.get(f"qwix {form}")
        if ours and BASE in rows:
            found[f"step of {form} / float32"] = 1 / ours["speed"]
            memory = ours["temporary_bytes"] / rows[BASE]["temporary_bytes"]
            found[f"memory of {form} / float32's"] = memory
        if ours and theirs:
            found[f"build of {form} / Qwix's"] = ours["build_over_peer"]
    return {name: (value, BARS[name]) for name, value in found.items()}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'':36}{'step':>9}{'float32 /':>11}{'trace':>8}{'lower':>8}{'compile':>9}{'memory':>9}"
    ]
    for name, row in rows.items():
        times = "".join(f"{row[part]:>{w}.2f}" for part, w in (("trace", 8), ("lower", 8)))
        lines.append(
            f"{name:36}{row['ms']:>6.0f} ms{row['speed']:>10.2f}x{times}{row['compile']:>9.2f}"
            f"{row['temporary_bytes'] / 1e6:>6.0f} MB"
        )
    lines.append("")
    for name, (value, bar) in judge(rows).items():
        met = "met" if value <= bar else "NOT met"
        lines.append(f"{name:40}{value:>6.2f}   at most {bar:.2f}: {met}")
    return "\n".join(lines)


def measure(libraries: dict[str, Library], forms: list[str], args: Any) -> dict[str, Any]:
    import _measure

    asked = [("fewbit", form) for form in forms]
    asked += [("qwix", form) for form in OF_PEER if "qwix" in libraries and form in forms]
    builds: dict[str, list[dict[str, float]]] = {f"{lib} {form}": [] for lib, form in asked}
    for number in range(args.builds + 1):  # the first of a process also pays for imports
        for lib, form in asked:
            answer = libraries[lib].ask("build", form)
            if answer.pop("quantized") != (FORMS[form] is not None):
                raise SystemExit(f"{lib}: the step of {form} is not what its name says")
            if number:
                builds[f"{lib} {form}"].append(answer)
    calls = {
        f"{lib} {form}": functools.partial(libraries[lib].ask, "call", form) for lib, form in asked
    }
    _measure.one_round(calls, list(calls))
    times = _measure.interleave(calls, budget=args.budget, least=4 if args.quick else 10)
    rows = _measure.summary(times, BASE)
    for name, of_rounds in builds.items():
        for key in of_rounds[0]:
            rows[name][key] = statistics.median(r[key] for r in of_rounds)
        lib, _, form = name.partition(" ")
        if peer := builds.get(f"qwix {form}") if lib == "fewbit" else None:
            pairs = zip(of_rounds, peer, strict=True)
            rows[name]["build_over_peer"] = statistics.median(
                a["build"] / b["build"] for a, b in pairs
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of steps")
    parser.add_argument("--builds", type=int, default=3, help="rounds of builds")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--serve", choices=["fewbit", "qwix"], help="one library, on request")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.forms)
        return
    import _measure
    import _page

    import fewbit

    if args.quick:
        args.budget, args.builds = 5.0, 1
    forms = list(dict.fromkeys(["float32", *args.forms]))
    libraries = {"fewbit": Library("fewbit", sys.executable, forms)}
    if pathlib.Path(args.peers).exists():
        libraries["qwix"] = Library("qwix", args.peers, list(OF_PEER))
    else:
        print(f"Qwix is not installed in {args.peers}: `make .venv-peers`; left out.")
    info = fewbit.kernels.info()
    facts = _measure.machine(isa=info.isa, versions=_measure.versions("jax", "jaxlib", "flax"))
    rows = measure(libraries, forms, args)
    for library in libraries.values():
        library.close()
    facts["load"].append(_measure.load())
    text = _measure.headline(facts) + "\n\n" + table(rows)
    print(text)
    if not args.quick and forms == list(FORMS):
        name = f"training-model-{info.isa}"
        path = _measure.write(name, {"machine": facts, "budget_s": args.budget, "rows": rows})
        print(f"written: {path.name}; {_page.put(name, text, PAGE)}")


if __name__ == "__main__":
    main()
