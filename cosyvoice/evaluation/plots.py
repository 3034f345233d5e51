"""Charts for the report: matplotlib drawn as SVG whose colours follow the page (light or dark).

A chart is drawn with stand-in colours that are then replaced by CSS variables, and its text stays text, so one
inlined SVG suits both colour schemes and stays sharp.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

#: Stand-in colour -> CSS variable of the page.
_PALETTE = {f"#f{i}e{i}d{i}": f"var(--c{i})" for i in range(1, 8)}
COLOURS = tuple(_PALETTE)
_TEXT, _GRID = "#0a0b0c", "#0c0b0a"
_VARIABLES = {**_PALETTE, _TEXT: "var(--muted)", _GRID: "var(--line)"}
SIZE = (4.6, 2.45)
#: Longer curves also get a running mean, and their steps turn pale.
SMOOTH_ABOVE = 40

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass(frozen=True)
class Line:
    """A curve: x [N], y [N], and optionally a band low [N], high [N] around it."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over ``width`` values, over fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, stop = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    return (sums[stop] - sums[start]) / (stop - start)


def line_chart(
    lines: Sequence[Line],
    percent: bool = False,
    from_zero: bool = False,
    log: bool = False,
    caption: str = "",
) -> str:
    """Curves over training steps.

    Args:
        lines: up to seven.
        percent: values are shares, shown in percent.
        from_zero: the value axis begins at 0.
        log: logarithmic value axis (positive values only).
        caption: what the chart shows, for screen readers.

    Returns:
        An ``<svg>`` element.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas()
        for colour, line in zip(COLOURS, lines):
            many = len(line.x) > SMOOTH_ABOVE
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.14, linewidth=0)
            if many:
                axes.plot(line.x, line.y, color=colour, alpha=0.3, linewidth=0.9)
            smooth = running_mean(line.y, max(3, len(line.y) // 15)) if many else line.y
            marker = "o" if len(line.x) <= 12 else None
            axes.plot(line.x, smooth, color=colour, label=line.label, marker=marker, markersize=3.5)
        if log:
            axes.set_yscale("log")
        elif from_zero:
            axes.set_ylim(bottom=0)
        _finish(axes, percent and not log, legend=len(lines) > 1)
        return _svg(figure, caption)


def stack_chart(
    x: np.ndarray, parts: Sequence[tuple[str, np.ndarray]], percent: bool = False, caption: str = ""
) -> str:
    """Parts of a whole over training steps, stacked; each part is [N]."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _canvas()
        values = [part for _, part in parts]
        labels = [label for label, _ in parts]
        if len(x) == 1:  # an area over one step would be invisible
            x, values = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(part, 2) for part in values]
        axes.stackplot(x, *values, labels=labels, colors=COLOURS[: len(parts)], alpha=0.85, linewidth=0)
        axes.set_ylim(bottom=0, top=1 if percent else None)
        axes.set_xlim(x[0], x[-1])
        _finish(axes, percent, legend=True)
        return _svg(figure, caption)


def interval_chart(
    names: Sequence[str], values: Sequence[tuple[float, float, float]], caption: str = ""
) -> str:
    """Error rates with intervals, one row a system: (value, low, high) as shares; the first is the baseline."""
    with matplotlib.rc_context({**_STYLE, "axes.grid.axis": "x"}):
        figure, axes = _canvas((4.6, 0.62 + 0.3 * len(names)))
        for row, (value, low, high) in enumerate(values):
            colour = COLOURS[1] if row == 0 else COLOURS[0]
            axes.plot([low, high], [row, row], color=colour, linewidth=2.4, alpha=0.55)
            axes.plot([value], [row], color=colour, marker="o", markersize=6)
            axes.annotate(
                f"{100 * value:.2f}",
                (value, row),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
        reach = [0.15, len(names) - 0.5]
        axes.plot([values[0][0]] * 2, reach, color=COLOURS[1], linewidth=0.9, linestyle=(0, (2, 3)))
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.75)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
        axes.margins(x=0.08)
        return _svg(figure, caption)


def _canvas(size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    return figure, axes


def _finish(axes: Axes, percent: bool, legend: bool) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    axes.margins(x=0.02)
    if legend:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=4,
            handlelength=1.1,
            handletextpad=0.5,
            columnspacing=1.2,
            borderaxespad=0.2,
        )


def _svg(figure: Figure, caption: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    # Only the drawing: no metadata, and no group ids, which would repeat from chart to chart on the page.
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    svg = svg.replace("'DejaVu Sans', sans-serif", "var(--sans)")
    width, height = (72 * side for side in figure.get_size_inches())
    head = f'<svg role="img" aria-label="{escape(caption)}" viewBox="0 0 {width:g} {height:g}">'
    return re.sub(r"^<svg[^>]*>", lambda _: head, svg)
