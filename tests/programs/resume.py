"""Trains for three epochs at once, then again with a stop in the middle of the second, and compares."""

import json
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
STOP = (1, 3)  # epoch, batches done


class Progress:
    def __init__(self):
        self.epoch, self.batch, self.losses = 0, 0, []

    def state_dict(self):
        return {"epoch": self.epoch, "batch": self.batch, "losses": list(self.losses)}

    def load_state_dict(self, state):
        self.epoch, self.batch, self.losses = state["epoch"], state["batch"], list(state["losses"])


def build(accelerator):
    set_seed(3)
    inputs = torch.randn(96, 6)
    labels = (inputs.sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    return *accelerator.prepare(model, optimizer, scheduler, loader), progress


def train(folder, stop=None, resume=False):
    """Returns the losses of every batch, of this rank."""
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model, optimizer, scheduler, loader, progress = build(accelerator)
    if resume:
        accelerator.load_state()
    for epoch in range(progress.epoch, EPOCHS):
        loader.set_epoch(epoch)
        active = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for x, y in active:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.batch += 1
            progress.losses.append(loss.item())
            if (epoch, progress.batch) == stop:
                progress.epoch = epoch
                accelerator.save_state()
                return progress.losses
        progress.batch = 0
    accelerator.wait_for_everyone()
    return progress.losses + scheduler.get_last_lr()


def main():
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as mine:
        folder = broadcast_object_list([mine])[0]
        whole = train(folder)
        first = train(folder, stop=STOP)
        resumed = train(folder, resume=True)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"losses": whole, "first": first, "is_equal": whole == resumed}


if __name__ == "__main__":
    print(json.dumps(main()))
