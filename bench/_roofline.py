"""The roofline plot: every product of bench/products.py under what the machine can do, as SVG."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from _measure import SHAPES, Shape

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 520, 64, 196, 34, 52
X_RANGE, Y_RANGE = (0.25, 4096), (0.25, 1024)  # operations per byte, GOP/s
COLORS = {
    "XLA float32": "#555555",
    "fewbit int8 W8A8": "#1f77b4",
    "fewbit int4 g32 A8": "#d62728",
    "fewbit int8 weight-only": "#2ca02c",
    "fewbit int4 g32 weight-only": "#ff7f0e",
    "fewbit fp8 weight-only": "#9467bd",
    "fewbit nf4 g64 weight-only": "#8c564b",
    "XLA int8 W8A8": "#17becf",
}
ROOF_COLORS = {"float32": "#555555", "int8": "#1f77b4", "int4": "#d62728"}


def _x(value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * _part(value, X_RANGE)


def _y(value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _part(value, Y_RANGE)


def _part(value: float, bounds: tuple[float, float]) -> float:
    low, high = (math.log(bound) for bound in bounds)
    return min(1.0, max(0.0, (math.log(value) - low) / (high - low)))


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, more: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {more}/>'


def _axes() -> list[str]:
    out = []
    for power in range(-2, 13, 2):
        x, label = _x(2.0**power), f"{2.0**power:g}"
        out.append(_line(x, TOP, x, HEIGHT - BOTTOM, 'stroke="#e4e4e4"'))
        out.append(_text(x, HEIGHT - BOTTOM + 16, label, 'text-anchor="middle"'))
    for power in range(-2, 11, 2):
        y = _y(2.0**power)
        out.append(_line(LEFT, y, WIDTH - RIGHT, y, 'stroke="#e4e4e4"'))
        out.append(_text(LEFT - 6, y + 4, f"{2.0**power:g}", 'text-anchor="end"'))
    middle = (LEFT + WIDTH - RIGHT) / 2
    title = "operations per byte of weight, input and output"
    out.append(_text(middle, HEIGHT - 12, title, 'text-anchor="middle"'))
    out.append(_text(LEFT - 6, TOP - 12, "GOP/s", 'text-anchor="end"'))
    return out


def _roofs(bandwidth: float, peaks: dict[str, float]) -> list[str]:
    out = []
    highest = max(peaks.values(), default=Y_RANGE[1])
    start = max(X_RANGE[0], Y_RANGE[0] / bandwidth)
    end = highest / bandwidth
    slope = _line(_x(start), _y(start * bandwidth), _x(end), _y(highest), 'stroke="#999"')
    out.append(slope)
    at = (start * end) ** 0.5 * 0.5
    out.append(_text(_x(at) - 8, _y(at * bandwidth) - 8, f"read {bandwidth:.0f} GB/s",
                     'text-anchor="end" fill="#777"'))  # fmt: skip
    for name, peak in peaks.items():
        color = ROOF_COLORS.get(name, "#999")
        y, x = _y(peak), _x(peak / bandwidth)
        out.append(_line(x, y, WIDTH - RIGHT, y, f'stroke="{color}"'))
        out.append(_text(WIDTH - RIGHT - 4, y - 5, f"{name} peak {peak:.0f}",
                         f'text-anchor="end" fill="{color}"'))  # fmt: skip
    return out


def _points(shape: Shape, numbers: dict[str, Any]) -> list[str]:
    out = []
    for name, color in COLORS.items():
        if name not in numbers:
            continue
        row = numbers[name]
        intensity = shape.operations / (1e6 * row["weight_mb"] + shape.io_bytes)
        rate = row["gop_per_s"]
        fill = color if name.startswith("fewbit") else "white"
        tip = f"<title>{name}, {shape}: {rate:.0f} GOP/s</title>"
        out.append(
            f'<circle cx="{_x(intensity):.1f}" cy="{_y(rate):.1f}" r="4.5" fill="{fill}" '
            f'stroke="{color}" stroke-width="1.5">{tip}</circle>'
        )
    return out


def svg(result: dict[str, Any]) -> str:
    """The picture of one results file."""
    shapes = {str(shape): shape for shape in SHAPES if not shape.back}
    measured = {name: r for name, r in result["shapes"].items() if name in shapes}
    reads = sorted(r["read_gb_per_s"] for r in measured.values())
    out = _axes() + _roofs(reads[len(reads) // 2], result["peak_gop_per_s"])
    for name, numbers in measured.items():
        out += _points(shapes[name], numbers["kernels"])
    for number, (name, color) in enumerate(COLORS.items()):
        y = TOP + 12 + 20 * number
        fill = color if name.startswith("fewbit") else "white"
        x = WIDTH - RIGHT + 14
        out.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{fill}" stroke="{color}"/>')
        out.append(_text(x + 10, y + 4, name))
    facts = result["machine"]
    y = TOP + 24 + 20 * len(COLORS)
    for line in (
        f"{facts['isa']}, {facts['threads']} threads",
        "a point per shape;",
        "hover names it",
    ):
        out.append(_text(WIDTH - RIGHT + 10, y, line, 'fill="#777"'))
        y += 16
    body = "\n".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def write(result: dict[str, Any]) -> pathlib.Path:
    path = DOCS / f"roofline-{result['machine']['isa']}.svg"
    path.write_text(svg(result), encoding="utf-8")
    return path
