"""Train with the VoiceBoxTrainer of voicebox-pytorch, with noise for the spectrograms."""

import torch
from voicebox_pytorch import ConditionalFlowMatcherWrapper, VoiceBox, VoiceBoxTrainer


class Spectrograms(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(12, 16, generator=torch.Generator().manual_seed(index))


voicebox = VoiceBox(
    dim=16, num_cond_tokens=8, depth=2, dim_head=8, heads=2, num_register_tokens=2, condition_on_text=False
)
trainer = VoiceBoxTrainer(
    ConditionalFlowMatcherWrapper(voicebox=voicebox),
    dataset=Spectrograms(),
    num_train_steps=5,
    num_warmup_steps=2,
    batch_size=4,
    grad_accum_every=2,
    valid_frac=0.2,
    log_every=1,
    save_results_every=2,
    save_model_every=3,
    force_clear_prev_results=False,
)
trainer.train()
