"""Train with the ImagenTrainer of imagen-pytorch, which splits the data and validates."""

import torch
from imagen_pytorch import Imagen, ImagenTrainer, Unet


class PicturesWithText(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 16, 16, generator=generator), torch.rand(5, 16, generator=generator)


unet = Unet(dim=8, cond_dim=16, dim_mults=(1, 2), num_resnet_blocks=1, layer_attns=(False, True), text_embed_dim=16)
imagen = Imagen(unets=(unet,), image_sizes=(16,), timesteps=10, cond_drop_prob=0.1, text_embed_dim=16)
trainer = ImagenTrainer(
    imagen,
    split_valid_from_train=True,
    split_valid_fraction=0.1,
    dl_tuple_output_keywords_names=("images", "text_embeds"),
)
trainer.add_train_dataset(PicturesWithText(), batch_size=8)
for step in range(6):
    trainer.train_step(unet_number=1, max_batch_size=4)
    if step % 3 == 2:
        trainer.valid_step(unet_number=1, max_batch_size=4)
        trainer.save(f"checkpoint-{step}.pt")
