"""The backend by option: what is traced under `backend('xla')`, exported, and read elsewhere."""

import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8, W8A8, normal, quantized
from tolerances import CODE_OF_NEXT_LAYER

import fewbit
from fewbit import kernels

ROOT = pathlib.Path(__file__).parents[2]
needs_native = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)


def model(p, x):
    h = jax.nn.gelu(x @ p["up"] + p["b"][None])
    return h @ p["down"]


def parameters():
    return {
        "up": normal(1, 64, 128) / 8,
        "b": normal(2, 128),
        "down": normal(3, 128, 64) / 8,
    }


def python(code, **environment):
    """What a new process prints, whose environment is ours with some changes."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(path for path in paths if path != str(ROOT))
    env = {**os.environ, "PYTHONPATH": others}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**env, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_native
def test_a_compiled_function_follows_the_backend():
    qf, qp, _ = quantized(model, W8A8, parameters(), normal(0, 3, 64))
    run = jax.jit(qf)
    x = normal(0, 3, 64)
    native = run(qp, x)
    with kernels.backend("xla"):
        assert "fewbit_matmul" not in run.lower(qp, x).as_text()
        through_xla = run(qp, x)
        with kernels.backend("native"):
            assert "fewbit_matmul" in run.lower(qp, x).as_text()
        packed = fewbit.pack(fewbit.unpack(qp))
        assert packed["up"].array.layout != "panels"  # as on a machine without kernels
    assert "fewbit_matmul" in run.lower(qp, x).as_text()
    np.testing.assert_array_equal(run(qp, x), native)
    np.testing.assert_allclose(through_xla, native, atol=CODE_OF_NEXT_LAYER * float(native.max()))


@needs_native
def test_the_plan_knows_the_backend():
    p, x = parameters(), normal(0, 3, 64)
    with kernels.backend("xla"):
        words = [row.runs_on for row in fewbit.plan(model, W8A8, p, x).sites]
    assert words == ["xla int8 dot, slow"] * 2
    words = [row.runs_on for row in fewbit.plan(model, W8A8, p, x).sites]
    assert words == ["native int8 + bias + gelu", "native int8"]


@needs_native
@pytest.mark.parametrize("rules", (W8, W8A8), ids=("w8", "w8a8"))
def test_an_export_is_refused_or_goes_through_xla(rules):
    x = normal(0, 3, 64)
    qf, qp, _ = quantized(model, rules, parameters(), x)
    run = jax.jit(lambda x: qf(qp, x))
    native = run(x)  # compiled with kernels before
    with pytest.raises(ValueError, match=r"with fewbit\.kernels\.backend\('xla'\)") as error:
        jax.export.export(run)(x)
    assert "fewbit.unpack(params)" in str(error.value)
    with kernels.backend("xla"):
        exported = jax.export.export(run)(x)
    assert "custom_call @fewbit" not in exported.mlir_module()
    limit = CODE_OF_NEXT_LAYER * float(jnp.abs(native).max())
    np.testing.assert_allclose(exported.call(x), native, atol=limit)


@needs_native
@pytest.mark.parametrize("rules", (W8, W8A8), ids=("w8", "w8a8"))
def test_an_export_runs_where_there_is_no_fewbit(rules, tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export cannot serialize without it")
    x = normal(0, 3, 64)
    qf, qp, _ = quantized(model, rules, parameters(), x)
    with kernels.backend("xla"):
        exported = jax.export.export(jax.jit(lambda x: qf(qp, x)))(x)
    (tmp_path / "model.bin").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", x)
    code = f"""
        import sys, numpy as np, jax.export
        read = jax.export.deserialize(bytearray(open({str(tmp_path / "model.bin")!r}, 'rb').read()))
        np.save({str(tmp_path / "y.npy")!r}, read.call(np.load({str(tmp_path / "x.npy")!r})))
        print('fewbit' in sys.modules)
    """
    assert python(code, XLA_FLAGS="").strip() == "False"
    native = qf(qp, x)
    limit = CODE_OF_NEXT_LAYER * float(jnp.abs(native).max())
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), native, atol=limit)


@needs_native
def test_a_symbolic_batch_and_a_packed_convolution_are_exported_too():
    qf, qp, _ = quantized(model, W8, parameters(), normal(0, 3, 64))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 64"), jnp.float32)
    with kernels.backend("xla"):
        exported = jax.export.export(jax.jit(lambda x: qf(qp, x)))(shape)
    for rows in (1, 5):
        x = normal(0, rows, 64)
        np.testing.assert_allclose(exported.call(x), qf(qp, x), atol=1e-5)

    def conv(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    w, image = normal(1, 3, 3, 32, 64), normal(2, 1, 8, 8, 32)
    qconv, qw, plan = quantized(conv, W8, w, image)
    assert plan.sites[0].runs_on.startswith("native")
    with pytest.raises(ValueError, match="cannot be exported"):
        jax.export.export(jax.jit(lambda x: qconv(qw, x)))(image)
    with kernels.backend("xla"):
        exported = jax.export.export(jax.jit(lambda x: qconv(qw, x)))(image)
    np.testing.assert_allclose(exported.call(image), qconv(qw, image), atol=1e-3)


@needs_native
def test_kernels_in_an_export_on_request():
    x = normal(0, 3, 64)
    qf, qp, _ = quantized(model, W8, parameters(), x)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("fewbit_matmul")]
    with kernels.backend("native"):
        exported = jax.export.export(jax.jit(lambda x: qf(qp, x)), disabled_checks=allowed)(x)
    assert "fewbit_matmul" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(x), qf(qp, x), atol=1e-6)


def test_the_environment_forces_a_backend():
    code = """
        import fewbit, jax.numpy as jnp
        from fewbit import kernels
        assert not kernels.native_available()
        print(kernels.info())
        with kernels.backend('native'):
            print('inside', kernels.info().forced)
    """
    out = python(code, FEWBIT_BACKEND="xla", PYTHONPATH=str(ROOT))
    assert "XLA runs everything" in out and "inside fewbit.kernels.backend('native')" in out
    if kernels.native_available():
        assert "; not used, XLA runs everything: FEWBIT_BACKEND=xla" in out
    code = """
        import fewbit
        from fewbit import kernels
        print(kernels.info())
        try:
            kernels.native_available()
        except ValueError as error:
            print('error', error)
    """
    out = python(code, FEWBIT_BACKEND="xlaa", PYTHONPATH=str(ROOT))
    wanted = "FEWBIT_BACKEND asks for the backend 'xlaa', which is not known; did you mean 'xla'?"
    assert f"no, and products are an error: {wanted}" in out and f"error {wanted}" in out
