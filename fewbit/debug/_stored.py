"""What is really stored: every parameter of a quantized model, its type, its bytes, and the totals.

A plan says what will be done; a report reads the arrays. With both, it says where they differ.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import (
    describe,
    human_bytes,
    is_array_like,
    key_name,
    natural_width,
    shorten,
    terminal_width,
    wrap,
)
from fewbit._util import table as text_table
from fewbit.calibration import Statistics
from fewbit.kernels import would_be_faster
from fewbit.models import flax_trees, front_end, is_keras
from fewbit.numerics import dtype_bits, qtype_name
from fewbit.planning import Plan
from fewbit.qarray import (
    QArray,
    WithAux,
    get_scale_shape,
    is_box,
    is_leaf,
    is_stored,
    unbox_parts,
    unboxed,
)

_MSG_NO_PARAMS = (
    "fewbit.report reads stored parameters, and {kind} holds none. Give it the parameters: "
    "fewbit.report(params), or what will be done to the model: fewbit.plan(model, rules, *inputs)."
)

_MSG_STATE = (
    "This nnx.State holds weights that are packed for kernels, whose bytes do not tell what they "
    "stand for. Give fewbit.report the model itself: nnx.merge(graphdef, state)."
)


@dataclass(frozen=True)
class StoredLeaf:
    """One parameter as it is stored; `qtype` is None for one that is not quantized."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    qtype: str | None
    granularity: str
    layout: str
    bytes: int
    float_bytes: int


@dataclass(frozen=True)
class Report:
    """What is stored, leaf by leaf. Prints as a table; `to_json()` for machines."""

    leaves: tuple[StoredLeaf, ...]
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def leaf(self, path: str) -> StoredLeaf:
        """The parameter at `path`."""
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"The report has no parameter {path!r}; report.leaves lists all of them.")

    @property
    def quantized(self) -> tuple[StoredLeaf, ...]:
        """The parameters that are stored quantized."""
        return tuple(leaf for leaf in self.leaves if leaf.qtype is not None)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def float_bytes(self) -> int:
        """Bytes that the same parameters take in their float types."""
        return sum(leaf.float_bytes for leaf in self.leaves)

    @property
    def bits_per_weight(self) -> float:
        """Bits of a quantized weight with its share of scales and zero points; 0 without any."""
        weights = sum(math.prod(leaf.shape) for leaf in self.quantized)
        return 8 * sum(leaf.bytes for leaf in self.quantized) / weights if weights else 0.0

    def to_json(self) -> str:
        """The report as a JSON document."""
        totals = {
            "parameters": sum(math.prod(leaf.shape) for leaf in self.leaves),
            "quantized_parameters": sum(math.prod(leaf.shape) for leaf in self.quantized),
            "bytes": self.bytes,
            "float_bytes": self.float_bytes,
            "bits_per_weight": self.bits_per_weight,
        }
        fields = {"leaves": [asdict(leaf) for leaf in self.leaves], "totals": totals}
        fields |= {"differences": list(self.differences), "notes": list(self.notes)}
        return json.dumps(fields, indent=2)

    def table(self, *, width: int | None = None) -> str:
        """The report as text of the terminal's width.

        In a narrow one paths are cut in the middle, then whole columns are left out (and named
        below); a number is never cut.
        """
        width = terminal_width() if width is None else width
        lines, left_out = _table(self.leaves, width) if self.leaves else ([], "")
        lines += [""] * bool(lines) + wrap(left_out, width) * bool(left_out)
        lines += wrap(self.summary, width)
        for title, items in (("Differs from the plan", self.differences), ("Notes", self.notes)):
            if items:
                lines += ["", f"{title}:"]
                lines += [line for item in items for line in wrap(item, width, "  ", "- ")]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """The totals in a sentence."""
        size = human_bytes(self.bytes)
        if not self.quantized:
            return f"No parameter is quantized (0 of {len(self.leaves)} arrays, {size})."
        ratio = self.float_bytes / self.bytes if self.bytes else 1.0
        return (
            f"{len(self.quantized)} of {len(self.leaves)} parameter arrays are quantized at "
            f"{self.bits_per_weight:.2f} bits per weight; {human_bytes(self.float_bytes)} → "
            f"{size} ({ratio:.2f}x smaller)"
        )

    def __str__(self) -> str:
        return self.table()


_COLUMNS = ("parameter", "shape", "stored", "scales", "layout", "bytes")
_BEFORE = "bytes in float"  # the sizes before quantization, which stand in the last column
_SHORTEST_PATH = 16  # what is left of a path below this tells too little


