"""Runs a traced program with its Sites replaced, and reads it with taps."""

from fewbit._util import face as _face

__getattr__, __dir__ = _face(__name__)
