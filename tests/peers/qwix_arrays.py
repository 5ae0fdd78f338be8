"""What Qwix answers to `cases.ARRAYS` and `cases.PRODUCTS`. Runs in the environment of the peers.

cd tests && python -m peers.qwix_arrays <where to write the .npz>
"""

import sys

import jax
import jax.numpy as jnp
import qwix
from peers import cases
from qwix._src.core import qarray


def arrays(results):
    for case in cases.ARRAYS:
        q = case.quantized(qwix)
        if q.scale.size == 1:
            # One number by itself is divided by eager XLA, but multiplied by a reciprocal under
            # jit, as several are everywhere: the last bit of a float32 scale depends on it.
            q = jax.jit(lambda case=case: case.quantized(qwix))()
        results.put_qarray(f"array/{case.name}/{case.seed}", q)
        results.put(f"array/{case.name}/{case.seed}/dequantized", qwix.dequantize(q))
        results.say(f"array/{case.name}/{case.seed}", cases.checksum(case.make()))


def blocks(results):
    for dtype in ("float32", "bfloat16"):
        array = cases.block_input(dtype)
        for qtype in cases.BLOCK_FORMATS:
            released = qwix.quantize(array, qtype, channelwise_axes=(0, 1), tiled_axes={2: 32})
            results.put(f"block/{qtype}/{dtype}/released_scale", released.scale)
            for name, scale in (("up", released.scale), ("down", released.scale / 2)):
                scale = scale.astype(dtype)
                q = qarray.quantize_with_scale_zero_point(array, qtype, scale, None)
                results.put_qarray(f"block/{qtype}/{dtype}/{name}", q)
                results.put(f"block/{qtype}/{dtype}/{name}/dequantized", qwix.dequantize(q))


def products(results):
    for case in cases.PRODUCTS:
        name = f"product/{case.op}/{case.name}"
        try:
            results.put(name, jnp.asarray(case.run(qwix)))
        except Exception as error:  # any refusal of the peer is an answer to be recorded
            results.say(name, f"{type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    answers = cases.Results()
    arrays(answers)
    blocks(answers)
    products(answers)
    answers.save(sys.argv[1])
