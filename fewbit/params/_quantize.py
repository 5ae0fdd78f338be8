"""Parameter trees: quantized by a plan or a template, and taken apart for an optimizer.

Quantizing is a pure function of float leaves, and no model is run. A subtree works as well as the
whole, so weights can be streamed; the result of one leaf depends on that leaf alone.
"""

import copy
from collections.abc import Mapping
from itertools import permutations
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import describe, is_array_like, key_name, nearest
from fewbit.calibration import Statistics, add_scales, belongs, is_fixed
from fewbit.kernels import for_kernels, quantize_for_kernels, quantize_plain, refuse_parts
from fewbit.numerics import should_quantize
from fewbit.planning import (
    SCALE,
    LoraParams,
    Plan,
    QuantizedParams,
    ScalePlan,
    is_static_scale,
    name_of_site,
)
from fewbit.qarray import (
    IN_A_RULE,
    HowToQuantize,
    PanelArray,
    QArray,
    WithAux,
    abstract_quantized,
    apart,
    check_finite,
    compute_scale_zero_point,
    get_scale_shape,
    is_box,
    is_leaf,
    is_part,
    is_stored,
    pack,
    quantize_with_scale_zero_point,
    rebox,
    repack,
    scale_type,
    tell_losses,
    unboxed,
)
from fewbit.training import QSCALE, is_learned, quantize_learned, split_learned, trained_scale

# --- What each parameter should become: from a plan, or from a tree of abstract quantized leaves --

_MSG_EXTRA = (
    "{path} is not found in the abstract_quantized_params.{near} Pass allow_extra_params=True to "
    "leave out parameters that the model does not have."
)
_MSG_MISSING = (
    "{count} of the plan's parameters {are} missing: {paths}.{near} Give the whole tree, or pass "
    "allow_missing_params=True to quantize a part of it."
)
_MSG_NO_TEMPLATE = (
    "quantize_params takes a Plan or a template as its second argument, got {found}. Make one: "
    "quantize_params(params, fewbit.plan(model, rules, *inputs)), or for Linen "
    "quantize_params(params, jax.eval_shape(quantized.init, key, x)['params'])."
)

# How a leaf is quantized (None: not at all), its shape if known, and the boxes of its template.
Becomes = tuple[HowToQuantize | None, tuple[int, ...] | None, Any]
WHOLE = object()  # a plan's leaf: its shape is the parameter's own


class Template:
    """What a leaf should become, from a plan or from a tree of abstract quantized leaves."""

    def __init__(self, source: Any, allow_extra: bool):
        self.allow_extra, self.whole = allow_extra, isinstance(source, Plan)
        self.is_nnx = hasattr(source, "_fewbit_pure_dict")
        self.adapters: set[str] = set()  # may be there already, or come later
        self.leaves: dict[str, Becomes] = {}
        self.scales: dict[str, ScalePlan] = {}
        self.by_site = isinstance(source, QuantizedParams)
        if isinstance(source, Plan):
            self.by_site = source.kind == "function"
            self.scales = {scale.name: scale for scale in source.scales}
            for leaf in source.leaves:
                how = leaf.how and leaf.how.replace(rule=leaf.rule)
                self.leaves[leaf.path] = (how, tuple(leaf.shape), WHOLE)
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
        if self.is_nnx:
            source = source._fewbit_pure_dict()
        refuse_parts(source, "fewbit.quantize_params(params, model)")
        flat, _ = jax.tree_util.tree_flatten_with_path(
            source, is_leaf=lambda x: isinstance(x, WithAux) or is_box(x)
        )
        if source is None or (
            flat and not any(hasattr(value, "shape") or is_box(value) for _, value in flat)
        ):
            raise TypeError(_MSG_NO_TEMPLATE.format(found=_kind(source)))
        for key, value in flat:
            path = key_name(key)
            if not is_static_scale(path, value):
                self.leaves[path] = _template_leaf(value)
            elif path.endswith(SCALE):
                name = path.removesuffix(SCALE)
                self.scales[name] = _template_scale(name, value, "")

    @property
    def learns(self) -> bool:
        """Whether a parameter is stored with a scale that training found."""
        return any(is_learned(how) for how, _, _ in self.leaves.values())

    def leaf(self, path: str) -> Becomes | None:
        if path not in self.leaves and not self.allow_extra:
            near = nearest(path, self.leaves, " The nearest are {}.", 3, 0.6, show=str)
            raise ValueError(_MSG_EXTRA.format(path=path, near=near))
        return self.leaves.get(path)

    def check_complete(self, seen: list[str]) -> None:
        """A plan is of a whole model; a template may be asked for any part."""
        given = {*seen, *self.adapters}
        missing = [path for path in self.leaves if path not in given]
        if not missing or not self.whole:
            return
        extra = [path for path in seen if path not in self.leaves]
        near = " {} is given, which the plan does not know."
        raise ValueError(
            _MSG_MISSING.format(
                count=len(missing),
                are="is" if len(missing) == 1 else "are",
                paths=", ".join(missing[:5]) + (", ..." if len(missing) > 5 else ""),
                near=nearest(missing[0], extra, near, cutoff=0.6),
            )
        )


