"""Checkpoints named `epoch_1` and `step_5`: the name says where to go on, and a loader skips what was trained."""

import json
import math
import os
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader

EPOCHS, ACCUMULATE = 2, 2


def train(folder, resume_from=None):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    set_seed(2)
    samples = [(torch.randn(5), torch.tensor(index % 2)) for index in range(64)]
    loader = DataLoader(samples, batch_size=4)
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    updates_per_epoch = math.ceil(len(loader) / ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * updates_per_epoch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    updates_per_epoch = math.ceil(len(loader) / ACCUMULATE)
    first_epoch, resume_step, completed = 0, None, 0
    if resume_from is not None:
        accelerator.load_state(os.path.join(folder, resume_from))
        kind, number = resume_from.split("_")
        if kind == "epoch":
            first_epoch = int(number) + 1
            completed = first_epoch * updates_per_epoch
        else:
            resume_step = int(number) * ACCUMULATE
            first_epoch, completed = resume_step // len(loader), int(number)
            resume_step -= first_epoch * len(loader)
    losses = []
    for epoch in range(first_epoch, EPOCHS):
        model.train()
        skips = resume_step is not None and epoch == first_epoch
        for x, y in accelerator.skip_first_batches(loader, resume_step) if skips else loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                if resume_from is None and completed == updates_per_epoch + 1:
                    accelerator.save_state(os.path.join(folder, f"step_{completed}"))
        if resume_from is None:
            accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    return {"losses": losses, "completed": completed, "lr": scheduler.get_last_lr()}


def main():
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as mine:
        folder = broadcast_object_list([mine])[0]
        whole = train(folder)
        accelerator.wait_for_everyone()
        steps = [name for name in sorted(os.listdir(folder)) if name.startswith("step_")]
        by_step, by_epoch = train(folder, steps[0]), train(folder, "epoch_0")
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"whole": whole, "by_step": by_step, "by_epoch": by_epoch}


if __name__ == "__main__":
    print(json.dumps(main()))
