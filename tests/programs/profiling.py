"""A few steps under torch's profiler, with a schedule and a trace file of every rank."""

import json
import os
import tempfile

import torch
from accelerate import Accelerator, ProfileKwargs
from accelerate.utils import broadcast_object_list


def steps(accelerator, model, optimizer, count, profiler=None):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if profiler is not None:
            profiler.step()
    return loss.item()


def main():
    handled = []

    def on_trace_ready(profiler):
        names = {event.key for event in profiler.key_averages()}
        handled.append("aten::addmm" in names or "aten::linear" in names)

    scheduled = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2, "skip_first": 1},
        on_trace_ready=on_trace_ready,
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[scheduled])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with accelerator.profile() as profiler:
        loss = steps(accelerator, model, optimizer, 7, profiler)

    with tempfile.TemporaryDirectory() as mine:
        folder = broadcast_object_list([mine])[0]
        with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder, record_shapes=True)):
            steps(accelerator, model, optimizer, 1)
        accelerator.wait_for_everyone()
        traces = sorted(os.listdir(folder))
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"handled": handled, "traces": traces, "loss": loss}


if __name__ == "__main__":
    print(json.dumps(main()))
