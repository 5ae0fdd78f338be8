"""What a Site's equation says of itself: its work, its letters, whether a gather looks up rows."""

from math import prod
from typing import Any

from fewbit.jaxprs import Eqn


def multiply_adds(eqn: Eqn) -> int:
    """Of one run of a product; a look-up has none."""
    name, p = eqn.primitive.name, eqn.params
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if name == "dot_general":
        (contracting, _), _ = p["dimension_numbers"]
        return prod(out) * prod(lhs[a] for a in contracting)
    if name == "conv_general_dilated":
        spec = p["dimension_numbers"].rhs_spec
        return prod(out) * prod(rhs) // max(rhs[spec[0]], 1)
    if name == "ragged_dot_general":
        numbers = p["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return prod(out) * prod(lhs[a] for a in numbers[0][0])
    return 0


def letters_of(eqn: Eqn) -> str:
    """A dot_general as an einsum string; nothing for other primitives."""
    if eqn.primitive.name != "dot_general":
        return ""
    return product_letters(eqn.params["dimension_numbers"], *(v.aval.ndim for v in eqn.invars))


def product_letters(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """A dot_general's dimension numbers as an einsum string over the same operands and result.

    >>> product_letters((((1,), (0,)), ((), ())), 2, 2)
    'ab,bc->ac'
    """
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    (lc, rc), (lb, rb) = dimension_numbers
    lhs = [next(letters) for _ in range(lhs_ndim)]
    shared = {r: lhs[left] for left, r in [*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)]}
    rhs = [shared[i] if i in shared else next(letters) for i in range(rhs_ndim)]
    out = [lhs[i] for i in lb]
    out += [lhs[i] for i in range(lhs_ndim) if i not in (*lc, *lb)]
    out += [rhs[i] for i in range(rhs_ndim) if i not in shared]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"


def is_row_lookup(eqn: Eqn) -> bool:
    """A gather that takes whole rows along one axis: `table[ids]`, `jnp.take(table, ids, axis)`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    axes = tuple(numbers.collapsed_slice_dims)
    return (
        len(axes) == 1
        and tuple(numbers.start_index_map) == axes
        and not numbers.operand_batching_dims
        and all(
            s == (1 if a in axes else n) for a, (s, n) in enumerate(zip(sizes, shape, strict=True))
        )
    )
