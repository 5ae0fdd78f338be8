"""Small things the tests share."""

import re

import jax
import jax.numpy as jnp
import pytest

import fewbit
from fewbit import PtqProvider, QuantizationRule

W8A8 = [QuantizationRule(weight_qtype="int8", act_qtype="int8")]
W8 = [QuantizationRule(weight_qtype="int8")]


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def quantized(function, rules, params, *args, strict=True):
    """(quantized function, quantized params, plan) of a plain function."""
    plan = fewbit.plan(function, rules, params, *args, strict=strict)
    return (
        fewbit.quantize_model(function, PtqProvider(rules)),
        fewbit.quantize_params(params, plan),
        plan,
    )


def relative_error(a, b):
    """Largest difference over largest value, over all float leaves of two trees."""
    errors = []
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (jnp.asarray(v, jnp.float32) for v in (x, y))
        errors.append(float(jnp.max(jnp.abs(x - y)) / (jnp.max(jnp.abs(y)) + 1e-12)))
    return max(errors)


def dot_types(function, *args):
    """The operand types of every product in the lowered program, e.g. ['i8xi8', 'f32xf32']."""
    text = jax.jit(function).lower(*args).as_text()
    found = re.findall(
        r"(?:dot_general|convolution).*: \(tensor<\S*?(\w+)>, tensor<\S*?(\w+)>\)", text
    )
    return [f"{a.split('x')[-1]}x{b.split('x')[-1]}" for a, b in found]


def says(kind, *sentences):
    """The block must raise `kind` with a message that holds all sentences."""

    class Says:
        def __enter__(self):
            self.raises = pytest.raises(kind)
            self.found = self.raises.__enter__()

        def __exit__(self, *error):
            done = self.raises.__exit__(*error)
            text = str(self.found.value)
            for sentence in sentences:
                assert sentence in text, f"{sentence!r} is not in:\n{text}"
            return done

    return Says()
