"""Planning: finds the largest batch that fits by a few trial steps before the training. Runs in ranks."""

from __future__ import annotations
