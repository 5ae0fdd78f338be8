"""Better weights for the same plan, under the names people know; each is still to come.

>>> from fewbit.contrib import gptq
>>> gptq.GptqRule
Traceback (most recent call last):
    ...
NotImplementedError: fewbit.gptq is not there yet. ...
"""

from typing import Any as _Any

from fewbit._absent import MODULES as _MODULES
from fewbit._absent import stand_in as _stand_in


def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        return _stand_in(name)
    raise AttributeError(f"fewbit.contrib has no {name!r}. It has {', '.join(_MODULES)}.")
