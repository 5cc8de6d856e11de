"""Short trials of a training with one change each, which measure its speed. Ranks run them."""

from __future__ import annotations
