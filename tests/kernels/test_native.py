"""The compiled part: it loads, its kernel equals the reference, and its absence is explained."""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from fewbit import kernels
from fewbit.kernels import _library, _quantize

ROOT = pathlib.Path(__file__).parents[2]
SHAPES = [(1,), (7,), (3, 5), (4, 64), (2, 3, 1000), (0, 4), (4, 0), (1, 1)]

needs_native = pytest.mark.skipif(
    not kernels.native_available(), reason=f"native part: {kernels.info().missing}"
)


def reference(x):
    return np.max(np.abs(np.asarray(x, np.float64)), axis=-1, initial=0)


def normal(shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), shape, dtype)


@needs_native
@pytest.mark.parametrize("shape", SHAPES)
def test_native_absmax_equals_the_reference(shape):
    x = normal(shape)
    np.testing.assert_array_equal(jax.jit(_quantize._absmax_rows_native)(x), reference(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_absmax_of_every_type_and_shape(shape, dtype):
    x = normal(shape, dtype)
    result = kernels.absmax_rows(x)
    assert (result.shape, result.dtype) == (shape[:-1], dtype)
    np.testing.assert_array_equal(np.asarray(result, np.float64), reference(x))


def test_nan_infinity_and_negative_zero():
    rows = [[1.0, np.nan, 3.0], [-np.inf, 2.0, 0.0], [np.inf, -np.nan, 1.0], [-0.0, 0.0, -0.0]]
    result = np.asarray(kernels.absmax_rows(jnp.array(rows, jnp.float32)))
    np.testing.assert_array_equal(result, [np.nan, np.inf, np.nan, 0.0])
    assert not np.signbit(result[3])


@needs_native
def test_subnormal_numbers_survive_the_native_form():
    tiny = np.full((2, 4), np.float32(1e-42))
    result = jax.jit(_quantize._absmax_rows_native)(tiny)
    np.testing.assert_array_equal(np.asarray(result).view(np.int32), tiny[:, 0].view(np.int32))


def test_transformations_compose():
    x = normal((3, 4, 5))
    want = reference(x)
    np.testing.assert_array_equal(jax.jit(kernels.absmax_rows)(x), want)
    np.testing.assert_array_equal(jax.vmap(kernels.absmax_rows)(x), want)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(kernels.absmax_rows), 1, 1)(x), want)
    assert jax.eval_shape(kernels.absmax_rows, x).shape == (3, 4)
    gradient = jax.jit(jax.grad(lambda x: kernels.absmax_rows(x).sum()))(x)
    expected = jax.grad(lambda x: jnp.max(jnp.abs(x), axis=-1).sum())(x)
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_backend_is_chosen_at_lowering(platform):
    traced = jax.jit(kernels.absmax_rows).trace(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    expected = platform == "cpu" and kernels.native_available()
    assert ("fewbit_absmax_rows" in text) == expected


@needs_native
@pytest.mark.parametrize("result_shape", [(4,), (3, 5), (), (3, 1)])
def test_a_wrong_result_shape_is_refused_at_the_boundary(result_shape):
    result = jax.ShapeDtypeStruct(result_shape, jnp.float32)
    call = jax.jit(jax.ffi.ffi_call("fewbit_absmax_rows", result))
    with pytest.raises(Exception, match=r"without its last axis; got operand f32\[3,5\]"):
        call(normal((3, 5))).block_until_ready()


@needs_native
def test_a_wrong_type_is_refused_at_the_boundary():
    call = jax.jit(jax.ffi.ffi_call("fewbit_absmax_rows", jax.ShapeDtypeStruct((3,), jnp.float32)))
    with pytest.raises(Exception, match="Wrong buffer dtype"):
        call(normal((3, 5), jnp.bfloat16)).block_until_ready()


def test_errors_name_the_fix():
    with pytest.raises(ValueError, match=r"x is a scalar.*x\.reshape\(1\)"):
        kernels.absmax_rows(jnp.float32(1))
    with pytest.raises(TypeError, match=r"int32\[2, 3\]. Convert it first: x.astype"):
        kernels.absmax_rows(jnp.zeros((2, 3), jnp.int32))


def test_info_and_doctor_show_a_backend_that_was_asked_for():
    with kernels.backend("xla"):
        inside = kernels.info()
        assert not kernels.native_available()
    assert inside.backend == "xla" and inside.forced == "fewbit.kernels.backend('xla')"
    if inside.native:
        assert "; not used, XLA runs everything: fewbit.kernels.backend('xla')" in str(inside)
    assert kernels.info().forced is None
    with pytest.raises(ValueError, match="'xlaa', which is not known; did you mean 'xla'"):
        with kernels.backend("xlaa"):
            pass


def test_info_prints_what_a_person_asks():
    info = kernels.info()
    lines = str(info).splitlines()
    wanted = ["native kernels", "CPU", "threads", "silu, sigmoid"]
    assert [line.partition(":")[0] for line in lines] == wanted
    assert info.isa in ("avx512_vnni", "avx2", "portable")
    assert 1 <= info.threads <= (os.cpu_count() or 1)


@needs_native
def test_library_and_operating_system_agree_on_the_cpu():
    code = """
        from fewbit.kernels import _info, _library
        assert _library.native_part().isa == _info.isa_from_flags(_info._cpu_flags())
    """
    unforced = {name: value for name, value in os.environ.items() if name != "FEWBIT_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT, env=unforced, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    forced = os.environ.get("FEWBIT_ISA")
    assert not forced or _library.native_part().isa == forced


def run_with_library(value):
    """What a fresh process with FEWBIT_NATIVE_LIBRARY=value prints."""
    code = """
        import jax.numpy as jnp
        import fewbit
        from fewbit import kernels
        assert not kernels.native_available()
        assert kernels.absmax_rows(jnp.array([[1.0, -2.0]])).tolist() == [2.0]
        print(kernels.info())
    """
    environment = {**os.environ, "FEWBIT_NATIVE_LIBRARY": value, "LD_PRELOAD": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_library_everything_runs_and_the_reason_is_told(tmp_path):
    assert "no, XLA runs everything: turned off" in run_with_library("")
    assert "which is not a file; correct or unset it" in run_with_library(str(tmp_path / "no.so"))
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert "does not load" in run_with_library(str(broken))


LIBRARY = """
const char* fewbit_isa() {{ return "portable"; }}
const char* fewbit_isa_problem() {{ return ""; }}
const char* fewbit_jaxlib_version() {{ return "99.1"; }}
int fewbit_ffi_api_major() {{ return {0}; }}
int fewbit_ffi_api_minor() {{ return {1}; }}
_Bool fewbit_activation() {{ return 0; }}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler on PATH")
@pytest.mark.parametrize("version", [(0, 99), (7, 0)])
def test_a_library_for_a_newer_jax_does_not_stop_this_one(tmp_path, version):
    """JAX registers functions when its backend starts, and does not start with one it refuses."""
    handlers = "".join(
        f"void* {name}(void* frame) {{ return 0; }}\n" for name in _library.FUNCTIONS
    )
    (tmp_path / "newer.c").write_text(LIBRARY.format(*version) + handlers)
    library = str(tmp_path / "newer.so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, "newer.c"],
        cwd=tmp_path, env={**os.environ, "LD_PRELOAD": ""}, check=True,
    )  # fmt: skip
    told = run_with_library(library)
    assert f"newer.so was built against jaxlib 99.1 (FFI {version[0]}.{version[1]}), and" in told
    assert f"jaxlib {jaxlib.__version__} (FFI 0." in told
    assert "Rebuild it: `pip install --force-reinstall --no-deps .`" in told


def test_many_threads_may_ask_first():
    """Registration is guarded: all see the same part, registered once."""
    import concurrent.futures

    _library._open_and_register.cache_clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda _: _library.native_part(), range(32)))
    assert len({id(part) for part in parts}) == 1
    assert parts[0].missing is None or not kernels.native_available()


def test_import_fewbit_is_enough_to_ask_about_kernels():
    code = "import fewbit; print(fewbit.kernels.info())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "native kernels:" in done.stdout
