"""Training with few bits: the provider, histories, learned scales, collected ranges, noise."""

from fewbit._util import face as _face

__getattr__, __dir__ = _face(__name__)
