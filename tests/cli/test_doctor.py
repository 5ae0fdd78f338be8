"""What the doctor says about fp8 units and Keras' backend, machine by machine."""

from dataclasses import dataclass

import pytest

from fewbit.cli._commands import fp8_here, keras_backend


@dataclass
class Device:
    platform: str
    device_kind: str
    compute_capability: str | None = None


@pytest.mark.parametrize(
    ("devices", "flags", "said"),
    [
        ([], ["amx_fp8", "avx10_2"], "native on this CPU (AMX-FP8, AVX10.2): emulate=True with"),
        ([], ["avx512_vnni", "amx_int8"], "not native here (the CPU has no fp8 units)"),
        ([Device("gpu", "NVIDIA H100", "9.0")], [], "native on this GPU (NVIDIA H100)"),
        ([Device("gpu", "NVIDIA A100", "8.0")], [], "not native here (this GPU (NVIDIA A100) has"),
        ([Device("gpu", "other")], ["amx_fp8"], "not native here (this GPU (other) has no fp8"),
        ([Device("tpu", "TPU7x")], [], "native on this TPU (TPU7x)"),
        ([Device("tpu", "TPU v5e")], [], "not native here (this TPU (TPU v5e) has no fp8 units)"),
    ],
)
def test_where_fp8_is_native(devices, flags, said):
    assert fp8_here(devices, frozenset(flags)).startswith(said)


def test_this_machine_gets_an_answer():
    assert fp8_here().startswith(("native on this", "not native here"))


def test_the_backend_is_read_as_keras_reads_it(tmp_path):
    home = {"KERAS_HOME": str(tmp_path)}
    assert keras_backend(home).startswith("tensorflow; fewbit.keras needs jax")
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert keras_backend(home) == "jax, which fewbit.keras runs on"
    assert keras_backend({**home, "KERAS_BACKEND": "torch"}).startswith("torch; ")
    (tmp_path / "keras.json").write_text("not json")
    assert keras_backend(home).startswith("tensorflow; ")
