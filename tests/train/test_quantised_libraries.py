"""Weights that bitsandbytes and torchao have quantised, on a CPU: adapters of two ranks equal those of one process.

The weights are random, since nothing is downloaded. Without these packages there is nothing to run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nbaccel import Accelerator
from nbaccel.base.quantised import base_of, is_quantised
from nbaccel.testing import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LLAMA = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


def four_bit(folder: Path) -> Any:
    """Return a model as QLoRA programs load it: NF4, with scales that are quantised too."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantisation, device_map={"": "cpu"}, dtype=torch.float32
    )
    model.config.use_cache = False
    return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


def eight_bit(folder: Path) -> Any:
    """Return a model whose linear layers torchao has quantised in place; transformers knows nothing of it."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    return model.requires_grad_(False)


LIBRARIES = pytest.mark.parametrize(
    ("library", "load"), [("bitsandbytes", four_bit), ("torchao", eight_bit)], ids=["bitsandbytes", "torchao"]
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(load: Callable[[Path], Any], folder: Path, **choices: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    base = load(folder)
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **choices))


def train(load: Callable[[Path], Any], folder: Path, batch_size: int, save: bool = False, **choices: Any) -> Any:
    """Train adapters for four batches, and save after two of them; return losses, and those after a resumption."""
    accelerator = Accelerator(cpu=True)
    model: Any = adapted(load, folder, **choices)
    torch.manual_seed(2)
    data: Any = torch.utils.data.DataLoader(torch.randint(0, 64, (32, 12)), batch_size=batch_size)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    def losses() -> list[float]:
        found = []
        for number, ids in enumerate(data):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
            if save and number == 1 and not (folder / "saved").exists():
                accelerator.save_state(folder / "saved")
        return found

    first = losses()
    if not save:
        return first, []
    accelerator.load_state(folder / "saved")
    return first, losses()


@LIBRARIES
def test_two_ranks_train_adapters_as_one_process(library: str, load: Any, checkpoint: Path) -> None:
    pytest.importorskip(library)
    (one, _), (two, _) = run_ranks(2, train, load, checkpoint, 4, timeout_s=180)
    assert one == two
    assert one == pytest.approx(run_ranks(1, train, load, checkpoint, 8, timeout_s=180)[0][0], abs=1e-6)
    assert one[-1] < one[0]


@LIBRARIES
def test_a_checkpoint_has_the_adapters_alone_and_goes_on(library: str, load: Any, checkpoint: Path) -> None:
    pytest.importorskip(library)
    ((first, again),) = run_ranks(1, train, load, checkpoint, 8, True, timeout_s=180)
    assert again == first[2:]
    names = load_file(checkpoint / "saved" / "model.safetensors")
    assert names
    assert all("lora_" in name for name in names)
    assert not list((checkpoint / "saved").glob("*frozen*"))


@LIBRARIES
def test_modules_to_save_are_trained_and_saved_beside_the_adapters(library: str, load: Any, checkpoint: Path) -> None:
    pytest.importorskip(library)
    (losses, again), _ = run_ranks(2, _train_head, load, checkpoint, timeout_s=180)
    assert again == losses[2:]
    names = load_file(checkpoint / "saved" / "model.safetensors")
    assert any("lm_head.modules_to_save" in name for name in names)
    assert not any("original_module" in name or "base_layer" in name for name in names)


def _train_head(load: Any, folder: Path) -> Any:
    return train(load, folder, 4, True, modules_to_save=["lm_head"])


@LIBRARIES
def test_the_base_is_recognised(library: str, load: Any, checkpoint: Path) -> None:
    pytest.importorskip(library)
    model = adapted(load, checkpoint)
    assert is_quantised(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in model.state_dict() if "lora_" in name}
    assert base_of(model) == {name for name, _ in model.named_parameters(remove_duplicate=False)} - trained


def test_merging_after_prepare_gives_a_model_without_adapters(checkpoint: Path) -> None:
    """Of torchao's weights peft merges those that transformers has quantised."""
    pytest.importorskip("bitsandbytes")
    model = adapted(four_bit, checkpoint, init_lora_weights=False)
    ids = torch.arange(8)[None]
    accelerator = Accelerator(cpu=True)
    prepared: Any = accelerator.prepare(model)
    wanted = prepared(input_ids=ids).logits
    merged: Any = accelerator.unwrap_model(prepared).merge_and_unload()  # type: ignore[operator]
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    answers = merged(input_ids=ids).logits  # its weights are quantised again, with the adapters in them
    assert torch.cosine_similarity(answers.flatten(), wanted.flatten(), dim=0) > 0.8
