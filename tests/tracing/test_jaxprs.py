"""The names of JAX primitives that fewbit knows, each pinned by tracing what makes it."""

from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fewbit._util._versions import known_range
from fewbit.interpreter._control_flow import REBUILD
from fewbit.interpreter._weights import MOVES
from fewbit.tracing import _jaxprs as jaxprs
from fewbit.tracing._origin import LAYOUT
from fewbit.tracing._sites import analyse

X = jnp.ones((8, 4))
IDS = jnp.arange(3, dtype=jnp.int32)


def mesh(kind):
    return jax.make_mesh((4,), ("m",), axis_types=(kind,))


def resharded(x):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        return jax.make_jaxpr(lambda x: jax.sharding.reshard(x, P("m")))(x)


def varying(x):
    @partial(jax.shard_map, mesh=mesh(AxisType.Auto), in_specs=(P(), P("m")), out_specs=P("m"))
    def add(w, x):
        return w[:2] + x

    return add(x, x)


MADE_BY = {
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, 16),
    "squeeze": lambda x: x.reshape(8, 4, 1).squeeze(2),
    "broadcast_in_dim": lambda x: x[:, None],
    "slice": lambda x: x[1:3],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (IDS[0], IDS[1]), (1, 2)),
    "rev": lambda x: x[::-1],
    "gather": lambda x: x[IDS],
    "split": lambda x: jnp.split(x, 2),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "stack": lambda x: jnp.stack([x, x]),
    "copy": lambda x: jnp.copy(x),
    "device_put": lambda x: jax.device_put(x),
    "name": lambda x: checkpoint_name(x, "kept"),
    "stop_gradient": lambda x: lax.stop_gradient(x),
    "optimization_barrier": lambda x: lax.optimization_barrier(x),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(mesh(AxisType.Auto), P("m"))
    ),
    "pvary": varying,
    "reshard": None,
}


def names_in(jaxpr):
    from jax.extend import core as jex

    found = set()
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        found.add(eqn.primitive.name)
        for sub in jex.jaxprs_in_params(eqn.params):
            found |= names_in(sub)
    return found


@pytest.mark.parametrize("name", sorted({*MOVES, *LAYOUT}))
def test_every_layout_primitive_is_what_jax_calls_it(name):
    jaxpr = resharded(X) if name == "reshard" else jax.make_jaxpr(MADE_BY[name])(X)
    assert name in names_in(jaxpr)


def test_the_tracer_and_the_interpreter_know_the_same_layout_primitives():
    """Else a weight would be planned as quantized and then silently dequantized on its way."""
    joins = {"gather", "concatenate", "stack"}  # several leaves, or a Site of its own
    assert set(MOVES) - joins == set(LAYOUT)


def test_every_body_that_is_walked_is_rebuilt():
    walked = {"jit", "scan", "while", "cond", "remat2", "shard_map"}
    assert set(REBUILD) == walked | {"custom_jvp_call", "custom_vjp_call"} == set(jaxprs.FORMS)


def equation_of(name, function, *args):
    (eqn,) = [e for e in jax.make_jaxpr(function)(*args).eqns if e.primitive.name == name]
    return eqn


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g / 2,))

BODIES = {
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "jit": jax.jit(jnp.sin),
    "remat2": jax.checkpoint(jnp.sin),
    "custom_jvp_call": doubled,
    "custom_vjp_call": halved,
    "shard_map": varying,
}


@pytest.mark.parametrize("name", sorted(jaxprs.FORMS))
def test_every_primitive_with_a_body_has_a_form_that_is_known(name):
    assert jaxprs.bodies(equation_of(name, BODIES[name], X))


# Other ways to write the same primitives, which may bind other params.
WAYS = {
    "cond": [
        lambda x: lax.switch(IDS[0], [jnp.sin, jnp.cos, jnp.tan], x),
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, cuda=jnp.cos),
        lambda x: jnp.linalg.det(x[:4]),
    ],
    "scan": [
        lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x, reverse=True, unroll=2),
        lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x, _split_transpose=True),
        lambda x: lax.map(jnp.sin, x, batch_size=3),
        lambda x: lax.fori_loop(0, 3, lambda _, c: c + 1, x),
    ],
    "while": [lambda x: lax.fori_loop(0, IDS[0], lambda _, c: c + 1, x)],
    "remat2": [
        jax.checkpoint(jnp.sin, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable),
        jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()),
    ],
    "jit": [jax.jit(jnp.sin, donate_argnums=0, keep_unused=True)],
    "shard_map": [jax.vmap(varying), jax.grad(lambda x: varying(x).sum())],
}


@pytest.mark.parametrize(("name", "number"), [(n, k) for n in WAYS for k in range(len(WAYS[n]))])
def test_every_way_to_write_it_has_a_form_that_is_known(name, number):
    """Also under transformations, and in what it is made of."""
    function = WAYS[name][number]
    assert name in names_in(jax.make_jaxpr(function)(X))
    transformed = [lambda x: jax.jvp(function, (x,), (x,)), jax.vmap(function)]
    for traced in (function, *transformed):
        x = X if traced is not transformed[1] else jnp.stack([X, X])
        analyse(jax.make_jaxpr(traced)(x), [None])


