"""ddpo-pytorch: a name that diffusers has moved since, and the plural forms of words, which its animals do not need."""

import sys
import types

import diffusers.utils
from diffusers.utils.torch_utils import randn_tensor

diffusers.utils.randn_tensor = randn_tensor
sys.modules["inflect"] = types.SimpleNamespace(engine=lambda: None)
