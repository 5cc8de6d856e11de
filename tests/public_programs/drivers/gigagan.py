"""Train GigaGAN of gigagan-pytorch: two models, two optimizers, a loader that is prepared later."""

from gigagan_pytorch import GigaGAN, ImageDataset

network = {"dim_max": 16, "image_size": 16, "num_skip_layers_excite": 2, "unconditional": True}
gan = GigaGAN(
    generator={"dim_capacity": 4, "style_network": {"dim": 16, "depth": 2}, **network},
    discriminator={"dim_capacity": 4, **network},
    log_steps_every=2,
    save_and_sample_every=100,
    early_save_thres_steps=0,
)
gan.set_dataloader(ImageDataset(folder="files/pictures", image_size=16).get_dataloader(batch_size=2))
gan(steps=3, grad_accum_every=2)