def _table(leaves: tuple[StoredLeaf, ...], width: int) -> tuple[list[str], str]:
    """The lines of the table, and a sentence about what had no room in it."""
    rows = [dict(zip(_COLUMNS, _row(leaf), strict=True)) for leaf in leaves]
    for dropped in ((), ("layout",), ("layout", "scales"), ("layout", "scales", _BEFORE)):
        names = [name for name in _COLUMNS if name not in dropped]
        cells = [names, *([row[name] for name in names] for row in rows)]
        if _BEFORE in dropped:
            for line in cells[1:]:
                line[-1] = line[-1].rpartition(" → ")[2]
        room = width - natural_width([["", *line[1:]] for line in cells])
        if room >= min(_SHORTEST_PATH, max(len(line[0]) for line in cells)):
            break
    header, *body = ([shorten(line[0], max(room, 6)), *line[1:]] for line in cells)
    natural = natural_width([header, *body])
    text = text_table(body, header, "m" + "l" * (len(header) - 1), max(width, natural))
    sentence = f"No room here for: {', '.join(dropped)}." if dropped else ""
    return text.split("\n"), sentence


def _row(leaf: StoredLeaf) -> tuple[str, ...]:
    size = human_bytes(leaf.bytes)
    if leaf.bytes != leaf.float_bytes:
        size = f"{human_bytes(leaf.float_bytes)} → {size}"
    shape = "x".join(map(str, leaf.shape)) or "scalar"
    path = leaf.path or "(root)"
    return path, shape, leaf.qtype or leaf.dtype, leaf.granularity, leaf.layout, size


def report(
    model_or_params: Any, plan: Plan | None = None, stats: Statistics | None = None
) -> Report:
    """What is really stored in a parameter tree, variables, an NNX or a Keras model.

    With the plan that the parameters should follow, the report lists where they do not. With the
    statistics of `calibrate` it says how many batches the static ranges come from.

    >>> import fewbit, jax.numpy as jnp
    >>> q = fewbit.quantize(jnp.ones((64, 32)), 'int8', channelwise_axes=(1,))
    >>> print(report({'up': q, 'bias': jnp.zeros(32)}).table(width=80))
    parameter  shape  stored   scales       layout  bytes
    ───────────────────────────────────────────────────────────────────
    bias       32     float32                       128 B
    up         64x32  int8     per-channel  plain   8.00 KiB → 2.12 KiB
    <BLANKLINE>
    1 of 2 parameter arrays are quantized at 8.50 bits per weight; 8.12 KiB → 2.25
    KiB (3.61x smaller)
    """
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            f"report(params, plan=...) takes a Plan, got a {type(plan).__name__}. Make one with "
            "fewbit.plan(model, rules, *inputs)."
        )
    if stats is not None and not isinstance(stats, Statistics):
        raise TypeError(
            f"report(params, stats=...) takes the Statistics of fewbit.calibrate, got a "
            f"{type(stats).__name__}."
        )
    tree, notes = _parameters(model_or_params)
    notes += _calibration(stats) if stats is not None else []
    leaves = list(_leaves(tree))
    if not leaves and (tree is None or jax.tree.leaves(tree)):
        raise TypeError(_MSG_NO_PARAMS.format(kind=describe(model_or_params)))
    rows = tuple(_stored(path, value) for path, value in leaves)
    found = () if plan is None else tuple(_differences(dict(leaves), rows, plan))
    return Report(rows, found, (*notes, *_padding(rows, plan), *_unpacked(leaves)))


def _calibration(stats: Statistics) -> list[str]:
    batches = "1 batch" if stats.batches == 1 else f"{stats.batches} batches"
    static = [name for name, entry in stats.entries.items() if "range" in entry.states]
    sites = "1 operand" if len(static) == 1 else f"{len(static)} operands"
    return [f"static ranges of {sites} come from {batches} of calibration data"]


# --- From what people hold to parameter leaves ----------------------------------------------------


def _parameters(source: Any) -> tuple[Any, list[str]]:
    """The parameter tree of a model, of variables or of a state, and what was left out."""
    if is_keras(source):
        reading = front_end(source).reading
        scales = reading.scales(source)
        return reading.parameters(source), _not_counted({"static scales": scales})
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    if nnx is not None and isinstance(source, nnx.Module | nnx.State):
        state = nnx.state(flax_trees.with_wholes(source))
        params, rest = nnx.split_state(state, nnx.Param, ...)
        tree = flax_trees.with_whole_weights(nnx.to_pure_dict(params))
        if any(map(_is_packed, jax.tree.leaves(tree, is_leaf=is_stored))):
            raise TypeError(_MSG_STATE)
        return tree, _not_counted({"other Variables": nnx.to_pure_dict(rest)})
    if linen is not None and isinstance(source, linen.Module):
        raise TypeError(_MSG_NO_PARAMS.format(kind=f"a Linen module ({type(source).__name__})"))
    if isinstance(source, Plan):
        raise TypeError(_MSG_NO_PARAMS.format(kind="a Plan"))
    if callable(source) and any(leaf is source for leaf in jax.tree.leaves(source)):
        raise TypeError(_MSG_NO_PARAMS.format(kind="a function"))
    if isinstance(source, Mapping) and isinstance(source.get("params"), Mapping):
        rest = {name: value for name, value in source.items() if name != "params"}
        return source["params"], _not_counted(rest)
    return source, []


def _is_packed(leaf: Any) -> bool:
    """Whether these are parts of a weight that lie packed, without what they stand for."""
    q = leaf.array if isinstance(leaf, WithAux) else leaf
    return type(q) is QArray and q.layout == "plain" and q.data.ndim != q.scale.ndim


