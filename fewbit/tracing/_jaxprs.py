"""Reading JAX's equations: the one file that knows what the params of a primitive are called.

Equation params are data, not API: they move between JAX releases. Everything else in fewbit asks
the functions here. A primitive with a body is read only in a form that `FORMS` lists; another one
is an error that says so, never a guess. `tests/interpreter/test_identity.py` rebuilds every
primitive with a body and holds the results against the plain model's.
"""

import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex
from jax.interpreters import partial_eval

from fewbit._util import known_range
from fewbit.ops import LONG

Eqn = Any  # jax.extend.core.JaxprEqn; spelled Any because its attributes are not typed
Jaxpr = Any

# Primitives whose products fewbit can quantize -> the op name people write in rules.
SITE_PRIMITIVES = {
    "dot_general": "dot_general",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot_general": "ragged_dot",
    "gather": "take",
}

# Primitives that carry a kernel or a solver of their own: never opened, listed in the plan.
OPAQUE_PRIMITIVES = frozenset(
    {
        *("pallas_call", "composite", "custom_linear_solve", "custom_partitioning", "reduce"),
        *("ffi_call", "call_exported"),
    }
)


def bind(eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    """Evaluate one equation exactly as it was traced (mesh, compute type and metadata included)."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The plain Jaxpr inside a ClosedJaxpr (or the Jaxpr itself)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> tuple[Any, ...]:
    """The constants closed over by a ClosedJaxpr; none for an open one."""
    return tuple(getattr(jaxpr, "consts", ()))


def varying_axes(array: Any) -> frozenset[str]:
    """The mesh axes over which an array inside `shard_map`, abstract or not, differs."""
    abstract = isinstance(array, jax.ShapeDtypeStruct)
    kind = (array if abstract else jax.typeof(array)).manual_axis_type
    return frozenset(kind.varying) if kind is not None else frozenset()


def is_literal(var: Any) -> bool:
    """Whether an equation's operand is a number written into it rather than a variable."""
    return isinstance(var, jex.Literal)


def same_literal(a: Any, b: Any) -> bool:
    """Whether both are literals of one value and type."""
    if not (is_literal(a) and is_literal(b)):
        return False
    return a.aval.dtype == b.aval.dtype and bool(a.val == b.val)


def same_equation(a: Eqn, b: Eqn) -> bool:
    """Whether two equations do the same, whatever their operands; bodies are compared as text."""
    if a.primitive is not b.primitive:
        return False
    inside = bodies(a), bodies(b)
    if inside[0] or inside[1]:
        return list(map(str, inside[0])) == list(map(str, inside[1]))
    return a.params == b.params


def repeated_over_rows(eqn: Eqn, shape: Sequence[int]) -> Any:
    """The vector (or fewer axes than `shape`) whose last axes are `shape`'s, which `eqn` repeats.

    None if the equation does something else.
    """
    name, (operand, *_), out = eqn.primitive.name, eqn.invars, eqn.outvars[0].aval.shape
    if is_literal(operand) or name not in ("reshape", "broadcast_in_dim"):
        return None
    columns = tuple(operand.aval.shape)
    rows = len(shape) - len(columns)
    if not columns or rows <= 0 or len(out) != len(shape) or tuple(shape[rows:]) != columns:
        return None
    if name == "broadcast_in_dim":
        kept = tuple(eqn.params["broadcast_dimensions"]) == tuple(range(rows, len(shape)))
        narrow = tuple(out) in ((1,) * rows + columns, tuple(shape))
        return operand if kept and narrow else None
    return operand if tuple(out) == (1,) * rows + columns else None


# --- primitives with bodies -----------------------------------------------------------------------

# Primitive -> the first JAX that binds it so -> the params it has there. What an equation carries
# picks the form, not the version that is installed.
FORMS: dict[str, dict[str, frozenset[str]]] = {
    name: {since: frozenset(names.split()) for since, names in forms.items()}
    for name, forms in {
        "scan": {
            "0.10.2": "jaxpr num_consts num_carry length reverse unroll",
            "0.11.0": "jaxpr ft_in ft_out length reverse unroll",
        },
        "while": {"0.10.2": "cond_jaxpr cond_nconsts body_jaxpr body_nconsts"},
        "cond": {"0.10.2": "branches"},
        "jit": {
            "0.10.2": "jaxpr in_shardings out_shardings in_layouts out_layouts donated_invars "
            "ctx_mesh name keep_unused inline compiler_options_kvs"
        },
        "remat2": {"0.10.2": "jaxpr prevent_cse differentiated policy"},
        "custom_jvp_call": {"0.10.2": "call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros"},
        "custom_vjp_call": {
            "0.10.2": "call_jaxpr fwd_jaxpr_thunk num_consts bwd out_trees symbolic_zeros"
        },
        "shard_map": {"0.10.2": "mesh in_specs out_specs jaxpr check_vma newly_manual_axes"},
    }.items()
}

# Params that an equation may have or not in any form: a `cond` of `lax.platform_dependent` has one.
OPTIONAL = {"cond": frozenset({"branches_platforms"})}

_MSG_UNKNOWN_FORM = (
    "{name} equations of JAX {version} are not as fewbit knows them: {what}. fewbit was tested "
    "with JAX {known}. Two ways out: a newer fewbit (`pip install --upgrade fewbit`), or a JAX of "
    "that range (`pip install 'jax<={newest}'`)."
)


class UnknownJaxError(NotImplementedError):
    """This JAX writes a primitive with a body in a way that fewbit cannot read."""


def _unknown(name: str, what: str) -> UnknownJaxError:
    known = known_range("jax")
    text = _MSG_UNKNOWN_FORM.format(
        name=name, what=what, version=jax.__version__, known=known, newest=known.split()[-1]
    )
    return UnknownJaxError(text)


def _params(eqn: Eqn) -> dict[str, Any]:
    """The params of an equation with a body, in one of the forms that are known."""
    name, found = eqn.primitive.name, eqn.params
    forms, names = FORMS[name].values(), found.keys() - OPTIONAL.get(name, ())
    if any(names == form for form in forms):
        return found
    nearest = min(forms, key=lambda form: len(form ^ names))
    missing, new = sorted(nearest - names), sorted(names - nearest)
    parts = [f"there is no {' and no '.join(missing)}"] * bool(missing)
    parts += [f"{' and '.join(new)} {'are' if len(new) > 1 else 'is'} new"] * bool(new)
    raise _unknown(name, ", ".join(parts))


class ScanParams(NamedTuple):
    """A `scan`: operands are constants, then the carry, then arrays sliced along axis 0."""

    body: Any
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any


class WhileParams(NamedTuple):
    """A `while`: operands are constants of `cond`, then those of `body`, then the carry."""

    cond: Any
    body: Any
    num_cond_consts: int
    num_body_consts: int


class RematParams(NamedTuple):
    """A `jax.checkpoint`, in its words."""

    policy: Any
    prevent_cse: bool


class ShardMapParams(NamedTuple):
    """A `shard_map`, in the words of `jax.shard_map`; `axis_names` are those it makes manual."""

    body: Any
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    check_vma: bool
    axis_names: frozenset[str]


def scan_params(eqn: Eqn) -> ScanParams:
    """The params of a `scan` equation."""
    p = _params(eqn)
    if "ft_in" in p:  # a tree of three parts, of which JAX has taken out what does not change
        consts, carry, xs = map(len, p["ft_in"].unpack())
    else:
        consts, carry = p["num_consts"], p["num_carry"]
        xs = len(eqn.invars) - consts - carry
    if xs < 0 or consts + carry + xs != len(eqn.invars):
        parts = f"{consts}, {carry} and {xs}"
        raise _unknown("scan", f"its {len(eqn.invars)} operands are in parts of {parts}")
    return ScanParams(p["jaxpr"], consts, carry, p["length"], p["reverse"], p["unroll"])


def while_params(eqn: Eqn) -> WhileParams:
    """The params of a `while` equation."""
    p = _params(eqn)
    return WhileParams(p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"], p["body_nconsts"])


def branch_platforms(eqn: Eqn) -> tuple[tuple[str, ...] | None, ...] | None:
    """The platforms of each branch (None: any other) of `lax.platform_dependent`; else None."""
    return _params(eqn).get("branches_platforms")


def remat_params(eqn: Eqn) -> RematParams:
    """The params of a `remat2` equation."""
    p = _params(eqn)
    return RematParams(p["policy"], p["prevent_cse"])


def jit_out_shardings(eqn: Eqn) -> tuple[Any, ...]:
    """The sharding that a jitted function demands of each of its results, or a mark for none."""
    return tuple(_params(eqn)["out_shardings"])


def is_long_argmax(eqn: Eqn) -> bool:
    """Whether an equation is an argmax over an axis as long as a vocabulary."""
    if eqn.primitive.name != "argmax":
        return False
    (axis,) = eqn.params["axes"]
    length = eqn.invars[0].aval.shape[axis]
    return isinstance(length, int) and length >= LONG


def argmax_params(eqn: Eqn) -> tuple[int, Any]:
    """Axis and index type of an `argmax` equation."""
    (axis,) = eqn.params["axes"]
    return axis, eqn.params["index_dtype"]


def shard_map_params(eqn: Eqn) -> ShardMapParams:
    """The params of a `shard_map` equation."""
    p = _params(eqn)
    return ShardMapParams(
        p["jaxpr"],
        p["mesh"],
        tuple(p["in_specs"]),
        tuple(p["out_specs"]),
        p["check_vma"],
        frozenset(p["newly_manual_axes"]),
    )


def product_axes(eqn: Eqn, side: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of an operand that a Site sums over, and those it goes through side by side.

    Of a convolution's input these are the channels alone: patches have no axis of their own.
    """
    name, p = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracting, batch = p["dimension_numbers"]
        return tuple(contracting[side]), tuple(batch[side])
    if name == "conv_general_dilated":
        numbers = p["dimension_numbers"]
        return ((numbers.lhs_spec if side == 0 else numbers.rhs_spec)[1],), ()
    numbers = p["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return tuple(numbers[0][side]), tuple(numbers[1][side])


def bodies(eqn: Eqn) -> tuple[Any, ...]:
    """The jaxprs fewbit walks into, in program order; empty for an equation without (or opaque)."""
    name = eqn.primitive.name
    if name not in FORMS:
        return ()
    p = _params(eqn)
    if name == "while":
        return (p["cond_jaxpr"], p["body_jaxpr"])
    if name == "cond":
        return tuple(p["branches"])
    return (p["call_jaxpr" if name.startswith("custom_") else "jaxpr"],)


def forwards(jaxpr: Any) -> tuple[int | None, ...]:
    """For each result of a jaxpr, the number of the input that it is, untouched; None for others.

    Sees through bodies: NNX returns all state of a scanned layer through `remat` and `scan`, and a
    weight that comes back so has not changed.
    """
    jaxpr = open_jaxpr(jaxpr)
    if jaxpr not in _forwards:
        source: dict[Any, int] = {var: k for k, var in enumerate(jaxpr.invars)}
        for eqn in jaxpr.eqns:
            for k, operand in enumerate(_forwarded_operands(eqn)):
                if operand is not None and not is_literal(operand) and operand in source:
                    source[eqn.outvars[k]] = source[operand]
        _forwards[jaxpr] = tuple(None if is_literal(v) else source.get(v) for v in jaxpr.outvars)
    return _forwards[jaxpr]


_forwards: weakref.WeakKeyDictionary[Any, tuple[int | None, ...]] = weakref.WeakKeyDictionary()


def _forwarded_operands(eqn: Eqn) -> Sequence[Any]:
    """For each result of an equation with bodies, the operand it is."""
    name, ins = eqn.primitive.name, eqn.invars
    if name in ("jit", "remat2", "custom_jvp_call", "custom_vjp_call"):
        return [None if k is None else ins[k] for k in forwards(bodies(eqn)[0])]
    if name == "scan":
        p = scan_params(eqn)
        moving, stacked = p.num_consts, p.num_consts + p.num_carry
        through = forwards(p.body)
        # A carry is its operand where each trip hands it on in its own place; what is stacked is
        # one where each trip hands on its slice.
        return [
            ins[k]
            if k is not None and (k >= stacked if j >= p.num_carry else k == moving + j)
            else None
            for j, k in enumerate(through)
        ]
    if name == "while":
        loop = while_params(eqn)
        first = loop.num_body_consts
        return [
            ins[loop.num_cond_consts + k] if k == first + j else None
            for j, k in enumerate(forwards(loop.body))
        ]
    if name == "cond":
        return [None if k is None else ins[1 + k] for k in common_forwards(*bodies(eqn))]
    return ()


def unread(jaxpr: Jaxpr) -> list[bool]:
    """For each input of a jaxpr, whether no result depends on it, seen through bodies.

    >>> import jax
    >>> unread(jax.make_jaxpr(jax.jit(lambda a, b: 2 * b))(1.0, 2.0).jaxpr)
    [True, False]
    """
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return [not one for one in used]


def common_forwards(*branches: Any) -> list[int | None]:
    """As `forwards`, where all branches of a conditional agree."""
    agreed = zip(*(forwards(branch) for branch in branches), strict=True)
    return [ks[0] if len(set(ks)) == 1 else None for ks in agreed]


def contains_product(jaxpr: Any) -> bool:
    """Whether a matrix product or convolution stands anywhere inside (opaque bodies included)."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in SITE_PRIMITIVES and eqn.primitive.name != "gather":
            return True
        if any(contains_product(sub) for sub in jex.jaxprs_in_params(eqn.params)):
            return True
    return False


def is_opaque(eqn: Eqn) -> bool:
    """Whether an equation is never opened: a kernel of its own, or a body of an unknown kind."""
    name = eqn.primitive.name
    if name in OPAQUE_PRIMITIVES:
        return True
    return name not in FORMS and any(map(contains_product, jex.jaxprs_in_params(eqn.params)))


def kernel_name(eqn: Eqn) -> str:
    """What a person would call an opaque equation."""
    p = eqn.params
    name = p.get("name") or getattr(p.get("name_and_src_info"), "name", "")
    return f"{eqn.primitive.name} {name!s}".strip()


# --- name stacks ----------------------------------------------------------------------------------

_SCOPE = re.compile(r"fewbit\[([^\]|]*)\|([^\]]*)\]")
_EINSUM = re.compile(r"[A-Za-z.]*(?:,[A-Za-z.]*)+(?:->[A-Za-z.]*)?|[A-Za-z.]+->[A-Za-z.]*")
_WRAPPER = re.compile(r"\b(?:vmap|jvp|transpose|checkpoint|rematted_computation|jit)\(")


# The scope around what a program asks to leave as it is.
LEFT_FLOAT = "fewbit-left-float"


class Where(NamedTuple):
    """What a name stack tells: the innermost module, its class, the user's own scopes after it."""

    path: str
    class_name: str
    user_scope: str
    einsum: str
    backward: bool
    in_module: bool
    left_float: bool = False


def scope_name(path: str, class_name: str) -> str:
    """The bracketed scope that a front end opens around one module call."""
    return f"fewbit[{path}|{class_name}]"


def join_stack(outer: str, eqn: Eqn) -> str:
    """Inner jaxprs carry their stack relative to the equation that holds them."""
    inner = str(eqn.source_info.name_stack)
    return f"{outer}/{inner}" if outer and inner else outer or inner


def where(stack: str) -> Where:
    """Read a joined name stack.

    >>> where("fewbit[enc/up|Dense]/vmap(bi,io->bo)")[:4]
    ('enc/up', 'Dense', '', 'bi,io->bo')
    >>> where("attn/scores")[:3]
    ('', '', 'attn/scores')
    """
    backward = "transpose(" in stack
    found = list(_SCOPE.finditer(stack))
    path, class_name = found[-1].groups() if found else ("", "")
    tail = stack[found[-1].end() :] if found else stack
    parts = [part for part in _WRAPPER.sub("", tail).replace(")", "").split("/") if part]
    einsum = parts[-1] if parts and _EINSUM.fullmatch(parts[-1]) else ""
    if einsum:
        parts.pop()
    scopes = [part for part in parts if not _EINSUM.fullmatch(part) and part != LEFT_FLOAT]
    left_float = LEFT_FLOAT in stack
    return Where(path, class_name, "/".join(scopes), einsum, backward, bool(found), left_float)
