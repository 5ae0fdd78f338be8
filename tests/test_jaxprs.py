"""The names of JAX primitives that fewbit knows, each pinned by tracing what makes it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fewbit import jaxprs
from fewbit.rebuild import REBUILD
from fewbit.trace_layout import LAYOUT
from fewbit.weight_moves import MOVES

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
    assert set(REBUILD) == walked | {"custom_jvp_call", "custom_vjp_call"}


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
