"""The other end of bench/_remote.py: a peer's kernels, built and called on request.

A script of products hands over `kernels(shape, weight, x) -> {name: (call, bytes of the weight)}`.
Run alone, it measures itself against its own float32 in the same kind of rounds. Other scripts
build their calls themselves and hand them to `serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _measure
from _measure import Shape as Shape
from _measure import machine as machine
from _measure import threads as threads
from _measure import versions as versions_of

Kernels = dict[str, tuple[Callable[[], Any], int]]
Builder = Callable[[Shape, np.ndarray, np.ndarray], Kernels]
TOLERANCE = 0.35  # of the root mean square: a wrong product is off by more than 1


def build(builder: Builder, shape: Shape) -> Kernels:
    """The peer's kernels on a random weight [k, n] (a table [n, k] if tied), each tried once."""
    source = np.random.default_rng(0)
    w_shape = (shape.n, shape.k) if shape.tied else (shape.k, shape.n)
    weight = source.standard_normal(w_shape, np.float32) * np.float32(shape.k**-0.5)
    x = source.standard_normal((shape.rows, shape.k), np.float32)
    kernels = builder(shape, weight, x)
    few = weight[:64].T if shape.tied else weight[:, :64]
    expected = x @ few
    for name, (call, _) in kernels.items():
        result = np.asarray(call())[:, :64]
        error = np.sqrt(np.mean((result - expected) ** 2) / np.mean(expected**2))
        if not error < TOLERANCE:
            raise RuntimeError(f"{name} at {shape} is off by {error:.2f} of its size")
    return kernels


def main(builder: Builder, base: str, *packages: str) -> None:
    """Serves (`--serve`) or measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--shapes", nargs="+")
    args = parser.parse_args()
    if args.serve:
        serve(lambda task: build(builder, Shape(*task)), versions_of(*packages))
        return
    print(versions_of(*packages))
    for shape in _measure.chosen_shapes(args.shapes):
        if shape.back:
            continue
        calls = {name: call for name, (call, _) in build(builder, shape).items()}
        times = _measure.interleave(calls, budget=args.budget)
        for name, numbers in _measure.summary(times, base).items():
            print(f"{shape!s:24}{name:36}{numbers['ms']:10.3f} ms{numbers['speed']:8.2f}x")


def serve(prepare: Callable[[Any], Kernels], versions: dict[str, str]) -> None:
    """Answers until its input ends; `prepare` makes the calls that are then asked for by name."""
    # Libraries print to standard output; the answers keep the pipe for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kernels: Kernels = {}
    for line in sys.stdin:
        question = json.loads(line)
        if question["what"] == "versions":
            answer: Any = versions
        elif question["what"] == "prepare":
            kernels = {}
            kernels = prepare(question["task"])
            answer = {name: size for name, (_, size) in kernels.items()}
        else:
            call = kernels[question["name"]][0]
            start = time.perf_counter()
            call()
            answer = time.perf_counter() - start
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
