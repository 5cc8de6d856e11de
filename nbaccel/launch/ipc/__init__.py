"""Communication between the kernel and its ranks: frames, a shared page, parcels, the kernel's state. Both run it."""

from __future__ import annotations
