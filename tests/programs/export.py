"""What leaves a training: a model file for inference, a plain state dict, and the model loaded from both."""

import json
import os
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset


def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def main():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    set_seed(11)
    inputs = torch.randn(64, 4)
    labels = inputs[:, :3].argmax(1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for x, y in loader:
            with accelerator.autocast():
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    with tempfile.TemporaryDirectory() as mine:
        folder = broadcast_object_list([mine])[0]
        accelerator.save_model(model, folder)
        accelerator.save(accelerator.get_state_dict(model), os.path.join(folder, "plain.pt"))
        accelerator.wait_for_everyone()
        files = sorted(os.listdir(folder))
        saved = load_file(os.path.join(folder, "model.safetensors"))
        plain = torch.load(os.path.join(folder, "plain.pt"), weights_only=True)
        accelerator.wait_for_everyone()
    fresh = build()
    fresh.load_state_dict(saved)
    with torch.no_grad():
        outputs = fresh(torch.ones(1, 4)).flatten().tolist()
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        same = torch.equal(fresh(inputs), unwrapped(inputs))
    accelerator.end_training()
    return {"files": files, "keys": sorted(plain), "outputs": outputs, "same": same}


if __name__ == "__main__":
    print(json.dumps(main()))
