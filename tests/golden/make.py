"""Makes the golden checkpoints: once, and never again. Files of old must stay readable.

    PYTHONPATH=tests/support python tests/golden/make.py <name> ...

Each folder holds a checkpoint and, in `expected.json`, the numbers its parameters decode to (for
some, also those it was made from). A new format version adds folders and leaves these as they are.
"""

import json
import pathlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.calibration import SimpleMovingAverage

HERE = pathlib.Path(__file__).parent


def wave(*shape, step=0.7):
    """Numbers between -2 and 2 that need no random generator."""
    n = np.arange(np.prod(shape))
    return (2 * np.sin(step * n + 0.3) * np.cos(0.05 * n)).astype(np.float32).reshape(shape)


def function(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


def of_function(rules, up, dtype=jnp.float32):
    floats = {"up": wave(*up), "down": wave(up[1], 3, step=1.1), "bias": wave(1, 3, step=0.4)}
    floats = {name: jnp.asarray(value, dtype) for name, value in floats.items()}
    plan = fewbit.plan(function, rules, floats, jnp.ones((2, up[0]), dtype))
    return fewbit.quantize_params(floats, plan), plan, floats


def rule(**fields):
    return [QuantizationRule(**fields)]


def int8():
    return of_function(rule(weight_qtype="int8", act_qtype="int8"), (16, 6))


def int3_uneven():
    return of_function(rule(weight_qtype="int3", tile_size=6, scale_dtype="float16"), (20, 7))


def int4_zero_point():
    rules = rule(weight_qtype="int4", tile_size=8, weight_calibration_method="minmax")
    return of_function(rules, (16, 8))


def nf4():
    return of_function(rule(weight_qtype="nf4", tile_size=8), (16, 8), jnp.bfloat16)


def fp8():
    return of_function(rule(weight_qtype="fp8"), (16, 5))


def int1():
    return of_function(rule(weight_qtype="int1"), (16, 9))


def nvfp4():
    return of_function(rule(weight_qtype="nvfp4"), (32, 16))


def mxfp4():
    return of_function(rule(weight_qtype="mxfp4"), (32, 32))


def static():
    rules = rule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    _, plan, floats = of_function(rules, (16, 6))
    average, seen = SimpleMovingAverage(), {"absmax": jnp.array([[3.0]])}
    stats = {s.site: {s.side: average.update(average.init(seen), seen)} for s in plan.scales}
    return fewbit.quantize_params(floats, plan, stats), plan, floats


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(
            lambda key, shape, dtype: jnp.asarray(wave(*shape)), ("in", None)
        )
        return nn.Dense(6, name="up", kernel_init=init)(x)


def linen():
    rules, x = rule(weight_qtype="int4"), jnp.ones((2, 16))
    floats = Boxed().init(jax.random.key(0), x)
    model = fewbit.quantize_model(Boxed(), PtqProvider(rules))
    template = jax.eval_shape(model.init, jax.random.key(0), x)
    params = nn.FrozenDict(fewbit.quantize_params(floats, template))
    return params, fewbit.plan(Boxed(), rules, x), nn.unbox(floats)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def of_nnx():
    rules, x, model = rule(weight_qtype="int8"), jnp.ones((2, 8)), Net(nnx.Rngs(0))
    for i, layer in enumerate(model.layers):
        layer.kernel.set_value(jnp.asarray(wave(*layer.kernel.shape, step=0.5 + i)))
    floats = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    quantized = fewbit.quantize_model(model, PtqProvider(rules), x)
    return nnx.to_pure_dict(nnx.state(quantized)), fewbit.plan(model, rules, x), floats


MAKERS = {
    **{f.__name__: f for f in (int8, int3_uneven, int4_zero_point, nf4, fp8, int1, nvfp4, mxfp4)},
    **{"static": static, "linen": linen, "nnx": of_nnx},
}


def numbers(tree):
    """{path: flat list} of the float leaves of a tree, quantized ones decoded."""
    from fewbit.io.checkpoint._tree import map_leaves
    from fewbit.qarray import is_box, unbox_parts, unboxed

    found = {}

    def visit(path, leaf):
        leaf = unboxed(leaf) if is_box(leaf) else leaf
        leaf = leaf.array if isinstance(leaf, fewbit.WithAux) else leaf
        if isinstance(leaf, fewbit.QArray):
            leaf = fewbit.dequantize(unbox_parts(leaf), jnp.float32)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            flat = np.asarray(leaf, np.float32).reshape(-1)
            found[path] = [float(str(x)) for x in flat]  # the shortest text that is this float32

    map_leaves(tree, visit)
    return found


def make(name):
    params, plan, floats = MAKERS[name]()
    fewbit.save(HERE / name, params, plan)
    expected = {"decoded": numbers(params)}
    if name in ("int8", "fp8"):
        expected["floats"] = numbers(floats)
    (HERE / name / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MAKERS:
        make(chosen)
