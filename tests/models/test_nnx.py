"""NNX layers and the ways people write a forward: compared with float, and int8 in the jaxpr."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import lax
from nnx_checks import (
    W8,
    W8A8,
    check,
    error,
    fresh,
    int8_products,
    normal,
    quantize,
    scales,
    stored,
)
from tolerances import CODE_OF_NEXT_LAYER, NNX_INT8, NNX_RECURRENT

import fewbit

TAKE = fewbit.QuantizationRule(weight_qtype="int8", op_names=("take",))
x8 = normal(4, 8)


def rngs():
    return nnx.Rngs(0)


# --- layers --------------------------------------------------------------------------------------


LAYERS = {
    "Linear": (lambda: nnx.Linear(8, 6, rngs=rngs()), x8, {"kernel": (1, 6)}),
    "Linear bf16": (
        lambda: nnx.Linear(8, 6, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs()),
        normal(4, 8, dtype="bfloat16"),
        {"kernel": (1, 6)},
    ),
    "Linear f32 weights, f16 compute": (
        lambda: nnx.Linear(8, 6, dtype=jnp.float16, rngs=rngs()),
        x8,
        {"kernel": (1, 6)},
    ),
    "LinearGeneral": (
        lambda: nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), rngs=rngs()),
        normal(4, 2, 4),
        {"kernel": (1, 1, 3, 5)},
    ),
    "Einsum": (
        lambda: nnx.Einsum("bi,ijk->bjk", (8, 3, 4), (3, 4), rngs=rngs()),
        x8,
        {"kernel": (1, 3, 4)},
    ),
    "Conv": (
        lambda: nnx.Conv(4, 6, (3, 3), rngs=rngs()),
        normal(2, 5, 5, 4),
        {"kernel": (1, 1, 1, 6)},
    ),
    "Conv grouped": (
        lambda: nnx.Conv(4, 6, (3,), feature_group_count=2, rngs=rngs()),
        normal(2, 5, 4),
        {"kernel": (1, 1, 6)},
    ),
    "ConvTranspose": (
        lambda: nnx.ConvTranspose(4, 6, (3,), strides=2, rngs=rngs()),
        normal(2, 5, 4),
        {"kernel": (1, 1, 6)},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, x, shapes = LAYERS[name]
    q = check(make(), x, products=1, tolerance=NNX_INT8)
    assert scales(q) == shapes


@pytest.mark.parametrize("name", ["Linear", "Conv", "Conv grouped", "ConvTranspose"])
def test_layer_weight_only(name):
    make, x, shapes = LAYERS[name]
    q = check(make(), x, products=0, tolerance=NNX_INT8, rules=[W8])
    assert scales(q) == shapes


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.emb = nnx.Embed(11, 8, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, ids):
        return self.emb.attend(self.up(self.emb(ids)))


class Untied(nnx.Module):
    def __init__(self, rngs):
        self.emb = nnx.Embed(11, 8, rngs=rngs)
        self.head = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.emb(ids))


ids = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)


def test_tied_embedding_is_one_qarray_for_look_up_and_logits():
    q = check(Tied(rngs()), ids, products=2, tolerance=NNX_INT8)
    assert scales(q) == {"emb/embedding": (11, 1), "up/kernel": (1, 8)}
    table = fewbit.dequantize(stored(q)["emb/embedding"])
    assert jnp.array_equal(q.emb(ids), table[ids])


def test_untied_embedding_stays_float_until_take_is_named():
    q = check(Untied(rngs()), ids, products=1, tolerance=NNX_INT8)
    assert scales(q) == {"head/kernel": (1, 11)}
    q = check(Untied(rngs()), ids, products=1, tolerance=NNX_INT8, rules=[TAKE, W8A8])
    assert scales(q) == {"emb/embedding": (11, 1), "head/kernel": (1, 11)}


def test_attention():
    model = nnx.MultiHeadAttention(2, 8, qkv_features=8, decode=False, rngs=rngs())
    q = check(model, normal(2, 5, 8), products=6, tolerance=NNX_INT8)
    assert scales(q)["query/kernel"] == (1, 2, 4)
    assert scales(q)["out/kernel"] == (1, 1, 8)


def test_attention_decodes_with_its_cache():
    model = nnx.MultiHeadAttention(2, 8, qkv_features=8, decode=True, rngs=rngs())
    model.init_cache((2, 4, 8))
    q = quantize(model, normal(2, 1, 8))
    whole = nnx.MultiHeadAttention(2, 8, qkv_features=8, decode=False, rngs=rngs())
    tokens = normal(2, 4, 8, seed=3)
    wanted = whole(tokens, mask=nnx.make_causal_mask(jnp.ones((2, 4))))
    for step in range(4):
        kept = q.cached_key
        out = q(tokens[:, step : step + 1])
        assert q.cached_key is kept, "the cache is updated in place"
        assert int(q.cache_index[...]) == step + 1
        assert error(out[:, 0], wanted[:, step]) < NNX_INT8
    assert int(model.cache_index[...]) == 0
    assert float(jnp.abs(q.cached_key[...]).min()) > 0
    q.init_cache((2, 4, 8))
    assert int(q.cache_index[...]) == 0 and not q.cached_key[...].any()
    assert error(q(tokens[:, :1])[:, 0], wanted[:, 0]) < NNX_INT8


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_recurrent_cells(cell):
    model = nnx.RNN(cell(4, 8, rngs=rngs()))
    q = check(model, normal(2, 5, 4), products=int8_gates(model), tolerance=NNX_RECURRENT)
    assert len(stored(q)) == int8_gates(model)


def int8_gates(model):
    return sum(isinstance(m, nnx.Linear) for _, m in nnx.iter_modules(model))


class Norm(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.up(x)))


def test_batch_norm_statistics_and_dropout_counts_advance():
    model = Norm(rngs())
    floats, q = fresh(model), quantize(model, x8)
    for step in (1, 2):
        wanted, out = floats(x8), q(x8)
        assert jnp.array_equal(out == 0, wanted == 0), "the same units are dropped"
        assert int(q.drop.rngs.count[...]) == step
    assert error(q.norm.mean[...], floats.norm.mean[...]) < NNX_INT8
    assert error(q.norm.var[...], floats.norm.var[...]) < NNX_INT8
    assert not model.norm.mean[...].any()
    q.eval(), floats.eval()
    before = q.norm.mean[...]
    assert error(q(x8), floats(x8)) < NNX_INT8
    assert jnp.array_equal(q.norm.mean[...], before)
    q.train()
    assert (q(x8) == 0).any()
    q.set_attributes(deterministic=True)
    assert not (q(x8) == 0).any()


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, *, rngs):
        return self.up(x) + rngs.noise.normal(x.shape)


def test_rngs_as_an_argument_advance():
    mine, theirs = nnx.Rngs(noise=1), nnx.Rngs(noise=1)
    model = Noise(rngs())

    class Outer(nnx.Module):
        def __init__(self):
            self.noise = model

        def __call__(self, x, streams):
            return self.noise(x, rngs=streams)

    outer = Outer()
    q = quantize(outer, x8, nnx.Rngs(noise=1))
    for step in (1, 2):
        assert error(q(x8, mine), outer(x8, theirs)) < NNX_INT8
        assert int(mine.noise.count[...]) == int(theirs.noise.count[...]) == step


class Sows(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = Sower(rngs)

    def __call__(self, x):
        return self.down(self.up(x))


class Sower(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return self.lin(x)


def test_sow_inside_and_outside_capture():
    model = Sows(rngs())
    with pytest.warns(DeprecationWarning, match="sow"):  # Flax's own, as for the float model
        q = quantize(model, x8)
    wanted = model.up(x8)
    out, caught = nnx.capture(q, nnx.Intermediate)(x8)
    (seen,) = jax.tree.leaves(nnx.to_pure_dict(caught))
    assert error(seen, wanted) < NNX_INT8
    again, caught = nnx.capture(q, nnx.Intermediate)(x8)
    assert len(jax.tree.leaves(caught)) == 1 and jnp.array_equal(out, again)
    with pytest.warns(DeprecationWarning, match="sow"):
        assert jnp.array_equal(q(x8), out)
    assert len(nnx.to_flat_state(nnx.pop(q, nnx.Intermediate))) == 1
    assert error(jax.tree.leaves(caught)[0], seen) == 0


# --- ways to write a product ---------------------------------------------------------------------


class Forward(nnx.Module):
    """A module whose forward is the given function of (module, x)."""

    def __init__(self, forward, shape=(8, 8)):
        self.w = nnx.Param(normal(*shape, seed=7))
        self.forward = nnx.static(forward)

    def __call__(self, x):
        return self.forward(self, x)


FORMS = {
    "x @ w": (lambda m, x: x @ m.w[...], (1, 8)),
    "x @ Variable": (lambda m, x: x @ m.w, (1, 8)),
    "matmul": (lambda m, x: jnp.matmul(x, m.w.get_value()), (1, 8)),
    "tensordot": (lambda m, x: jnp.tensordot(x, m.w[...], 1), (1, 8)),
    "bf16 cast": (lambda m, x: x.astype("bfloat16") @ m.w.astype(jnp.bfloat16), (1, 8)),
    "transposed": (lambda m, x: x @ m.w[...].T, (8, 1)),
    "on the left": (lambda m, x: (m.w[...] @ x.T).T, (8, 1)),
    "einsum": (lambda m, x: jnp.einsum("bi,ij->bj", x, m.w[...]), (1, 8)),
    "in cond": (lambda m, x: lax.cond(x[0, 0] > 9, lambda: x, lambda: x @ m.w[...]), (1, 8)),
    "in a jitted helper": (lambda m, x: helper(x, m.w[...]), (1, 8)),
    "value of the same shape": (lambda m, x: (x + m.w[0, 0]) @ m.w[...], (1, 8)),
}


@jax.jit
def helper(x, w):
    return jnp.tanh(x) @ w


@pytest.mark.parametrize("form", FORMS)
def test_form_of_product(form):
    forward, scale = FORMS[form]
    x = normal(8, 8) if form == "value of the same shape" else x8
    q = check(Forward(forward), x, products=1, tolerance=NNX_INT8)
    assert scales(q) == {"w": scale}


def test_an_activation_with_the_shape_of_a_weight_is_not_taken_for_it():
    q = check(
        Forward(lambda m, x: (x @ x) @ m.w[...]), normal(8, 8), products=2, tolerance=NNX_INT8
    )
    assert scales(q) == {"w": (1, 8)}


LOOPS = {
    "lax.scan over stacked weights": (
        lambda m, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, m.w[...])[0],
        (3, 8, 8),
        (3, 1, 8),
    ),
    "lax.scan, weight held": (
        lambda m, x: lax.scan(lambda h, _: (jnp.tanh(h @ m.w[...]), None), x, None, length=3)[0],
        (8, 8),
        (1, 8),
    ),
    "while_loop": (
        lambda m, x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ m.w[...])), (0, x)
        )[1],
        (8, 8),
        (1, 8),
    ),
    "fori_loop over layers": (
        lambda m, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ m.w[i]), x),
        (3, 8, 8),
        (3, 1, 8),
    ),
    "remat": (
        lambda m, x: jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, m.w[...]),
        (8, 8),
        (1, 8),
    ),
    "vmap": (
        lambda m, x: jax.vmap(lambda w: x @ w)(m.w[...]),
        (3, 8, 8),
        (3, 1, 8),
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_weight_in_jax_control_flow(loop):
    forward, shape, scale = LOOPS[loop]
    q = check(Forward(forward, shape), x8, products=1, tolerance=NNX_RECURRENT)
    assert scales(q) == {"w": scale}


# --- NNX transforms inside the model -------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(jnp.tanh(self.lin(x)))


class Scanned(nnx.Module):
    def __init__(self, rngs, layers=3):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def go(x, block):
            return block(x)

        return go(x, self.blocks)


class Vmapped(Scanned):
    def __call__(self, x):
        return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(self.blocks, x)


class Remat(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs)

    def __call__(self, x):
        return nnx.remat(lambda block, x: block(x))(self.block, x)


class Jitted(Remat):
    @nnx.jit
    def __call__(self, x):
        return self.block(x)


class Branching(Remat):
    def __call__(self, x):
        return nnx.cond(x[0, 0] > 99, lambda block, x: x, lambda block, x: block(x), self.block, x)


class Switching(Remat):
    def __call__(self, x):
        def idle(block, x):
            return x

        def work(block, x):
            return block(x)

        return nnx.switch(jnp.array(1), [idle, work], self.block, x)


class Looping(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return nnx.fori_loop(0, 2, lambda i, c: (c[0], jnp.tanh(c[0](c[1]))), (self.lin, x))[1]


class Whiling(Looping):
    def __call__(self, x):
        def more(carry):
            return carry[2] < 2

        def step(carry):
            lin, x, i = carry
            return lin, jnp.tanh(lin(x)), i + 1

        return nnx.while_loop(more, step, (self.lin, x, jnp.array(0)))[1]


TRANSFORMS = {
    Scanned: {"blocks/lin/kernel": (3, 1, 8)},
    Vmapped: {"blocks/lin/kernel": (3, 1, 8)},
    Remat: {"block/lin/kernel": (1, 8)},
    Jitted: {"block/lin/kernel": (1, 8)},
    Branching: {"block/lin/kernel": (1, 8)},
    Switching: {"block/lin/kernel": (1, 8)},
    Looping: {"lin/kernel": (1, 8)},
    Whiling: {"lin/kernel": (1, 8)},
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_nnx_transform_in_the_model(kind):
    model = kind(rngs())
    q = check(model, x8, products=1, tolerance=NNX_RECURRENT)
    assert scales(q) == TRANSFORMS[kind]
    floats = fresh(model)
    floats(x8), q(x8)
    for path, variable in nnx.to_flat_state(nnx.state(floats, nnx.BatchStat)):
        mine = dict(nnx.to_flat_state(nnx.state(q, nnx.BatchStat)))[path]
        assert error(mine[...], variable[...]) < NNX_RECURRENT, path


class StacksItself(nnx.Module):
    """A model that stacks its blocks in the forward and scans over the stack."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        stack = jax.tree.map(lambda *w: jnp.stack(w), *self.blocks)
        return lax.scan(lambda h, block: (block(h), None), self.first(x), stack)[0]


