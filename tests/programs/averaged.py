"""An average of the weights as an object of its own: registered for checkpoints, sampled from by the main process."""

import json
import os
import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Average:
    def __init__(self, parameters, decay):
        self.shadow, self.decay, self.updates = [p.detach().clone() for p in parameters], decay, 0
        self.stored = None

    @torch.no_grad()
    def step(self, parameters):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for shadow, now in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - now))

    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters, values=None):
        for parameter, value in zip(parameters, values or self.shadow, strict=True):
            parameter.copy_(value)

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state):
        self.shadow, self.updates = state["shadow"], state["updates"]


def main():
    with tempfile.TemporaryDirectory() as mine:
        config = DataLoaderConfiguration(split_batches=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config, step_scheduler_with_optimizer=False)
        folder = os.path.join(broadcast_object_list([mine])[0], "state")
        set_seed(9)
        model = torch.nn.Linear(3, 3)
        average = Average(model.parameters(), 0.9)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=8)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        accelerator.register_for_checkpointing(average)
        samples, batch_sizes = [], []
        for epoch in range(2):
            for (x,) in loader:
                batch_sizes.append(len(x))
                accelerator.backward((model(x) - x.roll(1, 1)).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                average.step(model.parameters())
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                plain = accelerator.unwrap_model(model)
                average.store(plain.parameters())
                average.copy_to(plain.parameters())
                with torch.no_grad():
                    samples.append(plain(torch.ones(1, 3)).sum().item())
                average.copy_to(plain.parameters(), average.stored)
            if epoch == 0:
                accelerator.save_state(folder)
        updates = average.updates
        accelerator.load_state(folder)
        went_back = updates - average.updates
        accelerator.wait_for_everyone()
    accelerator.end_training()
    shadow = sum(value.sum().item() for value in average.shadow)
    sizes = {"first": batch_sizes[0], "batches": len(batch_sizes)}
    return {"samples": samples, "sizes": sizes, "went_back": went_back, "shadow": shadow, "lr": scheduler.get_last_lr()}


if __name__ == "__main__":
    print(json.dumps(main()))
