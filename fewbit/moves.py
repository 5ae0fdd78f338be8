"""What the layout primitives do to a QArray: move the codes and let the scales follow.

For every move, `dequantize(move(q)) == move(dequantize(q))` exactly. Where the scales cannot follow
(a slice that starts inside a tile), the move raises `CannotMove` with the axis and the reason, and
the caller decides whether to dequantize. Codes in panels stay where they are as long as the move
can be said as another view of them; else they are unpacked first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fewbit import _layout_moves as plain
from fewbit import _lookups, _panel_moves, _reshape
from fewbit._layout_moves import CannotMove as CannotMove
from fewbit._layout_moves import rebuild as rebuild
from fewbit._qarray_panels import PanelArray
from fewbit._qarray_type import QArray

Move = Callable[..., Any]


def _move(in_panels: Callable[..., QArray | None] | None, unpacked: Move) -> Move:
    @functools.wraps(unpacked)
    def move(q: QArray, *args: Any, **kwargs: Any) -> Any:
        if isinstance(q, PanelArray):
            moved = None if in_panels is None else in_panels(q, *args, **kwargs)
            if moved is not None:
                return moved
            q = q.plain()
        return unpacked(q, *args, **kwargs)

    return move


transpose = _move(_panel_moves.transpose, plain.transpose)
reshape = _move(_panel_moves.reshape, _reshape.reshape)
expand_dims = _move(_panel_moves.expand_dims, plain.expand_dims)
squeeze = _move(_panel_moves.squeeze, plain.squeeze)
broadcast_in_dim = _move(_panel_moves.broadcast_in_dim, plain.broadcast_in_dim)
dynamic_slice = _move(_panel_moves.dynamic_slice, plain.dynamic_slice)
index = _move(_panel_moves.index, plain.index)
gather = _move(_panel_moves.gather, _lookups.gather)
take_rows = _move(_panel_moves.take_rows, _lookups.take_rows)
getitem = _move(_panel_moves.getitem, _lookups.getitem)
settle = _move(None, plain.settle)
slice_ = _move(_panel_moves.slice_, plain.slice_)
split = _move(None, plain.split)
rev = _move(None, plain.rev)


def concatenate(qs: Sequence[QArray], axis: int) -> QArray:
    """QArrays of one granularity joined along an axis."""
    return plain.concatenate([q.plain() if isinstance(q, PanelArray) else q for q in qs], axis)
