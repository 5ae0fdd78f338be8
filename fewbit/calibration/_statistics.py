"""Statistics: what calibration saw at each operand, as a value to print, save, merge and use.

As a mapping it is what `quantize_params` takes: for Linen and NNX nested like the parameters, with
`<op_id>_lhs` beside the weight; for a plain function `{'<site id>': {'lhs': {...}}}`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import NoPlainFile, load_json, open_file, terminal_width, write_atomically
from fewbit._util import table as text_table
from fewbit._version import __version__
from fewbit.calibration._observers import Observer
from fewbit.calibration._registry import observer_named
from fewbit.calibration._tails import TAIL, far_ranges
from fewbit.interpreter import Reading, combine_readings, over_layers
from fewbit.planning import Plan, ScalePlan
from fewbit.qarray import parse_method

_MSG_OTHER_MODEL = (
    "These are statistics of another model: {first} was made from parameters {a}, {second} from "
    "{b}. Calibrate the model that is quantized, with the rules that it is quantized by."
)
_MSG_OTHER_SHAPE = (
    "Statistics of {name} have different forms: {key} is {a} here and {b} there. They were "
    "collected with other rules, or on inputs that differ in more than act_batch_axes."
)
_MSG_OTHER_OBSERVERS = (
    "{name} was observed by {a} here and by {b} there. Merge statistics that the same observers "
    "collected with the same rules."
)
_MSG_OTHER_METHOD = (
    "The statistics of {name} were collected for {found}, and the plan asks for {method!r}. "
    "Calibrate with the rules that the model is quantized by."
)
_MSG_TWO_METHODS = (
    "The statistics of {name} were collected for act_calibration_method={a!r} here and {b!r} "
    "there. Merge statistics that were collected with the same rules."
)
_MSG_MERGE = "merge takes Statistics of the same model, got {found}."


@dataclass(frozen=True)
class Entry:
    """One operand: whose it is, how often its Site ran, and the state of each observer.

    `count` and the states are numpy arrays with the layers of scans in front. `method` is the
    calibration method that ranges of batches were taken by; None is not known.
    """

    site: str
    side: str
    count: np.ndarray
    states: Mapping[str, Mapping[str, np.ndarray]]
    method: str | None = None

    @property
    def reading(self) -> Reading:
        return Reading(self.count, {k: dict(state) for k, state in self.states.items()})


@dataclass(frozen=True, eq=False)
class Statistics(Mapping[str, Any]):
    """What calibration saw, by operand, in the layout that `quantize_params` takes.

    >>> import fewbit, jax.numpy as jnp
    >>> rule = fewbit.QuantizationRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
    >>> f, params = lambda params, x: x @ params['w'], {'w': jnp.eye(3)}
    >>> parts = [fewbit.calibrate(f, [rule], params, [jnp.full((2, 3), v)]) for v in (1.0, 3.0)]
    >>> stats = parts[0].merge(parts[1])
    >>> print(stats)
    operand               runs  range
    ─────────────────────────────────
    w/dot_general0 (lhs)  2     ±3
    <BLANKLINE>
    1 operand, 2 batches
    >>> stats['w:dot_general0']['lhs']['max_of_absmax']
    array([[3.]], dtype=float32)
    """

    kind: str
    model: str  # a digest of the parameters' paths and shapes
    batches: int
    entries: Mapping[str, Entry]  # by '<module>/<op_id>_lhs'
    own_observers: Mapping[str, Observer] = field(default_factory=dict, repr=False)

    # --- the mapping ------------------------------------------------------------------------------

    @functools.cached_property
    def tree(self) -> dict[str, Any]:
        """The statistics as plain nested dicts of arrays."""
        result: dict[str, Any] = {}
        for name, entry in self.entries.items():
            path = (entry.site, entry.side) if self.kind == "function" else name.split("/")
            node = result
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self.statistic(name)
        return result

    def statistic(self, name: str) -> dict[str, Any]:
        """`count` and what the observers make of their states, for '<module>/<op_id>_lhs'."""
        entry = self.entries[name]
        result: dict[str, Any] = {"count": entry.count}
        for observer, state in entry.states.items():
            finalize = over_layers(self._observer(observer).finalize, entry.count.ndim)
            result |= jax.tree.map(np.asarray, dict(finalize(dict(state))))
        return result

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def _observer(self, name: str) -> Observer:
        return self.own_observers.get(name) or observer_named(name)

    # --- merging ----------------------------------------------------------------------------------

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both runs together, as if one had seen all batches.

        Operands that only one of them has are kept: statistics of several methods come together.
        """
        if not isinstance(other, Statistics):
            raise TypeError(_MSG_MERGE.format(found=type(other).__name__))
        if (self.kind, self.model) != (other.kind, other.model):
            both = dict(a=f"{self.kind} {self.model[:12]}", b=f"{other.kind} {other.model[:12]}")
            raise ValueError(_MSG_OTHER_MODEL.format(first="one", second="the other", **both))
        entries = dict(self.entries)
        for name, entry in other.entries.items():
            entries[name] = self._merged(name, entry) if name in entries else entry
        own = {**self.own_observers, **other.own_observers}
        batches = self.batches + other.batches
        return replace(self, batches=batches, entries=entries, own_observers=own)

    def _merged(self, name: str, other: Entry) -> Entry:
        mine = self.entries[name]
        if (TAIL in mine.states) != (TAIL in other.states):  # older files have none
            mine, other = _without_tail(mine), _without_tail(other)
        if list(mine.states) != list(other.states):
            sides = dict(a=", ".join(mine.states), b=", ".join(other.states))
            raise ValueError(_MSG_OTHER_OBSERVERS.format(name=name, **sides))
        shapes = [
            {("count",): e.count.shape}
            | {(o, k): x.shape for o in e.states for k, x in e.states[o].items()}
            for e in (mine, other)
        ]
        for key in shapes[0].keys() | shapes[1].keys():
            a, b = (found.get(key, "missing") for found in shapes)
            if a != b:
                raise ValueError(_MSG_OTHER_SHAPE.format(name=name, key=".".join(key), a=a, b=b))

        if None not in (mine.method, other.method) and mine.method != other.method:
            text = _MSG_TWO_METHODS.format(name=name, a=mine.method, b=other.method)
            raise ValueError(text)

        def combine(a: Any, b: Any) -> Any:
            return {o: self._observer(o).merge(a[o], b[o]) for o in a}

        both = combine_readings(combine, mine.reading, other.reading)
        count, states = jax.tree.map(np.asarray, tuple(both))
        return replace(mine, count=count, states=states)

    def check_model(self, plan: Plan) -> None:
        """Raise if the plan is of a model with other parameters."""
        found = (plan.kind, model_digest(plan))
        if found != (self.kind, self.model):
            a, b = (f"{kind} {digest[:12]}" for kind, digest in ((self.kind, self.model), found))
            names = dict(first="the statistics", second="the plan")
            raise ValueError(_MSG_OTHER_MODEL.format(a=a, b=b, **names))

    def check_methods(self, scales: Iterable[ScalePlan]) -> None:
        """Raise if a scale is to be made by a method that other rules' statistics cannot tell."""
        for scale in scales:
            entry, text = self.entries.get(scale.name), scale.how.calibration_method
            method = parse_method(text)
            if entry is None or entry.method is None or method.name == "fixed":
                continue
            averaged = scale.rule is not None and scale.rule.act_static_reduction == "mean"
            if method.name in ("percentile", "mse") and not averaged:
                fits, found = "histogram" in entry.states, f"{entry.method!r}, without a histogram"
            else:
                fits, found = parse_method(entry.method) == method, repr(entry.method)
            if not fits:
                raise ValueError(
                    _MSG_OTHER_METHOD.format(name=scale.name, found=found, method=text)
                )

    # --- files ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all: arrays and a readable manifest, nothing pickled."""

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """What `save` wrote."""

        return load(path)

    # --- text -------------------------------------------------------------------------------------

    def table(self, *, width: int | None = None) -> str:
        """Operands, how often each Site ran, and the range seen."""
        width = terminal_width() if width is None else width
        header = ["operand", "runs", "range"]
        rows = [
            [_label(name), _runs(e), _range(self.statistic(name))]
            for name, e in self.entries.items()
        ]
        lines = text_table(rows, header, "mll", width).split("\n") if rows else []
        far = [f"far beyond most values: {text}" for text in map(str, far_ranges(self.entries))]
        return "\n".join([*lines, *[""] * bool(rows), self.summary, *far])

    @property
    def summary(self) -> str:
        """What there is, in a line."""
        operands = "1 operand" if len(self.entries) == 1 else f"{len(self.entries)} operands"
        return (
            f"{operands}, 1 batch" if self.batches == 1 else f"{operands}, {self.batches} batches"
        )

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Statistics({self.kind}, {self.summary})"


