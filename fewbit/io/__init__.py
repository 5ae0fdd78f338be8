"""Files: reading and writing checkpoints, ours and other people's."""

from fewbit._util import face as _face

__getattr__, __dir__ = _face(__name__)
