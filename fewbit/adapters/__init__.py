"""Low-rank factors beside weights: made, checked, run; the provider of LoRA and QLoRA."""

from fewbit._util import face as _face

__getattr__, __dir__ = _face(__name__)
