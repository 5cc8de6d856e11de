"""Packages for sound and speech that hardly anything is needed of: the programs train with codes or spectrograms."""

import importlib.machinery
import sys
import types

import torch


class Absent(types.ModuleType):
    """A module in which every name is a class that takes any arguments and does nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        init = {"__init__": lambda self, *_, **__: torch.nn.Module.__init__(self)}
        setattr(self, name, type(name, (torch.nn.Module,), init))
        return getattr(self, name)


for name in (
    "audiolm_pytorch",
    "audiolm_pytorch.data",
    "audiolm_pytorch.optimizer",
    "spear_tts_pytorch",
    "torchode",
    "vocos",
    "torchaudio",
    "torchaudio.functional",
    "torchaudio.transforms",
    "naturalspeech2_pytorch",
    "naturalspeech2_pytorch.aligner",
    "naturalspeech2_pytorch.utils",
    "naturalspeech2_pytorch.utils.tokenizer",
    "naturalspeech2_pytorch.naturalspeech2_pytorch",
):
    module = sys.modules[name] = Absent(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)

sys.modules["audiolm_pytorch.data"].get_dataloader = torch.utils.data.DataLoader
sys.modules["audiolm_pytorch.optimizer"].get_optimizer = lambda parameters, lr, wd: torch.optim.AdamW(
    parameters, lr, weight_decay=wd
)
