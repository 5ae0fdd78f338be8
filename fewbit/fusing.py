"""What follows a product at once in a jaxpr: a bias over its columns, and a known activation.

The kernels do both while the result is in the cache. A chain is found by its equations alone: an
activation is one if it is, equation by equation, what JAX makes of its function. Whatever else
reads a value on the way keeps it from being fused.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import jaxprs
from fewbit.jaxprs import Jaxpr
from fewbit.kernels import ACTIVATIONS

# The same functions as people also write them.
_SPELLINGS: tuple[tuple[str, Callable[[jax.Array], jax.Array]], ...] = (
    *ACTIVATIONS.items(),
    ("relu", lambda x: jnp.maximum(x, 0)),
    ("silu", lambda x: x * jax.nn.sigmoid(x)),
    ("silu", lambda x: jax.nn.sigmoid(x) * x),
)


_PRODUCTS = ("dot_general", "ragged_dot_general")


@dataclass(frozen=True)
class Chain:
    """A product and the equations after it that the kernel can do, by number."""

    product: int
    rest: tuple[int, ...]  # the last one makes the result
    bias: Any  # the variable, or None
    activation: str | None

    @property
    def last(self) -> int:
        return self.rest[-1]


class _Uses:
    """Which equations read a variable, and which makes it; a result of the jaxpr is read at -1."""

    def __init__(self, jaxpr: Jaxpr):
        self.eqns = jaxpr.eqns
        self.readers: dict[Any, list[int]] = defaultdict(list)
        self.maker: dict[Any, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for var in dict.fromkeys(v for v in eqn.invars if not jaxprs.is_literal(v)):
                self.readers[var].append(i)
            self.maker.update((var, i) for var in eqn.outvars)
        for var in jaxpr.outvars:
            if not jaxprs.is_literal(var):
                self.readers[var].append(-1)

    def of(self, var: Any) -> list[int]:
        return self.readers.get(var, [])


def find_chains(jaxpr: Jaxpr) -> dict[int, Chain]:
    """The chains of a jaxpr by their product's number; looked for once per jaxpr."""
    if jaxpr not in _chains:
        products = [i for i, e in enumerate(jaxpr.eqns) if e.primitive.name in _PRODUCTS]
        uses = _Uses(jaxpr) if products else None
        found = (_chain(uses, i) for i in products) if uses is not None else ()
        _chains[jaxpr] = {chain.product: chain for chain in found if chain is not None}
    return _chains[jaxpr]


_chains: weakref.WeakKeyDictionary[Any, dict[int, Chain]] = weakref.WeakKeyDictionary()


def _chain(uses: _Uses, product: int) -> Chain | None:
    (out,) = uses.eqns[product].outvars
    added = _bias(uses, out)
    bias, rest = (None, ()) if added is None else (added[0], (added[1],))
    value = uses.eqns[rest[0]].outvars[0] if rest else out
    name, after = _activation(uses, value)
    rest = (*rest, *after)
    return Chain(product, rest, bias, name) if rest else None


def _bias(uses: _Uses, value: Any) -> tuple[Any, int] | None:
    """The vector that is added to `value` over its columns, and the equation that does it."""
    if len(uses.of(value)) != 1 or uses.of(value) == [-1]:
        return None
    (at,) = uses.of(value)
    eqn = uses.eqns[at]
    if eqn.primitive.name != "add" or not _alike(eqn.outvars[0], value):
        return None
    others = [v for v in eqn.invars if v is not value]
    if len(others) != 1 or jaxprs.is_literal(others[0]) or others[0] not in uses.maker:
        return None
    bias = jaxprs.repeated_over_rows(uses.eqns[uses.maker[others[0]]], value.aval.shape)
    if bias is None or bias.aval.dtype != value.aval.dtype:
        return None
    return bias, at


def _activation(uses: _Uses, value: Any) -> tuple[str | None, tuple[int, ...]]:
    openers = {uses.eqns[i].primitive.name for i in uses.of(value) if i >= 0}
    for number, (name, _) in enumerate(_SPELLINGS):
        if _opener(number) not in openers:
            continue
        found = _match(uses, value, _pattern(number, value.aval.shape, value.aval.dtype.name))
        if found is not None:
            return name, found
    return None, ()


@functools.cache
def _opener(number: int) -> str:
    """The first primitive of a spelling, to look no further for most equations."""
    return _pattern(number, (1,), "float32").eqns[0].primitive.name


@functools.lru_cache(maxsize=256)
def _pattern(number: int, shape: tuple[int, ...], dtype: str) -> Jaxpr:
    function = _SPELLINGS[number][1]
    return jaxprs.open_jaxpr(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype)))


def _match(uses: _Uses, value: Any, pattern: Jaxpr) -> tuple[int, ...] | None:
    """The equations that compute `pattern` of `value`, if nothing else reads what lies between."""
    stands_for: dict[Any, Any] = {pattern.invars[0]: value}
    taken: list[int] = []
    for wanted in pattern.eqns:
        first = next(v for v in wanted.invars if not jaxprs.is_literal(v))
        at = next(
            (
                i
                for i in uses.of(stands_for[first])
                if i >= 0
                and i not in taken
                and jaxprs.same_equation(uses.eqns[i], wanted)
                and _same_operands(uses.eqns[i].invars, wanted.invars, stands_for)
            ),
            None,
        )
        if at is None:
            return None
        taken.append(at)
        stands_for.update(zip(wanted.outvars, uses.eqns[at].outvars, strict=True))
    result = stands_for[pattern.outvars[0]]
    between = [v for v in stands_for.values() if v is not result]
    if not _alike(result, value) or any(set(uses.of(v)) - set(taken) for v in between):
        return None
    return tuple(sorted(taken))


def _same_operands(found: Sequence[Any], wanted: Sequence[Any], stands_for: dict) -> bool:
    def same(a, b):
        if jaxprs.is_literal(a) or jaxprs.is_literal(b):
            return jaxprs.same_literal(a, b)
        return stands_for[b] is a

    return len(found) == len(wanted) and all(map(same, found, wanted))


def _alike(a: Any, b: Any) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
