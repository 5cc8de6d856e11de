"""Kinds of objects of libraries whose state is not in their attributes: pictures, compiled modules, tokenizers.

Each is known by its module and class, so that nothing is imported. Runs in ranks and in the kernel.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any

from nbaccel.namespace.kind import Kind, Stays, Step, Write
from nbaccel.namespace.state_in_c import differs

__all__ = ["Artist", "Script", "facts_of_matrix", "facts_of_tokenizer", "tensor_of_script"]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class Artist(Kind):
    """Figures and what is in them. A drawing changes much of them, so chosen values are compared."""

    def mark(self, obj: Any) -> Any:
        return list(_drawn(obj, set()))

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        if len(now) != len(mark) or any(map(differs, now, mark)):
            raise Stays("its figure is drawn in the rank: --out brings it")


_OF_DRAWINGS = ("_children", "_localaxes", "texts", "images", "patch", "title", "_left_title", "_right_title")
_OF_LABELS = ("label", "_suptitle", "_supxlabel", "_supylabel", "legend_", "legends", "patches", "lines")
_DATA_OF_ARTISTS = frozenset({"_xorig", "_yorig", "_A", "_offsets", "_facecolors", "_edgecolors", "_paths"})
_SET_BY_DRAWING = frozenset({"stale", "_x", "_y", "_invalidx", "_invalidy", "_subslice"})


def _drawn(artist: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the plain values, and the arrays, of an artist and of those in it."""
    if id(artist) in seen:
        return
    seen.add(id(artist))
    yield artist
    values = vars(artist)
    for name, value in values.items():
        is_chosen = type(value) in _PLAIN and name not in _SET_BY_DRAWING and not name.startswith("_stale")
        if is_chosen or name in _DATA_OF_ARTISTS:
            yield value
    for name in (*_OF_DRAWINGS, *_OF_LABELS):
        inner = values.get(name)
        for each in list(inner) if isinstance(inner, (list, tuple)) else [inner]:
            if each is not None and hasattr(each, "axes"):
                yield from _drawn(each, seen)
    for name in ("xaxis", "yaxis", "zaxis"):
        if (axis := values.get(name)) is not None:
            yield from _drawn(axis.label, seen)
            yield vars(axis).get("_scale").__class__
            yield from (axis.major.locator, axis.major.formatter)
            if not axis._get_autoscale_on():  # else a drawing sets them
                yield from map(float, axis.get_view_interval())
    if (size := values.get("bbox_inches")) is not None:
        yield from map(float, size.get_points().ravel())
    if (stack := values.get("_axstack")) is not None:
        for each in stack.as_list():
            yield from _drawn(each, seen)


def facts_of_matrix(matrix: Any) -> Any:
    """Return what a program may set in a matrix of xgboost after it was made."""
    arrays = matrix.get_label(), matrix.get_weight(), matrix.get_base_margin()
    return [zlib.crc32(each.tobytes()) for each in arrays], matrix.feature_names, matrix.feature_types


def facts_of_tokenizer(tokenizer: Any) -> Any:
    """Return what a program may set in a tokenizer: its pickle, of the whole vocabulary, takes half a second.

    Not how it pads and truncates: tokenizers of transformers set that in each call, by the call's arguments.
    """
    sizes = tokenizer.get_vocab_size(False), tokenizer.get_vocab_size(True)
    names = (
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "encode_special_tokens",
    )
    return sizes, [repr(getattr(tokenizer, name, None)) for name in names]


class Script(Kind):
    """Compiled modules of TorchScript: their tensors, which are in C. A change of their other attributes stays."""

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        for name, value in _tensors_of_script(obj).items():
            yield ("script", name), value

    def mark(self, obj: Any) -> Any:
        return getattr(obj, "training", None)  # none in a module that was frozen

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        return None if now == mark else (now,)

    def writing(self, obj: Any, change: Any) -> Write:
        return lambda: obj.train(change[0])


def _tensors_of_script(obj: Any) -> dict[str, Any]:
    return dict(obj.named_parameters(recurse=True)) | dict(obj.named_buffers(recurse=True))


def tensor_of_script(obj: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), obj)
