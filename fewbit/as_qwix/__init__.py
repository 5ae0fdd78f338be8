"""Programs that import qwix, run on fewbit as they are: `docs/as-qwix.md`.

>>> from fewbit.as_qwix import TABLE
>>> TABLE['qwix']['quantize_model']
'fewbit.quantize_model'
"""

from fewbit.as_qwix._install import install_as_qwix as install_as_qwix
from fewbit.as_qwix._table import TABLE as TABLE
