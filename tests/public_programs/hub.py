"""Make `hub` of a folder: tiny models and data under the names that public programs ask for.

A program finds every file and folder of it in its working directory, so `from_pretrained("bert-base-cased")` and
`load_dataset("nyu-mll/glue")` read these instead of a download. Models are random, texts and pictures are noise; what
is kept of the real ones is the format. Each function below makes one kind, from a seed of its own: made again with the
same packages, the files have the same bits.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["make_hub"]

_SEED = 20
_WORDS = [
    *("the", "a", "this", "is", "was", "are", "were", "and", "or", "but", "not", "in", "on", "of", "with", "to", "for"),
    *("he", "she", "it", "they", "we", "you", "big", "small", "old", "new", "red", "green", "blue", "slowly"),
    *("cat", "dog", "house", "tree", "river", "mountain", "city", "people", "photo", "toy", "code", "model", "data"),
    *("runs", "sleeps", "eats", "walk", "talk", "read", "write", "train", "loss", "step", "epoch"),
]
_CHARACTERS = [chr(code) for code in range(33, 127)]

_Row = dict[str, Any]


def _sentence(words: int = 8) -> str:
    return " ".join(random.choices(_WORDS, k=words))


def _picture(size: int = 32) -> Image.Image:
    """Return 4 x 4 random colours, enlarged."""
    return Image.frombytes("RGB", (4, 4), random.randbytes(48)).resize((size, size), Image.Resampling.BILINEAR)


# -- models and their tokenizers --------------------------------------------------------------------------------------


def _save(hub: Path, names: Iterable[str], *parts: Any) -> None:
    """Save a model, its tokenizer or image processor under each of `names`."""
    for name in names:
        for part in parts:
            part.save_pretrained(hub / name)


def _word_pieces() -> transformers.PreTrainedTokenizerBase:
    """Return a tokenizer of whole words and single characters: a trained one would differ from time to time."""
    characters = [character for character in _CHARACTERS if not character.isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters), *_WORDS]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=64)


def _byte_pairs(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((_sentence() for _ in range(400)), trainer)
    return tokenizer


def bert(hub: Path) -> None:
    tokenizer = _word_pieces()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    names = ["bert", "bert-base-cased", "bert-base-uncased"]
    _save(hub, names, transformers.BertForPreTraining(config), tokenizer)
    distil_config = transformers.DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64
    )
    _save(hub, ["distilbert-base-uncased"], transformers.DistilBertForMaskedLM(distil_config), tokenizer)


def gpt2(hub: Path) -> None:
    end = "<|endoftext|>"
    tokenizer = transformers.GPT2TokenizerFast(
        tokenizer_object=_byte_pairs([end]), model_max_length=64, unk_token=end, bos_token=end, eos_token=end
    )
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    _save(hub, ["gpt2", "huggingface-course/code-search-net-tokenizer"], config, tokenizer)


def llama(hub: Path) -> None:
    end = "<|endoftext|>"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_byte_pairs([end]), model_max_length=64, bos_token=end, eos_token=end, pad_token=end
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    names = ["llama", "HuggingFaceTB/SmolLM-360M", "HuggingFaceTB/SmolLM2-135M", "microsoft/phi-2"]
    _save(hub, names, transformers.LlamaForCausalLM(config), tokenizer)


def bart(hub: Path) -> None:
    byte_pairs = _byte_pairs(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    byte_pairs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs,
        model_max_length=64,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        sep_token="</s>",
        cls_token="<s>",
    )
    config = transformers.BartConfig(
        vocab_size=600,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=128,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = transformers.BartForConditionalGeneration(config)
    model.generation_config.max_length = 16
    model.generation_config.num_beams = 1
    _save(hub, ["bart"], model, tokenizer)


def t5(hub: Path) -> None:
    """Save a configuration only: trainers of pictures with texts read the width of the encoder."""
    config = transformers.T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    _save(hub, ["google/t5-v1_1-base"], config)


def vit(hub: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    _save(hub, ["vit"], transformers.ViTForImageClassification(config), processor)


def _vae() -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=8,
    )


def _unet(**more: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        **more,
    )


def stable_diffusion(hub: Path) -> None:
    """Save a pipeline of Stable Diffusion, one of SDXL, a ControlNet for each, and the autoencoder alone."""
    tokens = [*_CHARACTERS, *(f"{c}</w>" for c in _CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        tokenizer = transformers.CLIPTokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt", model_max_length=16)
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        projection_dim=32,
    )
    text_encoder, vae = transformers.CLIPTextModel(config), _vae()
    unet = _unet(cross_attention_dim=32, attention_head_dim=8)
    unet_xl = _unet(
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=80,
    )
    diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=diffusers.DDPMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(hub / "sd")
    shutil.copytree(hub / "sd", hub / "stable-diffusion-v1-5/stable-diffusion-v1-5")
    diffusers.StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=text_encoder,
        text_encoder_2=transformers.CLIPTextModelWithProjection(config),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet_xl,
        scheduler=diffusers.EulerDiscreteScheduler(),
        force_zeros_for_empty_prompt=True,
    ).save_pretrained(hub / "sdxl")
    for name, of in (("controlnet", unet), ("controlnet_xl", unet_xl)):
        controlnet = diffusers.ControlNetModel.from_unet(of, conditioning_embedding_out_channels=(16, 32))
        controlnet.save_pretrained(hub / name)
    _save(hub, ["stabilityai/sd-vae-ft-mse", "stabilityai/sd-vae-ft-ema"], vae)


def unet_config(hub: Path) -> None:
    diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).save_config(hub / "unet_config")


# -- data sets for `load_dataset` -------------------------------------------------------------------------------------


def _dataset(
    folder: Path, splits: Mapping[str, list[_Row]], config: str = "default", features: datasets.Features | None = None
) -> None:
    """Write one configuration: a Parquet file per split, and the card that names them."""
    folder.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet")
        card += [f"  - split: {split}", f"    path: {split}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")


def _sentence_pair(row: int) -> _Row:
    return {"sentence1": _sentence(), "sentence2": _sentence(), "label": random.randint(0, 1), "idx": row}


def glue(hub: Path) -> None:
    sizes = {"train": 96, "validation": 34, "test": 10}
    splits = {split: [_sentence_pair(row) for row in range(size)] for split, size in sizes.items()}
    for name in ("nyu-mll/glue", "glue"):
        _dataset(hub / name, splits, "mrpc")


def texts(hub: Path) -> None:
    wikitext = {
        split: [{"text": _sentence(12)} for _ in range(size)]
        for split, size in {"train": 510, "validation": 20, "test": 20}.items()
    }
    _dataset(hub / "Salesforce/wikitext", wikitext, "wikitext-2-v1")
    imdb = {
        split: [{"text": _sentence(40), "label": row % 2} for row in range(size)]
        for split, size in {"train": 120, "test": 40, "unsupervised": 40}.items()
    }
    _dataset(hub / "imdb", imdb)
    about = {"repo_name": "r", "path": "p", "copies": "1", "size": "10", "license": "mit"}
    for name, split in (("train", "train"), ("valid", "validation")):
        code = {split: [{"content": _sentence(200), **about} for _ in range(40)]}
        _dataset(hub / f"huggingface-course/codeparrot-ds-{name}", code)


def _question(row: int) -> _Row:
    words = _sentence(30).split()
    place = random.randrange(26)
    start = len(" ".join([*words[:place], ""]))
    answers = {"text": [words[place]], "answer_start": [start]}
    return {
        "id": str(row), "title": "t", "context": " ".join(words), "question": _sentence(5), "answers": answers
    }  # fmt: skip


def squad(hub: Path) -> None:
    sizes = {"train": 64, "validation": 24}
    _dataset(hub / "squad", {split: [_question(row) for row in range(size)] for split, size in sizes.items()})


def conll2003(hub: Path) -> None:
    kinds = ["O", *(f"{part}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for part in "BI")]
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "tokens": [datasets.Value("string")],
            "pos_tags": [datasets.Value("int64")],
            "chunk_tags": [datasets.Value("int64")],
            "ner_tags": [datasets.ClassLabel(names=kinds)],
        }
    )

    def row(number: int) -> _Row:
        words = _sentence(random.randint(4, 8)).split()
        tags = [random.randrange(len(kinds)) for _ in words]
        ones = [1] * len(words)
        return {"id": str(number), "tokens": words, "pos_tags": ones, "chunk_tags": ones, "ner_tags": tags}

    sizes = {"train": 48, "validation": 17, "test": 8}
    _dataset(
        hub / "conll2003",
        {split: [row(number) for number in range(size)] for split, size in sizes.items()},
        features=features,
    )


def classes(hub: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    splits = {
        split: [{"image": _picture(), "label": row % 2} for row in range(size)]
        for split, size in {"train": 32, "validation": 11}.items()
    }
    _dataset(hub / "tiny/classes", splits, features=features)


def pairs_of_pictures(hub: Path) -> None:
    """Write pairs under the column names of ControlNet's example and of InstructPix2Pix's."""
    pictures = ("original_image", "edited_image", "image", "conditioning_image")
    features = datasets.Features(
        {
            **{name: datasets.Image() for name in pictures},
            **{name: datasets.Value("string") for name in ("text", "edit_prompt")},
        }
    )
    rows: list[_Row] = []
    for _ in range(16):
        before, after = _picture(), _picture()
        named = dict(zip(pictures, (before, after, before, after), strict=True))
        rows.append({**named, "text": _sentence(4), "edit_prompt": "make it red"})
    _dataset(hub / "tiny/pairs", {"train": rows}, features=features)


def preferences(hub: Path) -> None:
    def row() -> _Row:
        question = {"role": "user", "content": _sentence(6)}
        return {answer: [question, {"role": "assistant", "content": _sentence(6)}] for answer in ("chosen", "rejected")}

    rows = [row() for _ in range(24)]
    _dataset(hub / "tiny/preferences", {"train": rows})
    _dataset(hub / "tiny/messages", {"train": [{"messages": row["chosen"]} for row in rows]})
    instructions = [dict.fromkeys(("instruction", "input", "output"), "") | {"output": _sentence(6)} for _ in range(24)]
    _dataset(hub / "tiny/instructions", {"train": instructions})


# -- files ------------------------------------------------------------------------------------------------------------


def _text_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _lines(path: Path, rows: Iterable[_Row]) -> None:
    _text_file(path, "\n".join(map(json.dumps, rows)))


def _save_picture(path: Path, picture: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def task_files(hub: Path) -> None:
    """Write the files of the examples of transformers, `--train_file` and `--validation_file`."""

    def multiple_choice(_: int) -> _Row:
        endings = {f"ending{number}": _sentence(4) for number in range(4)}
        return {"sent1": _sentence(), "sent2": _sentence(3), **endings, "label": random.randrange(4)}

    def summary(_: int) -> _Row:
        return {"text": _sentence(20), "summary": _sentence(6)}

    def translation(_: int) -> _Row:
        return {"translation": {"en": _sentence(), "ro": _sentence()}}

    def entities(_: int) -> _Row:
        words = _sentence().split()
        return {"tokens": words, "ner_tags": [random.choice(["O", "B-PER", "I-PER", "B-LOC"]) for _ in words]}

    kinds: dict[str, Callable[[int], _Row]] = {
        "glue": _sentence_pair,
        "swag": multiple_choice,
        "xsum": summary,
        "wmt": translation,
        "ner": entities,
    }
    for split, size in (("train", 64), ("validation", 22)):
        for kind, row in kinds.items():
            _lines(hub / f"files/{kind}_{split}.json", map(row, range(size)))
        questions = [_question(row) for row in range(size)]
        _text_file(hub / f"files/squad_{split}.json", json.dumps({"data": questions}))


def pictures(hub: Path) -> None:
    files = hub / "files"
    for number in range(104):
        _save_picture(files / f"pictures/{number:03}.png", _picture())
    for number in range(24):
        _save_picture(files / f"captioned/{number:03}.png", _picture())
    captions = ({"file_name": f"{number:03}.png", "text": _sentence(6)} for number in range(24))
    _lines(files / "captioned/metadata.jsonl", captions)
    for breed in ("beagle", "siamese", "pug"):
        for number in range(14):
            _save_picture(files / f"pets/{breed}_{number}.jpg", _picture(40))


def latents(hub: Path) -> None:
    """Write what REPA prepares from ImageNet: pictures, and mean and deviation of an autoencoder's latents."""
    folder = hub / "files/features"
    generator = np.random.default_rng(_SEED)
    (folder / "vae-sd").mkdir(parents=True)
    for number in range(16):
        np.save(folder / f"vae-sd/{number:03}.npy", generator.standard_normal((8, 32, 32), dtype=np.float32))
        _save_picture(folder / f"images/{number:03}.png", _picture(256))
    labels = [[f"{number:03}.npy", number % 10] for number in range(16)]
    _text_file(folder / "vae-sd/dataset.json", json.dumps({"labels": labels}))


