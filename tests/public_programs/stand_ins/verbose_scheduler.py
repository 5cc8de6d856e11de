"""Schedulers that hand `verbose` on, which torch no longer takes."""

import torch


class Scheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, last_epoch=-1, verbose=False):
        super().__init__(optimizer, last_epoch)


torch.optim.lr_scheduler._LRScheduler = Scheduler
