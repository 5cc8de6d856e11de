"""Sequence to sequence: what is generated has another length on every rank and is padded before it is gathered."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, WORDS = 0, 20


class Copier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 16, padding_idx=PAD)
        self.head = torch.nn.Linear(16, WORDS)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

    @torch.no_grad()
    def generate(self, tokens):
        return self(tokens).argmax(-1).masked_fill(tokens == PAD, PAD)


def collate(samples):
    tokens = pad_sequence(samples, batch_first=True, padding_value=PAD)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == PAD, -100)}


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(4)
    samples = [torch.randint(1, WORDS, (2 + index % 7,)) for index in range(45)]
    train, valid = (DataLoader(part, batch_size=4, collate_fn=collate) for part in (samples[:32], samples[32:]))
    model = Copier()
    decay = [{"params": model.embed.parameters(), "weight_decay": 0.01}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(decay, lr=0.1)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    history = []
    for _ in range(3):
        model.train()
        for batch in train:
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = total = count = 0
        for batch in valid:
            written = accelerator.unwrap_model(model).generate(batch["input_ids"])
            written = accelerator.pad_across_processes(written, dim=1, pad_index=PAD)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            written, labels = accelerator.gather_for_metrics((written, labels))
            asked = labels != -100
            right += (written[asked] == labels[asked]).sum().item()
            total += asked.sum().item()
            count += len(written)
        history.append(
            {"right": right, "tokens": total, "texts": count, "loss": accelerator.reduce(loss.detach(), "mean").item()}
        )
    accelerator.end_training()
    return {"history": history, "expected": sum(map(len, samples[32:]))}


if __name__ == "__main__":
    print(json.dumps(main()))
