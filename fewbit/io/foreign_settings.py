"""Settings out of somebody's config.json: of the right kind before anything is read by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fewbit._patterns import PatternError, compile_pattern
from fewbit.io.errors import CheckpointError, cut

WHERE = "quantization_config"

_MSG_SETTING = f"has a bad {WHERE}.{{key}}"
_MSG_PATTERN = f"has a bad {WHERE}.{{key}}: {{reason}}"
_FIX_SETTING = "Correct it in config.json, or fetch the checkpoint's own again."


def bad_setting(path: str, key: str, expected: str, found: Any) -> CheckpointError:
    """An error about one setting."""
    what = _MSG_SETTING.format(key=key)
    return CheckpointError(path, what, expected=expected, found=cut(found), fix=_FIX_SETTING)


def an_object(path: str, key: str, value: Any) -> Mapping[str, Any]:
    """An object of JSON; nothing at all is an empty one.

    >>> an_object('config.json', 'dynamic', None), an_object('config.json', 'dynamic', {'a': 1})
    ({}, {'a': 1})
    """
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping):
        raise bad_setting(path, key, "an object", value)
    return value


def two_sizes(path: str, key: str, value: Any) -> tuple[int, int] | None:
    """The height and width of a block; older files write '128x128'.

    >>> two_sizes('config.json', 'weight_block_size', '128x64')
    (128, 64)
    """
    if value is None:
        return None
    numbers: Any = value
    if isinstance(value, str):
        words = value.split("x")
        numbers = [int(n) for n in words if n.isdecimal() and len(n) < 10]
    sizes = isinstance(numbers, list | tuple) and len(numbers) == 2
    if not sizes or not all(type(n) is int and 0 < n < 2**31 for n in numbers):
        raise bad_setting(path, key, "two sizes, such as [128, 128]", value)
    return numbers[0], numbers[1]


def check_pattern(path: str, key: str, pattern: Any) -> None:
    """Raise if a pattern is none, or could run away."""
    if not isinstance(pattern, str):
        raise bad_setting(path, key, "a regular expression", pattern)
    try:
        compile_pattern(pattern)
    except PatternError as error:
        raise CheckpointError(
            path, _MSG_PATTERN.format(key=key, reason=error), fix=_FIX_SETTING
        ) from None
    except re.error as error:
        reason = f"{cut(pattern)} is no regular expression ({error})"
        raise CheckpointError(
            path, _MSG_PATTERN.format(key=key, reason=reason), fix=_FIX_SETTING
        ) from None


def begins_like(pattern: str, module: str) -> bool:
    """Whether a module's name begins as the pattern says, which is how these tools match.

    >>> begins_like('.*mlp', 'layers.0.mlp.up')
    True
    """
    return compile_pattern(pattern).matches(module, "start")
