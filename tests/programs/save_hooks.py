"""Models that save themselves: hooks around save_state and load_state tell them apart by their class."""

import json
import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list, set_seed


class Saved(torch.nn.Linear):
    def save_pretrained(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save(self.state_dict(), os.path.join(folder, "weights.pt"))

    @classmethod
    def from_pretrained(cls, folder):
        weights = torch.load(os.path.join(folder, "weights.pt"), weights_only=True)
        model = cls(weights["weight"].shape[1], weights["weight"].shape[0])
        model.load_state_dict(weights)
        return model


class Denoiser(Saved):
    pass


class TextEncoder(Saved):
    pass


NAMES = {Denoiser: "denoiser", TextEncoder: "text_encoder"}


def train(accelerator, models, optimizer, steps, seed):
    denoiser, text_encoder = models
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        with accelerator.accumulate(denoiser, text_encoder):
            x = torch.randn(4, 3, generator=generator)
            loss = (denoiser(text_encoder(x)) - x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    with tempfile.TemporaryDirectory() as mine:
        accelerator = Accelerator(cpu=True)
        folder = broadcast_object_list([mine])[0]
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=folder))
        set_seed(1)
        models = Denoiser(4, 3), TextEncoder(3, 4)
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-2)
        *models, optimizer = accelerator.prepare(*models, optimizer)
        seen = []

        def save_model_hook(models, weights, output_dir):
            if accelerator.is_main_process:
                for model in models:
                    seen.append(type(accelerator.unwrap_model(model)).__name__)
                    model = accelerator.unwrap_model(model)
                    model.save_pretrained(os.path.join(output_dir, NAMES[type(model)]))
                    weights.pop()

        def load_model_hook(models, input_dir):
            for _ in range(len(models)):
                model = accelerator.unwrap_model(models.pop())
                loaded = type(model).from_pretrained(os.path.join(input_dir, NAMES[type(model)]))
                model.load_state_dict(loaded.state_dict())

        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)
        train(accelerator, models, optimizer, steps=2, seed=10)
        checkpoint = os.path.join(folder, "checkpoint-2")
        accelerator.save_state(checkpoint)
        accelerator.wait_for_everyone()
        files = sorted(name for name in os.listdir(checkpoint) if not name.startswith("random_states"))
        first = train(accelerator, models, optimizer, steps=3, seed=11)
        accelerator.load_state(checkpoint)
        again = train(accelerator, models, optimizer, steps=3, seed=11)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"files": files, "seen": sorted(seen), "losses": first, "same": first == again}


if __name__ == "__main__":
    print(json.dumps(main()))
