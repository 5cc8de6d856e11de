"""Train with the DiffusionPriorTrainer of DALLE2-pytorch, and an Accelerator; each rank has other batches."""

import torch
from accelerate import Accelerator
from dalle2_pytorch import DiffusionPrior, DiffusionPriorNetwork
from dalle2_pytorch.trainer import DiffusionPriorTrainer

accelerator = Accelerator()
prior = DiffusionPrior(
    net=DiffusionPriorNetwork(dim=16, depth=1, dim_head=8, heads=2, num_timesteps=10),
    image_embed_dim=16,
    timesteps=10,
    cond_drop_prob=0.2,
    condition_on_text_encodings=False,
)
trainer = DiffusionPriorTrainer(
    prior,
    accelerator=accelerator,
    lr=1e-3,
    max_grad_norm=0.5,
    ema_beta=0.99,
    ema_update_after_step=1,
    ema_update_every=1,
)
for step in range(6):
    generator = torch.Generator().manual_seed(step * accelerator.num_processes + accelerator.process_index)
    text, image = torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)
    trainer(text_embed=text, image_embed=image, max_batch_size=4)
    trainer.update()
trainer.save("prior.pt", overwrite=True)