def k_diffusion(hub: Path) -> None:
    """Write a configuration of k-diffusion's train.py: its own one for MNIST, narrower."""
    model = {
        "type": "image_v1",
        "input_channels": 1,
        "input_size": [28, 28],
        "patch_size": 1,
        "mapping_out": 32,
        "depths": [1, 1],
        "channels": [16, 32],
        "self_attn_depths": [False, True],
        "has_variance": True,
        "loss_config": "karras",
        "loss_weighting": "soft-min-snr",
        "dropout_rate": 0.05,
        "augment_wrapper": True,
        "augment_prob": 0.12,
        "sigma_data": 0.6162,
        "sigma_min": 0.01,
        "sigma_max": 80,
        "sigma_sample_density": {"type": "cosine-interpolated"},
    }
    config = {
        "model": model,
        "dataset": {"type": "mnist", "location": "data/mnist"},
        "optimizer": {"type": "adamw", "lr": 2e-4, "betas": [0.95, 0.999], "eps": 1e-6, "weight_decay": 1e-3},
        "lr_sched": {"type": "constant", "warmup": 0.0},
        "ema_sched": {"type": "inverse", "power": 0.75, "max_value": 0.9999},
    }
    _text_file(hub / "files/k_diffusion.json", json.dumps(config))


_DDPO = """
import ml_collections


def get_config():
    config = {
        "run_name": "tiny",
        "seed": 1,
        "logdir": "logs",
        "num_epochs": 2,
        "save_freq": 2,
        "num_checkpoint_limit": 2,
        "mixed_precision": "no",
        "allow_tf32": False,
        "resume_from": "",
        "use_lora": False,
        "pretrained": {"model": "sd", "revision": "main"},
        "sample": {"num_steps": 3, "eta": 1.0, "guidance_scale": 5.0, "batch_size": 2, "num_batches_per_epoch": 2},
        "train": {
            "batch_size": 2,
            "use_8bit_adam": False,
            "learning_rate": 1e-4,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_weight_decay": 1e-4,
            "adam_epsilon": 1e-8,
            "gradient_accumulation_steps": 1,
            "max_grad_norm": 1.0,
            "num_inner_epochs": 1,
            "cfg": True,
            "adv_clip_max": 5,
            "clip_range": 1e-4,
            "timestep_fraction": 1.0,
        },
        "prompt_fn": "imagenet_animals",
        "prompt_fn_kwargs": {},
        "reward_fn": "jpeg_compressibility",
        "per_prompt_stat_tracking": {"buffer_size": 16, "min_count": 16},
    }
    return ml_collections.ConfigDict(config)
"""


