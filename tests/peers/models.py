"""Flax models that fewbit and its peers both quantize, and their parameters. Imports neither."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from peers.cases import numbers

WIDTH = 64


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(2 * WIDTH, name="up")(x))
        x = nn.relu(nn.Dense(WIDTH, use_bias=False, name="middle")(x))
        return nn.Dense(10, name="down")(x)


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), name="conv1")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3), strides=(2, 2), name="conv2")(x))
        return nn.Dense(10, name="head")(x.reshape(x.shape[0], -1))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# name: (kind, model, input). Images for the CNN: it gives its head 4 * 4 * 16 = 256 features.
MODELS = {
    "linen mlp": ("linen", LinenMLP, numbers((6, WIDTH), 11)),
    "linen cnn": ("linen", LinenCNN, numbers((3, 16, 16, 4), 12)),
    "nnx mlp": ("nnx", NnxMLP, numbers((6, WIDTH), 13)),
}

# name: fields of the rule.
RECIPES = {
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "w8": {"weight_qtype": "int8"},
    "w4 tile 32": {"weight_qtype": "int4", "tile_size": 32},
    "w4a8 tile 32": {"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 32},
    "nf4": {"weight_qtype": "nf4"},
    "e4m3": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
}


def pairs():
    """(model, recipe) names; the peer has no convolution with a quantized weight alone."""
    for model in MODELS:
        for recipe, fields in RECIPES.items():
            same = fields["weight_qtype"] == fields.get("act_qtype")
            if model != "linen cnn" or same:
                yield model, recipe


def rules(library, recipe):
    return [library.QuantizationRule(module_path=".*", **RECIPES[recipe])]


def filled(tree, seed=21):
    """A tree of the same shapes with numbers that do not depend on the library or its version."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    order = sorted(range(len(flat)), key=lambda i: jax.tree_util.keystr(flat[i][0]))
    leaves = [None] * len(flat)
    for rank, i in enumerate(order):
        shape = flat[i][1].shape
        factor = 1 / np.sqrt(max(1, np.prod(shape[:-1])))
        leaves[i] = numbers(shape, seed + rank, factor=float(factor))
    return jax.tree.unflatten(structure, leaves)


def linen_ptq(library, name, recipe):
    """Quantized parameters and output, by the flow that people write."""
    _, make, x = MODELS[name]
    model, key = make(), jax.random.key(0)
    params = filled(jax.eval_shape(model.init, key, x)["params"])
    ptq = library.quantize_model(model, library.PtqProvider(rules(library, recipe)))
    template = jax.eval_shape(ptq.init, key, x)["params"]
    quantized = library.quantize_params(params, template)
    return quantized, ptq.apply({"params": quantized}, x)


def nnx_ptq(library, name, recipe):
    _, make, x = MODELS[name]
    model = make(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, filled(state))
    ptq = library.quantize_model(model, library.PtqProvider(rules(library, recipe)), x)
    return nnx.to_pure_dict(nnx.state(ptq, nnx.Param)), ptq(x)


def ptq(library, name, recipe):
    run = {"linen": linen_ptq, "nnx": nnx_ptq}[MODELS[name][0]]
    return run(library, name, recipe)


def leaves(tree):
    """{path: array} with one spelling of a path, whatever holds the parts of a quantized array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): x
        for path, x in flat
        if hasattr(x, "dtype") and x.dtype != jnp.uint32
    }
