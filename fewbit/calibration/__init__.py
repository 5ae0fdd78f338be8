"""What calibration saw at each operand, and the static ranges made from it."""

from fewbit._util import face as _face

__getattr__, __dir__ = _face(__name__)
