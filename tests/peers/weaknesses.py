"""Questions whose answer is known, put to fewbit and to its peers alike. Imports neither of them.

Each function takes a library and returns something that JSON can hold: mostly the relative error
against the float result, or whether the parameter is stored quantized.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from peers.cases import numbers

INT8 = dict(weight_qtype="int8", act_qtype="int8")
W8 = dict(weight_qtype="int8")
MATMUL = (((1,), (0,)), ((), ()))


def error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, f"shape {got.shape} instead of {wanted.shape}"
    return float(np.abs(got - wanted).mean() / np.abs(wanted).mean())


def provider(library, fields):
    return library.PtqProvider([library.QuantizationRule(module_path=".*", **fields)])


def linen(library, model, x, fields):
    """(float params, quantized params, apply) by the documented flow."""
    key = jax.random.key(0)
    params = model.init(key, x)["params"]
    ptq = library.quantize_model(model, provider(library, fields))
    template = jax.eval_shape(ptq.init, key, x)["params"]
    quantized = library.quantize_params(params, template)
    return params, quantized, lambda q, x: ptq.apply({"params": q}, x)


def n_quantized(tree):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return sum("qvalue" in path for path in paths)


def linen_outcome(library, model, x, fields=INT8):
    params, quantized, apply = linen(library, model, x, fields)
    wanted = model.apply({"params": params}, x)
    return {"error": error(apply(quantized, x), wanted), "quantized": n_quantized(quantized)}


def nnx_outcome(library, model, x, fields=INT8):
    wanted = model(x)
    jax.clear_caches()  # or the peer would find the float product in JAX's cache
    ptq = library.quantize_model(model, provider(library, fields), x)
    first = error(ptq(x), wanted)
    return {"error": max(first, error(ptq(x), wanted)), "quantized": n_quantized(nnx.state(ptq))}


# --- arrays and products -----------------------------------------------------------------------


def int1(library):
    x = numbers((4, 64), 1)
    return error(library.dequantize(library.quantize(x, "int1", channelwise_axes=(0,))), x)


def float16_weights_of_a_usual_size(library):
    x = numbers((64, 64), 2, "float16", factor=0.02)
    return error(library.dequantize(library.quantize(x, "int8", channelwise_axes=(1,))), x)


def uint8_of_signed_numbers(library):
    x = numbers((4, 64), 3)
    return error(library.dequantize(library.quantize(x, "uint8", channelwise_axes=(0,))), x)


def _product(library, qtype, jit=False, tile=None, act=None):
    tiles = ({1: tile}, {0: tile}) if tile else ({}, {})
    a = library.quantize(
        numbers((8, 64), 4), act or qtype, channelwise_axes=(0,), tiled_axes=tiles[0]
    )
    b = library.quantize(numbers((64, 8), 5), qtype, channelwise_axes=(1,), tiled_axes=tiles[1])
    run = lambda a, b: library.dot_general(a, b, MATMUL)  # noqa: E731
    wanted = np.asarray(library.dequantize(a)) @ np.asarray(library.dequantize(b))
    return error((jax.jit(run) if jit else run)(a, b), wanted)


def int4_times_int4(library):
    return _product(library, "int4")


def mxfp8_times_mxfp8_under_jit(library):
    return _product(library, "mxfp8", jit=True, tile=32)


def label_summed_in_one_operand(library):
    a, b = numbers((4, 3), 6), numbers((5, 3), 7)
    q = library.quantize(b, "int8", channelwise_axes=(0,))
    return error(library.einsum("ab,cb->c", a, q), jnp.einsum("ab,cb->c", a, library.dequantize(q)))


def nf4_ragged_dot(library):
    x, w, sizes = numbers((8, 64), 8), numbers((2, 64, 16), 9), jnp.array([3, 5])
    q = library.quantize(w, "nf4", channelwise_axes=(2,))
    a = library.quantize(x, "int8", channelwise_axes=(0,))
    wanted = lax.ragged_dot(library.dequantize(a), library.dequantize(q), sizes)
    return error(library.ragged_dot(a, q, sizes), wanted)


def nf4_convolution(library):
    x, w = numbers((2, 6, 6, 4), 10), numbers((3, 3, 4, 8), 11)
    q = library.quantize(w, "nf4", channelwise_axes=(3,))
    a = library.quantize(x, "int8", channelwise_axes=(0,))
    layout = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    wanted = lax.conv_general_dilated(
        library.dequantize(a), library.dequantize(q), (1, 1), "SAME", **layout
    )
    return error(library.conv_general_dilated(a, q, (1, 1), "SAME", **layout), wanted)


# --- Linen models ------------------------------------------------------------------------------


class Matmul(nn.Module):
    width: int = 24

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.width))


class Scores(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(24)(x)
        return h @ h.T


def plain_product_after_a_quantized_model(library):
    """The error of `x @ y` by itself, once a model with a product of the same shapes has run."""
    x, h = numbers((5, 40), 12), numbers((5, 24), 13)
    _, quantized, apply = linen(library, Scores(), x, INT8)
    jax.clear_caches()
    apply(quantized, x)
    found = h @ h.T
    jax.clear_caches()
    return error(found, h @ h.T)


def quantized_model_after_a_plain_product(library):
    jax.clear_caches()
    x = numbers((5, 40), 12)
    _ = x @ numbers((40, 24), 13)
    return linen_outcome(library, Matmul(), x)


class WeightOnTheLeft(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 24))
        return jnp.einsum("io,bi->bo", w, x)


def weight_on_the_left(library):
    return linen_outcome(library, WeightOnTheLeft(), numbers((5, 40), 14), W8)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(32, 16)
        return table.attend(table(ids))


def tied_embedding(library):
    return linen_outcome(library, Tied(), jnp.arange(6)[None], W8)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(48)(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return stack()(x, None)[0]


def scanned_layers(library):
    params, quantized, apply = linen(library, Scanned(), x := numbers((5, 48), 15), INT8)
    wanted = Scanned().apply({"params": params}, x)
    flat = jax.tree_util.tree_leaves_with_path(quantized)
    shape = [list(leaf.shape) for path, leaf in flat if "scale" in jax.tree_util.keystr(path)]
    return {"scale": shape[0], "error": error(apply(quantized, x), wanted)}


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 24), jnp.bfloat16)
        return lax.dot_general(x, w, MATMUL, preferred_element_type=jnp.float32)


def float32_asked_of_bfloat16(library):
    x = numbers((5, 40), 16, "bfloat16")
    _, quantized, apply = linen(library, Wide(), x, INT8)
    return str(apply(quantized, x).dtype)


def convolution_with_a_quantized_weight_alone(library):
    return linen_outcome(library, nn.Conv(8, (3, 3)), numbers((2, 6, 6, 4), 17), W8)


def convolution_with_two_spellings_of_a_type(library):
    fields = dict(weight_qtype=jnp.int8, act_qtype="int8")
    return linen_outcome(library, nn.Conv(8, (3, 3)), numbers((2, 6, 6, 4), 17), fields)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (2, x.shape[-1], 24))
        return lax.ragged_dot(x, w, jnp.array([2, 3]))


def ragged_dot_in_a_model(library):
    return linen_outcome(library, Experts(), numbers((5, 40), 18))


def gradient_of_the_input(library):
    model, x = nn.Dense(24), numbers((5, 40), 19)
    params, quantized, apply = linen(library, model, x, INT8)
    wanted = jax.grad(lambda x: model.apply({"params": params}, x).sum())(x)
    return error(jax.grad(lambda x: apply(quantized, x).sum())(x), wanted)


def square_weight_and_square_input(library):
    """Quantized training where there is such a mode, else quantization after training."""
    model, x = nn.Dense(16), numbers((16, 16), 20)
    rules = [library.QuantizationRule(module_path=".*", **INT8)]
    try:
        training = library.QtProvider(rules)
    except NotImplementedError:
        return linen_outcome(library, model, x)
    qt = library.quantize_model(model, training)
    params = model.init(jax.random.key(0), x)
    return {"error": error(qt.apply(params, x), model.apply(params, x))}


# --- NNX models --------------------------------------------------------------------------------


class NnxMatmul(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(numbers((40, 24), 21))

    def __call__(self, x):
        return x @ self.w[...]


class NnxCast(NnxMatmul):
    def __call__(self, x):
        return jnp.dot(x.astype(jnp.bfloat16), self.w[...].astype(jnp.bfloat16))


class NnxNotSelf(nnx.Module):
    def __init__(this):
        this.w = nnx.Param(numbers((40, 24), 21))

    def __call__(this, x):
        return jnp.dot(x, this.w[...])


class NnxShardMap(NnxMatmul):
    def __call__(self, x):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("data")
        run = jax.shard_map(
            jnp.dot, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
        )
        return run(x, self.w[...])


def nnx_matmul(library):
    return nnx_outcome(library, NnxMatmul(), numbers((5, 40), 22))


def nnx_cast_of_the_weight(library):
    return nnx_outcome(library, NnxCast(), numbers((5, 40), 22))


def nnx_method_without_the_name_self(library):
    return nnx_outcome(library, NnxNotSelf(), numbers((5, 40), 22))


def nnx_shard_map(library):
    return nnx_outcome(library, NnxShardMap(), numbers((5, 40), 22))


QUESTIONS = {
    question.__name__: question
    for question in (
        int1,
        float16_weights_of_a_usual_size,
        uint8_of_signed_numbers,
        int4_times_int4,
        mxfp8_times_mxfp8_under_jit,
        label_summed_in_one_operand,
        nf4_ragged_dot,
        nf4_convolution,
        plain_product_after_a_quantized_model,
        quantized_model_after_a_plain_product,
        weight_on_the_left,
        tied_embedding,
        scanned_layers,
        float32_asked_of_bfloat16,
        convolution_with_a_quantized_weight_alone,
        convolution_with_two_spellings_of_a_type,
        ragged_dot_in_a_model,
        gradient_of_the_input,
        square_weight_and_square_input,
        nnx_matmul,
        nnx_cast_of_the_weight,
        nnx_method_without_the_name_self,
        nnx_shard_map,
    )
}


def answer(question, library):
    """What the function returns, or the exception in words."""
    try:
        return QUESTIONS[question](library)
    except Exception as problem:  # any failure is an answer
        return f"{type(problem).__name__}: {str(problem)[:200]}"
