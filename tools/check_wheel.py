"""Uses an installed fewbit as a user does who has no compiler: the README's ten lines, a native
product, a scan. tools/check_wheel.sh runs it in new environments.
"""

import pathlib
import platform
import re
import shutil

README = pathlib.Path(__file__).parent.parent / "README.md"


def ten_lines():
    """The README's first example, as it stands there."""
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL).group(1)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def native_product():
    """A product of int8 runs natively, as the plan says, and is near the float one."""
    import jax
    import jax.numpy as jnp

    import fewbit

    info = fewbit.kernels.info()
    assert info.backend == "native", info
    x = jax.random.normal(jax.random.key(0), (8, 256))
    params = {"w": jax.random.normal(jax.random.key(1), (256, 128))}
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]

    def model(params, x):
        return x @ params["w"]

    plan = fewbit.plan(model, rules, params, x)
    assert "native int8" in str(plan), plan
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    found = jax.jit(quantized)(fewbit.quantize_params(params, plan), x)
    expected = model(params, x)
    assert jnp.abs(found - expected).max() < 0.05 * jnp.abs(expected).max()


def scan():
    """Layers of a scan are Sites, each with weights of its own."""
    import jax
    import jax.numpy as jnp

    import fewbit

    x = jax.random.normal(jax.random.key(0), (8, 64))
    params = {"w": jax.random.normal(jax.random.key(1), (3, 64, 64)) / 8}
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]

    def model(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    plan = fewbit.plan(model, rules, params, x)
    assert "1 of 1 sites quantized" in str(plan), plan
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    found = jax.jit(quantized)(fewbit.quantize_params(params, plan), x)
    expected = model(params, x)
    assert jnp.abs(found - expected).max() < 0.1 * jnp.abs(expected).max()


def main():
    """All three; says where."""
    compilers = [name for name in ("cc", "gcc", "g++", "c++", "clang") if shutil.which(name)]
    assert not compilers, f"a compiler is on the PATH: {compilers}"
    import jax

    import fewbit

    assert "site-packages" in fewbit.__file__, fewbit.__file__
    ten_lines()
    native_product()
    scan()
    print(f"Python {platform.python_version()}, JAX {jax.__version__}: {fewbit.kernels.info()}")


if __name__ == "__main__":
    main()
