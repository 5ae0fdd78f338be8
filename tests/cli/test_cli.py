"""The command line, as a person calls it."""

import os
import subprocess
import sys

import pytest


def run(*args, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fewbit", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [
        ({}, 0, "native kernels: yes"),
        ({"FEWBIT_ISA": "portable"}, 0, "portable"),
        ({"FEWBIT_ISA": "avx1024"}, 1, "FEWBIT_ISA is 'avx1024'"),
        ({"FEWBIT_NATIVE_LIBRARY": ""}, 1, "no, XLA runs everything: turned off"),
    ],
)
def test_doctor_says_what_is_there_and_why_not(environment, code, said):
    done = run("doctor", **environment)
    assert done.returncode == code and said in done.stdout, done.stdout + done.stderr


def test_misuse_has_its_own_exit_code():
    done = run("doktor")
    assert done.returncode == 2 and "doctor" in done.stderr


def test_doctor_tells_of_fp8_and_of_keras():
    done = run("doctor", KERAS_BACKEND="torch")
    assert "fp8:" in done.stdout
    assert "torch; fewbit.keras needs jax: set KERAS_BACKEND=jax" in done.stdout