def _kind(value: Any) -> str:
    words = f"a {type(value).__name__}" if value is not None else "None"
    items = list(value) if isinstance(value, list | tuple) else []
    return words + (f" of {type(items[0]).__name__} objects" if items else "")


def _template_scale(name: str, value: WithAux, site: str) -> ScalePlan:
    array, how = value.array, value.how
    return ScalePlan(name, site, how.replace(rule=None), array.shape, str(array.dtype), how.rule)


def _template_leaf(value: Any) -> Becomes:
    if not isinstance(value, WithAux):
        shape = getattr(unboxed(value) if is_box(value) else value, "shape", None)
        return None, None if shape is None else tuple(shape), None
    q = value.array
    if is_box(q.data):
        return value.how, tuple(unboxed(q.data).shape), q
    return value.how, tuple(q.shape), q if q.layout != "plain" else None


# --- Each leaf as it should become ----------------------------------------------------------------

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
    (then `params` is a pure dict, and so is what comes back: `nnx.update(model, ...)` takes it).
    A template takes a subtree, so that weights can be streamed; a Plan takes one with
    `allow_missing_params=True`. With `allow_extra_params=True` parameters that it does not know
    are left out (in a list or an object None takes their place).

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
        rest = quantize_params(
            params.params,
            abstract_quantized_params,
            quant_stats,
            allow_extra_params=allow_extra_params,
            allow_missing_params=allow_missing_params,
            weight_absmax=weight_absmax,
        )
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
            return _EXTRA
        how, shape, boxed = found
        if how is None or shape is None:
            return _kept(path, value, shape)
        return _quantized(path, value, how, shape, boxed, learned=learned, absmax=known.get(path))

    result = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_leaf)
    if allow_extra_params:
        result = _without_extra(result)
        result = {} if result is _EXTRA else result
    given = quant_stats is not None
    if not allow_missing_params:
        template.check_complete(seen)
        if not given:
            _check_needs_no_statistics(template, seen, params)
    if given or any(map(is_fixed, template.scales.values())):
        check_statistics(quant_stats, abstract_quantized_params, template)
        result = add_scales(
            result,
            template.scales,
            quant_stats if given else {},
            by_site=template.by_site,
            whole=template.whole and given and not allow_missing_params,
            allow_extra=allow_extra_params,
            present=seen,
            known=template.leaves,
        )
    return apart(result) if template.is_nnx else result


_EXTRA = object()  # in the place of a parameter that is left out


def _without_extra(tree: Any) -> Any:
    """The tree without the parameters that are left out; `_EXTRA` if nothing else was in it."""
    if isinstance(tree, Mapping):
        parts = {key: _without_extra(part) for key, part in tree.items()}
        kept = {key: part for key, part in parts.items() if part is not _EXTRA}
        if parts and not kept:
            return _EXTRA
        if len(kept) == len(parts) and all(kept[key] is tree[key] for key in kept):
            return tree
        if isinstance(tree, dict):  # also one with a default, which only a copy keeps
            new = copy.copy(tree)
            new.clear()
            new.update(kept)
            return new
        return type(tree)(kept)  # type: ignore[call-arg]
    if tree is _EXTRA or is_leaf(tree):
        return tree
    children, structure = jax.tree.flatten(tree, is_leaf=lambda part: part is not tree)
    if not children or children[0] is tree:
        return tree
    found = map(_without_extra, children)
    return jax.tree.unflatten(structure, [None if part is _EXTRA else part for part in found])


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


