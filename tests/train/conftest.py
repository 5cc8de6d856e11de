"""What the tests of this folder need before the first of them."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  # sets a variable of the environment, which the guard of every test would report
