"""Train with the VideoTokenizerTrainer of magvit2-pytorch."""

import torch
from magvit2_pytorch import VideoTokenizer, VideoTokenizerTrainer


class Videos(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(3, 5, 16, 16, generator=torch.Generator().manual_seed(index))


tokenizer = VideoTokenizer(
    image_size=16,
    init_dim=8,
    max_dim=16,
    codebook_size=32,
    layers=("residual", "compress_space", "compress_time"),
    use_gan=True,
    perceptual_loss_weight=0.0,
)
trainer = VideoTokenizerTrainer(
    tokenizer,
    dataset=Videos(),
    batch_size=2,
    num_train_steps=4,
    grad_accum_every=2,
    validate_every_step=2,
    checkpoint_every_step=2,
    num_frames=5,
    warmup_steps=2,
    valid_frac=0.2,
)
trainer.train()
