"""silu and sigmoid inside a product have the bits of XLA's, or XLA does them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8A8, normal, quantized
from test_fused_products import mlp, needs_native, params
from test_native_matmul import LEVELS, in_a_process

import fewbit
from fewbit import kernels
from fewbit.kernels import _finish

pytestmark = needs_native
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
BELOW = LEVELS[LEVELS.index(kernels.info().isa) :]


SAME_BITS = """
import jax, numpy as np
from fewbit import kernels
import test_fused_products as t
print(kernels.info().isa, kernels.info().steps)
edge = np.linspace(-110, -80, 5001)  # where results become subnormal
x = jax.numpy.asarray(np.concatenate([t.GRID, edge, -edge, [1e-38, 3e-39]]).astype(np.float32))
for name in ('silu', 'sigmoid'):
    t.np.testing.assert_array_equal(t.of_bias(x, name), jax.jit(t.ACTIVATIONS[name])(x), name)
"""


# One bit would do to move a code of the next product, and that to choose another token.
@pytest.mark.parametrize("flags", ["", QUICK], ids=["optimized", "quick"])
@pytest.mark.parametrize("isa", BELOW)
def test_silu_and_sigmoid_have_the_bits_of_xla(isa, flags):
    found, steps = in_a_process(SAME_BITS, FEWBIT_ISA=isa, XLA_FLAGS=flags).split()
    assert found == isa
    # XLA rounds a product and a sum once on CPUs that can, which portable kernels never do.
    assert steps in (_finish.STEPS if isa != "portable" else ("None", *_finish.STEPS))


def test_the_numbers_that_are_asked_for_tell_all_steps_apart():
    results = {steps: _finish._native(f"sigmoid/{steps}") for steps in _finish.STEPS}
    once = kernels.info().isa != "portable"
    kinds = {result.tobytes() for result in results.values()}
    assert len(kinds) == (4 if once else 2)
    for result in results.values():
        exact = 1 / (1 + np.exp(-_finish._NUMBERS.astype(np.float64)))
        np.testing.assert_allclose(result, exact, rtol=4e-7)


def test_what_xla_does_otherwise_is_left_to_it(monkeypatch):
    monkeypatch.setattr(_finish, "_found", lambda: None)
    f, x = mlp(jax.nn.silu), normal(0, 3, 64)
    qf, qp, plan = quantized(f, W8A8, params(), x)
    assert plan.sites[0].runs_on == "native int8 + bias"
    assert kernels.info().steps is None
    assert "silu, sigmoid:  done by XLA after a product" in str(kernels.info())
    with monkeypatch.context() as patch:
        patch.setattr("fewbit.interpreter._interpret.find_chains", lambda jaxpr: {})
        fresh = fewbit.quantize_model(lambda *a: f(*a), fewbit.PtqProvider(W8A8))
        apart = jax.jit(fresh)(qp, x)
    np.testing.assert_array_equal(jax.jit(qf)(qp, x), apart)
    assert quantized(mlp(jax.nn.gelu), W8A8, params(), x)[2].sites[0].runs_on.endswith("gelu")


def test_a_model_with_silu_gives_the_same_bits_fused_and_not(monkeypatch):
    if kernels.info().steps is None:
        assert kernels.info().isa == "portable"
    f, x = mlp(jax.nn.silu), normal(0, 30, 64)
    qf, qp, _ = quantized(f, W8A8, params(), x)
    with monkeypatch.context() as patch:
        patch.setattr("fewbit.interpreter._interpret.find_chains", lambda jaxpr: {})
        fresh = fewbit.quantize_model(lambda *a: f(*a), fewbit.PtqProvider(W8A8))
        apart = jax.jit(fresh)(qp, x)
    np.testing.assert_array_equal(jax.jit(qf)(qp, x), apart)


def test_xla_is_asked_in_the_middle_of_anything():
    """Under a trace, without jit, with guarded transfers and on an explicit mesh."""

    def ask():
        _finish._found.cache_clear()
        return _finish.xla_steps()

    wanted, seen = ask(), []

    @jax.jit
    def traced(x):
        seen.append(ask())
        return jax.vmap(lambda y: y + (seen.append(ask()) or 0))(x)

    jaxpr = jax.make_jaxpr(traced)(jnp.ones(3))
    assert "logistic" not in str(jaxpr)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.transfer_guard("disallow"), jax.disable_jit(), jax.set_mesh(mesh):
        seen.append(ask())
    assert seen == [wanted] * 3


def test_it_is_asked_once_and_only_when_needed():
    code = """
import jax
from fewbit import kernels
from fewbit.kernels import _finish
assert kernels.native_available() and kernels.fused_activation('gelu') == 'gelu'
assert _finish._found.cache_info().misses == 0
print(kernels.info())
kernels.fused_activation('silu')
assert _finish._found.cache_info().misses == 1
"""
    assert "silu, sigmoid:" in in_a_process(code)