def check_statistics(quant_stats: Any, source: Any, template: Template) -> None:
    """Raise if statistics are of another model, or cannot tell what a scale's method asks for."""
    if not isinstance(quant_stats, Statistics):
        return
    if isinstance(source, Plan):
        quant_stats.check_model(source)
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
    packs: bool = True,
) -> Any:
    """One parameter as the plan's leaf says; `measured` as in `kernels.quantize_for_kernels`.

    `learned` are the scales that training found, `absmax` is a range that is known. `packs=False`
    stores one code per element.
    """
    how = leaf.how.replace(rule=leaf.rule)
    like = WHOLE if packs else None
    return _quantized(path, value, how, tuple(leaf.shape), like, measured, learned, absmax)


def _opened(path: str, value: Any) -> Any:
    """What is in a parameter's box, if it has one, and is not quantized yet."""
    array = unboxed(value) if is_box(value) else value
    if is_stored(array):
        bare = array.array if isinstance(array, WithAux) else array
        raise ValueError(_MSG_QUANTIZED.format(path=path, array=bare))
    return array


def _kept(path: str, value: Any, shape: tuple[int, ...] | None) -> Any:
    """A parameter that stays as it is, if it is the one that is meant."""
    array = _opened(path, value)
    found = getattr(array, "shape", None)
    if shape is not None and found is not None and tuple(found) != shape:
        raise ValueError(_shape_message(path, tuple(found), shape))
    return value


