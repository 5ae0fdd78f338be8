"""Quantize parameters: a pure function of float leaves and a plan (or template), leaf by leaf.

No model is run. A subtree works as well as the whole, so weights can be streamed; the result of one
leaf depends on that leaf alone.
"""

import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import permutations
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._plan import Plan, ScalePlan
from fewbit.adapter_params import LoraParams
from fewbit.calls import key_name
from fewbit.layouts import for_kernels
from fewbit.learned_scales import is_learned, split_learned, trained_scale
from fewbit.observed import Statistics
from fewbit.qarray import (
    HowToQuantize,
    QArray,
    WithAux,
    abstract_quantized,
    check_finite,
    compute_scale_zero_point,
    get_scale_shape,
    quantize_with_scale_zero_point,
)
from fewbit.static_scales import SCALE, QuantizedParams, is_static_scale, name_of_site
from fewbit.static_statistics import add_scales, is_fixed
from fewbit.storing import quantize_for_kernels, quantize_plain
from fewbit.training.learned import QSCALE, quantize_learned

_MSG_EXTRA = (
    "{path} is not found in the abstract_quantized_params.{near} Pass allow_extra_params=True to "
    "hand parameters that the model does not have through unchanged."
)
_MSG_MISSING = (
    "{count} of the plan's parameters {are} missing: {paths}.{near} Give the whole tree, or pass "
    "allow_missing_params=True to quantize a part of it."
)
_MSG_SHAPE = (
    "{path} has shape {found}, expected {wanted}.{turned} The plan or template was made for "
    "another model or other sizes: make it again with this model."
)
_MSG_TURNED = " It looks transposed: pass params with {path} as `array.transpose({axes})`."
_MSG_QUANTIZED = (
    "{path} is quantized already ({array!r}). quantize_params takes float parameters; dequantize "
    "it first to store it in another format: fewbit.dequantize(...)."
)
_MSG_NO_TEMPLATE = (
    "quantize_params takes a Plan or a template as its second argument, got {found}. Make one: "
    "quantize_params(params, fewbit.plan(model, rules, *inputs)), or for Linen "
    "quantize_params(params, jax.eval_shape(quantized.init, key, x)['params'])."
)


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    quant_stats: Any = None,
    *,
    allow_extra_params: bool = False,
    allow_missing_params: bool = False,
    weight_absmax: Mapping[str, Any] | None = None,
) -> Any:
    """The same tree with each planned leaf as `WithAux(QArray)`; other leaves pass through.

    `abstract_quantized_params` is a `Plan`, the template
    `jax.eval_shape(model.init, ...)['params']` of a quantized Linen model, or a quantized NNX model
    (then `params` is a pure dict). A template takes a subtree, so that weights can be streamed; a
    Plan takes one with `allow_missing_params=True`.

    `quant_stats` are the statistics that `fewbit.calibrate` collected for rules with
    `act_static_scale=True`; they become `<module>/<op_id>_lhs_scale` entries beside the weights.
    For a plain function they are `{'<site id>': {'lhs': statistic}}`, and the result is
    `QuantizedParams`. Without `quant_stats` only weights are quantized (and ranges that a rule
    fixes are added).

    `weight_absmax` has symmetric ranges for leaves, by path, that are not measured but known, as
    those of a training with delayed scales; each broadcasts to the leaf's scales.

    >>> import fewbit, jax.numpy as jnp
    >>> params = {'w': jnp.linspace(-1, 1, 12).reshape(3, 4), 'b': jnp.zeros((1, 4))}
    >>> f = lambda params, x: x @ params['w'] + params['b']
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8')]
    >>> plan = fewbit.plan(f, rules, params, jnp.ones((2, 3)))
    >>> quantize_params(params, plan)['w'].array
    QArray(qvalue=int8[3,4], scale=float32[1,4], qtype=int8)
    """
    if isinstance(params, Plan):
        raise TypeError(
            "quantize_params takes the parameters first and the plan second: "
            "quantize_params(params, plan)."
        )
    template = _Template(abstract_quantized_params, allow_extra_params)
    known = weight_absmax or {}
    if isinstance(params, LoraParams) and not template.learns:
        allowed: dict[str, Any] = dict(
            allow_extra_params=allow_extra_params,
            allow_missing_params=allow_missing_params,
            weight_absmax=weight_absmax,
        )
        rest = quantize_params(params.params, abstract_quantized_params, quant_stats, **allowed)
        return LoraParams(rest, params.adapters)
    learned: dict[str, Any] = {}
    if template.learns:
        params, learned = split_learned(params)
    seen = []

    def leaf(keypath, value):
        path = _path(keypath)
        seen.append(path)
        if path not in template.leaves and not hasattr(value, "shape") and not _is_box(value):
            return value  # a function or a number among the parameters, as Equinox modules have
        found = template.leaf(path)
        if found is None:
            return value
        how, shape, boxed = found
        if how is None or shape is None:
            return _kept(path, value, shape)
        return _quantized(path, value, how, shape, boxed, learned=learned, absmax=known.get(path))

    result = jax.tree_util.tree_map_with_path(
        leaf, params, is_leaf=lambda x: _is_box(x) or isinstance(x, WithAux | QArray)
    )
    if not allow_missing_params:
        template.check_complete(seen)
    if quant_stats is None and not any(map(is_fixed, template.scales.values())):
        return result
    if isinstance(quant_stats, Statistics) and isinstance(abstract_quantized_params, Plan):
        quant_stats.check_model(abstract_quantized_params)
    if isinstance(quant_stats, Statistics):
        quant_stats.check_methods(template.scales.values())
    given = quant_stats is not None
    return add_scales(
        result,
        template.scales,
        quant_stats if given else {},
        by_site=template.by_site,
        whole=template.whole and given and not allow_missing_params,
        allow_extra=allow_extra_params,
        present=seen,
        known=template.leaves,
    )


