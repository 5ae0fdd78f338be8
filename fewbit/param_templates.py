"""What each parameter should become: from a plan, or from a tree of abstract quantized leaves."""

from difflib import get_close_matches
from typing import Any

import jax

from fewbit._plan import Plan, ScalePlan
from fewbit.boxes import is_box, unboxed
from fewbit.calls import key_name
from fewbit.learned_scales import is_learned
from fewbit.qarray import HowToQuantize, WithAux
from fewbit.static_scales import SCALE, QuantizedParams, is_static_scale, name_of_site

_MSG_EXTRA = (
    "{path} is not found in the abstract_quantized_params.{near} Pass allow_extra_params=True to "
    "hand parameters that the model does not have through unchanged."
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

WHOLE = object()  # a plan's leaf: its shape is the parameter's own


class Template:
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
                    WHOLE,
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
            source, is_leaf=lambda x: isinstance(x, WithAux) or is_box(x)
        )
        if source is None or (
            flat and not any(hasattr(value, "shape") or is_box(value) for _, value in flat)
        ):
            raise TypeError(_MSG_NO_TEMPLATE.format(found=_kind(source)))
        self.leaves = {}
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


def _kind(value: Any) -> str:
    words = f"a {type(value).__name__}" if value is not None else "None"
    items = list(value) if isinstance(value, list | tuple) else []
    return words + (f" of {type(items[0]).__name__} objects" if items else "")


def _template_scale(name: str, value: WithAux, site: str) -> ScalePlan:
    array, how = value.array, value.how
    return ScalePlan(name, site, how.replace(rule=None), array.shape, str(array.dtype), how.rule)


def _template_leaf(value: Any) -> tuple[HowToQuantize | None, tuple[int, ...] | None, Any]:
    if not isinstance(value, WithAux):
        shape = getattr(unboxed(value) if is_box(value) else value, "shape", None)
        return None, None if shape is None else tuple(shape), None
    q = value.array
    if is_box(q.qvalue):
        return value.how, tuple(unboxed(q.qvalue).shape), q
    return value.how, tuple(q.shape), None
