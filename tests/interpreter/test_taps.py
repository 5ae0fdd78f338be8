"""What a tap reads leaves every body as a result, equal to the same model unrolled by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from helpers import normal
from jax.sharding import PartitionSpec

from fewbit.interpreter._interpret import Interpreter
from fewbit.interpreter._taps import Taps
from fewbit.tracing import _jaxprs as jaxprs
from fewbit.tracing._sites import analyse

W, X = normal(1, 6, 6) / 2, normal(2, 8, 6)
STACK = normal(3, 3, 6, 6) / 2
F64 = np.float64


class Ranges:
    """Reads the left operand: sum of all values, largest, smallest, and the result's sum."""

    def __init__(self, only=lambda site: True):
        self.wants = only

    def observe(self, site, operands, result):
        lhs = operands[0]
        return {"sum": jnp.sum(lhs), "edges": (jnp.max(lhs), jnp.min(lhs)), "out": jnp.sum(result)}

    def combine(self, site_id, a, b):
        (top, low), (top2, low2) = a["edges"], b["edges"]
        edges = (jnp.maximum(top, top2), jnp.minimum(low, low2))
        return {"sum": a["sum"] + b["sum"], "edges": edges, "out": a["out"] + b["out"]}


def expected(runs):
    """The reading of a Site from its list of (lhs, rhs), in float64."""
    products = [(F64(a), F64(a) @ F64(b)) for a, b in runs]
    return {
        "count": len(products),
        "sum": sum(a.sum() for a, _ in products),
        "max": max((a.max() for a, _ in products), default=0),
        "min": min((a.min() for a, _ in products), default=0),
        "out": sum(out.sum() for _, out in products),
    }


def read(f, params, *args, tap=None, jit=True, **kwargs):
    """(results, readings) of a function through a tapped interpreter."""

    def run(params, *args):
        leaves, tree = jax.tree.flatten((params, args))
        n = len(jax.tree.leaves(params))
        traced = jax.jit(lambda leaves: f(*flat(tree, leaves))).trace(leaves)
        kinds = [(f"p{i}", leaf.shape) if i < n else None for i, leaf in enumerate(leaves)]
        program = analyse(traced.jaxpr, kinds, site_path="leaf")
        bind = lambda site, ins: jaxprs.bind(site.eqn, ins)[0]  # noqa: E731
        interpreter = Interpreter(bind, lambda site: False, taps=Taps(tap or Ranges()), **kwargs)
        return interpreter.run_tapped(program.root, leaves)

    return (jax.jit(run) if jit else run)(params, *args)


def flat(tree, leaves):
    params, args = jax.tree.unflatten(tree, leaves)
    return params, *args


def check(reading, runs):
    """A reading against its runs; for layers, against a list of them."""
    layers = reading.count.ndim
    if layers:
        assert reading.count.shape[0] == len(runs)
        for i, inner in enumerate(runs):
            check(jax.tree.map(lambda leaf, i=i: leaf[i], reading), inner)
        return
    want = expected(runs)
    assert int(reading.count) == want["count"]
    value = reading.value
    found = {"sum": value["sum"], "out": value["out"]}
    found |= dict(zip(("max", "min"), value["edges"], strict=True))
    for key, number in found.items():
        np.testing.assert_allclose(float(number), want[key], rtol=1e-4, atol=1e-4)


@jax.custom_jvp
def with_jvp(w, x):
    return jnp.tanh(x @ w)


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[1] @ p[0] + p[1] @ t[0]))


@jax.custom_vjp
def with_vjp(w, x):
    return jnp.tanh(x @ w)


