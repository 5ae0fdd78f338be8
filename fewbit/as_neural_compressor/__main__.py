"""`python -m fewbit.as_neural_compressor`: run a program of Neural Compressor's JAX backend."""

import sys

from fewbit._util import run_program
from fewbit.as_neural_compressor._table import RUNNER, install

TEXT = """\
Runs a program that imports neural_compressor.jax on fewbit.keras, as it is. The program's own
arguments, exit code and output are its own."""

if __name__ == "__main__":
    run_program(sys.argv[1:], RUNNER, TEXT, lambda given: install(), {})