def test_a_model_that_stacks_its_own_blocks():
    model = StacksItself(rngs())
    plan = fewbit.plan(model, [W8A8], x8)
    assert any("stack" in note for note in plan.notes), plan.notes
    assert {row.site.path for row in plan.sites} >= {"first"}
    q = check(model, x8, products=2, tolerance=NNX_RECURRENT)
    assert set(stored(q)) == {"first/kernel"}, "a stacked weight is a new array, not a parameter"


# --- structure -----------------------------------------------------------------------------------


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 8, rngs=rngs)
        self.b = self.a

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def test_a_shared_module_stays_shared():
    q = check(Shared(rngs()), x8, products=2, tolerance=NNX_INT8)
    assert q.a is q.b and scales(q) == {"a/kernel": (1, 8)}
    rows = fewbit.plan(Shared(rngs()), [W8A8], x8).sites
    assert [row.site.id for row in rows] == ["a:dot_general0", "a:dot_general1"]


class Counts(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)
        self.n = 0

    def __call__(self, x):
        self.n += 1
        if self.n == 1:
            self.first = nnx.Cache(jnp.zeros(()))
        self.first[...] += 1
        return self.lin(x)


def test_python_attributes_and_new_variables_made_in_the_call():
    model = Counts(rngs())
    q = quantize(model, x8)
    assert q.n == model.n == 0 and not hasattr(q, "first")
    for step in (1, 2, 3):
        q(x8)
        assert q.n == step and int(q.first[...]) == step
    assert isinstance(q.first, nnx.Cache)
    assert model.n == 0 and not hasattr(model, "first")
    assert stored(q)


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.emb = nnx.Embed(11, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def encode(self, ids, *, scale=1.0, train=False):
        h = self.emb(ids)
        for block in self.blocks:
            h = jnp.tanh(block(h)) * scale
        return h if train else self.emb.attend(h)


def test_methods_and_keyword_arguments():
    model = Encoder(rngs())
    q = quantize(model, ids, methods=("encode",), scale=2.0)
    assert set(scales(q)) == {"emb/embedding", "blocks/0/kernel", "blocks/1/kernel"}
    for kwargs in ({"scale": 2.0}, {"scale": jnp.array(2.0)}, {"train": True}, {}):
        assert error(q.encode(ids, **kwargs), model.encode(ids, **kwargs)) < NNX_INT8
    assert int8_products(lambda: q.encode(ids)) == 3


def test_submodules_called_directly_give_what_they_give_inside():
    model = Encoder(rngs())
    q = quantize(model, ids, methods=("encode",))
    h = normal(2, 3, 8)
    for name, part, mine in (
        ("block", lambda m: m.blocks[0](h), "blocks/0/kernel"),
        ("attend", lambda m: m.emb.attend(h), "emb/embedding"),
    ):
        assert error(part(q), part(model)) < NNX_INT8, name
        assert int8_products(lambda part=part: part(q)) == 1, name
        assert mine in stored(q)
    steps = q.emb(ids)
    for block in q.blocks:
        steps = jnp.tanh(block(steps))
    assert error(q.emb.attend(steps), q.encode(ids)) < CODE_OF_NEXT_LAYER


# --- Linen modules inside of NNX models -----------------------------------------------------------


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(32, name="up")(x))
        return LinenHead(name="head")(x)


