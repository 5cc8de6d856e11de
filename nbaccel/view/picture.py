"""Picture: a PNG with a description in words, as notebooks show it. Pure."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import Any

__all__ = ["Bundle", "Picture"]

Bundle = tuple[dict[str, Any], dict[str, Any]]
"""Data and metadata, by MIME type."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG of `width` times `height` CSS pixels; it has more pixels than that, for sharp screens.

    text: the content in words.
    """

    png: bytes
    width: int
    height: int
    text: str

    def bundle(self) -> Bundle:
        """Return the data that a notebook saves of the picture."""
        image = {"width": self.width, "height": self.height, "alt": self.text}
        return (
            {"text/plain": self.text, "image/png": b64encode(self.png).decode("ascii")},
            {"image/png": image},
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self.bundle()

    def __repr__(self) -> str:
        return self.text
