"""Quantize parameters: a pure function of float leaves and a plan (or template), leaf by leaf.

No model is run. A subtree works as well as the whole, so weights can be streamed; the result of one
leaf depends on that leaf alone.
"""

from collections.abc import Mapping
from itertools import permutations
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._plan import Plan
from fewbit._qarray_losses import IN_A_RULE, tell_losses
from fewbit._scales import scale_type
from fewbit.adapter_params import LoraParams
from fewbit.boxes import is_box, rebox, unboxed
from fewbit.calls import key_name
from fewbit.layouts import for_kernels
from fewbit.learned_scales import is_learned, split_learned, trained_scale
from fewbit.numerics import should_quantize
from fewbit.observed import Statistics
from fewbit.param_templates import WHOLE, Template
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
from fewbit.static_statistics import add_scales, belongs, is_fixed
from fewbit.storing import quantize_for_kernels, quantize_plain
from fewbit.training.learned import QSCALE, quantize_learned

_MSG_TRAINS = (
    "This plan is of a model that trains (a QtProvider's): its parameters stay float, and "
    "quantize_params would change nothing. After training write fewbit.to_ptq(model, params), or "
    "quantize by a plan that serves: fewbit.plan(model, rules, *inputs)."
)
_MSG_SHAPE = (
    "{path} has shape {found}, expected {wanted}.{turned} The plan or template was made for "
    "another model or other sizes: make it again with this model."
)
_MSG_TURNED = " It looks transposed: pass params with {path} as `array.transpose({axes})`."
_MSG_NO_STATS = (
    "{what} that the rules ask for {have} no range: {names}. "
    "Collect statistics and pass them: stats = fewbit.calibrate(model, rules, params, batches), "
    "then quantize_params(params, plan, stats). allow_missing_params=True quantizes the weights "
    "alone."
)
_MSG_QUANTIZED = (
    "{path} is quantized already ({array!r}). quantize_params takes float parameters; dequantize "
    "it first to store it in another format: fewbit.dequantize(...)."
)
_MSG_NOT_FLOAT = (
    "{path} is {dtype}. Only bfloat16, float16, float32 and float64 parameters are quantized; cast "
    "it first if it holds real numbers, or keep it as it is with an earlier rule."
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
    `QuantizedParams`. Ranges that a rule fixes need none; a plan with other static scales is an
    error without `quant_stats`, unless `allow_missing_params=True` asks for the weights alone (or
    the parameters are abstract or traced, where there is nothing to run yet).

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
    if isinstance(abstract_quantized_params, Plan) and abstract_quantized_params.trains:
        raise ValueError(_MSG_TRAINS)
    template = Template(abstract_quantized_params, allow_extra_params)
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
        path = key_name(keypath)
        seen.append(path)
        if path not in template.leaves and not hasattr(value, "shape") and not is_box(value):
            return value  # a function or a number among the parameters, as Equinox modules have
        found = template.leaf(path)
        if found is None:
            return value
        how, shape, boxed = found
        if how is None or shape is None:
            return _kept(path, value, shape)
        return _quantized(path, value, how, shape, boxed, learned=learned, absmax=known.get(path))

    result = jax.tree_util.tree_map_with_path(
        leaf, params, is_leaf=lambda x: is_box(x) or isinstance(x, WithAux | QArray)
    )
    if not allow_missing_params:
        template.check_complete(seen)
    if quant_stats is None and not allow_missing_params:
        _check_needs_no_statistics(template, seen, params)
    if quant_stats is None and not any(map(is_fixed, template.scales.values())):
        return result
    plan = abstract_quantized_params if isinstance(abstract_quantized_params, Plan) else None
    check_statistics(quant_stats, plan, template)
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


def static_scales(plan: Plan, quant_stats: Any) -> dict[str, WithAux]:
    """The static scales of a plan by name, of statistics and of rules that fix them."""
    template = Template(plan, False)
    check_statistics(quant_stats, plan, template)
    given = quant_stats is not None
    stats = quant_stats if given else {}
    nowhere: Any = dict(by_site=False, present=(), known=())
    made = add_scales({}, template.scales, stats, whole=given, allow_extra=False, **nowhere)
    flat, _ = jax.tree_util.tree_flatten_with_path(made, is_leaf=lambda x: isinstance(x, WithAux))
    return {key_name(key): value for key, value in flat}


def check_statistics(quant_stats: Any, plan: Plan | None, template: Template) -> None:
    """Raise if statistics are of another model, or cannot tell what a scale's method asks for."""
    if not isinstance(quant_stats, Statistics):
        return
    if plan is not None:
        quant_stats.check_model(plan)
    quant_stats.check_methods(template.scales.values())


def _check_needs_no_statistics(template: Template, seen: list[str], params: Any) -> None:
    wanted = [
        name
        for name, scale in template.scales.items()
        if not is_fixed(scale) and (template.by_site or belongs(name, seen, template.leaves))
    ]
    later = jax.core.Tracer | jax.ShapeDtypeStruct
    if not wanted or any(isinstance(leaf, later) for leaf in jax.tree.leaves(params)):
        return
    names = ", ".join(wanted[:5]) + (", ..." if len(wanted) > 5 else "")
    one = len(wanted) == 1
    what = "A static activation scale" if one else f"{len(wanted)} static activation scales"
    raise ValueError(_MSG_NO_STATS.format(what=what, have="has" if one else "have", names=names))


def quantize_leaf(
    path: str,
    value: Any,
    leaf: Any,
    measured: HowToQuantize | None = None,
    learned: Mapping[str, Any] = {},
    absmax: Any = None,
) -> Any:
    """One parameter as the plan's leaf says; `measured` as in `storing.quantize_for_kernels`.

    `learned` are the scales that training found, `absmax` is a range that is known.
    """
    how = leaf.how.replace(rule=leaf.rule)
    return _quantized(path, value, how, tuple(leaf.shape), WHOLE, measured, learned, absmax)


def _kept(path: str, value: Any, shape: tuple[int, ...] | None) -> Any:
    """A parameter that stays as it is, if it is the one that is meant."""
    array = unboxed(value) if is_box(value) else value
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
    box = value if is_box(value) else None
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
        if boxed is WHOLE or prod(found) != prod(shape) or _is_turned(found, shape):
            raise ValueError(_shape_message(path, found, shape))
        array = _reshaped(array, shape)
    if not should_quantize(array.dtype):
        raise ValueError(_MSG_NOT_FLOAT.format(path=path, dtype=array.dtype))
    check_finite(array, path)
    packs = boxed is WHOLE and box is None  # a template is another program's, and plain
    if isinstance(array, jax.ShapeDtypeStruct):
        q = abstract_quantized(array, how)
        q = for_kernels(q, how) if packs else q
    elif absmax is not None:
        q = _with_absmax(jnp.asarray(array), absmax, how)
        _tell(array, q.scale, how, path)
        q = for_kernels(q, how) if packs else q
    elif is_learned(how):
        scale = trained_scale(path, shape, how, learned)
        scale = unboxed(scale) if is_box(scale) else scale
        check_finite(scale, path + QSCALE)
        q = quantize_learned(jnp.asarray(array), jnp.asarray(scale), how)
        _tell(array, q.scale, how, path)
        q = for_kernels(q, how) if packs else q
    else:
        store = quantize_for_kernels if packs else quantize_plain
        q, scale = store(jnp.asarray(array), how, measured)
        _tell(array, scale, how, path)
    return WithAux(rebox(q, None if boxed is WHOLE else boxed, box), how)


def _with_absmax(array: jax.Array, absmax: Any, how: HowToQuantize) -> QArray:
    edges = {"absmax": jnp.broadcast_to(absmax, get_scale_shape(array.shape, how))}
    dtype = scale_type(array.dtype, how.scale_dtype)
    scale, _ = compute_scale_zero_point(edges, how.qtype, dtype)
    return quantize_with_scale_zero_point(array, how.qtype, scale)


def _tell(array: Any, scale: Any, how: HowToQuantize, path: str) -> None:
    tell_losses(array, scale, how, path, IN_A_RULE, stacklevel=6)


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return array.reshape(shape)
