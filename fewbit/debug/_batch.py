"""A batch as people hold it, as the arguments of one call; and what goes wrong with it, told."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from fewbit._errors import describe, is_array_like
from fewbit.engine import UntraceableModelError

_MSG_EMPTY = (
    "The batch is empty. Pass what the model is called with: one array, a tuple of arguments, or a "
    "dict of keyword arguments."
)
_MSG_SHAPE = (
    "The model does not take this batch ({batch}): {error} Pass what it is called with: one array, "
    "a tuple of arguments, or a dict of keyword arguments."
)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: a tuple is several, a dict with string keys keywords.

    >>> arguments((1, 2)), arguments({'x': 1}), arguments(3)
    (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    if isinstance(batch, tuple):
        args, kwargs = batch, {}
    elif isinstance(batch, Mapping) and batch and all(isinstance(k, str) for k in batch):
        args, kwargs = (), dict(batch)
    else:
        args, kwargs = (batch,), {}
    if batch is None or not jax.tree.leaves((args, kwargs)):
        raise ValueError(_MSG_EMPTY)
    return args, kwargs


@contextmanager
def telling_about(batch: Any) -> Iterator[None]:
    """Around the float model's trace: what it raises is told with the batch it was called with."""
    try:
        yield
    except UntraceableModelError:
        raise
    except Exception as error:
        first = next(filter(_tells, str(error).strip().split("\n")), "")
        first += "" if first.endswith(".") else "."
        text = f"{type(error).__name__}: {first}"
        raise ValueError(_MSG_SHAPE.format(batch=_shapes(batch), error=text)) from error


def _tells(line: str) -> bool:
    """Whether a line of an error says something: Keras first says where it was raised."""
    return bool(line.strip()) and not line.startswith("Exception encountered when calling")


def _shapes(batch: Any) -> str:
    leaves = jax.tree.leaves(batch)
    texts = [
        f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" if is_array_like(leaf) else describe(leaf)
        for leaf in leaves[:4]
    ]
    return ", ".join(texts) + (", ..." if len(leaves) > 4 else "")
