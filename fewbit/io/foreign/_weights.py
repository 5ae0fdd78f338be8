"""A weight that another tool quantized, as a QArray: what the readers of all formats share.

Codes out of 32-bit words, settings out of somebody's config.json, and the weight made of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._util import PatternError, compile_pattern
from fewbit.io._errors import CheckpointError, cut
from fewbit.numerics import format_of
from fewbit.qarray import QArray

# --- Codes out of 32-bit words, as GPTQ, AWQ and compressed-tensors lay them ----------------------


def unpack_words(
    words: np.ndarray,
    bits: int,
    count: int,
    axis: int = -1,
    order: Sequence[int] | None = None,
) -> np.ndarray:
    """`count` codes along `axis` from words of `32 // bits` codes each, the lowest bits first.

    Field `i` of a word holds code `order[i]` of its share; without `order` code `i`.

    >>> unpack_words(np.array([0x76543210], np.int32), 4, 8)
    array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8)
    """
    source = np.moveaxis(np.ascontiguousarray(words).view(np.uint32), axis, -1)
    fields = 32 // bits
    shape = list(words.shape)
    shape[axis] *= fields
    codes = np.empty(shape, np.uint8)
    target = np.moveaxis(codes, axis, -1)
    for field in range(fields):
        place = field if order is None else order[field]
        shifted = source >> np.uint32(bits * field)
        target[..., place::fields] = (shifted & np.uint32(2**bits - 1)).astype(np.uint8)
    return codes.take(range(count), axis) if count != shape[axis] else codes


def unpack_stream(words: np.ndarray, bits: int, count: int, axis: int = -1) -> np.ndarray:
    """`count` codes along `axis` from a dense string of bits that runs through the words.

    >>> unpack_stream(np.array([-1, 0, 0], np.int32), 3, 12)
    array([7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 3, 0], dtype=uint8)
    """
    if 32 % bits == 0:
        return unpack_words(words, bits, count, axis)
    last = np.ascontiguousarray(np.moveaxis(words, axis, -1))
    raw = last.astype("<u4").view(np.uint8)
    single = np.unpackbits(raw, axis=-1, bitorder="little")[..., : count * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes = (single.reshape(*last.shape[:-1], count, bits) * weights).sum(-1, dtype=np.uint8)
    return np.moveaxis(codes, -1, axis)


# --- Settings out of config.json: of the right kind before anything is read by them ---------------

WHERE = "quantization_config"

_MSG_SETTING = f"has a bad {WHERE}.{{key}}"
_MSG_PATTERN = f"has a bad {WHERE}.{{key}}: {{reason}}"
_FIX_SETTING = "Correct it in config.json, or fetch the checkpoint's own again."


def bad_setting(path: str, key: str, expected: str, found: Any) -> CheckpointError:
    """An error about one setting."""
    what = _MSG_SETTING.format(key=key)
    return CheckpointError(path, what, expected=expected, found=cut(found), fix=_FIX_SETTING)


def an_object(path: str, key: str, value: Any) -> Mapping[str, Any]:
    """An object of JSON; nothing at all is an empty one.

    >>> an_object('config.json', 'dynamic', None), an_object('config.json', 'dynamic', {'a': 1})
    ({}, {'a': 1})
    """
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping):
        raise bad_setting(path, key, "an object", value)
    return value


def two_sizes(path: str, key: str, value: Any) -> tuple[int, int] | None:
    """The height and width of a block; older files write '128x128'.

    >>> two_sizes('config.json', 'weight_block_size', '128x64')
    (128, 64)
    """
    if value is None:
        return None
    numbers: Any = value
    if isinstance(value, str):
        numbers = [int(n) for n in value.split("x") if n.isdecimal() and len(n) < 10]
    sizes = isinstance(numbers, list | tuple) and len(numbers) == 2
    if not sizes or not all(type(n) is int and 0 < n < 2**31 for n in numbers):
        raise bad_setting(path, key, "two sizes, such as [128, 128]", value)
    return numbers[0], numbers[1]


def check_pattern(path: str, key: str, pattern: Any) -> None:
    """Raise if a pattern is none, or could run away."""
    if not isinstance(pattern, str):
        raise bad_setting(path, key, "a regular expression", pattern)
    try:
        compile_pattern(pattern)
    except (PatternError, re.error) as error:
        reason = str(error)
        if not isinstance(error, PatternError):
            reason = f"{cut(pattern)} is no regular expression ({error})"
        what = _MSG_PATTERN.format(key=key, reason=reason)
        raise CheckpointError(path, what, fix=_FIX_SETTING) from None


def begins_like(pattern: str, module: str) -> bool:
    """Whether a module's name begins as the pattern says, which is how these tools match.

    >>> begins_like('.*mlp', 'layers.0.mlp.up')
    True
    """
    return compile_pattern(pattern).matches(module, "start")


# --- The weight -----------------------------------------------------------------------------------

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

    def misfit(self, what: str, expected: Any, found: Any) -> CheckpointError:
        """An error: a part is of another kind than the rest of the checkpoint asks for."""
        return self.error(what, expected=expected, found=found, fix=_FIX_OTHER)

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
            what = _MSG_DTYPE.format(part=part)
            raise self.misfit(what, " or ".join(dtypes), array.dtype.name)
        return array

    def need_scales(self, part: str) -> np.ndarray:
        """A part that holds scales: floats, all of them finite."""
        array = self.need(part, *FLOATS)
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            first = tuple(int(i) for i in bad[0])
            count, are = ("1 number", "is") if len(bad) == 1 else (f"{len(bad)} numbers", "are")
            what = _MSG_NOT_FINITE.format(
                part=part, count=count, are=are, index=first, value=float(array[first])
            )
            raise self.error(what, fix=_FIX_NOT_FINITE)
        return array

    def check_shape(self, part: str, array: np.ndarray, wanted: tuple[int, ...], why: str) -> None:
        """Raise if an array has not the shape that the others ask for."""
        if array.shape != wanted:
            raise self.misfit(_MSG_SHAPE.format(part=part, why=why), wanted, array.shape)

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
            raise self.misfit(_MSG_SHAPE.format(part=part, why="a weight"), words, array.shape)


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

    def moved(numbers: np.ndarray) -> np.ndarray:
        return (numbers.astype(np.int16) - half).astype(np.int8).astype(storage)

    return moved(codes), None if zeros is None or (zeros == half).all() else moved(zeros)


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
    if index.size and (index < 0).all():  # -1 throughout: not used
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