def model_digest(plan: Plan) -> str:
    """A digest of the parameters' paths and shapes: what makes models the same to statistics."""
    lines = sorted(f"{leaf.path} {list(leaf.shape)}" for leaf in plan.leaves)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _without_tail(entry: Entry) -> Entry:
    return replace(entry, states={o: state for o, state in entry.states.items() if o != TAIL})


def _label(name: str) -> str:
    return f"{name[:-4]} ({name[-3:]})"


def _runs(entry: Entry) -> str:
    low, high = (int(f(entry.count)) if entry.count.size else 0 for f in (np.min, np.max))
    return str(low) if low == high else f"{low} to {high}"


def _range(statistic: Mapping[str, Any]) -> str:
    if "max_of_absmax" in statistic:
        return f"±{_span(statistic['max_of_absmax'])}"
    if "min_of_min" in statistic:
        low, high = statistic["min_of_min"].min(), statistic["max_of_max"].max()
        return f"{low:.4g} to {high:.4g}"
    return ", ".join(key for key in statistic if key != "count")


def _span(array: np.ndarray) -> str:
    low, high = (float(f(array)) if array.size else 0.0 for f in (np.min, np.max))
    return f"{high:.4g}" if low == high else f"{low:.4g} to ±{high:.4g}"


# --- Statistics in a file: a zip of `.npy` arrays and `manifest.json`, for `numpy.load` -----------

