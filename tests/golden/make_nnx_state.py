"""Makes golden/nnx_state, NNX states as fewbit 0.1 wrote them: once, and never again.

    git worktree add ../fewbit-0.1 a331de1
    PYTHONPATH=../fewbit-0.1:tests/support python tests/golden/make_nnx_state.py

There a Param held a whole `WithAux(QArray)`, packed for kernels where one would read it. `orbax` is
the state as Orbax saves it, `plain` that of the unpacked model without its nf4 weight, `bytes` that
of `fewbit.pack(model, layout='bits')`, `state.msgpack` the pure dict as flax.serialization writes
it. `expected.json` has the outputs of each for `x()`.
"""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx, serialization

import fewbit
from fewbit import PtqProvider, QuantizationRule

HERE = pathlib.Path(__file__).parent / "nnx_state"
STATIC = dict(act_qtype="int8", act_static_scale=True, act_calibration_method="minmax")
RULES = [
    QuantizationRule(module_path="value", weight_qtype="int8", **STATIC),
    QuantizationRule(module_path="head", weight_qtype="nf4", tile_size=32),
    QuantizationRule(
        module_path="layers/0",
        weight_qtype="int4",
        tile_size=16,
        weight_calibration_method="minmax",
    ),
    QuantizationRule(module_path="layers/1", weight_qtype="int3"),
]
# Orbax has no uint4, the type of plain nf4 codes.
WITHOUT_NF4 = [RULES[0], QuantizationRule(module_path="head", weight_qtype="int5"), *RULES[2:]]


def wave(*shape, step=0.7):
    """Numbers between -1 and 1 that need no random generator."""
    n = np.arange(np.prod(shape))
    return jnp.asarray(np.sin(step * n + 0.3) * np.cos(0.05 * n), "float32").reshape(shape)


class Net(nnx.Module):
    """With a module that is called as Orbax calls what a Variable holds, and a bare array."""

    def __init__(self, rngs):
        self.value = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 64, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 24, rngs=rngs), nnx.Linear(24, 6, rngs=rngs)])
        self.norm = nnx.LayerNorm(24, rngs=rngs)
        self.shift = jnp.zeros((1, 6))

    def __call__(self, x):
        x = jnp.tanh(self.head(jnp.tanh(self.value(x))))
        return self.layers[1](self.norm(self.layers[0](x))) + self.shift


def x():
    return wave(4, 64, step=0.31)


def net():
    """The model with the weights of the files."""
    model = Net(nnx.Rngs(0))
    for k, layer in enumerate([model.value, model.head, *model.layers]):
        layer.kernel[...] = wave(*layer.kernel.shape, step=0.5 + k) / 8
        layer.bias[...] = wave(*layer.bias.shape, step=0.2 + k) / 4
    model.shift = wave(1, 6)
    return model


def make():
    outputs = {}

    def quantized(rules):
        stats = fewbit.calibrate(net(), rules, batches=[x()])
        return fewbit.quantize_model(net(), PtqProvider(rules), x(), quant_stats=stats)

    def through_orbax(name, model):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(HERE / name, nnx.state(model))
        outputs[name] = np.asarray(model(x())).tolist()

    model = quantized(RULES)
    through_orbax("orbax", model)
    through_orbax("bytes", fewbit.pack(model, layout="bits"))
    through_orbax("plain", fewbit.unpack(quantized(WITHOUT_NF4)))
    state = nnx.to_pure_dict(nnx.state(model))
    (HERE / "state.msgpack").write_bytes(serialization.to_bytes(state))
    outputs["msgpack"] = outputs["orbax"]
    (HERE / "expected.json").write_text(json.dumps(outputs) + "\n")


if __name__ == "__main__":
    make()
