"""Linen layers, transforms and ways to write a product: each quantized, held against float."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from linen_cases import INT8, W8, W8A8, normal, products, quantize, relative_error, stored

import fewbit
from fewbit import QuantizationRule

# Relative mean error of one or two int8 products of normal data is about 0.01 (weights and
# activations) and 0.006 (weights only); the bounds leave room for a nonlinearity.
W8A8_ERROR = 0.025
W8_ERROR = 0.012


def check(model, rules, x, wanted, n_int8, *, bound, variables=None, **kwargs):
    """Quantize, run, compare: error, stored leaves, and the number of products on int8 codes."""
    ptq, variables, quantized = quantize(model, rules, x, variables=variables, **kwargs)
    assert stored(quantized["params"]) == wanted
    got = ptq.apply(quantized, x, **kwargs)
    expected = jax.jit(lambda v, x: model.apply(v, x, **kwargs))(variables, x)
    assert got.dtype == expected.dtype
    error = relative_error(got, expected)
    assert 0 < error < bound, error
    assert products(ptq.apply, quantized, x, **kwargs).get(INT8, 0) == n_int8
    return ptq, variables, quantized


# --- ways to write a product ----------------------------------------------------------------------


class Product(nn.Module):
    """One weight in a product written by `how`."""

    how: str
    shape: tuple = (32, 16)
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), self.shape, self.dtype)
        return WAYS[self.how](x, w)


WAYS = {
    "at": lambda x, w: x @ w,
    "matmul": lambda x, w: jnp.matmul(x, w),
    "dot": lambda x, w: jnp.dot(x, w),
    "tensordot": lambda x, w: jnp.tensordot(x, w, axes=((1,), (0,))),
    "lax": lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "cast": lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "transposed": lambda x, w: x @ w.T.T,
    "einsum": lambda x, w: jnp.einsum("bi,io->bo", x, w),
    "weight left": lambda x, w: jnp.einsum("io,bi->bo", w, x),
    "weight left, at": lambda x, w: (w.T @ x.T).T,
    "reshaped": lambda x, w: jnp.einsum("bi,ihd->bhd", x, w.reshape(32, 4, 4)),
    "jitted": jax.jit(lambda x, w: x @ w),
    "shared cast": lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32),
}


@pytest.mark.parametrize("how", list(WAYS))
def test_every_way_to_write_a_product(how):
    wanted = {"w": ("int8", (1, 16))}
    check(Product(how), W8A8, normal(8, 32), wanted, 1, bound=W8A8_ERROR)


def test_stored_transposed():
    class Logits(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.normal(1.0), (16, 32)).T

    check(Logits(), W8A8, normal(8, 32), {"w": ("int8", (16, 1))}, 1, bound=W8A8_ERROR)


def test_activation_with_the_shape_of_the_weight():
    class Twins(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(1.0), (16, 16))
            return (x @ w) @ x

    ptq, _, quantized = check(
        Twins(), W8A8, normal(16, 16), {"w": ("int8", (1, 16))}, 2, bound=2 * W8A8_ERROR
    )
    # Weight only: the second product, of two activations, stays float.
    ptq, _, quantized = check(
        Twins(), W8, normal(16, 16), {"w": ("int8", (1, 16))}, 0, bound=W8_ERROR
    )


# --- layers ---------------------------------------------------------------------------------------

LAYERS = {
    "Dense": (nn.Dense(16), (4, 32), {"kernel": (1, 16)}),
    "Dense without bias, 3-D input": (
        nn.Dense(16, use_bias=False),
        (2, 5, 32),
        {"kernel": (1, 16)},
    ),
    "DenseGeneral, two axes in": (
        nn.DenseGeneral(16, axis=(-2, -1)),
        (3, 8, 4),
        {"kernel": (1, 1, 16)},
    ),
    "DenseGeneral, two axes out": (nn.DenseGeneral((4, 8)), (3, 32), {"kernel": (1, 4, 8)}),
    "Einsum": (
        nn.Einsum((4, 32, 8), "bi,hio->bho", use_bias=False),
        (3, 32),
        {"kernel": (4, 1, 8)},
    ),
    "Conv 1-D": (nn.Conv(16, (3,)), (2, 10, 8), {"kernel": (1, 1, 16)}),
    "Conv 2-D": (nn.Conv(16, (3, 3), strides=2), (2, 8, 8, 4), {"kernel": (1, 1, 1, 16)}),
    "Conv grouped": (
        nn.Conv(16, (3, 3), feature_group_count=2),
        (2, 6, 6, 8),
        {"kernel": (1, 1, 1, 16)},
    ),
    "Conv depthwise": (
        nn.Conv(8, (3, 3), feature_group_count=8),
        (2, 6, 6, 8),
        {"kernel": (1, 1, 1, 8)},
    ),
    "Conv dilated": (nn.Conv(8, (3,), kernel_dilation=2), (2, 12, 4), {"kernel": (1, 1, 8)}),
    "ConvTranspose": (
        nn.ConvTranspose(16, (3, 3), strides=(2, 2)),
        (2, 5, 5, 8),
        {"kernel": (1, 1, 1, 16)},
    ),
    "ConvTranspose transposed": (
        nn.ConvTranspose(16, (3,), strides=(2,), transpose_kernel=True),
        (2, 5, 8),
        {"kernel": (1, 16, 1)},
    ),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers(name):
    model, shape, scales = LAYERS[name]
    wanted = {path: ("int8", scale) for path, scale in scales.items()}
    check(model, W8A8, normal(*shape), wanted, 1, bound=W8A8_ERROR)


@pytest.mark.parametrize("name", ["DenseGeneral, two axes in", "Einsum", "Conv grouped"])
def test_layers_weight_only(name):
    model, shape, scales = LAYERS[name]
    wanted = {path: ("int8", scale) for path, scale in scales.items()}
    check(model, W8, normal(*shape), wanted, 0, bound=W8_ERROR)


def test_attention():
    model = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32)
    x = normal(2, 6, 32)
    wanted = {f"{name}/kernel": ("int8", (1, 4, 8)) for name in ("query", "key", "value")}
    wanted["out/kernel"] = ("int8", (1, 1, 32))
    check(model, W8A8, x, wanted, 6, bound=0.06)  # four projections, scores, weighted sum
    check(model, W8, x, wanted, 0, bound=2 * W8_ERROR)


def test_attention_scores_can_be_left_alone():
    model = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32)
    rules = [QuantizationRule(module_path="", weight_qtype=None), *W8A8]
    ptq, _, quantized = quantize(model, rules, normal(2, 6, 32))
    assert products(ptq.apply, quantized, normal(2, 6, 32)) == {INT8: 4, ("float32", "float32"): 2}


def test_recurrent_cell():
    model = nn.RNN(nn.LSTMCell(16))
    x = normal(2, 5, 8)
    ptq, variables, quantized = quantize(model, W8A8, x)
    found = stored(quantized["params"])
    assert set(found.values()) == {("int8", (1, 16))} and len(found) == 8
    assert relative_error(ptq.apply(quantized, x), model.apply(variables, x)) < 0.03
    assert products(ptq.apply, quantized, x)[INT8] >= 2


# --- embeddings -----------------------------------------------------------------------------------


class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(20, 32, name="embed")
        x = table(ids)
        x = nn.Dense(32, name="mix")(x)
        return table.attend(x)


class Untied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(8, name="out")(nn.Embed(20, 32, name="embed")(ids))


def test_tied_embedding_is_one_qarray():
    ids = jnp.array([[1, 2, 3], [4, 19, 0]])
    wanted = {"embed/embedding": ("int8", (20, 1)), "mix/kernel": ("int8", (1, 32))}
    ptq, _, quantized = check(Tied(), W8A8, ids, wanted, 2, bound=0.03)
    looked_up = ptq.apply(quantized, ids, capture_intermediates=True, mutable=["intermediates"])[1]
    looked_up = looked_up["intermediates"]["embed"]["__call__"][0]
    table = fewbit.dequantize(quantized["params"]["embed"]["embedding"].array)
    assert jnp.array_equal(looked_up, table[ids])


def test_untied_embedding_is_quantized_when_named():
    ids = jnp.array([[1, 2, 3]])
    check(Untied(), W8A8, ids, {"out/kernel": ("int8", (1, 8))}, 1, bound=W8A8_ERROR)
    named = [QuantizationRule(weight_qtype="int8", op_names=("take", "dot_general"))]
    wanted = {"embed/embedding": ("int8", (20, 1)), "out/kernel": ("int8", (1, 8))}
    check(Untied(), named, ids, wanted, 0, bound=0.02)


# --- transforms -----------------------------------------------------------------------------------


class Block(nn.Module):
    features: int = 16

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.tanh(nn.Dense(32, name="up", param_dtype=jnp.float32)(x))
        return x + nn.Dense(self.features, name="down")(y), None


class Stack(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        layers = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        if self.kind == "vmap":
            blocks = nn.vmap(Block, in_axes=None, out_axes=0, axis_size=3, **layers)(name="blocks")
            return blocks(x)[0].sum(0)
        if self.kind == "remat":
            return nn.remat(Block)(name="blocks")(x)[0]
        if self.kind == "jit":
            return nn.jit(Block)(name="blocks")(x)[0]
        body = nn.remat(Block, prevent_cse=False) if self.kind == "scan remat" else Block
        return nn.scan(body, length=3, **layers)(name="blocks")(x, None)[0]


@pytest.mark.parametrize(
    "kind, rules",
    [("remat", W8A8), ("jit", W8A8), ("scan", W8A8), ("scan remat", W8A8), ("vmap", W8A8)]
    + [("scan", W8), ("vmap", W8)],
)
def test_lifted_transforms(kind, rules):
    model, x = Stack(kind), normal(4, 16)
    layers = () if kind in ("remat", "jit") else (3,)
    wanted = {
        "blocks/up/kernel": ("int8", (*layers, 1, 32)),
        "blocks/down/kernel": ("int8", (*layers, 1, 16)),
    }
    check(model, rules, x, wanted, 2 if rules is W8A8 else 0, bound=W8A8_ERROR)


def test_gradient_through_scan_of_remat():
    model, x = Stack("scan remat"), normal(4, 16)
    ptq, variables, quantized = quantize(model, W8A8, x)
    got = jax.grad(lambda x: (ptq.apply(quantized, x) ** 2).sum())(x)
    wanted = jax.grad(lambda x: (model.apply(variables, x) ** 2).sum())(x)
    assert relative_error(got, wanted) < 0.03


# --- control flow with weights inside -------------------------------------------------------------


class Branches(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(0.2), (16, 16))
        if self.how == "cond":
            return lax.cond(x.sum() > -1e9, lambda x: x @ w, lambda x: x * 2.0, x)
        if self.how == "switch":
            return lax.switch(jnp.int32(1), [lambda x: x @ w, lambda x: x @ w.T @ w], x)
        if self.how == "while":
            start = (jnp.int32(0), x)
            return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), start)[1]
        if self.how == "fori":
            return lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w), x)
        if self.how == "scan":
            return lax.scan(lambda c, row: (c, jnp.tanh(row @ w)), 0.0, x)[1]
        return lax.map(lambda row: row @ w, x)


@pytest.mark.parametrize("how", ["cond", "while", "fori", "scan", "map"])
def test_control_flow(how):
    wanted = {"w": ("int8", (1, 16))}
    check(Branches(how), W8A8, normal(4, 16), wanted, 1, bound=0.03)


class LinenBranches(nn.Module):
    @nn.compact
    def __call__(self, x, flag):
        dense = nn.Dense(16, name="a")
        other = nn.Dense(16, name="b")
        if self.is_mutable_collection("params"):
            return dense(x) + other(x)
        return nn.cond(flag, lambda m, x: dense(x), lambda m, x: other(x), self, x)


def test_linen_cond():
    model, x, flag = LinenBranches(), normal(4, 16), jnp.array(True)
    ptq, variables, quantized = quantize(model, W8A8, x, flag)
    assert stored(quantized["params"]) == {f"{n}/kernel": ("int8", (1, 16)) for n in "ab"}
    for flag in (jnp.array(True), jnp.array(False)):
        got, wanted = ptq.apply(quantized, x, flag), model.apply(variables, x, flag)
        assert relative_error(got, wanted) < W8A8_ERROR


class LinenWhile(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(16, name="a")
        if self.is_mutable_collection("params"):
            return dense(x)

        def body(module, carry):
            return carry[0] + 1, jnp.tanh(dense(carry[1]))

        return nn.while_loop(lambda m, c: c[0] < 3, body, self, (jnp.int32(0), x))[1]


def test_linen_while_loop():
    check(LinenWhile(), W8A8, normal(4, 16), {"a/kernel": ("int8", (1, 16))}, 1, bound=0.03)


def mapped(change, back=lambda a: a, **settings):
    """A Dense whose kernel is `change` of what is stored."""

    def on_kernels(f):
        return lambda variables: jax.tree.map(lambda a: f(a) if a.ndim == 2 else a, variables)

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            maps = dict(trans_in_fn=on_kernels(change), trans_out_fn=on_kernels(back))
            dense = nn.map_variables(nn.Dense, "params", **maps, init=True, **settings)
            return dense(8, name="d")(x)

    return Mapped()


MAPPED = {  # the module, and whether its weight can be stored
    "transposed": (mapped(jnp.transpose, jnp.transpose, mutable=True), True),
    "as it is": (mapped(lambda a: a), True),
    "halved": (mapped(lambda a: a * 0.5, lambda a: a * 2), False),
    "masked": (mapped(jnp.tril), False),
}


@pytest.mark.parametrize("name", MAPPED)
def test_variables_that_are_mapped_and_initialized(name):
    """Flax makes them anew where anything but 'params' is mutable, so nothing of ours may be."""
    model, stores = MAPPED[name]
    x, key = normal(4, 16), jax.random.key(0)
    variables = model.init(key, x)
    exact = model.apply(variables, x)
    (row,) = fewbit.plan(model, W8A8, x).sites
    assert row.quantized and row.site.weight == ("d/kernel" if stores else None)
    ptq = fewbit.quantize_model(model, fewbit.PtqProvider(W8A8))
    template = jax.eval_shape(ptq.init, key, x)["params"]
    params = fewbit.quantize_params(variables["params"], template)
    assert isinstance(params["d"]["kernel"], fewbit.WithAux) == stores
    out = ptq.apply({"params": params}, x)
    assert 0 < jnp.abs(out - exact).mean() < 0.03 * jnp.abs(exact).mean()
    assert jnp.array_equal(ptq.init_with_output(key, x)[0], out)
    static = dict(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    ranges = fewbit.calibrate(model, [fewbit.QuantizationRule(**static)], variables, [x])
    assert "1 operand" in repr(ranges)
    rule = fewbit.QtRule(**static)
    qt = fewbit.quantize_model(model, fewbit.QtProvider([rule]))
    out, stats = qt.apply(qt.init(key, x), x, mutable=["quant_stats"])
    assert stats["quant_stats"]["d"]["dot_general0_lhs"]["count"] == 1
    assert jnp.abs(out - exact).mean() < 0.03 * jnp.abs(exact).mean()


@pytest.mark.parametrize("source", ["template", "plan"])
def test_parameters_quantized_in_programs(source):
    """That close over concrete arrays, or take them: values cannot be looked at there."""
    model, x, key = Product("at"), normal(4, 32), jax.random.key(0)
    ptq = fewbit.quantize_model(model, fewbit.PtqProvider(W8A8))
    target = fewbit.plan(model, W8A8, x)
    if source == "template":
        target = jax.eval_shape(ptq.init, key, x)["params"]
    params = model.init(key, x)["params"]
    wanted = fewbit.unpack(fewbit.quantize_params(params, target))
    for args in ((), (params,)):
        make = lambda tree=params: fewbit.quantize_params(tree, target)  # noqa: E731
        assert jax.eval_shape(make, *args) == jax.eval_shape(lambda: wanted)
        found = jax.jit(make)(*args)
        assert all(map(jnp.array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted)))
        out = ptq.apply({"params": found}, x)
        assert jnp.allclose(out, ptq.apply({"params": wanted}, x), rtol=1e-5)
