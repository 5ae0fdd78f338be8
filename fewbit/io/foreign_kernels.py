"""A weight that another tool quantized, as a QArray: what the readers of all formats share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit.io.errors import CheckpointError, cut
from fewbit.io.foreign_settings import WHERE
from fewbit.numerics import format_of
from fewbit.qarray import QArray

_MSG_MISSING = "is quantized with {method}, but {part} is missing; the checkpoint has {found}"
_MSG_SHAPE = "cannot be read: {part} does not fit {why}"
_MSG_DTYPE = "cannot be read: {part} has another type"
_MSG_BITS = "has {bits} bits, and {method} is read with {known}"
_MSG_NOT_FINITE = (
    "cannot be read: {part} holds {count} that {are} NaN or infinite, the first at index {index}: "
    "{value}"
)
_MSG_GROUP = "cannot be read: its groups are of {found} inputs"
_MSG_CONTRADICTS = "is {found}, but {where}.{key} in config.json says {said}"
_MSG_BOTH = "is there twice, as {first} and as {second}"
_FIX_MISSING = "Fetch all files of the checkpoint again; a shard or the index is not whole."
_FIX_OTHER = "Check that config.json and these files belong together."
_FIX_CONTRADICTS = (
    "If the config is wrong, {fix}; if it is right, the file is of another checkpoint: fetch both "
    "again."
)
_FIX_BOTH = "Take the one that is left over out of the file, or fetch the checkpoint again."
_FIX_NOT_FINITE = (
    "Every number that shares such a scale would be NaN. Fetch the file again, or quantize the "
    "float checkpoint anew."
)
_FIX_BITS = (
    "Dequantize it with the tool that made it and quantize the float checkpoint: "
    "fewbit.quantize_checkpoint."
)
FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Foreign:
    """A quantized weight as its tool stored it: arrays by part, and the settings from config.json.

    `act_order` says what to do with rows whose groups are not in order (`by_group_index`).
    """

    name: str
    parts: Mapping[str, np.ndarray]
    config: Mapping[str, Any]
    method: str
    act_order: str = "rows"
    path: str = "the checkpoint"

    def error(self, what: str, **more: Any) -> CheckpointError:
        """An error about this weight."""
        return CheckpointError(self.path, what, tensor=self.name, **more)

    def contradicts(self, found: str, key: str, said: Any, fix: str) -> CheckpointError:
        """An error: the tensor is one thing, and a key of the config says another."""
        what = _MSG_CONTRADICTS.format(found=found, where=WHERE, key=key, said=cut(said))
        return self.error(what, fix=_FIX_CONTRADICTS.format(fix=fix))

    def only_one_of(self, *parts: str) -> None:
        """Raise if a weight is there in two forms."""
        found = [part for part in parts if part in self.parts]
        if len(found) > 1:
            raise self.error(_MSG_BOTH.format(first=found[0], second=found[1]), fix=_FIX_BOTH)

    @property
    def module(self) -> str:
        """The name of the weight's module, as configs match it."""
        return self.name.removesuffix(".weight")

    def need(self, part: str, *dtypes: str) -> np.ndarray:
        """A part of one of the dtypes; a missing one raises."""
        if part not in self.parts:
            found = ", ".join(self.parts) or "nothing of it"
            what = _MSG_MISSING.format(method=self.method, part=part, found=found)
            raise self.error(what, fix=_FIX_MISSING)
        array = self.parts[part]
        if dtypes and array.dtype.name not in dtypes:
            raise self.error(
                _MSG_DTYPE.format(part=part),
                expected=" or ".join(dtypes),
                found=array.dtype.name,
                fix=_FIX_OTHER,
            )
        return array

    def need_scales(self, part: str) -> np.ndarray:
        """A part that holds scales: floats, all of them finite."""
        array = self.need(part, *FLOATS)
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            first = tuple(int(i) for i in bad[0])
            one = len(bad) == 1
            count, are = ("1 number", "is") if one else (f"{len(bad)} numbers", "are")
            facts = dict(count=count, are=are, index=first, value=float(array[first]))
            what = _MSG_NOT_FINITE.format(part=part, **facts)
            raise self.error(what, fix=_FIX_NOT_FINITE)
        return array

    def check_shape(
        self, part: str, array: np.ndarray, wanted: tuple[int, ...], why: str
    ) -> np.ndarray:
        """The array, if it has the shape that the others ask for."""
        if tuple(array.shape) != tuple(wanted):
            raise self.error(
                _MSG_SHAPE.format(part=part, why=why),
                expected=tuple(wanted),
                found=tuple(array.shape),
                fix=_FIX_OTHER,
            )
        return array

    def check_bits(self, bits: Any, known: tuple[int, ...]) -> int:
        """The width, if it is one that is read."""
        if type(bits) is not int or bits not in known:
            words = ", ".join(map(str, known))
            what = _MSG_BITS.format(bits=cut(bits), method=self.method, known=words)
            raise self.error(what, fix=_FIX_BITS)
        return int(bits)

    def check_group(self, size: Any, rows: int) -> int:
        """The inputs that share a scale; -1 and None are all of them."""
        if size is None or (type(size) is int and size == -1):
            return rows
        if type(size) is not int or size < 1:
            raise self.error(_MSG_GROUP.format(found=cut(size)), fix=_FIX_OTHER)
        return size

    def need_matrix(self, part: str, *dtypes: str) -> np.ndarray:
        """A part with two axes."""
        array = self.need(part, *dtypes)
        self.need_axes(part, array, "two axes")
        return array

    def need_axes(self, part: str, array: np.ndarray, words: str = "two axes or more") -> None:
        """Raise for arrays that are no matrix, or no stack of such."""
        if array.ndim < 2 or (words == "two axes" and array.ndim > 2):
            what = _MSG_SHAPE.format(part=part, why="a weight")
            shape = tuple(array.shape)
            raise self.error(what, expected=words, found=shape, fix=_FIX_OTHER)


