"""A Comparison for human eyes, in the terminal's width."""

from fewbit._text import natural_width, table, terminal_width, wrap
from fewbit.debug._comparison import Comparison, SiteError
from fewbit.debug._metrics import decibels

_HEADER = ("site", "layer", "types", "weight", "local", "accum.", "clipped", "only", "restored")
_ALIGN = "mrlrrrrrr"
# Narrow terminals lose these first; the line below the table says so.
_DROP_ORDER = ("types", "clipped", "weight", "accum.")
_SITE_COMFORT = 30
_LEGEND = (
    "All in dB (signal to quantization noise; 6 dB are one bit): weight, the stored weight; "
    "local, the Site's result on float operands; accum., its result in the quantized model; only "
    "and restored, the model's output with only this Site quantized, and with only this one float."
)
_LEGEND_LAYER = " layer is the worst of those that a scan runs the Site for."
_MOST_OUTLIERS = 4


def render(comparison: Comparison, width: int | None = None) -> str:
    """The table, what it means, and what else was found."""
    width = terminal_width() if width is None else width
    out = comparison.output
    title = (
        f"Output of the quantized model: {decibels(out.sqnr)} dB, cosine {out.cosine:.5f}, "
        f"relative error {out.relative:.2%}"
    )
    if out.agreement is not None:
        title += f", argmax agrees on {out.agreement:.1%}"
    legend = _LEGEND + _LEGEND_LAYER * any(row.layers for row in comparison.sites)
    blocks = [wrap(title, width, "  ", ""), _rows(comparison, width), wrap(legend, width)]
    if comparison.first_not_finite is not None:
        text = f"NaN or infinity first appears at {comparison.first_not_finite}"
        blocks.insert(1, wrap(text, width, "  ", ""))
    found = comparison.outliers()
    if found:
        lines = ["outlier channels"]
        for outlier in found[:_MOST_OUTLIERS]:
            lines += wrap(str(outlier), width, "    ", "  ")
        if len(found) > _MOST_OUTLIERS:
            more = f"{len(found) - _MOST_OUTLIERS} more: comparison.outliers()"
            lines += wrap(more, width, "    ", "  ")
        blocks.append(lines)
    if comparison.notes:
        lines = [line for note in comparison.notes for line in wrap(note, width, "    ", "  ")]
        blocks.append(["notes", *lines])
    return "\n\n".join("\n".join(block) for block in blocks)


def _rows(comparison: Comparison, width: int) -> list[str]:
    cells = [_cells(row) for row in comparison.sites]
    kept = list(range(len(_HEADER)))

    def pick(line):
        return [line[i] for i in kept]

    empty = [i for i in kept[1:] if all(line[i] == "-" for line in cells)]
    kept = [i for i in kept if i not in empty]  # a column of nothing tells nothing
    longest = max((len(line[0]) for line in cells), default=0)
    hidden = []
    for name in _DROP_ORDER:
        others = natural_width([pick(line)[1:] for line in (_HEADER, *cells)])
        if width - others - 2 >= min(longest, _SITE_COMFORT):
            break
        number = _HEADER.index(name)
        if number in kept:
            kept.remove(number)
            hidden.append(name)
    text = table(list(map(pick, cells)), pick(_HEADER), "".join(pick(_ALIGN)), width)
    lines = text.split("\n")
    if hidden:
        lines += wrap(f"no room here for: {', '.join(hidden)}", width, "     ", "…    ")
    return lines


def _cells(row: SiteError) -> tuple[str, ...]:
    worst = row.worst_layer
    if not row.ran:
        return (row.site, "-", row.types, "-", "not run", *("-",) * 4)
    level = lambda d: decibels(None if d is None else d.sqnr)  # noqa: E731
    return (
        row.site,
        "-" if worst is None else ",".join(map(str, worst.layer)),
        row.types,
        level(row.weight),
        level(row.local),
        level(row.accumulated) if not row.not_finite else "NaN",
        "-" if row.clipped is None else f"{row.clipped:.2%}",
        decibels(row.only),
        decibels(row.restored),
    )
