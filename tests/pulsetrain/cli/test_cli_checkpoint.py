"""`pulsetrain checkpoint consolidate`: one file, or a folder of transformers, from a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain.cli import main
from pulsetrain.engine import Every
from pulsetrain.engine.checkpoint import load_safetensors
from pulsetrain.handlers import EMA, Checkpointer
from tests.support.models import Tied, pairs
from tests.support.runs_of_ranks import make

safetensors = pytest.importorskip("safetensors")


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    made = make(Tied(), DataLoader(pairs(16), 4), Checkpointer(tmp_path / "run", Every(epochs=1)))
    made.train()
    return made.model


def test_the_weights_of_the_latest_checkpoint_are_one_file(trained: nn.Module, tmp_path: Path, capsys: Any):
    file = tmp_path / "model.safetensors"
    assert main(["checkpoint", "consolidate", str(tmp_path / "run"), "--into", str(file)]) == 0
    assert "000000008-checkpoint" in capsys.readouterr().out
    model = Tied()
    assert not load_safetensors(model, file)
    for name, each in trained.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], each, rtol=0, atol=0)


@pytest.mark.parametrize("command", [["checkpoint", "consolidate"], ["export", "--format", "safetensors"]])
def test_the_weights_are_those_that_were_validated_or_those_that_were_trained(
    command: list[str], tmp_path: Path, capsys: Any
):
    average, data, run = EMA(0.9), DataLoader(pairs(16), 4), tmp_path / "run"
    made = make(Tied(), data, Checkpointer(run, Every(epochs=1)), average, val_loader=data)
    made.train()
    with average.applied():
        averaged = copy.deepcopy(made.model.state_dict())
    for number, (words, weights) in enumerate([([], averaged), (["--no-averages"], made.model.state_dict())]):
        file, model = tmp_path / f"{number}.safetensors", Tied()
        capsys.readouterr()
        assert main([*command, str(run), "--into", str(file), *words]) == 0
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == 1
        assert ("loading the averages" in err) is not bool(words)
        load_safetensors(model, file)
        for name, each in weights.items():
            torch.testing.assert_close(model.state_dict()[name], each, rtol=0, atol=0)


def test_an_existing_file_is_kept_unless_forced(trained: nn.Module, tmp_path: Path, capsys: Any):
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    words = ["checkpoint", "consolidate", str(tmp_path / "run"), "--into", str(file)]
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main([*words, "--force"]) == 0


def test_what_holds_no_checkpoint_or_no_model_to_make_is_refused(trained: nn.Module, tmp_path: Path, capsys: Any):
    assert main(["checkpoint", "consolidate", str(tmp_path / "nowhere")]) == 2
    assert main(["checkpoint", "consolidate", str(tmp_path / "run"), "--pretrained", str(tmp_path / "to")]) == 2
    assert "has no config.yaml" in capsys.readouterr().err


CONFIG = """
run: {folder}
model: {{class_path: tiny.make}}
data: {{class_path: tiny.data}}
strategy: pretrain
training: {{max_iterations: 2, device: cpu, seed: 0}}
handlers: [{{class_path: Checkpointer, init_args: {{every: {{iterations: 1}}}}}}]
"""
TINY = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def make():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))

def data():
    return torch.utils.data.DataLoader(torch.arange(64).reshape(8, 8) % 16, batch_size=4)
"""


@pytest.mark.slow
def test_a_model_of_transformers_is_loaded_by_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path / "run"))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", str(tmp_path / "config.yaml")]) == 0
    into = tmp_path / "model"
    assert main(["checkpoint", "consolidate", str(tmp_path / "run"), "--pretrained", str(into)]) == 0
    model = transformers.GPT2LMHeadModel.from_pretrained(into)
    assert model.config.n_embd == 8
