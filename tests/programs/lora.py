"""LoRA with peft: only the adapters learn, and only they are saved."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader, TensorDataset


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.query = torch.nn.Linear(16, 16)
        self.value = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        return self.head((scores @ self.value(x)).mean(1))


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    tokens = torch.randint(0, 32, (128, 6))
    labels = (tokens.sum(1) % 2).long()
    base = Base()
    frozen = base.query.weight.detach().clone()
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"]))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    plain = accelerator.unwrap_model(model)
    adapters = get_peft_model_state_dict(plain, state_dict=accelerator.get_state_dict(model))
    moved = sum(tensor.double().abs().sum().item() for tensor in adapters.values())
    kept = torch.equal(plain.base_model.model.query.base_layer.weight.detach(), frozen)
    accelerator.end_training()
    return {"losses": losses, "adapters": sorted(adapters), "moved": moved, "base_is_kept": kept}


if __name__ == "__main__":
    print(json.dumps(main()))
