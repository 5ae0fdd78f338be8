"""An NNX model and its quantized twin, ready to run on one batch. Neither is changed by it."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from fewbit.calls import TRACED
from fewbit.engine import Traced, is_stored
from fewbit.models import nnx_calls
from fewbit.models.nnx_structure import value_of
from fewbit.models.pairs import Pair

_NOTE_STATE = (
    "Variables other than Params differ between the two models ({names}): both runs use the "
    "quantized model's"
)
_SHOWN = 3


def pair(
    model: nnx.Module,
    quantized: nnx.Module,
    provider: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str,
) -> Pair:
    """Both models, called as `method(*args, **kwargs)`."""
    ready = nnx_calls.prepare(quantized, provider, method, args, kwargs)
    plain = nnx_calls.prepare(model, provider, method, args, kwargs)
    differing = _differing_state(model, quantized)
    notes: tuple[str, ...] = ()
    if differing:
        more = ", ..." if len(differing) > _SHOWN else ""
        notes = (_NOTE_STATE.format(names=", ".join(differing[:_SHOWN]) + more),)
    return Pair(
        "nnx",
        ready.runner,
        ready.dynamic,
        plain.runner,
        plain.dynamic,
        outputs=_outputs,
        notes=notes,
    )


def _outputs(traced: Traced) -> int:
    """A traced NNX call returns the method's own results first, the state after them."""
    after = jax.tree.unflatten(traced.out_tree, list(range(len(traced.forwarded))))
    return sum(static is TRACED for static in after.out.static)


def _differing_state(model: nnx.Module, quantized: nnx.Module) -> list[str]:
    """Variables that are no parameters and have other values in the two models."""

    def others(m: nnx.Module) -> dict[str, Any]:
        flat = nnx.to_flat_state(nnx.state(m, nnx.Not(nnx.Param)))
        return {"/".join(map(str, path)): value_of(variable) for path, variable in flat}

    mine, theirs = others(model), others(quantized)
    return [name for name, value in mine.items() if not _same(value, theirs.get(name))]


def _same(a: Any, b: Any) -> bool:
    leaves, other = (jax.tree.leaves(x, is_leaf=is_stored) for x in (a, b))
    return len(leaves) == len(other) and all(
        x is y or np.array_equal(_bits(x), _bits(y)) for x, y in zip(leaves, other, strict=True)
    )


def _bits(value: Any) -> Any:
    key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if key else value