class _Template:
    """What a leaf should become, from a plan or from a tree of abstract quantized leaves."""

    def __init__(self, source: Any, allow_extra: bool):
        self.allow_extra, self.whole = allow_extra, isinstance(source, Plan)
        self.adapters: set[str] = set()  # may be there already, or come later
        self.leaves: dict[str, tuple[HowToQuantize | None, tuple[int, ...] | None, Any]]
        self.scales: dict[str, ScalePlan] = {}
        self.by_site = isinstance(source, QuantizedParams)
        if isinstance(source, Plan):
            self.by_site = source.kind == "function"
            self.scales = {scale.name: scale for scale in source.scales}
            self.leaves = {
                leaf.path: (
                    leaf.how and leaf.how.replace(rule=leaf.rule),
                    tuple(leaf.shape),
                    _WHOLE,
                )
                for leaf in source.leaves
            }
            for adapter in source.adapters:
                self.leaves |= {n: (None, shape, None) for n, shape in adapter.shapes.items()}
                self.adapters |= set(adapter.names)
            return
        if isinstance(source, QuantizedParams):
            for site, entries in source.act_scales.items():
                for entry, value in entries.items():
                    if entry.endswith(SCALE):
                        name = name_of_site(site, entry.removesuffix(SCALE))
                        self.scales[name] = _template_scale(name, value, site)
            source = source.params
        if hasattr(source, "_fewbit_pure_dict"):  # an NNX model
            source = source._fewbit_pure_dict()
        flat, _ = jax.tree_util.tree_flatten_with_path(
            source, is_leaf=lambda x: isinstance(x, WithAux) or _is_box(x)
        )
        if source is None or (
            flat and not any(hasattr(value, "shape") or _is_box(value) for _, value in flat)
        ):
            raise TypeError(_MSG_NO_TEMPLATE.format(found=_kind(source)))
        self.leaves = {}
        for key, value in flat:
            path = _path(key)
            if not is_static_scale(path, value):
                self.leaves[path] = _template_leaf(value)
            elif path.endswith(SCALE):
                name = path.removesuffix(SCALE)
                self.scales[name] = _template_scale(name, value, "")

    @property
    def learns(self) -> bool:
        """Whether a parameter is stored with a scale that training found."""
        return any(is_learned(how) for how, _, _ in self.leaves.values())

    def leaf(self, path: str) -> tuple[HowToQuantize | None, tuple[int, ...] | None, Any] | None:
        if path not in self.leaves:
            if self.allow_extra:
                return None
            near = get_close_matches(path, self.leaves, 3)
            hint = f" The nearest are {', '.join(near)}." if near else ""
            raise ValueError(_MSG_EXTRA.format(path=path, near=hint))
        return self.leaves[path]

    def check_complete(self, seen: list[str]) -> None:
        """A plan is of a whole model; a template may be asked for any part."""
        given = {*seen, *self.adapters}
        missing = [path for path in self.leaves if path not in given] if self.whole else []
        if not missing:
            return
        extra = [path for path in seen if path not in self.leaves]
        near = get_close_matches(missing[0], extra, 1)
        raise ValueError(
            _MSG_MISSING.format(
                count=len(missing),
                are="is" if len(missing) == 1 else "are",
                paths=", ".join(missing[:5]) + (", ..." if len(missing) > 5 else ""),
                near=f" {near[0]!r} is given, which the plan does not know." if near else "",
            )
        )


