"""Train with the SFTTrainer of self-rewarding-lm-pytorch, which is given an Accelerator."""

import torch
from accelerate import Accelerator
from self_rewarding_lm_pytorch import create_mock_dataset
from self_rewarding_lm_pytorch.self_rewarding_lm_pytorch import SFTTrainer
from x_transformers import Decoder, TransformerWrapper


def sequence():
    """Return random tokens and the length of the prompt."""
    return torch.randint(0, 256, (32,)), torch.tensor(4)


model = TransformerWrapper(
    num_tokens=256, max_seq_len=64, attn_layers=Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
)
trainer = SFTTrainer(
    model,
    accelerator=Accelerator(),
    train_dataset=create_mock_dataset(24, sequence),
    valid_dataset=create_mock_dataset(8, sequence),
    batch_size=4,
    grad_accum_steps=2,
    num_epochs=2,
    valid_every=2,
)
trainer()
