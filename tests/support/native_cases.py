"""Every native op with operands to run it on: the table behind `test_native_meshes.py`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fewbit import kernels, ops
from fewbit.kernels import codes_dot, panel_conv, panel_product, plain_conv
from fewbit.kernels._conv import Window
from fewbit.kernels._quantize import absmax_rows
from fewbit.qarray import HowToQuantize, quantize
from fewbit.qarray._panels import to_panels

rng = np.random.default_rng(0)


class Case(NamedTuple):
    run: Any  # of the operands by name; gives an array or several
    operands: dict[str, jax.Array]


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def codes(*shape):
    return jnp.asarray(rng.integers(-127, 128, size=shape), jnp.int8)


def positive(*shape):
    return jnp.asarray(rng.uniform(0.5, 1.5, size=shape), jnp.float32)


def packed(shape, roles, qtype="int8", tile=None, **how):
    """The parts of a packed weight as operands, and the function that makes it of them again."""
    k = max(a for a, role in enumerate(roles) if role in "kc")
    q = quantize(
        normal(*shape),
        qtype,
        channelwise_axes=[a for a, role in enumerate(roles) if role in "ln"],
        tiled_axes={} if tile is None else {k: tile},
        **how,
    ).with_dtype("float32")
    p = to_panels(q, roles)
    leaves, tree = jax.tree.flatten(p)
    names = [f"w.{jax.tree_util.keystr(path)[1:]}" for path, _ in jax.tree.leaves_with_path(p)]
    return dict(zip(names, leaves, strict=True)), lambda o: tree.unflatten([o[n] for n in names])


def product(x, weight, **settings):
    parts, whole = weight
    more = {
        name: settings.pop(name)
        for name in ("act_scale", "bias", "group_sizes")
        if name in settings
    }

    def run(o):
        return panel_product(o["x"], whole(o), **{n: o[n] for n in more}, **settings)

    return Case(run, dict(x=x, **more, **parts))


def convolution(x, weight, window, **settings):
    parts, whole = weight
    more = {name: settings.pop(name) for name in ("act_scale",) if name in settings}

    def run(o):
        return panel_conv(o["x"], whole(o), window, **{n: o[n] for n in more}, **settings)

    return Case(run, dict(x=x, **more, **parts))


def channels(x, weight, window, **settings):
    more = {n: settings.pop(n) for n in ("act_scale", "scale") if n in settings}

    def run(o):
        return plain_conv(o["x"], o["w"], window, **{n: o[n] for n in more}, **settings)

    return Case(run, dict(x=x, w=weight, **more))


def sums(lhs, rhs, numbers, **scales):
    dtype = jnp.float32 if scales else jnp.int32

    def run(o):
        return codes_dot(o["lhs"], o["rhs"], numbers, *(o[n] for n in scales), out_dtype=dtype)

    return Case(run, dict(lhs=lhs, rhs=rhs, **scales))


def quantized(x, own, factor=None):
    how = HowToQuantize(qtype="int8", channelwise_axes=own)

    def run(o):
        q = kernels.quantize_natively(o["x"], how, o.get("factor"))
        if q is None:
            raise ValueError("left to XLA")
        return q.qvalue, q.scale

    return Case(run, dict(x=x) if factor is None else dict(x=x, factor=factor))


def attention(batch=2, new=4, heads=8, key_heads=4, dim=8, length=16):
    operands = dict(
        query=normal(batch, new, heads, dim),
        key=normal(batch, new, key_heads, dim),
        value=normal(batch, new, key_heads, dim),
        keys=normal(batch, length, key_heads, dim),
        values=normal(batch, length, key_heads, dim),
        start=jnp.int32(3),
        mask=jnp.asarray(rng.random((batch, new, length)) < 0.7),
        enters=jnp.asarray(rng.random((batch, new)) < 0.7),
    )
    run = lambda o: kernels.cached_attention(**o, factor=0.3, soft_cap=5.0)  # noqa: E731
    return Case(run, operands)


ONE = Window((1, 1), (1, 1), ((0, 0), (0, 0)))
THREE = Window((3, 3), (2, 2), ((1, 1), (1, 1)))
MATMUL = (((1,), (0,)), ((), ()))
BATCHED = (((3, 0), (0, 1)), ((1,), (2,)))


def table():
    cases = {
        "float rows": product(normal(8, 64), packed((64, 512), "kn")),
        "dynamic rows": product(
            normal(8, 64),
            packed((64, 512), "kn"),
            act="dynamic",
            bias=normal(512),
            activation="gelu",
        ),
        "static rows": product(
            normal(8, 64), packed((64, 512), "kn"), act="static", act_scale=0.02 * positive(8, 1)
        ),
        "one static scale": product(
            normal(8, 64), packed((64, 512), "kn"), act="static", act_scale=jnp.full((1, 1), 0.02)
        ),
        "codes, groups and zero points": product(
            codes(8, 256),
            packed((256, 512), "kn", "int4", 32, calibration_method="minmax"),
            act="codes",
            act_scale=positive(8, 8),
            act_tile=32,
        ),
        "a narrow weight": product(normal(8, 64), packed((64, 48), "kn"), bias=normal(48)),
        "an entry of a stack": stacked(),
        "ragged": product(
            normal(8, 64),
            packed((8, 64, 512), "lkn"),
            group_sizes=jnp.asarray([1, 0, 2, 1, 0, 1, 0, 2], jnp.int32),
            bias=normal(512),
        ),
        "nvfp4": product(normal(8, 64), packed((64, 512), "kn", "nvfp4", 16)),
        "transposed": transposed(),
        "1x1": convolution(
            normal(8, 8, 8, 32), packed((1, 1, 32, 512), "kkcn"), ONE, act="dynamic"
        ),
        "3x3 of codes": convolution(
            codes(8, 8, 16, 8),
            packed((3, 3, 8, 512), "kkcn"),
            THREE,
            act="codes",
            act_scale=positive(8),
        ),
        "3x3 of floats": convolution(
            normal(8, 8, 8, 8), packed((3, 3, 8, 512), "kkcn", "int4"), THREE
        ),
        "grouped": convolution(
            normal(8, 8, 8, 16),
            packed((3, 3, 8, 1024), "kkcn"),
            Window((3, 3), (1, 1), ((1, 1), (1, 1)), groups=2),
            act="dynamic",
        ),
        "two in a row": in_a_row(),
        "depthwise": channels(
            normal(8, 8, 8, 16),
            codes(9, 16).astype(jnp.float32),
            Window((3, 3), (1, 1), ((1, 1), (1, 1)), groups=16),
            scale=positive(16),
            act="dynamic",
        ),
        "depthwise codes": channels(
            codes(8, 8, 8, 16),
            codes(9, 32).astype(jnp.float32),
            Window((3, 3), (2, 2), ((1, 1), (1, 1)), groups=16),
            scale=positive(32),
            act="codes",
            act_scale=positive(8),
        ),
        "sums of codes": sums(codes(32, 64), codes(64, 128), MATMUL),
        "scaled codes": sums(
            codes(32, 64), codes(64, 128), MATMUL, left=positive(32), right=positive(128)
        ),
        "batched codes": sums(
            codes(8, 8, 8, 16),
            codes(16, 8, 8, 8),
            BATCHED,
            left=positive(8, 8),
            right=positive(8, 8),
        ),
        "quantize rows": quantized(normal(64, 128), (0,)),
        "quantize columns": quantized(normal(8, 16, 64), (2,)),
        "quantize whole": quantized(normal(64, 128), ()),
        "quantize shifted": quantized(normal(64, 128), (0,), positive(1, 128)),
        "quantize shifted by row": quantized(normal(64, 128), (0,), positive(64, 128)),
        "attention": attention(),
        "absmax": Case(lambda o: absmax_rows(o["x"]), dict(x=normal(8, 8, 64))),
        "take": take(),
        "training": training(),
    }
    return cases


def stacked():
    parts, whole = packed((8, 64, 512), "lkn")

    def run(o):
        return panel_product(o["x"], whole(o).at_layer(o["i"]), act="dynamic")

    return Case(run, dict(x=normal(8, 64), i=jnp.int32(3), **parts))


def transposed():
    parts, whole = packed((64, 512), "kn")

    def run(o):
        return jax.vjp(lambda x: panel_product(x, whole(o)), jnp.zeros((8, 64)))[1](o["g"])[0]

    return Case(run, dict(g=normal(8, 512), **parts))


def in_a_row():
    first, one = packed((1, 1, 32, 512), "kkcn")
    second, two = packed((1, 1, 512, 512), "kkcn")

    def run(o):
        h = jax.nn.relu(
            panel_conv(
                o["x"], one({k[2:]: v for k, v in o.items() if k[:2] == "1."}), ONE, act="dynamic"
            )
        )
        return panel_conv(
            h, two({k[2:]: v for k, v in o.items() if k[:2] == "2."}), ONE, act="dynamic"
        )

    parts = {f"1.{k}": v for k, v in first.items()} | {f"2.{k}": v for k, v in second.items()}
    return Case(run, dict(x=normal(8, 8, 8, 32), **parts))


def take():
    parts, whole = packed((512, 64), "nk")
    ids = jnp.asarray(rng.integers(0, 512, size=(8, 16)), jnp.int32)
    return Case(lambda o: ops.take(whole(o), o["ids"]), dict(ids=ids, **parts))


def training():
    def run(o):
        how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
        how2 = HowToQuantize(qtype="int8", channelwise_axes=(1,))
        return ops.dot_general(ops.Deferred(o["x"], how), ops.Deferred(o["w"], how2), MATMUL)

    return Case(run, dict(x=normal(64, 128), w=normal(128, 64)))
