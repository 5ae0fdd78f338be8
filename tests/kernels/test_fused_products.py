"""Bias and activation inside the product: numbers, transformations, and where they are used."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8, W8A8, normal, quantized
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from test_native_matmul import LEVELS, in_a_process
from tolerances import FUSED_ACTIVATION, FUSED_BF16

import fewbit
from fewbit import kernels, ops
from fewbit.interpreter import _interpret
from fewbit.kernels import ACTIVATIONS, panel_product
from fewbit.kernels._matmul import matmul
from fewbit.qarray import HowToQuantize, QArray, quantize
from fewbit.qarray._panels import to_panels

needs_native = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)
NAMES = (None, *ACTIVATIONS)


def exact(name, x):
    """The activation in float64, element by element where numpy has no such function."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = np.where(x < 0, np.exp(-np.abs(x)), 1.0) / (1 + np.exp(-np.abs(x)))
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return {
            None: lambda: x,
            "relu": lambda: np.maximum(x, 0),
            "relu6": lambda: np.minimum(np.maximum(x, 0), 6),
            "silu": lambda: x * sigmoid,
            "gelu": lambda: x * 0.5 * (1 + np.tanh(inner)),
            "gelu_exact": lambda: 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2)),
            "tanh": lambda: np.tanh(x),
            "sigmoid": lambda: sigmoid,
        }[name]()


def check_close(name, x, out, tolerance=FUSED_ACTIVATION):
    wanted, out = exact(name, x), np.asarray(out, np.float64)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(out[~finite], wanted[~finite])
    size = np.maximum(np.abs(np.asarray(x, np.float64)[finite]), np.abs(wanted[finite]))
    error = np.abs(out[finite] - wanted[finite])
    assert np.all(error <= tolerance * size + 1e-37), (name, np.max(error / (size + 1e-37)))


def bits(array):
    return np.asarray(array).view(np.uint16 if array.dtype == jnp.bfloat16 else np.uint32)


def weight(k, n, qtype="int8", tile=None):
    w = normal(1, k, n) / k**0.5
    tiled = {} if tile is None else {0: tile}
    q = quantize(w, qtype, channelwise_axes=(1,), tiled_axes=tiled)
    return to_panels(q, "kn")


def of_bias(values, name, dtype=jnp.float32):
    """The kernel's function of `values`: they are the bias of a product that is zero."""
    n = values.size
    zero = to_panels(QArray(jnp.zeros((32, n), jnp.int8), jnp.ones((1, n))), "kn")
    x = jnp.ones((1, 32), jnp.float32)
    return panel_product(x, zero, bias=values, activation=name, out_dtype=dtype)[0]


SWEEP = """
from fewbit import kernels
import test_fused_products as t
assert kernels.native_available(), kernels.info()
print(kernels.info().isa)
for name in t.ACTIVATIONS:
    t.test_every_activation_against_float64(name)
for act in ('none', 'dynamic'):
    t.test_a_fused_bias_is_bit_equal('int8', None, 3, 33, 64, act)
    t.test_a_fused_bias_is_bit_equal('int4', 32, 37, 200, 130, act)
"""

GRID = np.concatenate(
    [
        np.linspace(-30, 30, 30001),
        np.linspace(-1e-3, 1e-3, 501),
        np.geomspace(1e-36, 1e12, 501),
        -np.geomspace(1e-36, 1e12, 501),
        [0.0, -0.0, np.inf, -np.inf, np.nan],
    ]
).astype(np.float32)


@needs_native
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_against_float64(name):
    check_close(name, GRID, of_bias(jnp.asarray(GRID), name))
    narrow = jnp.asarray(GRID[:-5]).astype(jnp.bfloat16)
    out = of_bias(narrow, name, jnp.bfloat16)
    check_close(name, narrow.astype(jnp.float32), out.astype(jnp.float32), FUSED_BF16)


@needs_native
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=70), st.sampled_from(tuple(ACTIVATIONS)))
def test_any_number_through_any_activation(values, name):
    grid = np.asarray(values, np.float32)
    grid = np.where(np.abs(grid) < 1e-36, 0, grid).astype(np.float32)  # XLA flushes subnormals
    grid = np.where(np.isfinite(grid), np.clip(grid, -1e12, 1e12), grid).astype(np.float32)
    check_close(name, grid, of_bias(jnp.asarray(grid), name))


