"""Communication between ranks: process group, collectives over nested containers, objects, and checks of agreement."""

from __future__ import annotations
