"""RunFigure: a matplotlib figure that a notebook shows as it is, pyplot or not. Runs in the kernel.

A module of its own because its base class comes from matplotlib, which is imported when the first figure is made.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from nbaccel.view.figure import png_of, size_px

__all__ = ["RunFigure"]


class RunFigure(Figure):
    """A `matplotlib.figure.Figure`; as the last line of a cell it is seen.

    Notebooks know how to show a Figure only once pyplot was imported.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        width, height = size_px(self)
        return png_of(self), {"width": width, "height": height}
