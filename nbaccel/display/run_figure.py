"""RunFigure: a matplotlib figure that a notebook shows with or without pyplot. Runs in the kernel.

It is a separate module because its base class comes from matplotlib, which is imported when the first figure is made.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from nbaccel.display.figure import png_of, size_px

__all__ = ["RunFigure"]


class RunFigure(Figure):
    """A `matplotlib.figure.Figure` that a notebook shows as the last value of a cell.

    Without this class, notebooks can show a Figure only after pyplot was imported.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        width, height = size_px(self)
        return png_of(self), {"width": width, "height": height}
