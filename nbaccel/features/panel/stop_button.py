"""The panel of a running cell as widgets, with a button below it that stops the run. Runs in the kernel.

It uses core ipywidgets only, 7.7.1 or 8: a native button, usable by keyboard and screen reader. The caller decides what
a click does; the label of the button follows all requests to the run so far, from any source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as widgets

__all__ = ["LABELS", "StopButton"]

CSS_CLASS = "nbaccel-stop"
"""CSS class by which a style sheet, or a test, finds the button in the page."""

_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

LABELS = (
    ("Stop after this step", "Every rank finishes its step, and what the cell has made so far comes back"),
    ("Stop now", "Ends the ranks in the middle of the step; what the cell has made is lost"),
    ("Stopping", "The ranks are being ended"),
)
"""Labels and tooltips of the button, by the number of requests to end the run."""


class StopButton:
    """Widgets that are not displayed yet.

    Args:
        on_click: Called in the thread that handles the front end's message.
    """

    def __init__(self, on_click: Callable[[], None]) -> None:
        # All at once: whatever is set later is another message to the front end.
        self._panel = widgets.HTML()
        label, tooltip = LABELS[0]
        self._button = widgets.Button(
            description=label,
            tooltip=tooltip,
            layout=widgets.Layout(width="auto", margin="4px 0 0 0", align_self="flex-start"),
            # Not None: front ends are to report how many of them show it. The innermost, since of a widget whose class
            # they do not have (ipywidgets 7 here, 8 there) they count the box of their error as a view.
            _view_count=0,
        )
        self._box = widgets.VBox([self._panel, self._button], _dom_classes=(CSS_CLASS,))
        self._on_click: Callable[[Any], None] = lambda button: on_click()
        self._button.on_click(self._on_click)

    @property
    def model_ids(self) -> frozenset[str]:
        """Return the addresses of messages to its widgets."""
        return frozenset(widget.model_id for widget in self._widgets())

    @property
    def is_seen(self) -> bool:
        """Return whether a front end has reported that it shows this."""
        return bool(self._button._view_count)

    @property
    def data(self) -> dict[str, Any]:
        """Return the data that makes a front end show it, by MIME type."""
        return {_WIDGET_MIME: {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}}

    def show(self, html: str) -> None:
        """Show another state of the panel, as wide as its place: by default a widget is as wide as its content."""
        self._panel.value = f'<div style="width:0;min-width:100%">{html}</div>'

    def interrupted(self, times: int) -> None:
        """Take note that the run was asked to end `times` times."""
        label, tooltip = LABELS[min(times, len(LABELS) - 1)]
        self._button.description, self._button.tooltip = label, tooltip
        self._button.disabled = times >= len(LABELS) - 1

    def retire(self) -> None:
        """Remove the button after the run: the panel's last state stays, for a page that was reloaded meanwhile."""
        self._button.on_click(self._on_click, remove=True)
        self._button.layout.display = "none"

    def close(self) -> None:
        """Close the widgets, here and in the front end."""
        self._button._view_count = None  # else its end would be reported to widgets that are gone
        for widget in list(self._widgets()):
            widget.close()

    def _widgets(self) -> Iterator[Any]:
        for widget in (self._box, self._panel, self._button):
            yield widget
            yield from (part for name in ("layout", "style") if (part := getattr(widget, name, None)) is not None)
