"""RunFigure: a matplotlib figure that a notebook shows with or without pyplot, and its PNG. Runs in the kernel.

It is a separate module because its base class comes from matplotlib, which is imported when the first figure is made.
"""

from __future__ import annotations

import io
from typing import Any

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

__all__ = ["RunFigure", "png_of", "size_px"]

_CSS_DPI = 96
_COLOURS = 160


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
    """Return a PNG of few colours, a quarter of the size that matplotlib writes, as transparent as the figure."""
    before = figure.canvas
    canvas: Any = FigureCanvasAgg(figure)
    try:
        canvas.draw()
        pixels = numpy.array(canvas.buffer_rgba())
    finally:
        figure.set_canvas(before)
    file = io.BytesIO()
    _few_colours(pixels).save(file, "PNG", optimize=True, dpi=(figure.dpi, figure.dpi))
    return file.getvalue()


def _few_colours(pixels: Any) -> Any:
    """Return an image with a palette, made of pixels with red, green, blue and opacity.

    Pillow's own ways to find a palette ignore opacity, or turn the edges of letters into stripes. A figure has few
    colours: those that differ by less than a sixteenth are merged, and the rarest are replaced by the nearest of the
    others.
    """
    height, width = pixels.shape[:2]
    channels = pixels.reshape(-1, 4).astype(numpy.uint16)
    keys = channels[:, 0] >> 4
    for channel in (1, 2, 3):
        keys = keys << 4 | channels[:, channel] >> 4
    counts = numpy.bincount(keys, minlength=1 << 16)
    used = numpy.flatnonzero(counts)
    sums = [numpy.bincount(keys, channels[:, channel], minlength=1 << 16)[used] for channel in range(4)]
    means = numpy.stack(sums, axis=1) / counts[used, None]
    palette = means[numpy.argsort(-counts[used], kind="stable")[:_COLOURS]]
    seen = numpy.concatenate([means[:, :3] * means[:, 3:] / 255, means[:, 3:]], axis=1)
    places = numpy.concatenate([palette[:, :3] * palette[:, 3:] / 255, palette[:, 3:]], axis=1)
    nearest = ((seen[:, None] - places[None]) ** 2).sum(axis=2).argmin(axis=1)
    table = numpy.zeros(1 << 16, dtype=numpy.uint8)
    table[used] = nearest
    image = Image.frombytes("P", (width, height), table[keys].tobytes())
    palette = palette.round().astype(numpy.uint8)
    image.putpalette(palette[:, :3].tobytes())
    if (palette[:, 3] < 255).any():
        image.info["transparency"] = palette[:, 3].tobytes()
    return image
