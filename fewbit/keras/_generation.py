"""How models that hold quantized layers generate faster: what their classes of KerasHub get.

KerasHub is not imported for it: classes are known by their names.
"""

from typing import Any

from fewbit.keras._float_cache import FloatCacheAttention
from fewbit.keras._prompt_pieces import PromptInPieces

_FASTER: dict[str, type] = {
    "CachedGemma3Attention": FloatCacheAttention,
    "Gemma3CausalLM": PromptInPieces,
}


def faster_bases(original: Any) -> tuple[type, ...]:
    """What stands before KerasHub's own class; nothing for anybody else's, subclasses included.

    >>> faster_bases(int)
    ()
    """
    own = original.__module__.partition(".")[0] == "keras_hub"
    return (_FASTER[original.__name__],) if own and original.__name__ in _FASTER else ()