class LinenHead(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="down")(x)


def bridged(x):
    model = nnx.bridge.ToNNX(LinenMlp(), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(model, x)
    return model


class Around(nnx.Module):
    def __init__(self, x):
        self.inner = bridged(x)
        self.last = nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.inner(x))


@pytest.mark.parametrize("make", [bridged, Around])
def test_a_linen_module_in_an_nnx_model(make):
    x = jax.random.normal(jax.random.key(0), (4, 16))
    model, top = make(x), "inner/" if make is Around else ""
    exact = model(x)
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(model, rules, x)
    paths = [f"{top}up", f"{top}head/down", *["last"] * (make is Around)]
    assert [row.site.path for row in plan.sites] == paths and not plan.notes[1:]
    assert [row.site.class_name for row in plan.sites[:2]] == ["Dense", "Dense"]
    only = [fewbit.QuantizationRule(module_path=f"{top}head/.*", weight_qtype="int8")]
    assert [row.quantized for row in fewbit.plan(model, only, x).sites][:2] == [False, True]
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules), x)
    out = quantized(x)
    assert 0 < jnp.abs(out - exact).mean() < 0.05 * jnp.abs(exact).mean()
    inner = quantized.inner if make is Around else quantized
    assert type(inner) is not nnx.bridge.ToNNX and isinstance(inner, nnx.bridge.ToNNX)
    assert jnp.array_equal(nnx.jit(lambda model, x: model(x))(quantized, x), out)
    graph, state = nnx.split(quantized)
    assert jnp.array_equal(nnx.merge(graph, state)(x), out)
    assert jnp.array_equal(nnx.clone(quantized)(x), out)
    if make is Around:  # by itself too, under the rules of its place
        assert jnp.array_equal(quantized.last(quantized.inner(x)), out)
    assert jnp.array_equal(model(x), exact)  # the float model is as it was


def test_a_linen_module_in_an_nnx_model_trains():
    x = jax.random.normal(jax.random.key(0), (4, 16))
    model = bridged(x)
    rule = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    trained = fewbit.quantize_model(model, fewbit.QtProvider([rule]), x)
    loss = lambda model: jnp.mean(jnp.square(model(x)))  # noqa: E731
    exact, found = (nnx.to_pure_dict(nnx.grad(loss)(m)) for m in (model, trained))
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert jnp.abs(a - b).mean() < 0.1 * jnp.abs(b).mean()
