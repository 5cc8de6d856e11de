"""Train with the SPINTrainer of self-rewarding-lm-pytorch."""

import torch
from self_rewarding_lm_pytorch import SPINTrainer, create_mock_dataset
from x_transformers import Decoder, TransformerWrapper


def sequence():
    """Return random tokens and the length of the prompt."""
    return torch.randint(0, 256, (32,)), torch.tensor(4)


model = TransformerWrapper(
    num_tokens=256, max_seq_len=64, attn_layers=Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
)
trainer = SPINTrainer(
    model, max_seq_len=32, train_sft_dataset=create_mock_dataset(16, sequence), batch_size=4, epochs=1
)
trainer()
