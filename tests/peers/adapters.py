"""Models that both fewbit and PEFT know: their modules, base weights and inputs. Imports neither.

Weights lie as in PyTorch: a linear layer's is (out, in), a convolution's (out, in, *window).
"""

import numpy as np

RANK, ALPHA, OTHER_RANK, OTHER_ALPHA = 4, 8, 2, 6
LAYERS, WIDTH, HIDDEN, VOCABULARY, HEADS = 2, 32, 48, 61, 4

# The decoder: module in a layer -> (out, in).
PROJECTIONS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}
IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])

# One of each kind of layer: module -> shape of its weight.
SMALL = {"table": (11, 8), "up": (12, 8), "conv": (4, 3, 3, 3)}
ROWS = np.array([[0, 3, 10], [7, 7, 1]])


def drawn(shape, seed):
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(np.float32)


def decoder_name(layer, module):
    return f"model.layers.{layer}.{module}"


def decoder_weights():
    """The base weights of every module with an adapter, by its full name."""
    return {
        decoder_name(layer, module): drawn(shape, 10 * layer + k)
        for layer in range(LAYERS)
        for k, (module, shape) in enumerate(PROJECTIONS.items())
    }


def small_weights():
    return {name: drawn(shape, 100 + k) for k, (name, shape) in enumerate(SMALL.items())}


def image():
    return drawn((2, 3, 6, 6), 200)


def rows():
    return drawn((5, 8), 201)
