"""Programs of other libraries train unchanged inside `notebook_launcher`, in two ranks, with the asked precision.

Each runs as a script of its own, as a user would write it, and prints what it found out; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = """
def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data

def fingerprint(model):
    \"\"\"Alike on all ranks if they trained together.\"\"\"
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())
"""


def needs(*libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed; `make test` installs it")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_script(folder: Path, body: str, *launcher: str) -> Any:
    """Run `body` as a script; the value of its last line of output, which is JSON."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(body))
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    return json.loads(done.stdout.splitlines()[-1])


def script(imports: str, train: str, precision: str = "no") -> str:
    """A program that trains in two ranks and prints what both found; under torchrun it launches nothing itself."""
    return "\n".join(
        [
            "import json, os, torch",
            textwrap.dedent(imports),
            MODEL,
            textwrap.dedent(train),
            "if __name__ == '__main__':",
            "    if 'TORCHELASTIC_RUN_ID' in os.environ:",
            "        facts = train()",
            "        if os.environ['RANK'] == '0':  # torchrun does not keep lines of two ranks apart",
            "            print(json.dumps(facts), flush=True)",
            "        os._exit(0)  # torch's own end aborts now and then after gloo, with the work done",
            "    else:",
            "        from nbaccel import notebook_launcher",
            f"        print(json.dumps(notebook_launcher(train, num_processes=2, mixed_precision={precision!r})))",
        ]
    )


GATHERS = """
def from_both_ranks(fact):
    facts = [None, None]
    torch.distributed.all_gather_object(facts, fact)
    return facts
"""


def test_raw_ddp_trains_in_two_ranks(tmp_path: Path) -> None:
    train = """
    def train():
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        model, _, data = make()
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
        losses = []
        for epoch in range(4):
            for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return from_both_ranks([rank, os.environ["LOCAL_RANK"], fingerprint(model), losses])
    """
    (rank_0, local_0, weights_0, losses_0), (rank_1, local_1, weights_1, losses_1) = run_script(
        tmp_path, script(GATHERS, train)
    )
    assert [rank_0, rank_1, local_0, local_1] == [0, 1, "0", "1"]
    assert weights_0 == weights_1
    assert losses_0 != losses_1  # each rank saw its own half
    assert losses_0[-1] < losses_0[0]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_in_two_ranks_with_the_launchers_precision(tmp_path: Path, precision: str) -> None:
    needs("accelerate")
    train = """
    def train():
        accelerator = Accelerator(cpu=True)
        model, optimizer, data = make()
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        inner = []
        accelerator.unwrap_model(model)[0].register_forward_hook(lambda _, __, y: inner.append(str(y.dtype)))
        losses = []
        for epoch in range(4):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
        return from_both_ranks([accelerator.process_index, accelerator.mixed_precision, sorted(set(inner)),
                                fingerprint(model), losses, len(loader)])
    """
    facts = run_script(tmp_path, script(f"from accelerate import Accelerator\n{GATHERS}", train, precision))
    assert [fact[0] for fact in facts] == [0, 1]
    computed_in = "torch.bfloat16" if precision == "bf16" else "torch.float32"
    for _, asked, dtypes, _, losses, batches in facts:
        assert asked == precision
        assert dtypes == [computed_in]
        assert batches == 4
        assert losses[-1] < losses[0]
    assert facts[0][3] == facts[1][3]


@pytest.mark.full
def test_the_transformers_trainer_trains_a_small_bert_in_two_ranks_in_bf16(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    train = """
    class Sentences(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            words = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
            words[0] = index % 2
            return {"input_ids": words, "labels": index % 2}

    def train():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=64, max_position_embeddings=16)
        model = BertForSequenceClassification(config)
        seen = []
        model.bert.encoder.layer[1].output.dense.register_forward_hook(lambda _, __, y: seen.append(str(y.dtype)))
        arguments = TrainingArguments(
            output_dir="out", per_device_train_batch_size=4, num_train_epochs=2, bf16=True, use_cpu=True,
            report_to=[], save_strategy="no", logging_steps=4, disable_tqdm=True, learning_rate=1e-3,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
        result = trainer.train()
        return from_both_ranks([arguments.process_index, arguments.world_size, sorted(set(seen)),
                                fingerprint(trainer.model), result.global_step, result.training_loss])
    """
    imports = (
        f"from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments\n{GATHERS}"
    )
    program = script(imports, train)
    facts = run_script(tmp_path, program)
    assert [fact[:3] for fact in facts] == [[0, 2, ["torch.bfloat16"]], [1, 2, ["torch.bfloat16"]]]
    assert facts[0][3] == facts[1][3]
    assert facts[0][4] == 2 * 64 // (2 * 4)
    assert facts == run_script(tmp_path, program, *TORCHRUN)  # to the last bit of weights and loss


@pytest.mark.full
def test_lightning_fabric_trains_in_two_ranks_in_bf16(tmp_path: Path) -> None:
    needs("lightning")
    train = """
    def train():
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
        fabric.launch()
        model, optimizer, data = make()
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=8))
        losses, seen = [], []
        model.module[0].register_forward_hook(lambda _, __, y: seen.append(str(y.dtype)))
        for epoch in range(4):
            for x, y in loader:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return from_both_ranks([fabric.global_rank, fabric.world_size, sorted(set(seen)), fingerprint(model), losses])
    """
    facts = run_script(tmp_path, script(f"from lightning.fabric import Fabric\n{GATHERS}", train))
    assert [fact[:3] for fact in facts] == [[0, 2, ["torch.bfloat16"]], [1, 2, ["torch.bfloat16"]]]
    assert facts[0][3] == facts[1][3]
    assert facts[0][4][-1] < facts[0][4][0]
