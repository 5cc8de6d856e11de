"""RunFigure: a matplotlib figure that a notebook shows with or without pyplot, and its PNG. Runs in the kernel.

It is a separate module because its base class comes from matplotlib, which is imported when the first figure is made.
"""

from __future__ import annotations

import io
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine
from PIL import Image

__all__ = ["Margins", "RunFigure", "edge_of_column", "png_of", "size_px"]

_CSS_DPI = 96
_COLOURS = 160
_COMPRESSION = 7


_LEFT_IN, _RIGHT_IN, _TITLE_IN, _TICKS_IN = 0.55, 0.12, 0.26, 0.24
"""Room around a plot: for tick labels of seven characters, for half of the last one below, for its title, for ticks."""
_LABEL_IN = 0.18
"""Room for the label of an axis, beside that of its ticks."""
_TO_LABEL_IN = 19 / 72
"""From a plot down to the label of its axis: a tick, its number and the spaces between, as matplotlib measures them."""


def edge_of_column(width_in: float) -> float:
    """Return the left edge of a column, as x of a plot with a labelled axis that fills it: 0 to 1 is the plot itself.

    A title that begins there has the whole width of the column.

    Args:
        width_in: Width of the column, in inches.
    """
    left_in = _LEFT_IN + _LABEL_IN
    return -left_in / (width_in - left_in - _RIGHT_IN)


class Margins(LayoutEngine):
    """Places the plots of a figure's grid with fixed margins, in inches.

    matplotlib's own layout measures every text first, which means to lay out all ticks twice more: that took more than
    half of the time of a picture. The texts of our plots have known sizes.

    Args:
        head_in: Height of the title above all plots.
    """

    _adjust_compatible = False
    _colorbar_gridspec = True

    def __init__(self, head_in: float) -> None:
        super().__init__()
        self._head_in = head_in

    def execute(self, fig: Any) -> None:
        width_in, height_in = fig.get_size_inches()
        height_in -= self._head_in
        for axes in fig.axes:
            if (spec := axes.get_subplotspec()) is None:
                continue
            grid = spec.get_gridspec()
            shares = grid.get_width_ratios()
            column, row = spec.colspan, spec.rowspan
            left_in, right_in = (width_in * sum(shares[:end]) / sum(shares) for end in (column.start, column.stop))
            top_in, bottom_in = (height_in * (1 - end / grid.nrows) for end in (row.start, row.stop))
            left, right, bottom, top = self._margins(axes)
            box_in = (
                left_in + left,
                bottom_in + bottom,
                right_in - left_in - left - right,
                top_in - bottom_in - bottom - top,
            )
            across, up = fig.get_size_inches()
            axes.set_position([box_in[0] / across, box_in[1] / up, box_in[2] / across, box_in[3] / up])
            axes.xaxis.set_label_coords(0.5, -_TO_LABEL_IN / box_in[3])
            if not axes.get_ylabel():  # else its place depends on the widest number
                axes.yaxis.set_label_coords(0.0, 0.5)

    def _margins(self, axes: Axes) -> tuple[float, float, float, float]:
        """Return the room on the left, on the right, below and above a plot, in inches."""
        if not axes.axison:
            return _RIGHT_IN, _RIGHT_IN, _RIGHT_IN, _TITLE_IN
        left_in = _LEFT_IN + (_LABEL_IN if axes.get_ylabel() else 0.0)
        return left_in, _RIGHT_IN, _TICKS_IN + (_LABEL_IN if axes.get_xlabel() else 0.0), _TITLE_IN


class RunFigure(Figure):
    """A `matplotlib.figure.Figure` that a notebook shows as the last value of a cell.

    Without this class, notebooks can show a Figure only after pyplot was imported.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        width, height = size_px(self)
        return png_of(self), {"width": width, "height": height}


def size_px(figure: Figure) -> tuple[int, int]:
    """Return the width and height of `figure` in CSS pixels."""
    width, height = (round(inches * _CSS_DPI) for inches in figure.get_size_inches())
    return width, height


def png_of(figure: Figure) -> bytes:
    """Return a PNG of few colours, a quarter of the size that matplotlib writes."""
    before = figure.canvas
    canvas: Any = FigureCanvasAgg(figure)
    try:
        canvas.draw()
        pixels = numpy.array(canvas.buffer_rgba())
    finally:
        figure.set_canvas(before)
    file = io.BytesIO()
    # One byte in fifteen smaller at the level of `optimize`, in five times the time.
    _few_colours(pixels).save(file, "PNG", compress_level=_COMPRESSION, dpi=(figure.dpi, figure.dpi))
    return file.getvalue()


def _few_colours(pixels: Any) -> Any:
    """Return an image with a palette, made of pixels with red, green, blue and opacity.

    Pillow's own ways to find a palette ignore opacity, or turn the edges of letters into stripes. A figure has few
    colours: those that differ by less than a sixteenth are merged, and the rarest are replaced by the nearest of the
    others.
    """
    height, width = pixels.shape[:2]
    whole = pixels.reshape(-1, 4).view(numpy.uint32)[:, 0]
    drawn = numpy.flatnonzero(whole != whole[0])  # a twentieth: most pixels are ground, as the one in the corner
    channels = numpy.concatenate([pixels[0, :1], pixels.reshape(-1, 4)[drawn]]).astype(numpy.uint16)
    keys = channels[:, 0] >> 4
    for channel in (1, 2, 3):
        keys = keys << 4 | channels[:, channel] >> 4
    times = numpy.ones(len(keys))
    times[0] = len(whole) - len(drawn)
    counts = numpy.bincount(keys, times, minlength=1 << 16)
    used = numpy.flatnonzero(counts)
    sums = [numpy.bincount(keys, channels[:, channel] * times, minlength=1 << 16)[used] for channel in range(4)]
    means = numpy.stack(sums, axis=1) / counts[used, None]
    palette = means[numpy.argsort(-counts[used], kind="stable")[:_COLOURS]]
    seen = numpy.concatenate([means[:, :3] * means[:, 3:] / 255, means[:, 3:]], axis=1)
    places = numpy.concatenate([palette[:, :3] * palette[:, 3:] / 255, palette[:, 3:]], axis=1)
    nearest = ((seen[:, None] - places[None]) ** 2).sum(axis=2).argmin(axis=1)
    table = numpy.zeros(1 << 16, dtype=numpy.uint8)
    table[used] = nearest
    indices = numpy.full(len(whole), table[keys[0]])
    indices[drawn] = table[keys[1:]]
    image = Image.frombytes("P", (width, height), indices.tobytes())
    palette = palette.round().astype(numpy.uint8)
    image.putpalette(palette[:, :3].tobytes())
    if (palette[:, 3] < 255).any():
        image.info["transparency"] = palette[:, 3].tobytes()
    return image
