"""A learner that callbacks drive: one of them has the Accelerator, and swaps the model for the prepared one."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class Learner:
    def __init__(self, model, optimizer, loaders, callbacks):
        self.model, self.optimizer, self.loaders, self.callbacks = model, optimizer, loaders, callbacks

    def callback(self, name):
        for each in self.callbacks:
            getattr(each, name, lambda learner: None)(self)

    def one_epoch(self, phase):
        self.training = phase == "train"
        self.model.train(self.training)
        self.loader = self.loaders[phase]
        with torch.set_grad_enabled(self.training):
            for batch in self.loader:
                self.batch = batch
                self.callback("before_batch")
                x, y = batch
                self.predictions = self.model(x)
                self.loss = F.cross_entropy(self.predictions, y)
                if self.training:
                    self.callback("backward")
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.callback("after_batch")
        self.callback("after_epoch")

    def fit(self, epochs):
        self.callback("before_fit")
        for _ in range(epochs):
            self.one_epoch("train")
            self.one_epoch("valid")
        self.callback("after_fit")


class Distributed:
    def __init__(self):
        self.accelerator = Accelerator(cpu=True)

    def before_fit(self, learner):
        prepare = self.accelerator.prepare
        learner.model, learner.optimizer = prepare(learner.model, learner.optimizer)
        learner.loaders = {phase: prepare(loader) for phase, loader in learner.loaders.items()}

    def backward(self, learner):
        self.accelerator.backward(learner.loss)

    def after_fit(self, learner):
        learner.model = self.accelerator.unwrap_model(learner.model)
        self.accelerator.end_training()


class Metrics:
    def __init__(self, distributed):
        self.distributed, self.right, self.seen, self.history = distributed, 0, 0, []

    def after_batch(self, learner):
        if not learner.training:
            gather = self.distributed.accelerator.gather_for_metrics
            predictions, labels = gather((learner.predictions.argmax(1), learner.batch[1]))
            self.right += (predictions == labels).sum().item()
            self.seen += len(labels)

    def after_epoch(self, learner):
        if not learner.training:
            self.history.append([self.right, self.seen])
            self.right = self.seen = 0


def main():
    set_seed(6)
    x = torch.randn(70, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    loaders = {"train": DataLoader(data, batch_size=7), "valid": DataLoader(data, batch_size=16)}
    first = torch.nn.Linear(6, 8, bias=False)  # its gradient would be rounding alone, which Adam makes large
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    distributed = Distributed()
    metrics = Metrics(distributed)
    learner = Learner(model, torch.optim.Adam(model.parameters(), lr=0.02), loaders, [distributed, metrics])
    learner.fit(3)
    return {"history": metrics.history, "is_mine": learner.model is model, "loss": learner.loss.item()}


if __name__ == "__main__":
    print(json.dumps(main()))
