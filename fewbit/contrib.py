"""Better weights for the same plan, under the names people know; each is still to come.

>>> from fewbit.contrib import gptq
>>> gptq.GptqRule
Traceback (most recent call last):
    ...
NotImplementedError: fewbit.gptq is not there yet. ...
"""

from typing import Any

from fewbit._later import MODULES, stand_in


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return stand_in(name)
    raise AttributeError(f"fewbit.contrib has no {name!r}. It has {', '.join(MODULES)}.")
