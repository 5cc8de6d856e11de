"""Communication between the kernel and its ranks: frames, a shared page, payloads, the kernel's state. Both run it.

Imports `namespace`, `options` and `base`, and asks the table of `features`.
"""

from __future__ import annotations
