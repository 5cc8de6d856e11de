"""Train with the SoundStormTrainer of soundstorm-pytorch, with codes for the sound."""

import torch
from soundstorm_pytorch import ConformerWrapper, SoundStorm, SoundStormTrainer


class Codes(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        return torch.randint(0, 16, (12,), generator=g), torch.randint(0, 32, (12, 2), generator=g)


conformer = ConformerWrapper(
    codebook_size=32, num_quantizers=2, conformer={"dim": 16, "depth": 1, "dim_head": 8, "heads": 2}
)
model = SoundStorm(
    conformer,
    steps=4,
    schedule="cosine",
    num_semantic_token_ids=16,
    wav2vec_target_sample_hz=16,
    wav2vec_downsample_factor=1,
    codec_target_sample_hz=16,
    codec_downsample_factor=1,
)
trainer = SoundStormTrainer(
    model,
    dataset=Codes(),
    num_train_steps=5,
    num_warmup_steps=2,
    batch_size=4,
    grad_accum_every=2,
    valid_frac=0.2,
    save_results_every=2,
    save_model_every=3,
    force_clear_prev_results=False,
)
trainer.train()
