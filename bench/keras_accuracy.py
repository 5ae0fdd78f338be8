"""Accuracy that quantized Keras models keep, beside the bars.

A small CNN and a small transformer are trained on scikit-learn's digits and, unless `--quick`, on
12,000 images of Fashion-MNIST; every config's loss in points of accuracy is shown. Then the cosine
of float and quantized logits of a random Gemma3 (2 layers, 512 wide, 8,000 tokens).

    python bench/keras_accuracy.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))

import keras_trained as nets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits and Gemma3 alone")
    quick = parser.parse_args().quick
    sets = {"digits": (nets.digits, {"cnn": 20, "transformer": 30})}
    if not quick:
        sets["Fashion-MNIST"] = (nets.fashion_mnist, {"cnn": 3, "transformer": 3})
    for name, (read, epochs) in sets.items():
        train, test = read()
        for make in (nets.cnn, nets.transformer):
            model = nets.trained(make, train, epochs[make.__name__])
            exact, lost = nets.lost_points(model, train, test)
            print(f"\n{make.__name__} on {name}: {exact:.2f} % in float32")
            for config, points in lost.items():
                print(f"  {config:26} {points:+.2f} points lost, at most {nets.points(config)}")
    print("\nrandom Gemma3, cosine of logits")
    for name, cosine in nets.gemma_cosines().items():
        print(f"  {name:26} {cosine:.5f}, at least {nets.GEMMA[name][1]}")


if __name__ == "__main__":
    main()
