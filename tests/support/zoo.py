"""A zoo of small models that together hold every primitive with a body, and nestings of them.

Each entry is (name, function of (params, *args), params, args). Linen and NNX members are given as
pure functions of their parameters, the form in which every front end hands a model to the engine.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P


def _normal(i, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(i), shape, dtype) / jnp.asarray(4, dtype)


W = {"a": _normal(0, 8, 8), "b": _normal(1, 8, 8), "stack": _normal(2, 3, 8, 8)}
X = _normal(3, 5, 8)


@jax.custom_vjp
def clipped_product(x, w):
    return x @ w


clipped_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (3 * jnp.clip(g @ res[1].T, -1, 1), res[0].T @ g)
)


@jax.custom_jvp
def doubled_slope(x, w):
    return jnp.sin(x @ w)


@doubled_slope.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return doubled_slope(x, w), 2 * jnp.cos(x @ w) * (dx @ w + x @ dw)


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def pallas_product(x, w):
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(x, w)


@jax.custom_vjp
def tpu_product(x, w):
    """Compiles on TPUs alone."""

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=out)(x, w)


tpu_product.defvjp(
    lambda x, w: (tpu_product(x, w), (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g)
)


def nested_jits(p, x):
    @jax.jit
    def inner(w, x):
        return jnp.tanh(x @ w)

    return jax.jit(lambda p, x: inner(p["b"], inner(p["a"], x)))(p, x)


def scan_stacked(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, p["stack"])


def scan_reversed_with_constant(p, x):
    step = lambda h, w: (h @ w + h @ p["a"], (w, h[0]))  # noqa: E731
    return lax.scan(step, x, p["stack"], reverse=True, unroll=2)


def scan_weight_in_carry(p, x):
    return lax.scan(lambda c, _: ((jnp.tanh(c[0] @ c[1]), c[1]), None), (x, p["a"]), length=3)


def while_loop(p, x):
    cond = lambda c: (c[0] < 3) & (jnp.sum(c[1] @ p["b"]) < 1e6)  # noqa: E731
    return lax.while_loop(cond, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["a"])), (0, x))


def fori_loop(p, x):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["stack"][i]), x)


def cond(p, x):
    return lax.cond(x[0, 0] > 0, lambda w, x: x @ w, lambda w, x: x - w[0][None], p["a"], x)


def switch(p, x):
    branches = [lambda x: x @ p["a"], lambda x: x @ p["b"], lambda x: x]
    return lax.switch(jnp.int32(1), branches, x)


def by_platform(p, x):
    """The branch of another platform need not compile on this one."""
    return lax.platform_dependent(
        x, p["a"], cpu=lambda x, w: x @ w, tpu=tpu_product, default=lambda x, w: jnp.sin(x @ w)
    )


def remat(p, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda w, x: jnp.sin(x @ w) @ w, policy=policy)(p["a"], x)


def scan_of_remat_of_cond(p, x):
    @jax.checkpoint
    def step(h, w):
        h = lax.cond(h.sum() > 0, lambda h: h @ w, lambda h: h @ w.T, h)
        return jax.jit(jnp.tanh)(h), None

    return lax.scan(step, x, p["stack"])


def custom_vjp(p, x):
    return clipped_product(jax.nn.relu(x), p["a"])


def custom_jvp(p, x):
    return doubled_slope(jax.nn.silu(x), p["a"])


def grad_inside(p, x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["a"]) ** 2))(x)


def vmapped(p, x):
    return jax.vmap(lambda row: lax.scan(lambda h, w: (h @ w, h), row, p["stack"]))(x)


def opaque_kernels(p, x):
    y = pl.pallas_call(add_one, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    return pallas_product(y, p["a"])


def sharded(p, x):
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "m"), P()), out_specs=P(None, "m"))
    def product(w, x):
        return jnp.tanh(x @ w)

    return product(p["a"], x) @ p["b"]


def sharded_sum(p, x):
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("m"), P(None, "m")), out_specs=P())
    def product(w, x):
        return lax.psum(x @ w, "m")

    return product(p["a"], x)


def convolution(p, x):
    image, kernel = x.reshape(1, 5, 8, 1), p["stack"][:, :, 0].reshape(3, 8, 1, 1)
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def ragged(p, x):
    return lax.ragged_dot(x, p["stack"], jnp.array([2, 0, 3], jnp.int32))


def look_up(p, x):
    ids = jnp.array([0, 3, 7, -1], jnp.int32)
    return jnp.take(p["a"], ids, axis=0) @ p["a"].T + p["b"][ids]


def random_and_effects(p, x):
    jax.debug.callback(lambda v: None, x.sum())
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return (x + noise) @ p["a"]


def linear_solve(p, x):
    return jnp.linalg.solve(p["a"] @ p["a"].T + jnp.eye(8), x.T)


def associative(p, x):
    return lax.associative_scan(lambda a, b: a @ b, p["stack"]), lax.map(lambda r: r @ p["a"], x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(nn.gelu(nn.LayerNorm()(nn.Dense(16)(x)))), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = layers()(x, None)
        x = nn.MultiHeadDotProductAttention(num_heads=2)(x[None])[0]
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.remat
        def step(layer, h):
            return nnx.silu(layer(h))

        x = nnx.scan(lambda h, layer: step(layer, h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )
        return self.attention(x[None])[0], self.conv(x[..., None])


def linen_entry():
    model = LinenModel()
    variables = model.init(jax.random.key(0), X)
    return (lambda variables, x: model.apply(variables, x)), variables, (X,)


def nnx_entry():
    graphdef, state = nnx.split(NnxModel(nnx.Rngs(0)))
    return (lambda state, x: nnx.merge(graphdef, state)(x)), state, (X,)


FUNCTIONS = [
    nested_jits,
    scan_stacked,
    scan_reversed_with_constant,
    scan_weight_in_carry,
    while_loop,
    fori_loop,
    cond,
    switch,
    by_platform,
    remat,
    scan_of_remat_of_cond,
    custom_vjp,
    custom_jvp,
    grad_inside,
    vmapped,
    opaque_kernels,
    sharded,
    sharded_sum,
    convolution,
    ragged,
    look_up,
    random_and_effects,
    linear_solve,
    associative,
]
ZOO = {f.__name__: (f, W, (X,)) for f in FUNCTIONS}
LAZY = {"linen": linen_entry, "nnx": nnx_entry}
NAMES = [*ZOO, *LAZY]


def member(name):
    return ZOO[name] if name in ZOO else LAZY[name]()