@pytest.mark.parametrize("name", sorted(jaxprs.FORMS))
@pytest.mark.parametrize("change", ["one less", "one more"])
def test_a_form_that_is_not_known_is_said(name, change):
    """As a later JAX may bind it: found while a model is analysed, not at some KeyError."""
    jaxpr = jax.make_jaxpr(BODIES[name])(X)
    (at,) = [i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == name]
    params = dict(jaxpr.eqns[at].params)
    if change == "one less":
        gone = next(key for key in params if "jaxpr" in key or key == "branches")
        del params[gone]
        what = f"there is no {gone}"
    else:
        params["flavour"] = 1
        what = "flavour is new"
    eqns = list(jaxpr.eqns)
    eqns[at] = eqns[at].replace(params=params)
    changed = jaxprs.open_jaxpr(jaxpr).replace(eqns=eqns)
    with pytest.raises(jaxprs.UnknownJaxError) as error:
        analyse(changed, [None])
    text = str(error.value)
    assert text.startswith(f"{name} equations of JAX {jax.__version__} are not as fewbit knows")
    assert what in text and known_range("jax") in text
    assert "pip install --upgrade fewbit" in text and "pip install 'jax<=" in text


def test_a_scan_with_parts_that_do_not_add_up_is_said():
    eqn = equation_of("scan", BODIES["scan"], X)
    parts = jaxprs.scan_params(eqn)
    shorter = eqn.replace(invars=eqn.invars[: parts.num_consts + parts.num_carry - 1])
    with pytest.raises(jaxprs.UnknownJaxError, match="operands are in parts of"):
        jaxprs.scan_params(shorter)


def test_parts_of_a_scan_are_counted_by_leaves():
    """Nested carries, inputs and constants, some of which JAX takes out of the loop."""

    def nested(x):
        def step(c, row):
            return {"a": (c["a"][0] + row["k"], c["a"][1]), "b": c["b"] + x.sum()}, (row["j"], None)

        return lax.scan(step, {"a": (jnp.zeros(4), x), "b": jnp.float32(0)}, {"k": x, "j": x})

    for function in (nested, lambda x: jax.vmap(nested)(jnp.stack([x, x]))):
        eqn = equation_of("scan", function, X)
        p = jaxprs.scan_params(eqn)
        body = jaxprs.open_jaxpr(p.body)
        carry = slice(p.num_consts, p.num_consts + p.num_carry)
        assert [v.aval for v in body.invars[carry]] == [v.aval for v in body.outvars[: p.num_carry]]
        sliced = p.num_consts + p.num_carry
        assert all(v.aval.shape[0] == p.length == 8 for v in eqn.invars[sliced:])


def test_a_body_that_nobody_knows_is_listed_with_its_products():
    """Its products stay float: that is said, not left to be found out."""
    jaxpr = jax.make_jaxpr(jax.checkpoint(lambda w: X @ w))(jnp.ones((4, 4)))
    (eqn,) = jaxpr.eqns
    other = jex.Primitive("remat9")
    other.multiple_results = True
    changed = jaxprs.open_jaxpr(jaxpr).replace(eqns=[eqn.replace(primitive=other)])
    (listed,) = analyse(changed, [("w", (4, 4))]).opaque
    assert "remat9 at the model's top level is opaque and runs as it is; it reads w" in listed
    assert "products inside it are not quantized" in listed


def test_a_program_that_was_exported_is_listed():
    """What `jax.export` made has no body to look into; who calls it has one."""
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    exported = jax.export.export(jax.jit(lambda w: X @ w))(shape)
    jaxpr = jax.make_jaxpr(exported.call)(jnp.ones((4, 4)))
    (listed,) = analyse(jaxpr, [("w", (4, 4))]).opaque
    assert listed.startswith("call_exported") and "it reads w" in listed


@pytest.mark.parametrize(
    "stack,path,class_name,scope,einsum,backward",
    [
        ("fewbit[a/b|Dense]", "a/b", "Dense", "", "", False),
        ("fewbit[a|A]/fewbit[a/b|B]/mine", "a/b", "B", "mine", "", False),
        ("vmap(fewbit[a|A])/...ij,jk->...ik", "a", "A", "", "...ij,jk->...ik", False),
        ("transpose(jvp(fewbit[a|A]))/ij,jk", "a", "A", "", "ij,jk", True),
        ("outer/inner", "", "", "outer/inner", "", False),
        ("", "", "", "", "", False),
    ],
)
def test_name_stacks_are_read(stack, path, class_name, scope, einsum, backward):
    found = jaxprs.where(stack)
    assert (found.path, found.class_name, found.user_scope) == (path, class_name, scope)
    assert (found.einsum, found.backward) == (einsum, backward)
