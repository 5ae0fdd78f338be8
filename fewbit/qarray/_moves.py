"""What the layout primitives do to a QArray: move the codes and let the scales follow.

For every move, `dequantize(move(q)) == move(dequantize(q))` exactly. Where the scales cannot follow
(a slice that starts inside a tile), the move raises `CannotMove` with the axis and the reason, and
the caller decides whether to dequantize. Codes in panels stay where they are as long as the move
can be said as another view of them; else they are unpacked first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fewbit.qarray import _layout_moves, _lookup, _panels
from fewbit.qarray._layout_moves import CannotMove as CannotMove
from fewbit.qarray._panels import PanelArray
from fewbit.qarray._type import QArray


def _move(
    in_panels: Callable[..., QArray | None] | None, unpacked: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(unpacked)
    def move(q: QArray, *args: Any, **kwargs: Any) -> Any:
        if isinstance(q, PanelArray):
            moved = None if in_panels is None else in_panels(q, *args, **kwargs)
            if moved is not None:
                return moved
            q = q.plain()
        return unpacked(q, *args, **kwargs)

    return move


transpose = _move(_panels.transpose, _layout_moves.transpose)
reshape = _move(_panels.reshape, _layout_moves.reshape)
expand_dims = _move(_panels.expand_dims, _layout_moves.expand_dims)
squeeze = _move(_panels.squeeze, _layout_moves.squeeze)
broadcast_in_dim = _move(_panels.broadcast_in_dim, _layout_moves.broadcast_in_dim)
dynamic_slice = _move(_panels.dynamic_slice, _layout_moves.dynamic_slice)
index = _move(_panels.index, _layout_moves.index)
gather = _move(_panels.gather, _lookup.gather)
take_rows = _move(_panels.take_rows, _lookup.take_rows)
getitem = _move(_panels.getitem, _lookup.getitem)
settle = _move(None, _layout_moves.settle)
slice_ = _move(_panels.slice_, _layout_moves.slice_)
split = _move(None, _layout_moves.split)
rev = _move(None, _layout_moves.rev)


def concatenate(qs: Sequence[QArray], axis: int) -> QArray:
    """QArrays of one granularity joined along an axis."""
    plain = [q.plain() if isinstance(q, PanelArray) else q for q in qs]
    return _layout_moves.concatenate(plain, axis)


QArray._moves.update(transpose=transpose, reshape=reshape, index=index, getitem=getitem)
