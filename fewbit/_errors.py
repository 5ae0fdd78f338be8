"""What a value is, for messages: its kind, never its numbers."""

from collections.abc import Mapping
from typing import Any

_SHOWN = 4  # keys of a mapping: enough to recognise it


def describe(value: Any) -> str:
    """A value in a few words: an array by type and shape, a container by what it holds.

    >>> import jax.numpy as jnp
    >>> describe(jnp.ones((2, 3))), describe({'up': jnp.ones(3)}), describe(3), describe(describe)
    ('a float32[2,3] array', "a dict with the key 'up'", 'the int 3', 'the function describe')
    """
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | complex):
        return f"the {type(value).__name__} {value!r}"
    if isinstance(value, str):
        return f"the string {value[:60]!r}{'...' if len(value) > 60 else ''}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return with_article(kind) + _keys(value)
    if isinstance(value, list | tuple):
        return _sequence(kind, value)
    if is_array_like(value):
        return _array(kind, value)
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return with_article(kind)


def is_array_like(value: Any) -> bool:
    """Whether a value has the shape and the type of an array, concrete or abstract.

    >>> import numpy as np
    >>> is_array_like(np.ones(3)), is_array_like([1.0])
    (True, False)
    """
    if isinstance(value, type):
        return False
    return getattr(value, "shape", None) is not None and getattr(value, "dtype", None) is not None


def with_article(noun: str) -> str:
    """
    >>> with_article('int8[3] array'), with_article('Plan')
    ('an int8[3] array', 'a Plan')
    """
    # "a uint8", "a unit": the letter u is mostly spoken as a consonant in names of types.
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def _array(kind: str, value: Any) -> str:
    try:
        shape = ",".join(map(str, value.shape))
    except TypeError:
        return with_article(kind)
    text = f"{value.dtype}[{shape}]"
    if kind in ("QArray", "WithAux"):
        return f"a {kind} that stands for {text}"
    return with_article(f"{text} array")


def _keys(value: Mapping[Any, Any]) -> str:
    names = [repr(key) if isinstance(key, str) else type(key).__name__ for key in value]
    if not names:
        return " without any key"
    more = ", ..." if len(names) > _SHOWN else ""
    return f" with the key{'s' * (len(names) > 1)} {', '.join(names[:_SHOWN])}{more}"


def _sequence(kind: str, value: Any) -> str:
    if not len(value):
        return f"an empty {kind}"
    inner = {type(item).__name__ for item in value}
    if all(is_array_like(item) for item in value):
        return f"{with_article(kind)} of {len(value)} array{'s' * (len(value) > 1)}"
    if len(inner) == 1:
        return f"{with_article(kind)} of {inner.pop()} objects"
    return with_article(kind)
