"""Communication between ranks: process group, collectives over nested containers, checks of agreement. In ranks.

Imports `base` and torch.
"""

from __future__ import annotations