@dataclass(frozen=True)
class Kernel:
    """A weight as `[..., in, out]` codes, and the order of its rows where that was changed.

    With `permutation`, row `r` of `array` belongs to input channel `permutation[r]`:
    `x[..., permutation] @ array` is the product that the checkpoint means.
    """

    array: QArray
    permutation: np.ndarray | None = None


def centred(codes: np.ndarray, zeros: np.ndarray | None, bits: int) -> tuple[Any, Any]:
    """Unsigned codes and zero points as signed ones; zero points in the middle are none.

    Only the difference of code and zero point counts, so both move by half the range.

    >>> codes, zeros = centred(np.array([[0, 15]], np.uint8), np.array([[8, 8]], np.uint8), 4)
    >>> codes.tolist(), zeros
    ([[-8, 7]], None)
    """
    storage, half = format_of(f"int{bits}").storage, 1 << (bits - 1)
    signed = (codes.astype(np.int16) - half).astype(np.int8).astype(storage)
    if zeros is None or bool((zeros == half).all()):
        return signed, None
    return signed, (zeros.astype(np.int16) - half).astype(np.int8).astype(storage)


def kernel(
    codes: np.ndarray,
    scale: np.ndarray,
    zeros: np.ndarray | None,
    qtype: str,
    group: int | None = None,
) -> QArray:
    """A QArray of `[in, out]` parts, `group` rows to a scale."""
    count, rows = scale.shape[-2], codes.shape[-2]
    uneven = group is not None and count not in (1, rows) and count * group != rows
    return QArray(
        jnp.asarray(codes),
        jnp.asarray(scale),
        None if zeros is None else jnp.asarray(zeros),
        qtype,
        tiles=((-2, group),) if uneven and group is not None else (),
    )


def by_group_index(
    weight: Foreign,
    codes: np.ndarray,
    scale: np.ndarray,
    zeros: np.ndarray | None,
    group: int,
    qtype: str,
) -> Kernel:
    """`[in, out]` rows whose group may be given one by one (`g_idx`, "act-order"), exactly.

    Where the index only counts up by whole groups it says nothing new. Else `act_order='rows'`
    gives every row its own scale, in place, and `'sort'` sorts the rows by group, so that groups
    stay groups, and hands the order of the inputs along.
    """
    if "g_idx" not in weight.parts:
        return Kernel(kernel(codes, scale, zeros, qtype, group))
    index = weight.need("g_idx", "int32", "int64")
    if index.size and bool((index < 0).all()):  # -1 throughout: not used
        return Kernel(kernel(codes, scale, zeros, qtype, group))
    weight.check_shape("g_idx", index, (codes.shape[0],), "the inputs, one group for each")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= scale.shape[0]:
        raise weight.error(
            "is damaged: g_idx names groups that have no scale",
            expected=f"0 to {scale.shape[0] - 1}",
            found=f"{low} to {high}",
        )
    whole = np.arange(codes.shape[0]) // group
    if np.array_equal(index, whole):
        return Kernel(kernel(codes, scale, zeros, qtype, group))
    order = np.argsort(index, kind="stable").astype(np.int32)
    if weight.act_order == "sort" and np.array_equal(index[order], whole):
        return Kernel(kernel(codes[order], scale, zeros, qtype, group), order)
    return Kernel(kernel(codes, scale[index], None if zeros is None else zeros[index], qtype))
