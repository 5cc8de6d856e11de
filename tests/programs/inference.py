"""Distributed inference: prompts are dealt to the ranks, answers of all lengths are collected in their order."""

import json

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, pad_across_processes

PROMPTS = [f"{word}: " for word in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")]


class Parrot(torch.nn.Module):
    """Generates bytes from bytes; longer prompts get longer answers."""

    def __init__(self):
        super().__init__()
        self.step = torch.nn.Linear(1, 1)
        with torch.no_grad():
            self.step.weight.fill_(1)
            self.step.bias.fill_(1)

    @torch.inference_mode()
    def generate(self, prompts):
        answers = []
        for prompt in prompts:
            codes = torch.tensor([list(prompt.encode())], dtype=torch.float32)
            answers.append(self.step(codes[0, : len(prompt) // 2, None]).flatten().long())
        return torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)


def main():
    state = PartialState(cpu=True)
    model = Parrot().to(state.device).eval()

    # Texts: every rank has some, the first ones perhaps one more.
    with state.split_between_processes(PROMPTS) as mine:
        tokens = model.generate(mine)
        texts = [bytes(row[row > 0].tolist()).decode() for row in tokens]
    texts = gather_object(texts)

    # Tensors: every rank has equally many after padding, and they are equally long after another one.
    with state.split_between_processes(PROMPTS, apply_padding=True) as mine:
        tokens = pad_across_processes(model.generate(mine), dim=1)
        assert len(mine) == -(-len(PROMPTS) // state.num_processes)
    lengths = gather_object([list(tokens.shape)])

    # Several inputs that belong together.
    with state.split_between_processes({"prompt": PROMPTS, "seed": list(range(7))}) as mine:
        pairs = gather_object(list(zip(mine["prompt"], mine["seed"], strict=True)))

    state.wait_for_everyone()
    if state.is_main_process:
        assert len(texts) == len(PROMPTS)
    return {"texts": texts, "width": lengths[0][1], "pairs": pairs}


if __name__ == "__main__":
    print(json.dumps(main()))
