"""A device that counts its memory, where there is no card: a program that measures its peak asks for one of three.

The library under test says that there is an NPU; what is counted is nothing.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))  # the recorder has not begun the program yet
importlib.import_module(f"{task['library']}.utils").is_npu_available = lambda *_, **__: True
torch.npu = SimpleNamespace(
    empty_cache=lambda: None,
    reset_max_memory_allocated=lambda: None,
    memory_allocated=lambda: 0,
    max_memory_allocated=lambda: 0,
)
