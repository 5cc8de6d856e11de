"""Train with the Trainer of rectified-flow-pytorch."""

import torch
from rectified_flow_pytorch import RectifiedFlow, Trainer, Unet


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(index))


trainer = Trainer(
    RectifiedFlow(Unet(dim=8, dim_mults=(1, 2))),
    dataset=Pictures(),
    num_train_steps=6,
    batch_size=4,
    save_results_every=3,
    checkpoint_every=3,
    num_samples=4,
    grad_accum_every=2,
)
trainer()
