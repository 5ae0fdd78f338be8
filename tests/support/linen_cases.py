"""What the Linen tests share: the flow people write, and ways to see what really ran."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

import fewbit
from fewbit import PtqProvider, QArray, QuantizationRule, WithAux

W8A8 = [QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
W8 = [QuantizationRule(module_path=".*", weight_qtype="int8")]


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def relative_error(got, wanted):
    got, wanted = jnp.asarray(got, jnp.float32), jnp.asarray(wanted, jnp.float32)
    assert got.shape == wanted.shape
    return float(jnp.mean(jnp.abs(got - wanted)) / jnp.mean(jnp.abs(wanted)))


def quantize(model, rules, *inputs, variables=None, **kwargs):
    """(quantized model, float variables, quantized variables) by the documented flow."""
    key = jax.random.key(1)
    if variables is None:
        init = lambda k, *xs: model.init(k, *xs, **kwargs)  # noqa: E731
        variables = random_variables(jax.eval_shape(init, key, *inputs))
    ptq = fewbit.quantize_model(model, PtqProvider(rules))
    template = jax.eval_shape(lambda k, *xs: ptq.init(k, *xs, **kwargs), key, *inputs)["params"]
    qparams = fewbit.quantize_params(variables["params"], template)
    assert jax.tree.structure(qparams) == jax.tree.structure(template)
    assert [*map(shape_of, jax.tree.leaves(qparams))] == [*map(shape_of, jax.tree.leaves(template))]
    return ptq, variables, {**variables, "params": qparams}


def random_variables(shapes):
    """Variables drawn by NumPy: compiling Linen's initializers costs more than the test."""
    rng = np.random.default_rng(7)

    def draw(path, leaf):
        if path[0].key != "params":
            fill = np.ones if path[-1].key == "var" else np.zeros
            return jnp.asarray(fill(leaf.shape, leaf.dtype))
        fan_in = math.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 1
        return jnp.asarray(rng.normal(size=leaf.shape) / math.sqrt(fan_in), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def shape_of(leaf):
    return leaf.shape, leaf.dtype


def equations(fn, *args, **kwargs):
    """Every equation of a traced call, at any depth."""

    def walk(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield eqn
            for inner in jex.jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(lambda *a: fn(*a, **kwargs))(*args)))


def products(fn, *args, **kwargs):
    """How many products run on which operand types: {('int8', 'int8'): 2}."""
    count = {}
    for eqn in equations(fn, *args, **kwargs):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "fewbit_codes_dot"):
            types = tuple(str(v.aval.dtype) for v in eqn.invars[:2])
            count[types] = count.get(types, 0) + 1
        elif eqn.primitive.name == "fewbit_panel_conv" and eqn.params["spec"].act != "none":
            count[INT8] = count.get(INT8, 0) + 1
    return count


INT8 = ("int8", "int8")


def stored(tree):
    """{path: (qtype, scale shape)} of the quantized leaves of a tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, WithAux))
    found = {}
    for path, leaf in flat:
        if isinstance(leaf, WithAux):
            assert isinstance(leaf.array, QArray)
            name = "/".join(str(k.key) for k in path)
            found[name] = (str(leaf.array.qtype), tuple(leaf.array.scale.shape))
    return found
