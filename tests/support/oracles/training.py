"""References for quantized training: letters for axes, products in float64 as definitions read.

Codes come from `fewbit.quantize`, which has an oracle of its own: the largest value of every range
lies on a tie, so that a second opinion on its code would be a matter of the last bit.
"""

import jax.numpy as jnp
import numpy as np

from fewbit.qarray import dequantize, quantize


def quantized(x, qtype, kept=(), tiles=None):
    """(scale, numbers), one scale per index of the axes `kept`, tiles ({axis: size}) elsewhere."""
    q = quantize(jnp.asarray(x, jnp.float32), qtype, channelwise_axes=kept, tiled_axes=tiles)
    return np.asarray(q.scale), np.asarray(dequantize(q, jnp.float32), np.float64)


def axes(letters, wanted):
    return [axis for axis, c in enumerate(letters) if c in wanted]


def forward(letters, out, operands, types, tile=None):
    """The product of operands rounded per index of every axis that is not summed.

    A `tile` is on the last summed axis; {letter: size} on axes of rhs, lhs shares summed ones.
    """
    decoded = []
    for own, x, qtype in zip(letters, operands, types, strict=True):
        if qtype is None:
            decoded.append(np.asarray(x, np.float64))
            continue
        summed = [c for c in own if c not in out]
        tiles = {own.index(summed[-1]): tile} if tile else {}
        if isinstance(tile, dict):
            shared = tile if own is letters[1] else {c: tile[c] for c in summed if c in tile}
            tiles = {own.index(c): n for c, n in shared.items()}
        kept = [axis for axis in axes(own, out) if axis not in tiles]
        decoded.append(quantized(x, qtype, kept, tiles)[1])
    return np.einsum(f"{letters[0]},{letters[1]}->{out}", *decoded)


def gradient(letters, out, operands, types, g, side, grad_type, residual="shift", tile=None):
    """The gradient of operand `side`.

    `residual` says what g is multiplied with: 'shift' the codes of the other operand, its scale
    moved into g; 'float' the other operand itself; or a type that it is rounded to. A `tile` is of
    all summed axes as one; {letter: size} are tiles of axes of their own.
    """
    own, other = letters[side], letters[1 - side]
    g, x = np.asarray(g, np.float32), np.asarray(operands[1 - side], np.float64)
    summed = [c for c in other if c in out and c not in own]
    if grad_type is None:
        return np.einsum(f"{out},{other}->{own}", g, x)
    if residual == "shift":
        scale, decoded = quantized(x, types[1 - side], axes(other, out))
        x = decoded / scale
        spread = "".join(c for c in other if c in out)
        scale = scale.reshape([n for c, n in zip(other, x.shape, strict=True) if c in out])
        g = g * np.einsum(f"{spread},{out}->{out}", scale, np.ones_like(g))
    elif residual != "float":
        tiled = tile if isinstance(tile, dict) else {}
        channels = axes(other, [c for c in other if c not in summed and c not in tiled])
        x = quantized(x, residual, channels, {other.index(c): n for c, n in tiled.items()})[1]
    kept = axes(out, [c for c in out if c not in summed])
    if isinstance(tile, dict):
        tile = {out.index(c): n for c, n in tile.items() if c in summed}
    elif tile is not None:
        g, x, out, other = join(g, x, out, other, summed)
        kept = axes(out, [c for c in out if c != summed[0]])
        tile = {out.index(summed[0]): tile}
    _, rounded = quantized(g, grad_type, kept, tile)
    return np.einsum(f"{out},{other}->{own}", rounded, x)


def join(g, x, out, other, summed):
    """The summed axes made one, in their order in `other`."""
    results = []
    for array, letters in ((g, out), (x, other)):
        order = [c for c in letters if c not in summed[1:]]
        spelled = "".join("".join(summed) if c == summed[0] else c for c in order)
        moved = np.einsum(f"{letters}->{spelled}", array)
        sizes = dict(zip(letters, array.shape, strict=True))
        sizes[summed[0]] = int(np.prod([sizes[c] for c in summed]))
        results += [moved.reshape([sizes[c] for c in order]), "".join(order)]
    return results[0], results[2], results[1], results[3]