FORMAT, VERSION = "fewbit statistics", 1
_MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # same statistics, same bytes

_MSG_FOREIGN = (
    "{path} is no file of fewbit statistics: {why}. stats.save(path) writes one, and "
    "fewbit.Statistics.load(path) reads it."
)
_MSG_NEWER = (
    "{path} is in format {found} of fewbit statistics, and this fewbit ({own}) reads up to "
    "{version}. Use a newer fewbit (it was written by {writer}), or calibrate again."
)
_MSG_FAILED = (
    "The statistics cannot be written to {path}: {reason}. What was there before is whole."
)
_MSG_DAMAGED = "{path} is damaged: {what}. Take another copy of the file, or calibrate again."
_MSG_COMPRESSED = "{member} is compressed, which stats.save never does"
_MSG_MORE = "its manifest names more arrays than there is room for in the file"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OverflowError),
    *(struct.error, zlib.error, UnicodeDecodeError, OSError),
)
_MSG_CHECKSUM = "the checksum of {array} is {found}, expected {wanted}"


def save(stats: Statistics, path: str | os.PathLike[str]) -> None:
    """Write `stats` to `path`, whole or not at all."""
    arrays: dict[str, bytes] = {}
    rows = []

    def put(value: Any) -> dict[str, str]:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asarray(value), allow_pickle=False)
        data = stream.getvalue()
        member = f"arrays/{len(arrays)}.npy"
        arrays[member] = data
        return {"array": member, "sha256": hashlib.sha256(data).hexdigest()}

    for name, entry in stats.entries.items():
        states = {
            observer: {key: put(value) for key, value in state.items()}
            for observer, state in entry.states.items()
        }
        row = {"name": name, "site": entry.site, "side": entry.side, "count": put(entry.count)}
        rows.append({**row, "method": entry.method, "states": states})
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "fewbit": __version__,
        "kind": stats.kind,
        "model": stats.model,
        "batches": stats.batches,
        "operands": rows,
    }

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            text = json.dumps(manifest, indent=1).encode()
            for member, data in {_MANIFEST: text, **arrays}.items():
                archive.writestr(zipfile.ZipInfo(member, _EPOCH), data)

    try:
        write_atomically(path, write)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, _MSG_FAILED.format(path=path, reason=reason)) from error


