"""A tracker of one's own, beside the loop that feeds it."""

import json

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch.utils.data import DataLoader, TensorDataset


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.rows = []
        self.config = None
        self.is_finished = False

    @property
    def tracker(self):
        return self.rows

    @on_main_process
    def store_init_configuration(self, values):
        self.config = values

    @on_main_process
    def log(self, values, step=None, prefix=""):
        self.rows.append([step, {prefix + name: value for name, value in values.items()}])

    @on_main_process
    def finish(self):
        self.is_finished = True


def main():
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    config = {"lr": 0.1, "epochs": 2}
    accelerator.init_trackers("points", config=config)
    torch.manual_seed(0)
    inputs = torch.randn(64, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for epoch in range(config["epochs"]):
        total = 0.0
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += accelerator.gather(loss.detach()).mean().item()
            step += 1
            if step % 2 == 0:
                accelerator.log({"loss": loss.item()}, step=step)
        accelerator.log({"mean": total / len(loader), "epoch": epoch}, step=step, log_kwargs={"list": {"prefix": "x/"}})
    rows = None
    if accelerator.is_main_process:
        accelerator.get_tracker("list").rows.append(["by hand", {}])
        rows = accelerator.get_tracker("list", unwrap=True)
    accelerator.end_training()
    if accelerator.is_main_process:
        return {"rows": rows, "config": tracker.config, "finished": tracker.is_finished}
    return None


if __name__ == "__main__":
    answer = main()
    if answer is not None:
        print(json.dumps(answer))
