"""Textual inversion: one embedding learns; after each step the others are put back through the unwrapped model."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

TOKENS, NEW = 12, 11


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Embedding(TOKENS, 8)
        self.mix = torch.nn.Linear(8, 8)

    def get_input_embeddings(self):
        return self.embeddings

    def forward(self, tokens):
        return self.mix(self.embeddings(tokens)).mean(1)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    encoder, decoder = Encoder(), torch.nn.Linear(8, 4)
    encoder.mix.requires_grad_(False)
    decoder.requires_grad_(False)
    optimizer = torch.optim.AdamW(encoder.get_input_embeddings().parameters(), lr=0.05, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / accelerator.num_processes))
    samples = [(torch.tensor([index % NEW, NEW, (3 * index) % NEW]), torch.randn(4)) for index in range(32)]
    loader = DataLoader(samples, batch_size=4)
    encoder.train()
    encoder, optimizer, loader, scheduler = accelerator.prepare(encoder, optimizer, loader, scheduler)
    decoder.to(accelerator.device)
    before = accelerator.unwrap_model(encoder).get_input_embeddings().weight.data.clone()
    others = torch.arange(TOKENS) != NEW
    losses = []
    for _ in range(3):
        for tokens, target in loader:
            with accelerator.accumulate(encoder):
                loss = F.mse_loss(decoder(encoder(tokens)), target)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    weight = accelerator.unwrap_model(encoder).get_input_embeddings().weight
                    weight[others] = before[others]
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    after = accelerator.unwrap_model(encoder).get_input_embeddings().weight.data
    accelerator.end_training()
    kept, moved = torch.equal(after[others], before[others]), (after[NEW] - before[NEW]).norm().item()
    return {"losses": losses, "lr": scheduler.get_last_lr(), "others_are_kept": kept, "moved": moved}


if __name__ == "__main__":
    print(json.dumps(main()))
