"""Other people's quantized checkpoints as QArrays: `fewbit.read_checkpoint`, leaf by leaf."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._util import nearest
from fewbit.io._errors import CheckpointError
from fewbit.io._sources import TensorSource
from fewbit.io.checkpoint._tree import put_at
from fewbit.io.foreign._formats import FORMATS, quantization_of, read_config
from fewbit.io.foreign._weights import WHERE, Foreign, Kernel
from fewbit.io.stream._names import Target, map_names, turned
from fewbit.numerics import qtype_name
from fewbit.qarray import QArray

ACT_ORDERS = ("rows", "sort")
# Names and types that only quantized checkpoints have.
_TRACES = (".qweight", ".weight_packed", "_scale_inv", ".weight_scale")
_COMMON = ("scales",)  # a name that other tensors have too

_MSG_NO_CONFIG = "looks quantized ({name!r}), but there is no config.json that says how"
_FIX_NO_CONFIG = "Put the checkpoint's config.json beside it, or pass config=<a dict or its path>."
_MSG_OTHERS = (
    "is a part of a weight quantized with {methods}, but {where}.quant_method in config.json says "
    "{said}"
)
_FIX_OTHERS = (
    "If the config is wrong, write {other!r} there, with its settings; if the tensor is left over, "
    "leave it out: names=[({pattern!r}, None), ...]."
)
_MSG_UNKNOWN = "The checkpoint has no {path!r} among its {count} parameters.{near}"
_MSG_ACT_ORDER = "act_order is {found!r}; it is 'rows' (a scale for each row) or 'sort'."
_MSG_MIXED = "cannot be stacked: its tensors differ in {what}"


def read_checkpoint(
    path: str | os.PathLike[str] | Mapping[str, np.ndarray],
    *,
    names: Iterable[Sequence[Any]] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    transpose: bool = True,
    dtype: Any = None,
    act_order: str = "rows",
) -> ForeignCheckpoint:
    """A Hugging Face checkpoint, a tensor at a time: quantized weights as exact QArrays.

    `path` is a `.safetensors` file or a folder (sharded or not) with its `config.json`, or a dict
    of arrays with `config=`. Weights in fp8 (blocks, channels, tensors), compressed-tensors (2 to
    8 bits, int8, fp8), GPTQ and AWQ become QArrays of the shape `[in, out]`, or of PyTorch's
    `[out, in]` with `transpose=False`; other tensors stay the arrays they are. `names` maps names
    to paths, as docs/checkpoints.md tells; without it `.` becomes `/`. `dtype` is the float type
    that the QArrays stand for, by default that of their scales.

    GPTQ's act-order gives each input row a group of its own choice. `act_order='rows'` keeps the
    rows and gives each its scale; `'sort'` sorts the rows by group, which keeps groups, and
    `.permutation(path)` is the order that the inputs must be brought into.

    >>> tensors = {'up.weight': jnp.ones((4, 2), 'float8_e4m3fn'),
    ...            'up.weight_scale_inv': np.ones((1, 1), np.float32), 'norm.scale': np.ones(2)}
    >>> config = {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [128, 128]}}
    >>> found = read_checkpoint(tensors, config=config, names=[(r'(.*)\\.weight', r'\\1/kernel')])
    >>> found
    ForeignCheckpoint(fp8, blocks of 128x128; 1 of 2 parameters quantized)
    >>> found['up/kernel']
    QArray(qvalue=float8_e4m3fn[2,4], scale=float32[1,1], qtype=float8_e4m3fn)
    """
    if act_order not in ACT_ORDERS:
        raise ValueError(_MSG_ACT_ORDER.format(found=act_order))
    source = _Arrays(path) if isinstance(path, Mapping) else TensorSource(path)
    if isinstance(config, (str, os.PathLike)):
        config = read_config(os.fspath(config), named=True)
    elif config is None and isinstance(source, TensorSource):
        config = read_config(source.folder)
    return ForeignCheckpoint(source, config, names, transpose, dtype, act_order)


class ForeignCheckpoint(Mapping[str, Any]):
    """Parameters by path; each is read, and its codes unpacked, when it is asked for."""

    def __init__(
        self,
        source: Any,
        config: Mapping[str, Any] | None,
        names: Iterable[Sequence[Any]] | None,
        transpose: bool,
        dtype: Any,
        act_order: str,
    ):
        self._source, self._act_order = source, act_order
        self._transpose, self._dtype = transpose, dtype
        self.method: str | None = None
        self.settings: Mapping[str, Any] = {}
        found = quantization_of(config, source.path)
        if found is not None:
            self.method, self.settings = found
            FORMATS[self.method].check(self.settings, source.path)
        self._parts = self._grouped()
        if found is None:
            self._refuse_traces()
        targets = map_names(source.path, list(self._parts), names)
        self._targets = {target.path: target for target in targets}
        if found is not None:
            for target in targets:
                for name in target.sources:
                    self._refuse_others(name)
        self._permutations: dict[str, np.ndarray | None] = {}

    @property
    def format(self) -> str:
        """What the checkpoint is in, as config.json says."""
        if self.method is None:
            return "float"
        return str(FORMATS[self.method].describe(self.settings))

    @property
    def quantized(self) -> tuple[str, ...]:
        """The paths that are QArrays."""
        return tuple(p for p, t in self._targets.items() if self._is_quantized(t.sources[0]))

    def sources(self, path: str) -> tuple[str, ...]:
        """The tensors in the files that a parameter is made of."""
        names = self._target(path).sources
        return tuple(tensor for name in names for tensor in self._parts[name].values())

    def permutation(self, path: str) -> np.ndarray | None:
        """The order of the inputs that a weight with sorted rows asks for, None for none.

        The product of the checkpoint is `x[..., permutation] @ weight`.
        """
        self._target(path)
        if path not in self._permutations:
            self[path]
        return self._permutations[path]

    def tree(self) -> dict[str, Any]:
        """All of it as nested dicts, with `<name>_permutation` beside weights with sorted rows."""
        result: dict[str, Any] = {}
        for path, value in self.items():
            put_at(result, path.split("/"), value)
            order = self.permutation(path)
            if order is not None:
                put_at(result, f"{path}_permutation".split("/"), jnp.asarray(order))
        return result

    def __getitem__(self, path: str) -> Any:
        target = self._target(path)
        values, orders = zip(*(self._read(name, target) for name in target.sources), strict=True)
        self._permutations[path] = _stacked_orders(orders, values[0], target.stack)
        if not target.stack:
            return values[0]
        if isinstance(values[0], QArray):
            return _stacked(self._source.path, path, values, target.stack)
        return np.stack(values).reshape(target.stack + values[0].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __repr__(self) -> str:
        count = f"{len(self.quantized)} of {len(self)} parameters quantized"
        return f"ForeignCheckpoint({self.format}; {count})"

    def _grouped(self) -> dict[str, dict[str, str]]:
        """The tensors of each weight: {name: {part: tensor}}, plain ones alone as `weight`."""
        groups: dict[str, dict[str, str]] = {}
        for name in self._source.names:
            found = FORMATS[self.method].part_of(name) if self.method else None
            logical, part = found or (name, "weight")
            groups.setdefault(logical, {})[part] = name
        return groups

    def _is_quantized(self, name: str) -> bool:
        if self.method is None:
            return False
        # Codes without a scale: reading them as a quantized weight says what is missing.
        return set(self._parts[name]) != {"weight"} or _are_codes(name, self._source.dtype(name))

    def _read(self, name: str, target: Target) -> tuple[Any, np.ndarray | None]:
        tensors = {p: self._source.read(tensor) for p, tensor in self._parts[name].items()}
        if not self._is_quantized(name):
            array = tensors["weight"]
            axes = turned(array.shape, target.axes)
            return (array if axes is None else np.ascontiguousarray(array.transpose(axes))), None
        method, path = str(self.method), self._source.path
        weight = Foreign(name, tensors, self.settings, method, self._act_order, path)
        kernel: Kernel = FORMATS[method].read(weight)
        q = kernel.array if self._dtype is None else kernel.array.with_dtype(self._dtype)
        if target.axes != "T" and (target.axes is not None or not self._transpose):
            q = q.mT  # as PyTorch has it
            axes = turned(q.shape, target.axes)
            q = q if axes is None else q.transpose(axes)
        return q, kernel.permutation

    def _target(self, path: str) -> Target:
        if path not in self._targets:
            near = nearest(path, self._targets, " The nearest are {}.", 3, 0.6, show=str)
            raise KeyError(_MSG_UNKNOWN.format(path=path, count=len(self), near=near))
        return self._targets[path]

    def _refuse_traces(self) -> None:
        for name in self._source.names:
            if _are_codes(name, self._source.dtype(name)) or name.endswith(_TRACES):
                what = _MSG_NO_CONFIG.format(name=name)
                raise CheckpointError(self._source.path, what, fix=_FIX_NO_CONFIG)

    def _refuse_others(self, name: str) -> None:
        """Raise for a tensor that this method does not know, and another one does."""
        if set(self._parts[name]) != {"weight"}:
            return
        known = {method: form.part_of(name) for method, form in FORMATS.items()}
        methods = [m for m, found in known.items() if found and found[1] not in _COMMON]
        if methods:
            what = _MSG_OTHERS.format(
                methods=" or ".join(methods), where=WHERE, said=repr(self.method)
            )
            pattern = rf".*{re.escape(name[name.rfind('.') :])}"
            fix = _FIX_OTHERS.format(other=methods[0], pattern=pattern)
            raise CheckpointError(self._source.path, what, tensor=name, fix=fix)


def _are_codes(name: str, dtype: str) -> bool:
    """Whether a tensor's type says that its numbers need a scale."""
    small = dtype.startswith(("float8_", "float4_", "float6_", "F6_"))
    return small or (name.endswith("weight") and dtype in ("int8", "uint8"))