def _not_counted(collections: Mapping[str, Any]) -> list[str]:
    sizes = {name: sum(_nbytes(x) for x in jax.tree.leaves(c)) for name, c in collections.items()}
    return [f"{name}: {human_bytes(size)}, not counted" for name, size in sizes.items() if size]


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Arrays and quantized nodes by path, without partitioning boxes around them or their parts."""
    for key, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        value = unboxed(value) if is_box(value) else value
        if isinstance(value, WithAux) and isinstance(value.array, QArray):
            value = value.replace(array=unbox_parts(value.array))
        elif isinstance(value, QArray):
            value = unbox_parts(value)
        if is_array_like(value):
            yield key_name(key), value


def _nbytes(array: Any) -> int:
    dtype = getattr(array, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return -(-math.prod(array.shape) * dtype_bits(dtype) // 8)


def _stored(path: str, value: Any) -> StoredLeaf:
    q = value.array if isinstance(value, WithAux) else value
    if not isinstance(q, QArray):
        size = _nbytes(q)
        return StoredLeaf(path, tuple(q.shape), str(q.dtype), None, "", "", size, size)
    return StoredLeaf(
        path,
        tuple(q.shape),
        str(q.dtype),
        qtype_name(q.qtype),
        _granularity(q),
        q.layout,
        q.nbytes,
        q.size * q.dtype.itemsize,
    )


def _granularity(q: QArray) -> str:
    """How scales are laid out, read off their shape."""
    counts = zip(q.scale.shape, q.tile_shape, q.shape, strict=True)
    tiles = [tile for count, tile, dim in counts if 1 < count < dim]
    if tiles:
        return "tile " + "x".join(map(str, tiles))
    return "per-tensor" if math.prod(q.scale.shape) == 1 else "per-channel"


def _differences(
    values: Mapping[str, Any], rows: tuple[StoredLeaf, ...], plan: Plan
) -> Iterator[str]:
    stored = {row.path: row for row in rows}
    planned = {leaf.path: leaf for leaf in plan.leaves}
    scales = tuple(scale.name + "_" for scale in plan.scales)
    for path in planned:
        if path not in stored:
            yield f"{path} is in the plan, but not stored"
    for path, row in stored.items():
        leaf = planned.get(path)
        if leaf is None and not path.startswith(scales):
            yield f"{path} is stored, but not in the plan"
        if leaf is None:
            continue
        wanted = None if leaf.how is None else qtype_name(leaf.how.qtype)
        if row.shape != leaf.shape:
            yield f"{path} is {row.shape} where the plan has {leaf.shape}"
        elif row.qtype != wanted:
            yield (
                f"{path} is stored as {row.qtype or row.dtype}, "
                f"the plan says {wanted or leaf.dtype}"
            )
        elif leaf.how is not None:
            yield from _storage_differences(path, values[path], row, leaf)


def _unpacked(leaves: list[tuple[str, Any]]) -> Iterator[str]:
    """Parameters that run through XLA here although native kernels could read them."""
    plain = [
        path
        for path, value in leaves
        if isinstance(value, WithAux)
        and isinstance(value.array, QArray)
        and would_be_faster(value.array, value.how)
    ]
    if plain:
        yield (
            f"{len(plain)} parameters ({plain[0]}{', ...' * (len(plain) > 1)}) are not packed, so "
            "their products run through XLA, slower than natively: fewbit.pack(params) packs them"
        )


def _padding(rows: tuple[StoredLeaf, ...], plan: Plan | None) -> Iterator[str]:
    """What whole panels cost beyond the true width."""
    true = {leaf.path: leaf.bytes_after for leaf in plan.leaves} if plan is not None else {}
    packed = [row for row in rows if row.layout == "panels" and row.path in true]
    extra = sum(row.bytes - true[row.path] for row in packed)
    if extra > 0:
        yield (
            f"{len(packed)} parameters lie in panels for the native kernels; filling up their last "
            f"blocks takes {human_bytes(extra)}"
        )


def _storage_differences(path: str, value: Any, row: StoredLeaf, leaf: Any) -> Iterator[str]:
    q, how = (value.array, value.how) if isinstance(value, WithAux) else (value, None)
    scales, wanted = tuple(q.scale.shape), tuple(get_scale_shape(leaf.shape, leaf.how))
    if scales != wanted:
        yield f"{path} has scales of shape {scales}, the plan says {wanted}"
        return
    if how is not None and how.calibration_method != leaf.how.calibration_method:
        yield (
            f"{path} was calibrated by {how.calibration_method!r}, "
            f"the plan says {leaf.how.calibration_method!r}"
        )
    # Panels are padded to whole blocks, which a note says.
    if row.bytes != leaf.bytes_after and row.layout != "panels":
        fix = "; fewbit.pack(params) stores codes at their true width" * (row.layout == "plain")
        yield f"{path} takes {row.bytes} bytes, the plan says {leaf.bytes_after}{fix}"
