"""Products of QArrays inside Pallas kernels, run by Pallas' interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import normal, says
from jax.experimental import pallas as pl

import fewbit
import fewbit.pallas as qpl

M, K, N = 16, 64, 32
NUMBERS = (((1,), (0,)), ((), ()))
X, W = normal(0, M, K), normal(1, K, N)
HOWS = {
    "per-channel": dict(channelwise_axes=(1,)),
    "per-tensor": {},
    "tiles of k": dict(channelwise_axes=(1,), tiled_axes={0: 16}),
    "blocks": dict(tiled_axes={0: 16, 1: 8}),
    "per element of k": dict(channelwise_axes=(0, 1)),
}


def float_product(x, w):
    x, w = (fewbit.dequantize(v) if isinstance(v, fewbit.QArray) else v for v in (x, w))
    return x @ w


def near(found, wanted, bound=1e-5):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert jnp.abs(found - wanted).max() <= bound * jnp.abs(wanted).max()


@pytest.mark.parametrize("how", HOWS)
def test_dot_beside_the_float_product(how):
    w = qpl.quantize(W, "int8", **HOWS[how])
    near(qpl.dot(X, w), float_product(X, w))
    x = qpl.quantize(X, "int8", channelwise_axes=(0,))
    near(qpl.dot(x, w), float_product(x, w))
    xt, wt = x.transpose((1, 0)), w.transpose((1, 0))
    numbers = (((0,), (1,)), ((), ()))
    near(qpl.dot_general(xt, wt, numbers), float_product(x, w))


def test_codes_are_multiplied_as_integers():
    x, w = (qpl.quantize(v, "int8", channelwise_axes=(a,)) for v, a in ((X, 0), (W, 1)))
    text = str(jax.make_jaxpr(qpl.dot)(x, w))
    assert text.count("dot_general") == 1 and "preferred_element_type=int32" in text
    whole = jnp.einsum("mk,kn->mn", x.qvalue.astype(jnp.int32), w.qvalue.astype(jnp.int32))
    assert (qpl.dot(x, w) == whole.astype(jnp.float32) * x.scale * w.scale).all()


def test_both_sides_in_tiles():
    x = qpl.quantize(X, "int8", channelwise_axes=(0,), tiled_axes={1: 16})
    w = qpl.quantize(W, "int8", channelwise_axes=(1,), tiled_axes={0: 16})
    near(qpl.dot(x, w), float_product(x, w))
    other = qpl.quantize(W, "int8", channelwise_axes=(1,), tiled_axes={0: 32})
    with says(ValueError, "axis 1 of lhs has tiles of 16, axis 0 of rhs tiles of 32"):
        qpl.dot(x, other)


@pytest.mark.parametrize("qtype", ["nf4", "float8_e4m3fn", "int4", "mxfp4"])
@pytest.mark.parametrize("with_x", [False, True])
def test_other_types(qtype, with_x):
    w = qpl.quantize(W, qtype, channelwise_axes=(1,), tiled_axes={0: 32})
    x = qpl.quantize(X, "int8", channelwise_axes=(0,)) if with_x else X
    near(qpl.dot(x, w), float_product(x, w))


def test_zero_points():
    x = qpl.quantize(X + 1, "int8", channelwise_axes=(0,), calibration_method="minmax")
    near(qpl.dot(x, qpl.quantize(W, "int8")), float_product(x, qpl.quantize(W, "int8")))


@pytest.mark.parametrize("text", ["mk,nk->mn", "km,kn->nm", "bmk,bkn->bmn", "mbk,bnk->nbm"])
def test_einsum(text):
    sizes = dict(m=8, k=32, n=4, b=2)
    left, right, _ = text.replace("->", ",").split(",")
    operands = [normal(i, *(sizes[c] for c in side)) for i, side in enumerate((left, right))]
    tiled = {right.index("k"): 8}
    channels = tuple(a for a in range(len(right)) if a not in tiled)
    w = qpl.quantize(operands[1], "int8", channelwise_axes=channels, tiled_axes=tiled)
    near(qpl.einsum(text, operands[0], w), jnp.einsum(text, operands[0], fewbit.dequantize(w)))


@pytest.mark.parametrize("text", ["mm,mn->mn", "mk,kn->n", "mk,kn,nj->mj"])
def test_einsums_that_are_more_than_a_product(text):
    operands = [jnp.ones((4, 4))] * (text.count(",") + 1)
    with says(ValueError, "multiplies two operands", repr(text)):
        qpl.einsum(text, *operands)


# --- pallas_call ----------------------------------------------------------------------------------


def matmul(x, w, block_k=K, block_n=N):
    """Blocks of both operands; what is summed over is summed block by block."""

    def kernel(x_ref, w_ref, out_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        loaded = w_ref[...]
        if isinstance(w_ref, qpl.QArray):
            loaded = dataclasses.replace(loaded, qvalue=loaded.qvalue)
        out_ref[...] += qpl.dot(x_ref[...], loaded, preferred_element_type=jnp.float32)

    return qpl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(N // block_n, K // block_k),
        in_specs=[
            pl.BlockSpec((M, block_k), lambda n, k: (0, k)),
            pl.BlockSpec((block_k, block_n), lambda n, k: (k, n)),
        ],
        out_specs=pl.BlockSpec((M, block_n), lambda n, k: (0, n)),
        interpret=True,
    )(x, w)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("blocks", [(K, N), (32, 16), (8, 8)])
def test_quantized_operands_in_blocks(how, blocks):
    x = qpl.quantize(X, "int8", channelwise_axes=(0,))
    w = qpl.quantize(W, "int8", **HOWS[how])
    near(matmul(x, w, *blocks), float_product(x, w))
    near(matmul(X, w, *blocks), float_product(X, w))
    assert jnp.allclose(matmul(X, W, *blocks), X @ W, rtol=1e-5, atol=1e-5)


def test_arguments_without_specs_and_other_trees():
    w = qpl.quantize(W, "int8", channelwise_axes=(1,))

    def kernel(tree, out_ref):
        assert tree["none"] is None
        out_ref[...] = qpl.dot(tree["x"][...], tree["w"][...])

    out = jax.ShapeDtypeStruct((M, N), jnp.float32)
    tree = {"x": X, "w": w, "none": None}
    near(qpl.pallas_call(kernel, out, interpret=True)(tree), float_product(X, w))
    whole = {"x": pl.BlockSpec((M, K), lambda: (0, 0)), "w": pl.BlockSpec((K, N), lambda: (0, 0))}
    specs = [{**whole, "none": None}]
    found = qpl.pallas_call(kernel, out, in_specs=specs, interpret=True)(tree)
    near(found, float_product(X, w))


def test_a_stack_of_weights_of_which_a_block_has_one():
    w = qpl.quantize(normal(3, 4, K, N), "int8", channelwise_axes=(0, 2))

    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = qpl.dot(x_ref[...], w_ref[...])

    spec = pl.GridSpec(
        grid=(4,),
        in_specs=[
            pl.BlockSpec((M, K), lambda g: (0, 0)),
            pl.BlockSpec((None, K, N), lambda g: (g, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, M, N), lambda g: (g, 0, 0)),
    )
    out = jax.ShapeDtypeStruct((4, M, N), jnp.float32)
    found = qpl.pallas_call(kernel, out, grid_spec=spec, interpret=True)(X, w)
    near(found, jnp.einsum("mk,gkn->gmn", X, fewbit.dequantize(w)))


def test_what_cannot_be_cut_into_blocks():
    w = qpl.quantize(W, "int8", tiled_axes={0: 16})
    with says(
        ValueError,
        "scales of a (64, 32) QArray, (4, 1), into blocks of (24, 32): on axis 0 a block of 24",
    ):
        spec = pl.BlockSpec((24, N), lambda: (0, 0))
        x = pl.BlockSpec((M, K), lambda: (0, 0))
        out = jax.ShapeDtypeStruct((M, N), jnp.float32)
        qpl.pallas_call(lambda *refs: None, out, in_specs=[x, spec], interpret=True)(X, w)
    with says(ValueError, "codes are packed (layout='bits')", "fewbit.unpack(q)"):
        matmul(X, fewbit.pack(qpl.quantize(W, "int4")))
    with says(TypeError, "needs a pallas.BlockSpec with a block_shape"):
        qpl.pallas_call(lambda *refs: None, out, in_specs=[x, pl.BlockSpec()], interpret=True)(X, w)
