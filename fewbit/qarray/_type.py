"""QArray: an array in few bits, as one value. WithAux: a QArray and how it was made."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import (
    FORMATS,
    QType,
    canonical_qtype,
    dtype_bits,
    format_of,
    from_bit_patterns,
    qtype_name,
    unpack_bits,
)
from fewbit.qarray._how import HowToQuantize
from fewbit.qarray._tiles import infer_tile_shape

_PARTS = ("qvalue", "scale", "zero_point", "tensor_scale")
_STATIC = ("qtype", "dtype", "tiles", "layout", "last_dim")


_MSG_TRACED = (
    "Whether two quantized arrays are equal is a question about values, which a program that is "
    "being traced does not have. Ask outside of jit, or compare parts in it: "
    "jax.tree.map(jax.numpy.array_equal, a, b)."
)
_MSG_EQUAL_TO_ARRAY = (
    "{ours!r} == {other} has no answer: codes are rounded, so element by element hardly any would "
    "be equal. Decode first: jax.numpy.allclose(fewbit.dequantize(...), array)."
)


class _Stored:
    """Refuses to be computed with: decoding behind the user's back would undo the saving.

    Equal are two of one type whose static fields and parts are, bit by bit.
    """

    __slots__ = ("__weakref__",)

    def items(self) -> Any:
        """The parts by name, one code per element, as `nnx.update` reads the values of a node."""
        return parts_of(self).items()

    # Makes NumPy arrays on the left hand over to our __radd__ instead of looping over objects.
    __array_ufunc__ = None

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{getattr(self, 'array', self)!r} cannot be used as an array in arithmetic. For a "
            "product that stays quantized call fewbit.dot_general, fewbit.einsum or another op of "
            "fewbit; for a float array call fewbit.dequantize(...) first. A float model that was "
            "given quantized parameters is run quantized: fewbit.quantize_model(model, provider). "
            "A submodule of what Linen's bind returns is such a float model: use apply(variables, "
            "x, method=lambda model, x: model.part(x))."
        )

    __array__ = __neg__ = __abs__ = __pos__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, jax.Array | np.ndarray | np.generic | int | float | complex):
            ours, kind = getattr(self, "array", self), type(other).__name__
            raise TypeError(_MSG_EQUAL_TO_ARRAY.format(ours=ours, other=f"a value of type {kind}"))
        if type(self) is not type(other):
            return NotImplemented
        ours, theirs = jax.tree.flatten(self), jax.tree.flatten(other)
        return ours[1:] == theirs[1:] and all(map(_same_part, ours[0], theirs[0]))

    def __hash__(self) -> int:
        parts, structure = jax.tree.flatten(self)
        return hash((type(self), structure, *(getattr(part, "shape", None) for part in parts)))


def _same_part(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        raise TypeError(_MSG_TRACED)
    if not isinstance(a, jax.Array | np.ndarray) or not isinstance(b, jax.Array | np.ndarray):
        return bool(a == b)  # abstract values, specs
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()  # NaN is itself


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(init=False, eq=False, repr=False)
class QArray(_Stored):
    """Codes and the scales that give them meaning: `(qvalue - zero_point) * scale * tensor_scale`.

    `qvalue` has the array's shape. `scale` and `zero_point` have its rank and, on each axis, one
    number per tile. `tensor_scale` is the second level of nvfp4. `dtype` is the float type that the
    array stands for (None: the scale's). `tiles` lists (negative axis, tile) where the last tile is
    shorter than the others. With `layout='bits'` the first part holds the codes packed along the
    last axis, whose logical length is `last_dim`, and `.qvalue` unpacks them.

    Parts are not checked here, so that boxes, specs and abstract values may take their place;
    `validate_qarray` checks them.

    `a == b` tells whether static fields (type, dtype, tiles, layout) and all parts are equal, bit
    by bit, which reads their values; plain and packed codes differ (`fewbit.unpack` first), and
    being traced or beside an array it is an error.

    >>> QArray(jnp.zeros((32, 64), jnp.int8), jnp.ones((1, 64)))
    QArray(qvalue=int8[32,64], scale=float32[1,64], qtype=int8)
    >>> q = QArray(jnp.zeros((2, 2), jnp.int8), jnp.ones((1, 2)))
    >>> q == QArray(jnp.zeros((2, 2), 'int8'), jnp.ones((1, 2)), qtype='int8'), q == q.T
    (True, False)
    """

    __slots__ = ("data", "_scale", "_zero_point", "_tensor_scale", "_static")
    if TYPE_CHECKING:  # what runs must not see these, or they would become fields
        data: Any
        _scale: Any
        _zero_point: Any
        _tensor_scale: Any
        _static: tuple[str | None, str | None, tuple[tuple[int, int], ...], str, int | None]
    # The moves stand on this class, so they are made known to it (at the end of `_moves`).
    _moves: ClassVar[dict[str, Callable[..., Any]]] = {}
    # A dataclass for its fields alone: what prints trees (Flax's tabulate) finds the parts by them.
    qvalue: Any
    scale: Any
    zero_point: Any
    tensor_scale: Any
    # `dataclasses.replace` knows fields alone: it hands this on too, and what they mean is kept.
    _copied: dataclasses.InitVar[Any]

    def __init__(
        self,
        qvalue: Any,
        scale: Any,
        zero_point: Any = None,
        qtype: QType | None = None,
        *,
        tensor_scale: Any = None,
        dtype: Any = None,
        tiles: Sequence[tuple[int, int]] = (),
        layout: str = "plain",
        last_dim: int | None = None,
        _copied: QArray | None = None,
    ):
        if _copied is not None:  # whose `.qvalue` was read: one code per element
            qtype, tiles = qtype or _copied.qtype, tiles or _copied.tiles
            dtype = dtype or _copied._static[1]
        if qtype is None:
            name = getattr(getattr(qvalue, "dtype", None), "name", None)
            qtype = name if layout == "plain" and name in FORMATS else None
        # Names rather than dtypes, which cannot be compared with all names.
        static = (
            None if qtype is None else qtype_name(qtype),
            None if dtype is None else jnp.dtype(dtype).name,
            tuple((int(axis), int(tile)) for axis, tile in tiles),
            layout,
            last_dim,
        )
        self._set(qvalue, scale, zero_point, tensor_scale, static)

    def _set(self, *fields: Any) -> None:
        names = ("data", "_scale", "_zero_point", "_tensor_scale", "_static")
        for name, value in zip(names, fields, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A QArray does not change; make another: q.replace({name}=...).")

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        parts = (self.data, self._scale, self._zero_point, self._tensor_scale)
        keys = map(jax.tree_util.GetAttrKey, _PARTS)
        return tuple(zip(keys, parts, strict=True)), self._static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> QArray:
        new = object.__new__(cls)
        new._set(*children, static)
        return new

    def __reduce__(self) -> Any:
        children = (self.data, self._scale, self._zero_point, self._tensor_scale)
        return QArray.tree_unflatten, (self._static, children)

    def replace(self, **changes: Any) -> QArray:
        """A copy with some of the constructor's arguments changed."""
        fields = {"qvalue": self.data, "dtype": self._static[1]}
        fields |= {name: getattr(self, name) for name in _PARTS[1:]}
        fields |= {name: getattr(self, name) for name in ("qtype", "tiles", "layout", "last_dim")}
        return QArray(**(fields | changes))

    def items(self) -> Any:
        q = self
        if self.layout == "bits":
            q = self.replace(qvalue=self.qvalue, layout="plain", last_dim=None)
        return parts_of(q).items()

    @classmethod
    def of_parts(cls, static: Any, parts: Mapping[str, Any]) -> QArray:
        """The inverse of `parts_of`; `static` is what the parts do not say."""
        return cls.tree_unflatten(static, [parts.get(name) for name in _PARTS])

    @property  # type: ignore[no-redef]
    def qvalue(self) -> Any:
        """The codes, one element each, in their storage dtype; unpacked on demand."""
        if self.layout == "plain":
            return self.data
        if is_variable(self.data):
            return unpacked(self.data, part_values(self).qvalue)
        row = format_of(self.qtype)
        if not isinstance(self.data, (jax.Array, np.ndarray)):
            return jax.ShapeDtypeStruct(self.shape, row.storage)
        patterns = unpack_bits(jnp.asarray(self.data), row.bits, self.last_dim)
        if row.kind == "sign":  # the bit is the sign
            return (1 - 2 * patterns.astype(jnp.int8)).astype(row.storage)
        return from_bit_patterns(patterns, row.bits, row.storage)

    @property
    def _copied(self) -> QArray:
        return self

    @property  # type: ignore[no-redef]
    def scale(self) -> Any:
        return self._scale

    @property  # type: ignore[no-redef]
    def zero_point(self) -> Any:
        return self._zero_point

    @property  # type: ignore[no-redef]
    def tensor_scale(self) -> Any:
        return self._tensor_scale

    @property
    def qtype(self) -> Any:
        """The quantized type: a dtype if native, a name if emulated."""
        return None if self._static[0] is None else canonical_qtype(self._static[0])

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        return self._static[2]

    @property
    def layout(self) -> str:
        return self._static[3]

    @property
    def last_dim(self) -> int | None:
        return self._static[4]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.layout == "plain":
            return tuple(self.data.shape)
        return (*self.data.shape[:-1], self.last_dim)

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The float type that the array stands for."""
        if self._static[1] is not None:
            return jnp.dtype(self._static[1])
        dtype = jnp.dtype(self._scale.dtype)
        return dtype if dtype.itemsize > 1 else jnp.dtype(jnp.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that all parts take, 4-bit types at half a byte an element."""
        parts = (part for part in jax.tree.leaves(self) if hasattr(part, "dtype"))
        return sum(-(-math.prod(p.shape) * dtype_bits(p.dtype) // 8) for p in parts)

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """How many elements share one scale, per axis; the last tile may be shorter."""
        return infer_tile_shape(self.shape, self._scale.shape, self.tiles)

    @property
    def scale_tile_shape(self) -> tuple[int, ...]:
        return self.tile_shape  # also of one in panels, which has its own

    @property
    def zero_point_tile_shape(self) -> tuple[int, ...] | None:
        """How many elements share one zero point, per axis; None without one."""
        if self._zero_point is None:
            return None
        return infer_tile_shape(self.shape, self.zero_point.shape, self.tiles)

    @property
    def T(self) -> QArray:
        return self.transpose()

    @property
    def mT(self) -> QArray:
        return self.swapaxes(-1, -2)

    def transpose(self, *axes: Any) -> QArray:
        """The axes permuted, as `jax.Array.transpose`."""
        perm = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return self._moves["transpose"](self, perm or tuple(reversed(range(self.ndim))))

    def swapaxes(self, axis1: int, axis2: int) -> QArray:
        """Two axes exchanged."""
        perm = list(range(self.ndim))
        perm[axis1], perm[axis2] = perm[axis2], perm[axis1]
        return self.transpose(perm)

    def reshape(self, *shape: Any) -> QArray:
        """The array in another shape, if its scales keep their meaning there."""
        new_shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._moves["reshape"](self, new_shape)

    def astype(self, dtype: Any) -> QArray:
        """Stand for another float type, with the scale in that type too; codes stay."""
        dtype = jnp.dtype(dtype)
        if dtype_bits(self._scale.dtype) < 16:
            return self.with_dtype(dtype)
        return self.replace(scale=self._scale.astype(dtype), dtype=None)

    def with_dtype(self, dtype: Any) -> QArray:
        """Stand for another float type; all parts stay as they are."""
        bare = self.replace(dtype=None)
        return bare if bare.dtype == jnp.dtype(dtype) else self.replace(dtype=dtype)

    def at_layer(self, i: Any) -> QArray:
        """Entry `i` (it may be traced) of the first axis."""
        return self._moves["index"](self, i, 0)

    def __getitem__(self, key: Any) -> QArray:
        if key is Ellipsis:  # in a kernel the parts are references, which this reads
            return jax.tree.map(lambda part: part[...], self)
        return self._moves["getitem"](self, key)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[QArray]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        fields = {"qvalue": self.data, "scale": self._scale, "zero_point": self._zero_point}
        fields["tensor_scale"] = self._tensor_scale
        words = [f"{k}={_short(v)}" for k, v in fields.items() if v is not None]
        words.append(f"qtype={self._static[0]}")
        for name, value in zip(_STATIC[1:], self._static[1:], strict=True):
            if value not in (None, (), "plain"):
                words.append(f"{name}={value}")
        return f"QArray({', '.join(words)})"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class WithAux(_Stored):
    """What a parameter tree holds for a quantized parameter: the array and how it was quantized.

    Two are equal if both are, as QArrays are; `how` knows its rule, so the same codes of another
    rule are another parameter.

    >>> q = QArray(jnp.zeros((2, 2), jnp.int8), jnp.ones((1, 2)))
    >>> WithAux(q, HowToQuantize(qtype='int8', channelwise_axes=(1,))).shape
    (2, 2)
    """

    array: Any  # the only field: `how` is not data, and what prints trees cannot print it
    if TYPE_CHECKING:
        how: HowToQuantize
    else:  # which `dataclasses.replace` hands on
        how: dataclasses.InitVar[Any] = None

    def __init__(self, array: Any, how: HowToQuantize):
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "how", how)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("array"), self.array),), self.how

    @classmethod
    def tree_unflatten(cls, how: Any, children: Any) -> WithAux:
        return cls(children[0], how)

    @property
    def value(self) -> Any:
        return self.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return len(self.array.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def replace(self, **changes: Any) -> WithAux:
        """A copy with `array` or `how` changed."""
        return WithAux(**({"array": self.array, "how": self.how} | changes))

    def astype(self, dtype: Any) -> WithAux:
        """The array as another float type."""
        return self.replace(array=self.array.astype(dtype))

    def reshape(self, *shape: Any) -> WithAux:
        """The array in another shape; `how` still tells how it was made."""
        return self.replace(array=self.array.reshape(*shape))

    def __getitem__(self, key: Any) -> WithAux:
        return self.replace(array=self.array[key])

    def __repr__(self) -> str:
        return f"WithAux(array={_short(self.array)}, how={self.how!r})"


def is_stored(value: Any) -> bool:
    """Whether a tree node is a quantized parameter."""
    return isinstance(value, WithAux | QArray)


def parts_of(stored: Any) -> dict[str, Any]:
    """What a stored parameter is made of, by name: `array`, or `qvalue`, `scale`, `zero_point`.

    >>> sorted(parts_of(QArray(jnp.zeros((2, 2), jnp.int8), jnp.ones((1, 2)))))
    ['qvalue', 'scale']
    """
    keyed, _ = stored.tree_flatten_with_keys()
    return {key.name: part for key, part in keyed if part is not None}


def apart(tree: Any) -> Any:
    """A tree with each stored parameter as nested dicts of its parts, as an NNX state has them.

    >>> q = QArray(jnp.zeros((2, 2), jnp.int8), jnp.ones((1, 2)))
    >>> tree = apart({'kernel': WithAux(q, HowToQuantize(qtype='int8'))})
    >>> list(tree['kernel']), list(tree['kernel']['array'])
    (['array'], ['qvalue', 'scale'])
    """
    one = lambda x: {k: apart(v) for k, v in parts_of(x).items()} if is_stored(x) else x  # noqa: E731
    return jax.tree.map(one, tree, is_leaf=is_stored)


def _short(value: Any) -> str:
    if isinstance(value, QArray) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return repr(value)
    return f"{jnp.dtype(value.dtype).name}[{','.join(map(str, value.shape))}]"


# --- Parts that NNX holds as Variables, by what these offer: no framework is imported -------------

_MSG_UNPACKED = (
    "This is a copy of codes or scales that lie packed for kernels, so what is written to it would "
    "be lost. Write to the parts of the plain form: model = fewbit.unpack(model)."
)


def is_variable(value: Any) -> bool:
    """Whether a part of a stored parameter is a framework's Variable."""
    return hasattr(value, "get_value") and hasattr(value, "get_metadata")


def part_values(tree: Any) -> Any:
    """The same with the values of Variables; stored parameters then are made of arrays."""
    if isinstance(tree, QArray) and not is_variable(tree.data):
        return tree
    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


def unpacked(variable: Any, array: Any) -> Any:
    """A Variable like the packed part's for what was unpacked of it: to be read only."""
    kind: Any = type(variable)
    return _unpacked_type(kind)(array)


@functools.cache
def _unpacked_type(kind: type) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(_MSG_UNPACKED)

    return type(f"Unpacked{kind.__name__}", (kind,), {"set_value": refuse})
