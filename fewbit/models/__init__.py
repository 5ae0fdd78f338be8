"""Front ends: models of each kind planned, quantized, calibrated, converted and paired."""

from fewbit._util import face as _face

__getattr__, __dir__ = _face(__name__)