@needs_native
@pytest.mark.parametrize("act", ("none", "dynamic"))
@pytest.mark.parametrize(
    ("rows", "k", "n"), ((1, 96, 100), (3, 33, 64), (37, 200, 130), (0, 32, 5))
)
@pytest.mark.parametrize(("qtype", "tile"), (("int8", None), ("int4", 32), ("nf4", None)))
def test_a_fused_bias_is_bit_equal(qtype, tile, rows, k, n, act):
    w, x, b = weight(k, n, qtype, tile if k % 32 == 0 else None), normal(2, rows, k), normal(3, n)
    product = panel_product(x, w, act=act)
    added = product + b[None]
    np.testing.assert_array_equal(bits(panel_product(x, w, act=act, bias=b)), bits(added))
    for name in ("relu", "relu6"):
        out = panel_product(x, w, act=act, bias=b, activation=name)
        np.testing.assert_array_equal(bits(out), bits(ACTIVATIONS[name](added)))
    check_close("gelu", added, panel_product(x, w, act=act, bias=b, activation="gelu"))
    check_close("silu", product, panel_product(x, w, act=act, activation="silu"))
    narrow = panel_product(x, w, act=act, bias=b.astype(jnp.bfloat16), out_dtype=jnp.bfloat16)
    wide = (product + b.astype(jnp.bfloat16).astype(jnp.float32)[None]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(bits(narrow), bits(wide))


@needs_native
def test_a_sum_over_nothing_is_the_bias():
    w = to_panels(quantize(jnp.ones((32, 70)), "int8", channelwise_axes=(1,)), "kn")
    data, scale, *_ = w.packed_parts
    bias = jnp.pad(normal(0, 70), (0, 58)).reshape(2, 64)
    none, one = jnp.zeros((0,), jnp.float32), jnp.ones((), jnp.float32)
    out = matmul(
        jnp.zeros((3, 0), jnp.float32),
        data[:, :0],
        scale,
        jnp.zeros((0,), jnp.uint8),
        one,
        jnp.int32(0),
        none,
        bias,
        qtype="int8",
        k=0,
        n=70,
        group=0,
        out_dtype="float32",
        activation="relu",
    )
    np.testing.assert_array_equal(out, np.tile(np.maximum(bias.reshape(-1)[:70], 0), (3, 1)))


@needs_native
def test_what_does_not_fit_is_an_error():
    w, x = weight(32, 70), jnp.ones((2, 32))
    with pytest.raises(ValueError, match=r"each of the 70 columns, shape \(70,\), got \(3,\)"):
        panel_product(x, w, bias=jnp.ones(3))
    with pytest.raises(ValueError, match="'gelus' is not known; did you mean 'gelu'"):
        panel_product(x, w, activation="gelus")
    data, scale, *_ = w.packed_parts
    none, one = jnp.zeros((0,), jnp.float32), jnp.ones((), jnp.float32)
    common = (x, data, scale, jnp.zeros((0,), jnp.uint8), one, jnp.int32(0), none)
    what = dict(qtype="int8", k=32, n=70, group=0, out_dtype="float32")
    for bias, activation, words in (
        (jnp.ones((1, 64)), None, "bias must have the shape [2,64] but has [1,64]"),
        (jnp.ones((2, 64), jnp.float16), None, "bias must be float32 or bfloat16"),
        (None, "gelus", "there is no activation 'gelus'; there are none, relu"),
    ):
        with pytest.raises(Exception) as error:
            jax.block_until_ready(matmul(*common, bias, activation=activation, **what))
        assert words in str(error.value)
    back = (jnp.ones((2, 70)), *common[1:])
    with pytest.raises(Exception, match="bias and activation belong to the float results"):
        jax.block_until_ready(matmul(*back, jnp.ones((2, 64)), transposed=True, **what))


@needs_native
def test_derivatives_are_those_of_the_steps():
    w, x, b = weight(64, 100), normal(2, 5, 64), normal(3, 100)

    def fused(x, b):
        return panel_product(x, w, bias=b, activation="gelu")

    def apart(x, b):
        return jax.nn.gelu(panel_product(x, w) + b[None])

    g = normal(4, 5, 100)
    out, pull = jax.vjp(fused, x, b)
    wanted, pull_apart = jax.vjp(apart, x, b)
    np.testing.assert_array_equal(out, wanted)
    for a, c in zip(pull(g), pull_apart(g), strict=True):
        np.testing.assert_array_equal(a, c)
    _, tangent = jax.jvp(fused, (x, b), (jnp.ones_like(x), jnp.ones_like(b)))
    _, tangent_apart = jax.jvp(apart, (x, b), (jnp.ones_like(x), jnp.ones_like(b)))
    np.testing.assert_array_equal(tangent, tangent_apart)
    text = str(jax.make_jaxpr(jax.grad(lambda x: fused(x, b).sum()))(x))
    assert text.count("fewbit_panel_dot") == 2  # x·W and g·Wᵀ, nothing twice


@needs_native
def test_vmap_over_rows_and_over_biases():
    w, x, b = weight(64, 100), normal(2, 3, 5, 64), normal(3, 3, 100)
    call = lambda x, b: panel_product(x, w, act="dynamic", bias=b, activation="relu")  # noqa: E731
    for axes, one in (((0, None), lambda i: (x[i], b[0])), ((0, 0), lambda i: (x[i], b[i]))):
        out = jax.vmap(call, axes)(x, b[0] if axes[1] is None else b)
        for i in range(3):
            np.testing.assert_array_equal(out[i], call(*one(i)))


@needs_native
@pytest.mark.parametrize("n", (256, 100))
def test_over_devices_each_adds_its_part_of_the_bias(n):
    w, x, b = weight(64, n), normal(2, 8, 64), normal(3, n)
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    names = "columns" if n % 256 == 0 else None
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    call = jax.jit(lambda x, b: panel_product(x, w, bias=b, activation="silu"))
    shared = jax.jit(
        lambda w, x, b: panel_product(x, w, bias=b, activation="silu"),
        out_shardings=NamedSharding(mesh, PartitionSpec("rows", names)),
    )
    packed = jax.tree.map(lambda part: place(part, names) if part.ndim > 2 else place(part), w)
    args = packed, place(x, "rows"), place(b, names)
    # Fewer rows on a device may be summed in another order.
    np.testing.assert_allclose(shared(*args), call(x, b), atol=1e-5)
    assert "all-gather" not in shared.lower(*args).compile().as_text()


# --- the ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_op_finishes_whatever_runs_it(name):
    x, b = normal(2, 2, 5, 64), normal(3, 100)
    q = quantize(normal(1, 64, 100), "int8", channelwise_axes=(1,))
    numbers = (((2,), (0,)), ((), ()))
    for w in (q, to_panels(q, "kn")):
        deferred = ops.Deferred(x, HowToQuantize(qtype="int8", channelwise_axes=(0, 1)))
        for rows in (x, deferred):
            product = ops.dot_general(rows, w, numbers) + b[None, None]
            out = ops.dot_general(rows, w, numbers, bias=b, activation=name)
            check_close(name, product, out)
            out = ops.einsum("btk,kn->btn", rows, w, bias=b, activation=name)
            check_close(name, product, out)
    turned = ops.einsum("btk,kn->bnt", x, q, bias=normal(4, 5), activation=name)
    check_close(name, jnp.swapaxes(ops.dot(x, q), 1, 2) + normal(4, 5)[None, None], turned)


def test_the_op_refuses_an_unknown_activation():
    q = quantize(normal(1, 64, 100), "int8", channelwise_axes=(1,))
    with pytest.raises(ValueError, match="'rely' is not known; did you mean 'relu'"):
        ops.dot_general(normal(2, 2, 64), q, (((1,), (0,)), ((), ())), activation="rely")


# --- in a model -----------------------------------------------------------------------------------


def over_rows(bias, x):
    return jnp.reshape(bias, (1,) * (x.ndim - 1) + (-1,))


def mlp(activation):
    def f(p, x):
        h = activation(x @ p["up"] + over_rows(p["b"], x))
        return h @ p["down"] + over_rows(p["c"], x)

    return f


def params(k=64, n=128):
    up, down = normal(1, k, n) / k**0.5, normal(2, n, k) / n**0.5
    return {"up": up, "b": normal(3, n), "down": down, "c": normal(4, k)}


MODELS = {
    "relu": jax.nn.relu,
    "relu by max": lambda x: jnp.maximum(x, 0),
    "relu6": jax.nn.relu6,
    "silu": jax.nn.silu,
    "silu by hand": lambda x: x * jax.nn.sigmoid(x),
    "silu turned": lambda x: jax.nn.sigmoid(x) * x,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def unfused(monkeypatch, function, rules, qparams, *args):
    """The same quantized program with nothing fused."""
    with monkeypatch.context() as patch:
        patch.setattr("fewbit.interpreter._interpret.find_chains", lambda jaxpr: {})
        fresh = fewbit.quantize_model(lambda *a: function(*a), fewbit.PtqProvider(rules))
        return jax.jit(fresh)(qparams, *args)


@needs_native
@pytest.mark.parametrize("rules", (W8, W8A8), ids=("w8", "w8a8"))
@pytest.mark.parametrize("name", MODELS)
def test_models_fuse_and_say_so(name, rules, monkeypatch):
    f, x = mlp(MODELS[name]), normal(0, 2, 3, 64)
    qf, qp, plan = quantized(f, rules, params(), x)
    what = "native int8" if rules is W8A8 else "native float"
    known = name.split()[0]
    assert [row.runs_on for row in plan.sites] == [f"{what} + bias + {known}", f"{what} + bias"]
    out = jax.jit(qf)(qp, x)
    wanted = unfused(monkeypatch, f, rules, qp, x)
    if known.startswith("relu"):
        np.testing.assert_array_equal(bits(out), bits(wanted))
    else:  # a code of the next product may fall on the other side of a tie
        np.testing.assert_allclose(out, wanted, atol=2e-2 if rules is W8A8 else 1e-5)


@needs_native
@pytest.mark.parametrize("rules", (W8, W8A8), ids=("w8", "w8a8"))
def test_gradients_of_a_fused_model_are_the_unfused_ones(rules, monkeypatch):
    f, x = mlp(jax.nn.gelu), normal(0, 3, 64)
    qf, qp, _ = quantized(f, rules, params(), x)

    def grads(model):
        def loss(b, x):
            return jnp.sum(jnp.square(model(qp | {"b": b}, x)))

        return jax.jit(jax.grad(loss, (0, 1)))(qp["b"], x)

    fused = grads(qf)
    with monkeypatch.context() as patch:
        patch.setattr("fewbit.interpreter._interpret.find_chains", lambda jaxpr: {})
        fresh = fewbit.quantize_model(lambda *a: f(*a), fewbit.PtqProvider(rules))
        for a, b in zip(fused, grads(fresh), strict=True):
            np.testing.assert_array_equal(a, b)
    assert all(float(jnp.abs(g).max()) > 0 for g in fused)


@needs_native
@pytest.mark.parametrize("frame", ("linen", "nnx"))
def test_dense_layers_of_flax_fuse(frame):
    if frame == "linen":
        nn = pytest.importorskip("flax.linen")
        model = nn.Sequential([nn.Dense(128), nn.gelu, nn.Dense(64), nn.relu])
        x = normal(0, 3, 64)
        plan = fewbit.plan(model, W8A8, x)
    else:
        nnx = pytest.importorskip("flax.nnx")
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.Linear(64, 128, rngs=rngs), nnx.gelu, nnx.Linear(128, 64, rngs=rngs), nnx.relu
        )
        plan = fewbit.plan(model, W8A8, normal(0, 3, 64))
    words = [row.runs_on for row in plan.sites]
    assert words == ["native int8 + bias + gelu", "native int8 + bias + relu"]


@needs_native
def test_inside_scan_vmap_and_with_several_column_axes():
    def f(p, x):
        def layer(x, w_b):
            return jax.nn.gelu(x @ w_b[0] + w_b[1]), None

        x, _ = jax.lax.scan(layer, x, (p["w"], p["b"]))
        heads = jnp.einsum("bk,khd->bhd", x, p["heads"]) + p["hb"]
        return jnp.tanh(heads)

    p = dict(
        w=normal(1, 3, 64, 64) / 8,
        b=normal(2, 3, 64),
        heads=normal(3, 64, 4, 32),
        hb=normal(4, 4, 32),
    )
    x = normal(0, 5, 64)
    with jax.numpy_rank_promotion("allow"):
        qf, qp, plan = quantized(f, W8, p, x)
        assert [row.runs_on for row in plan.sites] == [
            "native float + bias + gelu",
            "native float + bias + tanh",
        ]
        out = jax.jit(qf)(qp, x)
        np.testing.assert_allclose(out, qf(fewbit.unpack(qp), x), atol=1e-5)
        np.testing.assert_array_equal(jax.vmap(lambda r: qf(qp, r[None])[0])(x), out)


def test_what_is_read_elsewhere_is_not_fused():
    w, x, b = jnp.ones((8, 4)), jnp.ones((2, 8)), jnp.ones((1, 4))
    row = lambda b: jnp.reshape(b, (4,))  # noqa: E731

    def chains(f):
        found = _interpret.find_chains(jax.make_jaxpr(f)(x, w, b).jaxpr)
        return [(c.bias is not None, c.activation) for c in found.values()]

    def add(y, b):
        return y + jnp.reshape(row(b), (1, 4))

    assert chains(lambda x, w, b: jax.nn.gelu(add(x @ w, b))) == [(True, "gelu")]
    assert chains(lambda x, w, b: jax.nn.silu(x @ w)) == [(False, "silu")]
    assert chains(lambda x, w, b: (lambda y: (y, add(y, b)))(x @ w)) == []
    assert chains(lambda x, w, b: (lambda y: (y, jax.nn.relu(y)))(add(x @ w, b))) == [(True, None)]
    assert chains(lambda x, w, b: (lambda y: jnp.tanh(y) * y)(add(x @ w, b))) == [(True, None)]
    assert chains(lambda x, w, b: add(x @ w, b) + add(x @ w, b)) == [(True, None)] * 2
    assert chains(lambda x, w, b: x @ w + 1.0) == []
    assert chains(lambda x, w, b: x @ w + jnp.ones((2, 4))) == []  # not a vector over columns
    assert chains(lambda x, w, b: jnp.maximum(x @ w, 1.0)) == []
    assert chains(lambda x, w, b: jax.nn.gelu(x @ w) * 2) == [(False, "gelu")]

    @jax.jit
    def gelu(x):  # the name alone does not make it one
        return x * 2

    assert chains(lambda x, w, b: gelu(x @ w)) == []

    @jax.jit
    def silu(x):
        return x * jnp.tanh(x)

    assert chains(lambda x, w, b: silu(x @ w)) == []


@needs_native
def test_an_overridden_product_is_never_fused():
    class Doubled(fewbit.PtqProvider):
        def dot_general(self, *args, **kwargs):
            return 2 * super().dot_general(*args, **kwargs)

    f, x, p = mlp(jax.nn.relu), normal(0, 3, 64), params()
    plan = fewbit.plan(f, W8, p, x)
    qp = fewbit.quantize_params(p, plan)
    doubled = fewbit.quantize_model(f, Doubled(W8))(qp, x)

    def by_hand(p, x):
        h = jax.nn.relu(2 * (x @ p["up"]) + p["b"][None])
        return 2 * (h @ p["down"]) + p["c"][None]

    np.testing.assert_allclose(
        doubled, fewbit.quantize_model(by_hand, fewbit.PtqProvider(W8))(qp, x), rtol=1e-5, atol=1e-5
    )


@needs_native
@pytest.mark.parametrize("isa", LEVELS[LEVELS.index(kernels.info().isa) + 1 :])
def test_the_instruction_sets_below_this_cpu(isa):
    assert in_a_process(SWEEP, FEWBIT_ISA=isa).split() == [isa]