def _shape_message(path: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    turned = ""
    if _is_turned(found, wanted):
        orders = permutations(range(len(found)))
        axes = next(order for order in orders if tuple(found[k] for k in order) == wanted)
        turned = _MSG_TURNED.format(path=path, axes=", ".join(map(str, axes)))
    return _MSG_SHAPE.format(path=path, found=found, wanted=wanted, turned=turned)


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
    array = _opened(path, value)
    if not isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ValueError(
            f"params is not a pure dict of jax.Array: {path} is a {type(array).__name__}. For NNX "
            "pass nnx.to_pure_dict(nnx.state(model))."
        )
    found = tuple(array.shape)
    if found != shape:
        # A template may hold the shape a parameter is used in (stored flat, used as heads); a
        # reshape of a transposed one would pass too, and scramble it.
        if boxed is WHOLE or prod(found) != prod(shape) or _is_turned(found, shape):
            raise ValueError(_shape_message(path, found, shape))
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct(shape, array.dtype)
        else:
            array = array.reshape(shape)
    if not should_quantize(array.dtype):
        raise ValueError(_MSG_NOT_FLOAT.format(path=path, dtype=array.dtype))
    check_finite(array, path)
    packs = boxed is WHOLE and box is None  # a template is another program's, and plain
    scale = None
    if isinstance(array, jax.ShapeDtypeStruct):
        q = abstract_quantized(array, how)
    elif absmax is not None:
        q = _with_absmax(jnp.asarray(array), absmax, how)
    elif is_learned(how):
        parameter = trained_scale(path, shape, how, learned)
        parameter = unboxed(parameter) if is_box(parameter) else parameter
        check_finite(parameter, path + QSCALE)
        q = quantize_learned(jnp.asarray(array), jnp.asarray(parameter), how)
    else:
        store = quantize_for_kernels if packs else quantize_plain
        q, scale = store(jnp.asarray(array), how, measured)
    if scale is None:
        scale, q = q.scale, for_kernels(q, how) if packs else q
    tell_losses(array, scale, how, path, IN_A_RULE, stacklevel=5)
    if isinstance(boxed, QArray) and not is_box(boxed.data):
        return WithAux(_in_layout_of(boxed, q), how)
    # Boxes are where the parameter has one: a tree without them stays so.
    return WithAux(rebox(q, None if boxed is WHOLE or box is None else boxed, box), how)


def _in_layout_of(template: QArray, q: QArray) -> QArray:
    return repack(q, template) if isinstance(template, PanelArray) else pack(q)


def _with_absmax(array: jax.Array, absmax: Any, how: HowToQuantize) -> QArray:
    edges = {"absmax": jnp.broadcast_to(absmax, get_scale_shape(array.shape, how))}
    dtype = scale_type(array.dtype, how.scale_dtype)
    scale, _ = compute_scale_zero_point(edges, how.qtype, dtype)
    return quantize_with_scale_zero_point(array, how.qtype, scale)


# --- Which leaves gradients reach, and how to give `jax.grad` only those --------------------------

_MSG_NO_PARAMS = (
    "fewbit.{name} takes parameters (a tree of arrays), got {found}. Write fewbit.{name}(params)."
)
_MSG_PARTS = (
    "The two parts do not fit together at {path}: {what}. merge_trainable takes the two trees that "
    "one call of split_trainable returned; each leaf is None in exactly one of them."
)


def trainable(params: Any) -> Any:
    """A tree of bools: True where a leaf can be differentiated (float, not quantized).

    The mask for `optax.masked`. Where `jax.grad` says that it got int8, `split_trainable` gives it
    the float leaves alone; for NNX write
    `nnx.grad(loss, argnums=nnx.DiffState(0, fewbit.float_params()))`.

    >>> import fewbit, jax.numpy as jnp
    >>> q = fewbit.quantize(jnp.ones((2, 2)), 'int8')
    >>> trainable({'w': q, 'b': jnp.zeros(2), 'step': jnp.array(0)})
    {'b': True, 'step': False, 'w': False}
    """
    return _mask("trainable", params)


def _mask(name: str, params: Any) -> Any:
    def is_number(value):
        return is_stored(value) or is_array_like(value) or isinstance(value, bool | int | float)

    def can(value):
        # Equinox modules and the like have functions and strings among their leaves.
        if is_whole(value) or not is_number(value):
            return False
        return bool(jnp.issubdtype(jnp.result_type(value), jnp.floating))

    def is_whole(value):  # a scale of an NNX state is a float, and no parameter of its own
        return is_stored(value) or is_part(value)

    leaves = jax.tree.leaves(params, is_leaf=is_stored)
    if params is None or (leaves and not any(map(is_number, leaves))):
        raise TypeError(_MSG_NO_PARAMS.format(name=name, found=describe(params)))
    return jax.tree.map(can, params, is_leaf=is_whole)


def split_trainable(params: Any) -> tuple[Any, Any]:
    """The float leaves and the rest: two trees like `params`, None where the other has a leaf.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8')]
    >>> def f(params, x):
    ...     return x @ params['w'] + params['b']
    >>> params, x = {'w': jnp.eye(2), 'b': jnp.zeros((1, 2))}, jnp.ones((3, 2))
    >>> params = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    >>> qf = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
    >>> floats, rest = split_trainable(params)
    >>> def loss(floats, rest, x):
    ...     return qf(merge_trainable(floats, rest), x).sum()
    >>> jax.grad(loss)(floats, rest, x)
    {'b': Array([[3., 3.]], dtype=float32), 'w': None}
    """
    mask = _mask("split_trainable", params)
    floats = jax.tree.map(lambda m, v: v if m else None, mask, params)
    rest = jax.tree.map(lambda m, v: None if m else v, mask, params)
    return floats, rest


def merge_trainable(floats: Any, rest: Any) -> Any:
    """The tree that `split_trainable` took apart.

    >>> merge_trainable({'a': 1.0, 'b': None}, {'a': None, 'b': 2})
    {'a': 1.0, 'b': 2}
    """

    def one(keypath, a, b):
        if a is None or b is None:
            return b if a is None else a
        path = jax.tree_util.keystr(keypath)
        raise ValueError(_MSG_PARTS.format(path=path, what="both have a leaf there"))

    try:
        return jax.tree_util.tree_map_with_path(one, floats, rest, is_leaf=_is_whole)
    except ValueError as error:
        if "do not fit together" in str(error):
            raise
        path, what = _first_difference(floats, rest)
        raise ValueError(_MSG_PARTS.format(path=path, what=what)) from error


def _is_whole(value: Any) -> bool:
    return value is None or is_stored(value)


def _first_difference(floats: Any, rest: Any) -> tuple[str, str]:
    """Where two trees part, in words: JAX's own sentence may print whole arrays."""
    kinds = f"the first is {describe(floats)}, the second {describe(rest)}"
    if type(floats) is not type(rest):
        return "the top", kinds
    flat = [jax.tree_util.tree_flatten_with_path(t, is_leaf=_is_whole)[0] for t in (floats, rest)]
    paths = [[jax.tree_util.keystr(key) for key, _ in leaves] for leaves in flat]
    for here, there, which in ((*paths, "first"), (*paths[::-1], "second")):
        only = [path for path in here if path not in set(there)]
        if only:
            return only[0], f"only the {which} has it"
    return "the top", kinds