def ddpo(hub: Path) -> None:
    """Write the settings of ddpo-pytorch's train.py, which are a module."""
    _text_file(hub / "files/ddpo.py", _DDPO.lstrip())


def enwik8(hub: Path) -> None:
    """Write a text of more than the 90 MB that programs cut off for training, which is one page again and again."""
    page = _sentence(1_000).encode()
    path = hub / "data/enwik8.gz"
    (hub / "data/enwik8").mkdir(parents=True)
    with path.open("wb") as file, gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as compressed:
        for _ in range(91_000_000 // len(page) + 1):
            compressed.write(page)
    shutil.copy(path, hub / "data/enwik8/enwik8.gz")


_KINDS: tuple[Callable[[Path], None], ...] = (
    *(bert, gpt2, llama, bart, t5, vit, stable_diffusion, unet_config),
    *(glue, texts, squad, conll2003, classes, pairs_of_pictures, preferences),
    *(task_files, pictures, latents, k_diffusion, ddpo, enwik8),
)


def make_hub(hub: Path) -> None:
    """Make all of `hub`, which appears when it is complete."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    hub.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hub.", dir=hub.parent) as unfinished:
        for make in _KINDS:
            random.seed(_SEED)
            torch.manual_seed(_SEED)
            make(Path(unfinished, "hub"))
        try:
            Path(unfinished, "hub").rename(hub)
        except OSError:
            if not hub.is_dir():  # else another call has made it meanwhile
                raise