class _Arrays:
    """A dict of arrays in the place of files."""

    def __init__(self, arrays: Mapping[str, Any]):
        self.path, self._arrays = "the checkpoint", arrays

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def dtype(self, name: str) -> str:
        return jnp.dtype(self._arrays[name].dtype).name

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._arrays[name])


def _stacked(path: str, name: str, arrays: Sequence[QArray], stack: tuple[int, ...]) -> QArray:
    """QArrays of one kind as one, the layers in front."""
    first = arrays[0]
    for what in ("shape", "qtype", "tiles", "dtype"):
        kinds = [getattr(q, what) for q in arrays]
        if any(kind != kinds[0] for kind in kinds):
            words = what if what != "qtype" else f"type ({', '.join(map(qtype_name, kinds[:2]))})"
            raise CheckpointError(path, _MSG_MIXED.format(what=words), tensor=name)
    if any(q.scale.shape != first.scale.shape for q in arrays):
        raise CheckpointError(path, _MSG_MIXED.format(what="the groups of scales"), tensor=name)

    def joined(parts: Sequence[Any]) -> Any:
        return jnp.stack(parts).reshape(stack + parts[0].shape)

    zeros = [q.zero_point for q in arrays]
    kind = next((zero for zero in zeros if zero is not None), None)
    if kind is not None:
        zeros = [jnp.zeros(kind.shape, kind.dtype) if z is None else z for z in zeros]
    return first.replace(
        qvalue=joined([q.qvalue for q in arrays]),
        scale=joined([q.scale for q in arrays]),
        zero_point=None if kind is None else joined(zeros),
    )


def _stacked_orders(
    orders: Sequence[np.ndarray | None], value: Any, stack: tuple[int, ...]
) -> np.ndarray | None:
    found = next((order for order in orders if order is not None), None)
    if found is None:
        return None
    same = np.arange(found.size, dtype=np.int32)
    rows = np.stack([same if order is None else order for order in orders])
    return rows.reshape(stack + found.shape)