with_vjp.defvjp(lambda w, x: (with_vjp(w, x), (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


def plain(w, x):
    return jnp.tanh(x @ w)


WRAPS = {
    "plain": plain,
    "jit": jax.jit(plain),
    "remat": jax.checkpoint(plain),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "remat of jit of custom_vjp": jax.checkpoint(jax.jit(with_vjp)),
    "cond": lambda w, x: jax.lax.cond(x[0, 0] < 99, plain, lambda w, x: x, w, x),
}


def chain(w, x, times):
    """The operands of a layer applied again and again, and its last result."""
    runs, x = [], F64(x)
    for _ in range(times):
        runs.append((x, w))
        x = np.tanh(x @ F64(w))
    return runs, x


@pytest.mark.parametrize("kind", list(WRAPS))
def test_one_product_in_a_body(kind):
    outs, readings = read(WRAPS[kind], W, X, jit=False)
    assert list(readings) == ["p0:dot_general0"]
    check(readings["p0:dot_general0"], [(X, W)])
    np.testing.assert_allclose(outs[0], WRAPS[kind](W, X), rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["remat of jit of custom_vjp", "cond"])
def test_layers_of_a_scan_have_readings_of_their_own(kind, reverse):
    def f(ws, x):
        return jax.lax.scan(lambda x, w: (WRAPS[kind](w, x), None), x, ws, reverse=reverse)[0]

    _, readings = read(f, STACK, X)
    runs, x = [None] * 3, F64(X)
    for i in reversed(range(3)) if reverse else range(3):
        runs[i] = [(x, STACK[i])]
        x = np.tanh(x @ F64(STACK[i]))
    check(readings["p0:dot_general0"], runs)


@pytest.mark.parametrize("kind", ["remat of jit of custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("loop", ["scan", "while", "fori"])
def test_trips_of_a_loop_are_combined(kind, loop):
    layer = WRAPS[kind]

    def f(w, x):
        if loop == "scan":
            return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=4)[0]
        if loop == "fori":
            return jax.lax.fori_loop(0, 4, lambda i, x: layer(w, x), x)
        step = lambda c: (c[0] + 1, layer(w, c[1]))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 4, step, (0, x))[1]

    outs, readings = read(f, W, X)
    runs, last = chain(W, X, 4)
    check(readings["p0:dot_general0"], runs)
    np.testing.assert_allclose(outs[0], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_a_loop_of_any_number_of_trips(trips):
    def f(w, x, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, plain(w, c[1])), (0, x))

    _, readings = read(f, W, X, jnp.array(trips))
    check(readings["p0:dot_general0"], chain(W, X, trips)[0])

    def over_time(w, rows):
        return jax.lax.scan(lambda c, row: (c, row @ w), 0, rows)[1]

    rows = X.reshape(8, 1, 6)[:trips]
    _, readings = read(over_time, W, rows)
    check(readings["p0:dot_general0"], [(row, W) for row in np.asarray(rows)])


def test_a_product_in_the_condition_of_a_loop_is_read_each_time_it_is_asked():
    def f(w, x):
        go = lambda c: (c[0] < 2) & (jnp.sum(c[1] @ w) < 1e6)  # noqa: E731
        return jax.lax.while_loop(go, lambda c: (c[0] + 1, plain(w, c[1])), (0, x))

    _, readings = read(f, W, X)
    runs = chain(W, X, 3)[0]
    check(readings["p0:dot_general0"], runs)  # asked three times
    check(readings["p0:dot_general1"], runs[:2])  # run twice


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_branch_not_taken_has_a_count_of_zero(index):
    def f(ws, x, index):
        ways = [plain, lambda w, x: plain(w, 2 * x), lambda w, x: x]
        return jax.lax.switch(index, ways, ws, x)

    _, readings = read(f, W, X, jnp.array(index))
    check(readings["p0:dot_general0"], [(X, W)] if index == 0 else [])
    check(readings["p0:dot_general1"], [(2 * F64(X), W)] if index == 1 else [])


def test_branches_that_layers_take_in_turn():
    def f(ws, x):
        def step(c, w):
            i, x = c
            return (i + 1, jax.lax.cond(i % 2 == 0, plain, lambda w, x: jnp.tanh(x @ w.T), w, x)), 0

        return jax.lax.scan(step, (0, x), ws)[0]

    _, readings = read(f, STACK, X)
    x, even, odd = F64(X), [], []
    for i, w in enumerate(F64(STACK)):
        w = w if i % 2 == 0 else w.T
        even.append([(x, w)] if i % 2 == 0 else [])
        odd.append([] if i % 2 == 0 else [(x, w)])
        x = np.tanh(x @ w)
    check(readings["p0:dot_general1"], even)  # branches are numbered as a switch has them
    check(readings["p0:dot_general0"], odd)


def test_a_loop_around_layers_around_a_loop_around_a_branch():
    def layer(w, x):
        def step(i, x):
            return jax.lax.cond(i == 1, jax.checkpoint(plain), lambda w, x: x + 1, w, x)

        return jax.lax.fori_loop(0, 3, step, x)

    def f(ws, x):
        stack = lambda x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, stack(c[1])), (0, x))[1]

    outs, readings = read(f, STACK, X)
    runs, x = [[], [], []], F64(X)
    for _ in range(2):
        for i in range(3):
            runs[i].append((x + 1, STACK[i]))
            x = np.tanh((x + 1) @ F64(STACK[i])) + 1
    check(readings["p0:dot_general0"], runs)
    np.testing.assert_allclose(outs[0], x, rtol=1e-4, atol=1e-4)


def test_a_scan_of_scans_has_two_layer_axes():
    ws = normal(4, 2, 3, 6, 6) / 2

    def f(ws, x):
        inner = lambda x, w: (plain(w, x), None)  # noqa: E731
        return jax.lax.scan(lambda x, w: (jax.lax.scan(inner, x, w)[0], None), x, ws)[0]

    _, readings = read(f, ws, X)
    assert readings["p0:dot_general0"].count.shape == (2, 3)
    x, runs = F64(X), []
    for outer in F64(ws):
        runs.append([])
        for w in outer:
            runs[-1].append([(x, w)])
            x = np.tanh(x @ w)
    check(readings["p0:dot_general0"], runs)


# --- several devices ------------------------------------------------------------------------------


def mapped(body, mesh, x_spec, check_vma=True):
    return jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec(), x_spec), out_specs=x_spec, check_vma=check_vma
    )


