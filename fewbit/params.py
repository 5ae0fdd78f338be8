"""Quantize parameters: a pure function of float leaves and a plan (or template), leaf by leaf.

No model is run. A subtree works as well as the whole, so weights can be streamed; the result of one
leaf depends on that leaf alone.
"""

from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._plan import Plan
from fewbit.calls import key_name
from fewbit.qarray import HowToQuantize, QArray, WithAux, check_finite, quantize_with

_MSG_EXTRA = (
    "{path} is not found in the abstract_quantized_params.{near} Pass allow_extra_params=True to hand "
    "parameters that the model does not have through unchanged."
)
_MSG_SHAPE = (
    "{path} has shape {found}, expected {wanted}. The plan or template was made for another model or "
    "other sizes: make it again with this model."
)

_quantize_leaf = jax.jit(quantize_with, static_argnums=1)


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    quant_stats: Any = None,
    *,
    allow_extra_params: bool = False,
) -> Any:
    """The same tree with each planned leaf as `WithAux(QArray)`; other leaves pass through.

    `abstract_quantized_params` is a `Plan`, the template `jax.eval_shape(model.init, ...)['params']` of
    a quantized Linen model, or a quantized NNX model (then `params` is a pure dict).

    >>> import fewbit, jax.numpy as jnp
    >>> params = {'w': jnp.linspace(-1, 1, 12).reshape(3, 4), 'b': jnp.zeros(4)}
    >>> f = lambda params, x: x @ params['w'] + params['b']
    >>> plan = fewbit.plan(f, [fewbit.QuantizationRule(weight_qtype='int8')], params, jnp.ones((2, 3)))
    >>> quantize_params(params, plan)['w'].array
    QArray(qvalue=int8[3,4], scale=float32[1,4], qtype=int8)
    """
    if quant_stats:
        raise NotImplementedError(
            "Static activation scales from quant_stats come with calibration. Leave quant_stats out and "
            "use dynamic ranges (act_static_scale=False)."
        )
    template = _Template(abstract_quantized_params, allow_extra_params)

    def leaf(keypath, value):
        path = _path(keypath)
        found = template.leaf(path)
        return value if found is None else _quantized(path, value, *found)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=_is_box)


class _Template:
    """What a leaf should become, from a plan or from a tree of abstract quantized leaves."""

    def __init__(self, source: Any, allow_extra: bool):
        self.allow_extra = allow_extra
        self.leaves: dict[str, tuple[HowToQuantize | None, tuple[int, ...], Any]]
        if isinstance(source, Plan):
            self.leaves = {
                leaf.path: (leaf.how and leaf.how.replace(rule=leaf.rule), tuple(leaf.shape), None)
                for leaf in source.leaves
            }
            return
        if hasattr(source, "_fewbit_pure_dict"):  # an NNX model
            source = source._fewbit_pure_dict()
        flat, _ = jax.tree_util.tree_flatten_with_path(
            source, is_leaf=lambda x: isinstance(x, WithAux) or _is_box(x)
        )
        self.leaves = {_path(key): _template_leaf(value) for key, value in flat}

    def leaf(self, path: str) -> tuple[HowToQuantize, tuple[int, ...], Any] | None:
        if path not in self.leaves:
            if self.allow_extra:
                return None
            near = get_close_matches(path, self.leaves, 3)
            hint = f" The nearest are {', '.join(near)}." if near else ""
            raise ValueError(_MSG_EXTRA.format(path=path, near=hint))
        how, shape, boxes = self.leaves[path]
        return None if how is None else (how, shape, boxes)


def _template_leaf(value: Any) -> tuple[HowToQuantize | None, tuple[int, ...], Any]:
    if not isinstance(value, WithAux):
        return None, (), None
    q = value.array
    if _is_box(q.qvalue):
        return value.how, tuple(unboxed(q.qvalue).shape), q
    return value.how, tuple(q.shape), None


def quantize_leaf(path: str, value: Any, leaf: Any) -> Any:
    """One parameter as the plan's leaf says."""
    return _quantized(path, value, leaf.how.replace(rule=leaf.rule), tuple(leaf.shape), None)


def _quantized(
    path: str, value: Any, how: HowToQuantize, shape: tuple[int, ...], boxed: Any
) -> Any:
    box = value if _is_box(value) else None
    array = unboxed(box) if box is not None else value
    if isinstance(array, WithAux | QArray):
        raise ValueError(
            f"{path} is quantized already ({array!r}). quantize_params takes float parameters; "
            "dequantize it first to store it in another format."
        )
    if not isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ValueError(
            f"params is not a pure dict of jax.Array: {path} is a {type(array).__name__}. For NNX pass "
            "nnx.to_pure_dict(nnx.state(model))."
        )
    if tuple(array.shape) != shape:
        if np.prod(array.shape) != np.prod(shape):
            raise ValueError(_MSG_SHAPE.format(path=path, found=tuple(array.shape), wanted=shape))
        array = array.reshape(shape)  # stored flat, used in another shape: the template's counts
    check_finite(array, path)
    if isinstance(array, jax.ShapeDtypeStruct):
        q = jax.eval_shape(lambda x: quantize_with(x, how), array)
    else:
        q = _quantize_leaf(jnp.asarray(array), how)
    return WithAux(rebox(q, boxed, box), how)


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
    """Each part in a box like the float parameter's, its axis names dropped where the part is one wide."""

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
    """What is in a box, as it is: under a mesh, `unbox()` would also place it (and whole QArrays)."""
    try:
        return box.unbox(apply_constraint=False)
    except TypeError:  # a box of another kind, which never places anything
        return box.unbox()


def _is_box(value: Any) -> bool:
    """Flax's partitioning boxes, by their documented interface (no framework is imported here)."""
    return hasattr(value, "unbox") and hasattr(value, "replace_boxed")


def is_box(value: Any) -> bool:
    return _is_box(value)


def _path(keypath: tuple[Any, ...]) -> str:
    return key_name(keypath)


def trainable(params: Any) -> Any:
    """A tree of bools: True where a leaf can be differentiated (float, not quantized).

    The mask for `optax.masked`, and the answer to "jax.grad got int8": differentiate the float leaves
    only.

    >>> import fewbit, jax.numpy as jnp
    >>> q = fewbit.quantize(jnp.ones((2, 2)), 'int8')
    >>> trainable({'w': q, 'b': jnp.zeros(2), 'step': jnp.array(0)})
    {'b': True, 'step': False, 'w': False}
    """

    def can(value):
        if isinstance(value, WithAux | QArray):
            return False
        return bool(jnp.issubdtype(jnp.result_type(value), jnp.floating))

    return jax.tree.map(can, params, is_leaf=lambda x: isinstance(x, WithAux | QArray))