_WHOLE = object()  # a plan's leaf: its shape is the parameter's own


def _kind(value: Any) -> str:
    words = f"a {type(value).__name__}" if value is not None else "None"
    items = list(value) if isinstance(value, list | tuple) else []
    return words + (f" of {type(items[0]).__name__} objects" if items else "")


def _template_scale(name: str, value: WithAux, site: str) -> ScalePlan:
    array, how = value.array, value.how
    return ScalePlan(name, site, how.replace(rule=None), array.shape, str(array.dtype), how.rule)


def _template_leaf(value: Any) -> tuple[HowToQuantize | None, tuple[int, ...] | None, Any]:
    if not isinstance(value, WithAux):
        shape = getattr(unboxed(value) if _is_box(value) else value, "shape", None)
        return None, None if shape is None else tuple(shape), None
    q = value.array
    if _is_box(q.qvalue):
        return value.how, tuple(unboxed(q.qvalue).shape), q
    return value.how, tuple(q.shape), None


def quantize_leaf(
    path: str,
    value: Any,
    leaf: Any,
    measured: HowToQuantize | None = None,
    learned: Mapping[str, Any] = {},
) -> Any:
    """One parameter as the plan's leaf says; `measured` as in `storing.quantize_for_kernels`.

    `learned` are the scales that training found.
    """
    how = leaf.how.replace(rule=leaf.rule)
    return _quantized(path, value, how, tuple(leaf.shape), _WHOLE, measured, learned)


def _kept(path: str, value: Any, shape: tuple[int, ...] | None) -> Any:
    """A parameter that stays as it is, if it is the one that is meant."""
    array = unboxed(value) if _is_box(value) else value
    if isinstance(array, WithAux | QArray):
        raise ValueError(_MSG_QUANTIZED.format(path=path, array=_bare(array)))
    found = getattr(array, "shape", None)
    if shape is not None and found is not None and tuple(found) != shape:
        raise ValueError(_shape_message(path, tuple(found), shape))
    return value


def _bare(array: Any) -> Any:
    return array.array if isinstance(array, WithAux) else array


