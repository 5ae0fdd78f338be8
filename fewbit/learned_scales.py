"""Learned scales in parameter trees: `<w>_qscale` beside the weight `<w>`.

They are no parameters of the float model: front ends take them out before it is traced and hand
them to the run by name, as they do with adapters.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fewbit.beside import owner_of, put_beside, split_beside
from fewbit.boxes import kept_names
from fewbit.calibration import parse_method
from fewbit.decisions import Leaf, Request
from fewbit.jaxprs import unread
from fewbit.qarray import HowToQuantize, get_scale_shape
from fewbit.trace import Program
from fewbit.training.learned import QSCALE, parameter_dtype, start_scale

_MSG_MISSING = (
    "Parameter '{leaf}' has a learned scale by {rule!r}, and there is no '{name}' beside it{more}. "
    "Add scales that start from the weights: params = fewbit.add_learned_scales(model, params, "
    "*inputs) (a Linen model's own init and an NNX model's quantize_model make them too).{near}"
)
_MSG_SHAPE = (
    "The learned scale '{name}' has shape {found}, but '{leaf}' {shape} needs {wanted}: {rule!r}. "
    "Scales that were learned under other groups do not fit: use the rule they were made for, or "
    "start anew with fewbit.add_learned_scales(model, params, *inputs)."
)
_MSG_UNUSED = (
    "The parameters hold the learned scale '{name}', but no rule learns the scales of '{leaf}', so "
    "it would not be used. Write weight_calibration_method='learned' in the rule for it, take it "
    "out, or make the provider with strict=False."
)
_MSG_UNTRAINED = (
    "'{leaf}' is to be stored with learned scales, and the parameters have no '{name}'. A learned "
    "scale is found by training: train with QtProvider(rules) and convert with "
    "fewbit.to_ptq(model, params), or write weight_calibration_method='mse' for weights that were "
    "not trained quantized."
)


def is_learned(how: HowToQuantize | None) -> bool:
    """Whether a weight is stored with a scale that training found."""
    return how is not None and parse_method(how.calibration_method).learned


def split_learned(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A tree without learned scales, and these by full name.

    >>> split_learned({'up': {'w': 1, 'w_qscale': 2}})
    ({'up': {'w': 1}}, {'up/w_qscale': 2})
    """
    return split_beside(tree, (QSCALE,))


def put_learned(tree: Any, scales: Mapping[str, Any]) -> Any:
    """A tree with these scales beside their weights, in the place of those of the same names.

    >>> put_learned({'up': {'w': 1}}, {'up/w_qscale': 2})
    {'up': {'w': 1, 'w_qscale': 2}}
    """
    return put_beside(tree, scales, (QSCALE,))


def learned_leaves(
    leaves: Sequence[Leaf | None], requests: Mapping[str, Request]
) -> dict[str, tuple[Leaf, Request]]:
    """Every parameter whose scale is learned, by the name of the scale."""
    return {
        leaf.path + QSCALE: (leaf, requests[leaf.path])
        for leaf in leaves
        if leaf is not None and leaf.path in requests and is_learned(requests[leaf.path].how)
    }


def abstract_learned(
    leaves: Sequence[Leaf | None], requests: Mapping[str, Request]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every learned scale, by name, as an abstract array."""
    return {
        name: jax.ShapeDtypeStruct(
            get_scale_shape(leaf.shape, request.how), parameter_dtype(leaf.dtype)
        )
        for name, (leaf, request) in learned_leaves(leaves, requests).items()
    }


def check_learned(
    leaves: Sequence[Leaf | None],
    requests: Mapping[str, Request],
    values: Mapping[str, Any],
    strict: bool,
) -> None:
    """Every learned scale is there, in its shape; strictly, none is there without a rule."""
    wanted = learned_leaves(leaves, requests)
    missing = [name for name in wanted if name not in values]
    extra = [name for name in values if name not in wanted]
    if missing:
        leaf, request = wanted[missing[0]]
        close = get_close_matches(missing[0], extra, 1)
        raise ValueError(
            _MSG_MISSING.format(
                leaf=leaf.path,
                rule=request.rule,
                name=missing[0],
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                near=f" There is '{close[0]}', which no rule learns." if close else "",
            )
        )
    for name, (leaf, request) in wanted.items():
        check_scale_shape(name, leaf.shape, request.how, values[name], request.rule)
    if extra and strict:
        name = extra[0]
        raise ValueError(_MSG_UNUSED.format(name=name, leaf=name.removesuffix(QSCALE)))


def check_leftovers(program: Program, leaves: Sequence[Leaf | None]) -> None:
    """No parameter is a learned scale that neither a rule nor the model itself reads."""
    paths = {leaf.path for leaf in leaves if leaf is not None}
    found = {
        k: leaf.path
        for k, leaf in enumerate(leaves)
        if leaf is not None and owner_of(leaf.path, (QSCALE,)) in paths
    }
    if not found:
        return
    idle = unread(program.root.jaxpr)
    name = next((path for k, path in found.items() if idle[k]), None)
    if name is not None:
        raise ValueError(_MSG_UNUSED.format(name=name, leaf=name.removesuffix(QSCALE)))


def check_scale_shape(
    name: str, shape: Sequence[int], how: HowToQuantize, scale: Any, rule: Any
) -> None:
    """A learned scale has the shape that its weight's granularity asks for."""
    wanted, found = get_scale_shape(tuple(shape), how), tuple(scale.shape)
    if found != wanted:
        text = dict(name=name, leaf=name.removesuffix(QSCALE), shape=tuple(shape), rule=rule)
        raise ValueError(_MSG_SHAPE.format(**text, found=found, wanted=wanted))


def trained_scale(path: str, shape: Sequence[int], how: HowToQuantize, scales: Any) -> Any:
    """The scale that was learned for a parameter that is to be stored."""
    name = path + QSCALE
    if name not in scales:
        raise ValueError(_MSG_UNTRAINED.format(leaf=path, name=name))
    check_scale_shape(name, shape, how, scales[name], how.rule)
    return scales[name]


def started(value: Any, how: HowToQuantize) -> Any:
    """Where the learned scale of a parameter begins, on the devices that the parameter is on."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: start_scale(x, how), value)
    scale = start_scale(value, how)
    sharding = getattr(value, "sharding", None)
    if isinstance(value, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return scale
    spec = [*sharding.spec, *[None] * (value.ndim - len(sharding.spec))]
    kept = kept_names(spec, scale.shape, value.shape)
    if any(size % _ways(sharding.mesh, n) for size, n in zip(scale.shape, kept, strict=True)):
        kept = ()
    return jax.device_put(scale, NamedSharding(sharding.mesh, PartitionSpec(*kept)))


def _ways(mesh: Any, entry: Any) -> int:
    ways = 1
    for name in () if entry is None else (entry,) if isinstance(entry, str) else entry:
        ways *= mesh.shape[name]
    return ways