def auto_mesh(*shape, kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(kind,) * len(shape))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["remat of jit of custom_vjp", "cond"])
def test_shards_are_combined(kind, check_vma):
    f = mapped(WRAPS[kind], auto_mesh(4), PartitionSpec("data"), check_vma)
    _, readings = read(f, W, X)
    check(readings["p0:dot_general0"], [(part, W) for part in np.split(F64(X), 4)])


def test_equal_shards_count_once():
    _, readings = read(mapped(plain, auto_mesh(4, 2), PartitionSpec("data")), W, X)
    check(readings["p0:dot_general0"], [(part, W) for part in np.split(F64(X), 4)])


@pytest.mark.parametrize("kind", ["while", "layers", "time", "branch"])
def test_loops_inside_shards_and_shards_inside_loops(kind):
    spec, mesh = PartitionSpec("data"), auto_mesh(2)

    def loop(w, x):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, plain(w, c[1])), (0, x))[
            1
        ]

    halves = np.split(F64(X), 2)
    if kind == "while":
        for f in (mapped(loop, mesh, spec), lambda w, x: mapped(loop, mesh, spec)(w, x) * 1):
            check(
                read(f, W, X)[1]["p0:dot_general0"],
                [run for part in halves for run in chain(W, part, 2)[0]],
            )
    elif kind == "layers":
        layers = lambda w, x: jax.lax.scan(lambda x, w: (plain(w, x), None), x, w)[0]  # noqa: E731
        inside = read(mapped(layers, mesh, spec), STACK, X)[1]["p0:dot_general0"]
        around = read(
            lambda ws, x: jax.lax.scan(lambda x, w: (mapped(plain, mesh, spec)(w, x), None), x, ws)[
                0
            ],
            STACK,
            X,
        )[1]["p0:dot_general0"]
        x, runs = F64(X), []
        for w in F64(STACK):
            runs.append([(part, w) for part in np.split(x, 2)])
            x = np.tanh(x @ w)
        check(inside, runs)
        check(around, runs)
    elif kind == "time":
        steps = lambda w, x: jax.lax.scan(  # noqa: E731
            lambda c, row: (c, row[None] @ w), 0, x
        )[1][:, 0]
        found = read(mapped(steps, mesh, spec), W, X)[1]["p0:dot_general0"]
        check(found, [(row[None], W) for row in F64(X)])
    else:

        def ways(w, x):
            return jax.lax.cond(jnp.sum(x) > 0, plain, lambda w, x: x, w, x)

        x = jnp.concatenate([jnp.abs(X[:4]), -jnp.abs(X[4:])])
        check(read(mapped(ways, mesh, spec), W, x)[1]["p0:dot_general0"], [(x[:4], W)])


