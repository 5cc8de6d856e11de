"""The inside of a rank: its runtime from start to end, and its changes to the notebook that it was copied from."""

from __future__ import annotations
