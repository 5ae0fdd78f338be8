"""What the layout primitives do to a QArray: move the codes and let the scales follow.

For every move, `dequantize(move(q)) == move(dequantize(q))` exactly. Where the scales cannot follow
(a slice that starts inside a tile), the move raises `CannotMove` with the axis and the reason, and
the caller decides whether to dequantize.
"""

from fewbit._layout_moves import CannotMove as CannotMove
from fewbit._layout_moves import broadcast_in_dim as broadcast_in_dim
from fewbit._layout_moves import concatenate as concatenate
from fewbit._layout_moves import dynamic_slice as dynamic_slice
from fewbit._layout_moves import expand_dims as expand_dims
from fewbit._layout_moves import index as index
from fewbit._layout_moves import rebuild as rebuild
from fewbit._layout_moves import rev as rev
from fewbit._layout_moves import settle as settle
from fewbit._layout_moves import slice_ as slice_
from fewbit._layout_moves import split as split
from fewbit._layout_moves import squeeze as squeeze
from fewbit._layout_moves import transpose as transpose
from fewbit._lookups import gather as gather
from fewbit._lookups import getitem as getitem
from fewbit._lookups import take_rows as take_rows
from fewbit._reshape import reshape as reshape