def _shape_message(path: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    turned = ""
    if _is_turned(found, wanted):
        axes = next(p for p in permutations(range(len(found))) if _take(found, p) == wanted)
        turned = _MSG_TURNED.format(path=path, axes=", ".join(map(str, axes)))
    return _MSG_SHAPE.format(path=path, found=found, wanted=wanted, turned=turned)


def _take(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in axes)


def _is_turned(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    wide = [tuple(n for n in shape if n != 1) for shape in (found, wanted)]
    return wide[0] != wide[1] and sorted(found) == sorted(wanted)


def _quantized(
    path: str,
    value: Any,
    how: HowToQuantize,
    shape: tuple[int, ...],
    boxed: Any,
    measured: HowToQuantize | None = None,
    learned: Mapping[str, Any] = {},
    absmax: Any = None,
) -> Any:
    box = value if _is_box(value) else None
    array = unboxed(box) if box is not None else value
    if isinstance(array, WithAux | QArray):
        raise ValueError(_MSG_QUANTIZED.format(path=path, array=_bare(array)))
    if not isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ValueError(
            f"params is not a pure dict of jax.Array: {path} is a {type(array).__name__}. For NNX "
            "pass nnx.to_pure_dict(nnx.state(model))."
        )
    if tuple(array.shape) != shape:
        found = tuple(array.shape)
        # A template may hold the shape a parameter is used in (stored flat, used as heads); a
        # reshape of a transposed one would pass too, and scramble it.
        if boxed is _WHOLE or prod(found) != prod(shape) or _is_turned(found, shape):
            raise ValueError(_shape_message(path, found, shape))
        array = _reshaped(array, shape)
    check_finite(array, path)
    packs = boxed is _WHOLE and box is None  # a template is another program's, and plain
    if isinstance(array, jax.ShapeDtypeStruct):
        q = abstract_quantized(array, how)
        q = for_kernels(q, how) if packs else q
    elif absmax is not None:
        q = _with_absmax(jnp.asarray(array), absmax, how)
        warn_clamped(q.scale, path, stacklevel=5)
        q = for_kernels(q, how) if packs else q
    elif is_learned(how):
        scale = trained_scale(path, shape, how, learned)
        scale = unboxed(scale) if _is_box(scale) else scale
        check_finite(scale, path + QSCALE)
        q = quantize_learned(jnp.asarray(array), jnp.asarray(scale), how)
        warn_clamped(q.scale, path, stacklevel=5)
        q = for_kernels(q, how) if packs else q
    else:
        store = quantize_for_kernels if packs else quantize_plain
        q, scale = store(jnp.asarray(array), how, measured)
        warn_clamped(scale, path, stacklevel=5)
    return WithAux(rebox(q, None if boxed is _WHOLE else boxed, box), how)


def _with_absmax(array: jax.Array, absmax: Any, how: HowToQuantize) -> QArray:
    edges = {"absmax": jnp.broadcast_to(absmax, get_scale_shape(array.shape, how))}
    scale, _ = compute_scale_zero_point(edges, how.qtype, how.scale_dtype or array.dtype)
    return quantize_with_scale_zero_point(array, how.qtype, scale)


def warn_clamped(scale: Any, path: str, stacklevel: int = 2) -> None:
    """float16 holds scales from 6e-5 to 65504; beyond, a scale is clamped and accuracy is lost."""
    if scale.dtype != jnp.float16 or isinstance(scale, jax.core.Tracer):
        return
    info = jnp.finfo(jnp.float16)
    clamped = int(jnp.sum((scale <= float(info.tiny)) | (scale >= float(info.max))))
    if clamped:
        warnings.warn(
            f"{path}: {clamped} of {scale.size} scales do not fit float16 and were clamped, "
            "which costs accuracy. Use scale_dtype='bfloat16' or 'float32' in the rule for it.",
            stacklevel=stacklevel + 1,
        )


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return array.reshape(shape)


def rebox(q: QArray, boxed: QArray | None, box: Any = None) -> QArray:
    """Put partitioning boxes on the parts: those of the template, or the float parameter's own."""
    if boxed is not None:
        parts = {"qvalue": q.qvalue, "scale": q.scale, "zero_point": q.zero_point}
        new = {
            name: getattr(boxed, name).replace_boxed(part) if part is not None else None
            for name, part in parts.items()
        }
        return q.replace(**new)
    if box is None:
        return q
    return box_parts(q, box)


def box_parts(q: QArray, box: Any) -> QArray:
    """Each part in a box like the float parameter's, without axis names where it is one wide."""

    def boxed(part):
        names = getattr(box, "names", None)
        new = box.replace_boxed(part)
        if names is None:
            return new
        kept = tuple(
            None if n == 1 and m != 1 else name
            for name, n, m in zip(names, part.shape, q.shape, strict=True)
        )
        return new.replace(names=kept)

    return jax.tree.map(boxed, q)


def unbox_parts(q: QArray) -> QArray:
    """A QArray without boxes on its parts."""
    return jax.tree.map(lambda x: unboxed(x) if _is_box(x) else x, q, is_leaf=_is_box)


def unboxed(box: Any) -> Any:
    """What is in a box, as it is: under a mesh, `unbox()` would place it too (even a QArray)."""
    try:
        return box.unbox(apply_constraint=False)
    except TypeError:  # a box of another kind, which never places anything
        return box.unbox()


def _is_box(value: Any) -> bool:
    """Flax's partitioning boxes, by their documented interface (no framework is imported here)."""
    return hasattr(value, "unbox") and hasattr(value, "replace_boxed")


def is_box(value: Any) -> bool:
    """Whether a tree node is a framework's partitioning box around a parameter."""
    return _is_box(value)


def _path(keypath: tuple[Any, ...]) -> str:
    return key_name(keypath)