def test_explicit_meshes():
    mesh = auto_mesh(4, kind=jax.sharding.AxisType.Explicit)
    spec = PartitionSpec("data")
    with jax.set_mesh(mesh):
        x = jax.device_put(X, spec)

        def f(ws, x):
            x = jax.lax.scan(lambda x, w: (jax.checkpoint(plain)(w, x), None), x, ws)[0]
            x = jax.lax.fori_loop(0, 2, lambda i, x: plain(ws[0], x), x)
            return jax.shard_map(plain, in_specs=(PartitionSpec(), spec), out_specs=spec)(ws[1], x)

        _, readings = read(f, STACK, x)
    y, runs = F64(X), []
    for w in F64(STACK):
        runs.append([(y, w)])
        y = np.tanh(y @ w)
    first, y = chain(STACK[0], y, 2)
    check(readings["p0:dot_general0"], runs)
    check(readings["p0:dot_general1"], first)
    check(readings["p0:dot_general2"], [(part, STACK[1]) for part in np.split(y, 4)])


# --- what a tap does not do -----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_tapped_run_has_the_models_results(name):
    function, params, args = zoo.member(name)
    wanted = lambda ts: jnp.issubdtype(ts.site.lhs.dtype, jnp.floating)  # noqa: E731
    outs, readings = read(function, params, *args, tap=Ranges(wanted))
    plain_outs = jax.tree.leaves(jax.jit(function)(params, *args))
    for out, want in zip(outs, plain_outs, strict=True):
        np.testing.assert_allclose(np.asarray(out), np.asarray(want), rtol=1e-5, atol=1e-5)
    assert all(int(jnp.min(r.count)) >= 0 for r in readings.values())


@pytest.mark.parametrize("name", ["scan_of_remat_of_cond", "while_loop", "custom_vjp"])
def test_without_a_tap_or_a_wanted_site_the_program_is_the_same(name):
    function, params, args = zoo.member(name)

    def lowered(taps, through):
        def run(params, *args):
            leaves = jax.tree.leaves((params, args))
            tree = jax.tree.structure((params, args))
            traced = jax.jit(lambda leaves: function(*flat(tree, leaves))).trace(leaves)
            program = analyse(traced.jaxpr, [None] * len(leaves))
            bind = lambda site, ins: jaxprs.bind(site.eqn, ins)[0]  # noqa: E731
            interpreter = Interpreter(bind, lambda s: True, taps=taps, rebuild_all=True)
            return through(interpreter)(program.root, leaves)

        return jax.jit(run).lower(params, *args).as_text()

    def first(interpreter):
        return lambda *args: interpreter.run_tapped(*args)[0]

    bare = lowered(Taps(), lambda i: i.run)
    assert lowered(Taps(), first) == bare
    nothing = Taps(Ranges(lambda site: False))
    assert lowered(nothing, first) == bare


@pytest.mark.parametrize("kind", ["remat", "custom_jvp", "custom_vjp"])
def test_gradients_pass_a_tapped_body_and_readings_have_none(kind):
    def loss(x, tapped):
        if not tapped:
            return jnp.sum(WRAPS[kind](W, x))
        outs, readings = read(WRAPS[kind], W, x, jit=False)
        return jnp.sum(outs[0]) + 0 * readings["p0:dot_general0"].count.astype(jnp.float32)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(gradient(X, True), gradient(X, False), rtol=1e-6)


def test_results_do_not_change_if_a_tap_wants_one_site_of_many():
    def f(ws, x):
        x = plain(ws[0], x)
        return jax.lax.cond(x[0, 0] < 99, lambda: plain(ws[1], x), lambda: plain(ws[2], x))

    only = Ranges(lambda ts: ts.site.index == 1)  # in the branch for False
    _, readings = read(f, STACK, X, tap=only)
    assert list(readings) == ["p0:dot_general1"]
    check(readings["p0:dot_general1"], [])
