"""A character model of Python's own manual: sequences of all lengths, and a loss per token over all ranks.

The number of tokens of a step is counted over its batches and ranks before the first of them goes backward, as
Accelerate's guide on gradient accumulation for language models does.
"""

import contextlib
import json
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

ACCUMULATION = 2


def get_lines():
    lines = [line.strip() for name in sorted(topics)[:12] for line in topics[name].splitlines()]
    return [list(line.encode("ascii", "ignore")[:40]) for line in lines if len(line) > 8][:192]


def collate(lines):
    tokens = pad_sequence([torch.tensor(line) for line in lines], batch_first=True)
    labels = tokens.clone()
    labels[tokens == 0] = -100
    return {"tokens": tokens, "labels": labels}


class CharModel(torch.nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = torch.nn.Embedding(128, width)
        self.gru = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, 128)

    def forward(self, tokens, labels):
        logits = self.head(self.gru(self.embedding(tokens))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def main():
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    set_seed(1)
    model = CharModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(get_lines(), batch_size=16 // accelerator.num_processes, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        batches = iter(loader)
        for _ in range(len(loader) // ACCUMULATION):
            group = [next(batches) for _ in range(ACCUMULATION)]
            local = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in group]).sum()
            num_tokens = accelerator.gather(local).sum().item()
            reported = torch.zeros(())
            for i, batch in enumerate(group):
                is_last = i == len(group) - 1
                no_sync = model.no_sync if not is_last and accelerator.num_processes > 1 else contextlib.nullcontext
                with no_sync():
                    loss = model(**batch)
                    reported += loss.detach() / num_tokens
                    # Gradients are averaged over the ranks, and backward divides by the accumulation steps.
                    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps
                    accelerator.backward(loss * scale / num_tokens)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(reported, reduction="sum").item())
    weight = accelerator.unwrap_model(model).head.weight.detach().double().abs().sum().item()
    accelerator.end_training()
    return {"losses": losses, "weight": weight}


if __name__ == "__main__":
    print(json.dumps(main()))
