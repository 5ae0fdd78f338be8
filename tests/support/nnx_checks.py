"""What the NNX tests share: quantize, compare with the float model, count the int8 products."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core as jex

import fewbit

W8A8 = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")
W8 = fewbit.QuantizationRule(weight_qtype="int8")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "fewbit_codes_dot")


def quantize(model, *inputs, rules=(W8A8,), **kwargs):
    return fewbit.quantize_model(model, fewbit.PtqProvider(rules), *inputs, **kwargs)


def normal(*shape, seed=0, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def error(found, wanted):
    """Relative mean absolute error."""
    found, wanted = (jnp.asarray(x, "float32") for x in (found, wanted))
    assert found.shape == wanted.shape
    return float(jnp.mean(jnp.abs(found - wanted)) / jnp.mean(jnp.abs(wanted)))


def int8_products(fn, *args):
    """How many products of two int8 operands the jaxpr of `fn` holds, at any depth."""

    def count(jaxpr):
        n = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in PRODUCTS:
                n += all(v.aval.dtype == jnp.int8 for v in eqn.invars[:2])
            elif eqn.primitive.name == "fewbit_panel_conv":
                n += eqn.params["spec"].act != "none"
            n += sum(count(getattr(j, "jaxpr", j)) for j in jex.jaxprs_in_params(eqn.params))
        return n

    return count(jax.make_jaxpr(fn)(*args).jaxpr)


def is_param(value):
    return isinstance(value, nnx.Param)


def stored(model):
    """{path: QArray} of a quantized model; each is a WithAux whose parts are nnx.Params."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, fewbit.WithAux) and isinstance(node.array, fewbit.QArray):
            parts = jax.tree.leaves(node, is_leaf=is_param)
            assert parts and all(map(is_param, parts))
            values = jax.tree.map(lambda p: p.get_value(), node.array, is_leaf=is_param)
            found["/".join(map(str, path))] = values
    return found


def scales(model):
    return {path: q.scale.shape for path, q in stored(model).items()}


def fresh(model):
    """A copy whose state can change without touching `model`."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x, state), copy=True)


def check(model, *inputs, products, tolerance, rules=(W8A8,), **kwargs):
    """Quantize; the output is the float model's within `tolerance` and `products` run in int8."""
    wanted = fresh(model)(*inputs, **kwargs)
    q = quantize(model, *inputs, rules=rules, **kwargs)
    found = jax.tree.leaves(fresh(q)(*inputs, **kwargs))
    for mine, theirs in zip(found, jax.tree.leaves(wanted), strict=True):
        assert error(mine, theirs) < tolerance
        assert mine.dtype == theirs.dtype
    assert int8_products(lambda *a: fresh(q)(*a, **kwargs), *inputs) == products
    return q
