"""Products with weights in panels: against float64, under every transformation, over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fewbit
from fewbit import kernels, ops
from fewbit.interpreter import _traced
from fewbit.numerics import format_of
from fewbit.qarray import HowToQuantize, QArray, dequantize, quantize
from fewbit.qarray import _moves as moves
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

rng = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def weight(shape, roles, qtype, tile=None, scale_dtype=None, method="absmax"):
    k = max(a for a, r in enumerate(roles) if r == "k")
    own = format_of(qtype).tile or tile
    channelwise = [a for a, r in enumerate(roles) if r in "ln"]
    tiled = {} if own is None else {k: own}
    q = quantize(
        normal(*shape),
        qtype,
        channelwise_axes=channelwise,
        tiled_axes=tiled,
        scale_dtype=scale_dtype,
        calibration_method=method,
    ).with_dtype("float32")
    return q, to_panels(q, roles)


def wide(x):
    x = x.quantized() if isinstance(x, ops.Deferred) else x
    x = dequantize(x, jnp.float32) if isinstance(x, QArray) else x
    return np.asarray(x, np.float64)


def agree(out, spec, *operands, tolerance=3e-6):
    """Within `tolerance` of the float64 product, in units of the sum of magnitudes."""
    exact = np.einsum(spec, *map(wide, operands))
    size = np.einsum(spec, *(np.abs(wide(x)) for x in operands))
    assert out.shape == exact.shape
    error = np.abs(np.asarray(out, np.float64) - exact) / np.maximum(size, 1e-30)
    assert error.max(initial=0) < tolerance, error.max()


PRODUCTS = [
    ("btd,dnh->btnh", (2, 5, 64), (64, 4, 16), "knn"),
    ("btd,dnh->bnth", (2, 5, 64), (64, 4, 16), "knn"),
    ("btd,dnh->thbn", (2, 5, 64), (64, 4, 16), "knn"),
    ("btnh,nhd->btd", (2, 5, 4, 32), (4, 32, 40), "kkn"),
    ("bthn,nhd->btd", (2, 5, 32, 4), (4, 32, 40), "kkn"),
    ("btd,vd->btv", (1, 3, 96), (130, 96), "nk"),
    ("d,dn->n", (96,), (96, 70), "kn"),
]


@pytest.mark.parametrize("qtype", ("int8", "int4", "nf4"))
@pytest.mark.parametrize(("spec", "x_shape", "w_shape", "roles"), PRODUCTS)
def test_every_order_of_axes(spec, x_shape, w_shape, roles, qtype):
    q, p = weight(w_shape, roles, qtype, tile=None if qtype == "int8" else 32)
    x = normal(*x_shape)
    agree(ops.einsum(spec, x, p), spec, x, q)
    inputs, out = spec.split("->")
    turned = ",".join(reversed(inputs.split(","))) + "->" + out
    agree(ops.einsum(turned, p, x), turned, q, x)


FORMATS = {
    "int8": {},
    "int6": {},
    "int4": dict(tile=32, scale_dtype="float16"),
    "int4 asymmetric": dict(tile=32, method="minmax"),
    "int3": dict(tile=64),
    "int2": dict(tile=16),
    "int1": dict(tile=32),
    "nf4": dict(tile=64, scale_dtype="bfloat16"),
    "float8_e4m3fn": {},
    "float8_e5m2": dict(tile=128),
    "mxfp4": {},
    "mxfp8": {},
    "nvfp4": {},
}


@pytest.mark.parametrize("rows", (1, 3, 33))
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_with_float_rows(name, rows):
    q, p = weight((160, 72), "kn", name.split()[0], **FORMATS[name])
    x = normal(rows, 160)
    agree(ops.dot(x, p), "mk,kn->mn", x, q)
    half = x.astype(jnp.bfloat16)
    out = ops.dot_general(half, p, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    agree(out, "mk,kn->mn", half, q)
    assert ops.dot(half, p.with_dtype("bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", (1, 3, 33))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("name", ("int8", "int6", "int4", "int4 asymmetric", "int2", "nf4"))
def test_rows_quantized_on_the_way_are_the_rows_that_quantize_makes(name, dtype, rows):
    q, p = weight((160, 72), "kn", name.split()[0], **FORMATS[name])
    tile = FORMATS[name].get("tile")
    for tiled in ({}, {1: tile} if tile else {}):
        how = HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes=tiled)
        x = ops.Deferred(normal(rows, 160, dtype=dtype), how)
        numbers = (((1,), (0,)), ((), ()))
        out = ops.dot_general(x, p, numbers, preferred_element_type=jnp.float32)
        agree(out, "mk,kn->mn", x, q)
        agree(ops.dot_general(x.quantized(), p, numbers), "mk,kn->mn", x, q, tolerance=3e-6)
        assert ops.describe_dot(x, p, numbers) == (
            "native float" if name == "nf4" else "native int8"
        )


def test_what_the_kernels_do_not_run_is_right_all_the_same():
    q, p = weight((64, 72), "kn", "int8")
    x = quantize(normal(3, 64), "int8", channelwise_axes=(0,), calibration_method="minmax")
    agree(ops.dot(x, p), "mk,kn->mn", x, q)  # a zero point on the rows
    batch = normal(72, 3)
    agree(ops.dot_general(p, batch, (((1,), (0,)), ((), ()))), "kn,nm->km", q, batch)
    agree(ops.einsum("bk,kn->b", normal(0, 64), p), "bk,kn->b", normal(0, 64), q)
    assert ops.describe_dot(batch.T, p, (((1,), (1,)), ((), ()))).startswith("dequantize")


def test_nan_and_infinity_come_through():
    _, p = weight((64, 72), "kn", "int8")
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    x = normal(16, 64).at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf)
    for rows in (x, ops.Deferred(x, how)):
        for w in (p, p.plain()):
            out = np.asarray(ops.dot(rows, w))
            assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()
            assert not np.isfinite(out[2]).any()


# --- transformations ------------------------------------------------------------------------------


def close(a, b, tolerance=2e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=1.0))


def project(x, w):
    return ops.einsum("td,dnh->tnh", x, w)


def test_gradients_read_the_same_bytes():
    q, p = weight((64, 4, 16), "knn", "int8")
    x = normal(2, 5, 64)

    def loss(w, x):
        return jnp.sum(project(x, w) ** 2)

    for make in (
        lambda w: jax.grad(functools.partial(loss, w))(x[0]),
        lambda w: jax.jit(jax.grad(functools.partial(loss, w)))(x[0]),
        lambda w: jax.vmap(jax.grad(functools.partial(loss, w)))(x),
        lambda w: jax.grad(lambda x: jax.vmap(functools.partial(loss, w))(x).sum())(x),
        lambda w: jax.jvp(functools.partial(loss, w), (x[0],), (x[1],))[1],
        lambda w: jax.hessian(lambda x: loss(w, x[None]))(x[0, 0])[:3],
        lambda w: jax.grad(lambda x: jax.checkpoint(functools.partial(loss, w))(x))(x[0]),
    ):
        close(make(p), make(q))


def test_vmap_over_rows_and_over_a_stack():
    q, p = weight((64, 4, 16), "knn", "int4", tile=32)
    x = normal(3, 5, 64)
    close(jax.vmap(project, (0, None))(x, p), jax.vmap(project, (0, None))(x, q))
    close(jax.vmap(project, (2, None))(x.transpose(1, 2, 0), p), jax.vmap(project, (0, None))(x, q))
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    both = jax.vmap(lambda x, w: project(ops.Deferred(x, how).quantized(), w), (0, None))
    close(both(x, p), both(x, q))
    stack, packed = weight((3, 64, 72), "lkn", "int8")
    close(jax.vmap(ops.dot)(x, packed), jax.vmap(ops.dot)(x, stack))
    pick = lambda w: jax.vmap(lambda i: ops.dot(x[0], w.at_layer(i)))(jnp.arange(3))  # noqa: E731
    close(pick(packed), pick(stack))


def layers(x, w):
    def step(x, i):
        return jnp.tanh(ops.dot(x, w.at_layer(i))), None

    return jax.lax.scan(step, x, jnp.arange(len(w)))[0]


def test_control_flow_and_its_gradients():
    q, p = weight((3, 64, 64), "lkn", "int4", tile=32)
    x = normal(5, 64)
    close(layers(x, p), layers(x, q))
    close(jax.grad(lambda x: layers(x, p).sum())(x), jax.grad(lambda x: layers(x, q).sum())(x))

    def loop(w, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(ops.dot(x, w.at_layer(i))), x)

    close(loop(p, x), layers(x, q))

    def either(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: ops.dot(x, w[0]), lambda: ops.dot(x, w[1]))

    close(either(p, x), either(q, x))


def test_a_layer_of_a_stack_is_never_copied():
    _, p = weight((3, 128, 128), "lkn", "int8")
    text = jax.jit(layers).lower(normal(5, 128), p).compile().as_text()
    assert "fewbit_matmul" in text
    layer = "u8[1,2,4,8,64,4]"
    assert layer not in text.replace(" ", "")


# --- devices --------------------------------------------------------------------------------------


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


@pytest.mark.parametrize("columns", (None, "y"))
def test_devices_share_rows_and_panels_without_gathering(columns):
    q, p = weight((128, 512), "kn", "int4", tile=32)
    x, here = normal(16, 128), mesh()
    xs = jax.device_put(x, NamedSharding(here, PartitionSpec("x")))

    def place(part):
        return jax.device_put(part, NamedSharding(here, PartitionSpec(columns)))

    packed = jax.tree.map(place, p)
    compiled = jax.jit(ops.dot).lower(xs, packed).compile()
    assert "all-gather" not in compiled.as_text() and "fewbit_matmul" in compiled.as_text()
    out = compiled(xs, packed)
    assert out.sharding.spec == PartitionSpec("x", columns) or columns is None
    agree(out, "mk,kn->mn", x, q)
    grad = jax.jit(jax.grad(lambda x, w: jnp.sum(ops.dot(x, w) ** 2)))
    close(grad(xs, packed), grad(x, q), 1e-4)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (PartitionSpec(), "panels"),
        (PartitionSpec(None, None, "y"), "panels"),
        (PartitionSpec(None, "y", None), "plain"),
        (PartitionSpec("y"), "plain"),
        (PartitionSpec(None, None, ("x", "y")), "plain"),  # would cut a panel open
    ],
)
def test_quantize_params_packs_what_devices_can_share(spec, layout):
    def f(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w, x = normal(2, 256, 256), normal(8, 256)
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(f, rules, w, x)
    qf = jax.jit(fewbit.quantize_model(f, fewbit.PtqProvider(rules)))
    alone = qf(fewbit.quantize_params(w, plan), x)
    there = jax.device_put(w, NamedSharding(mesh(), spec))
    spread = fewbit.quantize_params(there, plan)
    assert spread.array.layout == layout
    close(qf(spread, x), alone, 2e-2 if layout == "plain" else 1e-6)


def test_explicit_meshes_and_shard_map_run_through_xla():
    q, p = weight((128, 256), "kn", "int8")
    x, here = normal(8, 128), mesh(AxisType.Explicit)
    with jax.set_mesh(here):
        xs = jax.device_put(x, NamedSharding(here, PartitionSpec("x")))
        packed = jax.device_put(p, NamedSharding(here, PartitionSpec()))
        agree(jax.jit(ops.dot)(xs, packed), "mk,kn->mn", x, q)
    auto = mesh()
    each = jax.shard_map(
        lambda x, w: ops.dot(x, w),
        mesh=auto,
        in_specs=(PartitionSpec("x"), PartitionSpec()),
        out_specs=PartitionSpec("x"),
    )
    agree(jax.jit(each)(x, p), "mk,kn->mn", x, q)
    assert "fewbit_matmul" in jax.jit(each).lower(x, p).as_text()


# --- models ---------------------------------------------------------------------------------------


def decoder(params, tokens):
    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
    return x @ params["embed"].T


def decoder_params():
    own = np.random.default_rng(0)  # whichever tests ran before

    def drawn(*shape):
        return jnp.asarray(0.1 * own.normal(size=shape), jnp.float32)

    layers = {"up": drawn(2, 128, 256), "down": drawn(2, 256, 128)}
    return {"embed": drawn(320, 128), "layers": layers}


RULES = {
    "int8": dict(weight_qtype="int8", act_qtype="int8"),
    "int4": dict(weight_qtype="int4", tile_size=32, scale_dtype="float16"),
    "nf4": dict(weight_qtype="nf4", tile_size=64),
    "fp8": dict(weight_qtype="fp8"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_model_runs_natively_and_the_plan_said_so(name):
    rules = [fewbit.QuantizationRule(**RULES[name])]
    params, tokens = decoder_params(), jnp.arange(0, 320, 10)[None]
    plan = fewbit.plan(decoder, rules, params, tokens)
    words = {row.site.op: row.runs_on for row in plan.sites}
    assert words == {
        "take": "xla gather",
        "dot_general": "native int8" if name == "int8" else "native float",
    }
    qparams = fewbit.quantize_params(params, plan)
    assert qparams["embed"].array.layout == "panels"
    model = fewbit.quantize_model(decoder, fewbit.PtqProvider(rules))
    text = jax.jit(model).lower(qparams, tokens).as_text()
    assert text.count("fewbit_matmul") >= 3
    through_xla = jax.jit(model).lower(fewbit.unpack(qparams), tokens).as_text()
    assert "fewbit_matmul" not in through_xla
    native, xla = (np.asarray(model(p, tokens)) for p in (qparams, fewbit.unpack(qparams)))
    apart = np.abs(native - xla).max(-1).ravel() / np.abs(xla).max()
    # A difference in the last place of a sum may turn a code of the next layer's activations, and
    # so move all of its row, by less than rounding does.
    turned = apart > 1e-5
    assert turned.mean() < (0.4 if name == "int8" else 0.01)
    rounding = np.abs(xla - np.asarray(decoder(params, tokens))).max(-1).ravel()
    assert (apart[turned] * np.abs(xla).max() < rounding[turned]).all()
    packed = fewbit.pack(fewbit.unpack(qparams))
    np.testing.assert_array_equal(model(packed, tokens), model(qparams, tokens))


@pytest.mark.parametrize("name", ("int8", "int4"))
def test_gradients_of_scales_are_those_of_the_plain_array(name):
    rules = [fewbit.QuantizationRule(**RULES[name])]
    params, tokens = decoder_params(), jnp.array([[3, 7, 11]])
    qparams = fewbit.quantize_params(params, fewbit.plan(decoder, rules, params, tokens))
    model = fewbit.quantize_model(decoder, fewbit.PtqProvider(rules))

    def total(params):
        loss = lambda p: jnp.sum(model(p, tokens) ** 2)  # noqa: E731
        grads = jax.grad(loss, allow_int=True)(params)["layers"]["up"].array
        parts = grads.packed_parts if grads.layout == "panels" else (None, grads.scale)
        return float(jnp.sum(parts[1].astype(jnp.float32)))

    wanted = total(fewbit.unpack(qparams))
    assert wanted != 0 and total(qparams) == pytest.approx(wanted, rel=1e-2)


def test_without_jit_and_on_a_mesh_set_around_the_call():
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    params, tokens = decoder_params(), jnp.array([[3, 7, 11]])
    qparams = fewbit.quantize_params(params, fewbit.plan(decoder, rules, params, tokens))
    model = fewbit.quantize_model(decoder, fewbit.PtqProvider(rules))
    expected = model(qparams, tokens)
    with jax.disable_jit():
        close(model(qparams, tokens), expected, 1e-2)
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(kind)):
            close(jax.jit(model)(qparams, tokens), expected, 1e-2)
    with jax.set_mesh(jax.make_mesh((1,), ("d",))):
        assert fewbit.plan(decoder, rules, params, tokens).sites[-1].runs_on == "native int8"


def test_panels_split_over_an_explicit_mesh_say_what_to_do():
    _, p = weight((128, 512), "kn", "int8")
    here = mesh(AxisType.Explicit)
    with jax.set_mesh(here):
        place = lambda part: jax.device_put(part, NamedSharding(here, PartitionSpec("x")))  # noqa: E731
        with pytest.raises(ValueError, match=r"fewbit\.unpack\(params\)"):
            ops.dot(normal(2, 128), jax.tree.map(place, p))


def test_a_stack_indexed_by_number_runs_natively():
    def f(w, x):
        for i in range(2):
            x = jnp.tanh(x @ w[i])
        return x

    w, x = 0.1 * normal(2, 128, 128), normal(3, 128)
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(f, rules, w, x)
    assert {row.runs_on for row in plan.sites} == {"native int8 + tanh"}
    qf, qw = fewbit.quantize_model(f, fewbit.PtqProvider(rules)), fewbit.quantize_params(w, plan)
    close(qf(qw, x), qf(fewbit.unpack(qw), x), 1e-2)


def test_the_report_and_the_log_say_that_packing_is_faster(caplog):
    nn = pytest.importorskip("flax.linen")
    model, x = nn.Dense(128), normal(2, 128)
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    ptq = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    key = jax.random.key(0)
    template, made = jax.eval_shape(ptq.init, key, x), ptq.init(key, x)
    assert jax.tree.structure(template) == jax.tree.structure(made)
    assert "fewbit.pack(params) packs them" in str(fewbit.report(made["params"]))
    assert "fewbit.pack" not in str(fewbit.report(fewbit.pack(made["params"])))
    _traced._say_unpacked.cache_clear()
    for _ in range(2):
        ptq.apply(made, x[:1])
    assert caplog.text.count("fewbit.pack(params)") == 1


def test_other_platforms_get_a_plain_product():
    _, p = weight((64, 128), "kn", "int8")
    for platform in ("tpu", "cuda"):
        traced = jax.jit(ops.dot).trace(normal(2, 64), p)
        assert "fewbit_matmul" not in traced.lower(lowering_platforms=(platform,)).as_text()


def test_export_refuses_native_calls_and_takes_the_unpacked_tree():
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    params, tokens = decoder_params(), jnp.array([[3, 7, 11]])
    qparams = fewbit.quantize_params(params, fewbit.plan(decoder, rules, params, tokens))
    model = jax.jit(fewbit.quantize_model(decoder, fewbit.PtqProvider(rules)))
    with pytest.raises(ValueError, match="cannot be exported"):
        jax.export.export(model)(qparams, tokens)
    plain = fewbit.unpack(qparams)
    jax.tree_util.tree_leaves(plain)
    exported = jax.export.export(jax.jit(lambda x: model(plain, x)))(tokens)
    # Exported, XLA fuses a scale with the sum after it, which may turn a code of the next layer.
    close(exported.call(tokens), model(plain, tokens), 1e-2)


def test_rows_of_a_table_and_its_logits_share_one_copy():
    q, p = weight((320, 128), "nk", "int8")
    rows = moves.take_rows(p, jnp.array([5, 319]), 0)
    np.testing.assert_array_equal(dequantize(rows), dequantize(q)[jnp.array([5, 319])])
    x = normal(2, 128)
    agree(ops.dot(x, p.T), "mk,nk->mn", x, q)