def load(path: str | os.PathLike[str]) -> Statistics:
    """Read what `save` wrote; anything else is a ValueError that says what it is."""
    name = os.fspath(path)
    try:
        number = open_file(path)
    except NoPlainFile as error:
        raise ValueError(_MSG_FOREIGN.format(path=name, why=f"it {error.what}")) from None
    with open(number, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = _Members(archive, name, os.fstat(number).st_size)
                return _read(members, _manifest(members, name), name)
        except _ZIP_ERRORS as error:
            file.seek(0)
            if file.read(2) != b"PK":
                why = "it is no zip archive"
                raise ValueError(_MSG_FOREIGN.format(path=name, why=why)) from error
            what = error or "it is cut off"
            raise ValueError(_MSG_DAMAGED.format(path=name, what=what)) from error


class _Members:
    """The members of an archive, each as long as it is in the file and all no longer than it.

    `save` compresses nothing; an archive of a few bytes that unpacks to all of the memory is none
    of its own.
    """

    def __init__(self, archive: zipfile.ZipFile, path: str, left: int):
        self.archive, self._path, self._left = archive, path, left

    def __contains__(self, name: str) -> bool:
        return name in self.archive.namelist()

    def read(self, name: str) -> bytes:
        info = self.archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            what = _MSG_COMPRESSED.format(member=name)
            raise ValueError(_MSG_DAMAGED.format(path=self._path, what=what))
        self._left -= info.file_size
        if self._left < 0:
            raise ValueError(_MSG_DAMAGED.format(path=self._path, what=_MSG_MORE))
        return self.archive.read(info)


def _array(data: bytes) -> np.ndarray:
    """An array out of a member; its header is believed if as many bytes follow as it says."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the npy format")
    shape, _, dtype = _HEADERS[version](stream)
    follow = len(data) - stream.tell()
    if not dtype.hasobject and (not dtype.itemsize or math.prod(shape) * dtype.itemsize != follow):
        raise ValueError(f"{shape} of {dtype} in {follow} bytes")
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _manifest(archive: _Members, path: str) -> dict[str, Any]:
    if _MANIFEST not in archive:
        raise ValueError(_MSG_FOREIGN.format(path=path, why=f"it has no {_MANIFEST}"))
    manifest = load_json(archive.read(_MANIFEST), f"{path} is damaged: {_MANIFEST}")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ValueError(_MSG_FOREIGN.format(path=path, why=f"its format is {found!r}"))
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        facts = dict(found=version, own=__version__, version=VERSION)
        raise ValueError(_MSG_NEWER.format(path=path, writer=manifest.get("fewbit"), **facts))
    return manifest


def _read(archive: _Members, manifest: dict[str, Any], path: str) -> Statistics:
    def get(place: Any, what: str) -> np.ndarray:
        member, wanted = place["array"], place["sha256"]
        data = archive.read(member)
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            text = _MSG_CHECKSUM.format(array=what, found=found[:16], wanted=str(wanted)[:16])
            raise ValueError(_MSG_DAMAGED.format(path=path, what=text))
        try:
            return _array(data)
        except (ValueError, TypeError, ArithmeticError) as error:
            text = f"{what} is no plain array ({error})"
            raise ValueError(_MSG_DAMAGED.format(path=path, what=text)) from error

    try:
        entries = {}
        for row in manifest["operands"]:
            name = row["name"]
            states = {
                observer: {key: get(at, f"{name} {key}") for key, at in state.items()}
                for observer, state in row["states"].items()
            }
            count = get(row["count"], f"{name} count")
            method = row.get("method")  # older files do not say
            if method is not None and not isinstance(method, str):
                raise TypeError(f"the method of {name} is {method!r}")
            entries[name] = Entry(row["site"], row["side"], count, states, method)
        batches = manifest["batches"]
        if type(batches) is not int or not 0 <= batches < 2**63:
            raise TypeError(f"{batches!r:.40} batches")
        return Statistics(manifest["kind"], manifest["model"], batches, entries)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"its manifest is not complete ({type(error).__name__}: {error})"
        raise ValueError(_MSG_DAMAGED.format(path=path, what=what)) from error


# --- Running statistics of calibrations: what static activation scales are made from --------------

# Ranges contain zero, so zero is neutral for all three and an untouched statistic is all zeros.
_EXTREMES = {
    "absmax": ("max_of_absmax", jnp.maximum),
    "max": ("max_of_max", jnp.maximum),
    "min": ("min_of_min", jnp.minimum),
}


@dataclasses.dataclass(frozen=True)
class SimpleMovingAverage:
    """Mean and extremes of calibrations over steps, kept as a dict of arrays.

    The dict has `count` (int32) and, for each key of the calibration, `sum_of_<key>` and the
    extreme seen, `max_of_absmax`, `max_of_max` or `min_of_min` (float32).

    >>> average = SimpleMovingAverage()
    >>> stat = average.init({'absmax': jnp.array([0.0])})
    >>> for value in (1.0, 3.0):
    ...     stat = average.update(stat, {'absmax': jnp.array([value])})
    >>> average.get_calibration(stat), average.get_calibration(stat, reduction='range')
    ({'absmax': Array([2.], dtype=float32)}, {'absmax': Array([3.], dtype=float32)})
    """

    bootstrap_steps: int = 0

    def init(self, calibration: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """An empty statistic for calibrations of this shape."""
        stat = {"count": jnp.zeros((), jnp.int32)}
        for key, value in calibration.items():
            stat[f"sum_of_{key}"] = jnp.zeros(value.shape, jnp.float32)
            stat[_EXTREMES[key][0]] = jnp.zeros(value.shape, jnp.float32)
        return stat

    def update(
        self, stat: Mapping[str, jax.Array], calibration: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The statistic with one more calibration in it."""
        result = dict(stat)
        result["count"] = stat["count"] + 1
        for key, value in calibration.items():
            total = stat.get(f"sum_of_{key}")
            if total is None:
                raise ValueError(
                    f"The statistic has no 'sum_of_{key}', only {sorted(stat)}: it was collected "
                    "with another calibration method. Start a new one with init()."
                )
            if total.shape != value.shape:
                raise ValueError(
                    f"Shape mismatch between the statistic 'sum_of_{key}' {total.shape} and the "
                    f"calibration {value.shape}. Scales of static activations may not depend on "
                    "the batch: average the axes in act_batch_axes, and keep the others fixed."
                )
            value = value.astype(jnp.float32)
            result[f"sum_of_{key}"] = total + value
            name, extreme = _EXTREMES[key]
            if name in stat:
                result[name] = extreme(stat[name], value)
        return result

    def get_calibration(
        self,
        stat: Mapping[str, jax.Array],
        default: Mapping[str, jax.Array] | None = None,
        *,
        reduction: str = "mean",
    ) -> dict[str, jax.Array]:
        """The calibration that the statistic stands for: its mean, or the range it saw.

        `default` is returned while `count <= bootstrap_steps`.
        """
        if reduction not in ("mean", "range"):
            raise ValueError(f"Unknown reduction {reduction!r}: use 'mean' or 'range'.")
        result = {}
        for name, total in stat.items():
            if not name.startswith("sum_of_"):
                continue
            key = name.removeprefix("sum_of_")
            # Layers of a scan have a count each: its axes are the leading ones of the sums.
            count = stat["count"].reshape(
                stat["count"].shape + (1,) * (total.ndim - stat["count"].ndim)
            )
            if reduction == "mean":
                value = total / jnp.maximum(count, 1).astype(jnp.float32)
            elif _EXTREMES[key][0] in stat:
                value = stat[_EXTREMES[key][0]]
            else:
                raise ValueError(
                    f"The statistic has no '{_EXTREMES[key][0]}', only {sorted(stat)}: it comes "
                    "from another library. Use reduction='mean'."
                )
            if default is not None:
                early = count <= self.bootstrap_steps
                value = jnp.where(early, default[key].astype(jnp.float32), value)
            result[key] = value
        return result
