"""`pulsetrain export --format safetensors|torch_export|onnx`: other tools compute what the run's model computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import load_safetensors

safetensors = pytest.importorskip("safetensors", reason="safetensors is not there: pip install safetensors")

CONFIG = """
run: {folder}
model: {{class_path: exported.{model}}}
data: {{class_path: exported.{data}}}
strategy: {strategy}
training: {{max_iterations: 4, learning_rate: 0.05, device: cpu, seed: 3}}
handlers: [{{class_path: Checkpointer, init_args: {{every: {{iterations: 2}}}}}}]
"""
MODULE = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def pairs():
    x = torch.randn(12, 4)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=6)


def llama():
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, max_position_embeddings=16))


def adapted():
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def tokens():
    return torch.utils.data.DataLoader(torch.arange(96).reshape(12, 8) % 16, batch_size=6)
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "exported.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "exported", raising=False)

    def run(model: str = "net", data: str = "pairs", strategy: str = "supervised") -> Path:
        folder = tmp_path / "run"
        text = CONFIG.format(folder=folder, model=model, data=data, strategy=strategy)
        (tmp_path / "config.yaml").write_text(text)
        assert main(["train", str(tmp_path / "config.yaml")]) == 0
        return folder

    return run


def trained(folder: Path, checkpoint: str = "latest") -> Any:
    """The run's model, made by hand."""
    from pulsetrain.engine.checkpoint import load_weights

    module = sys.modules["exported"]
    model = module.net()
    load_weights(model, folder / checkpoint)
    return model.eval()


def test_safetensors_has_the_weights(train: Any, tmp_path: Path, capsys: Any) -> None:
    folder = train()
    assert main(["export", str(folder), "--format", "safetensors", "--into", "model.safetensors"]) == 0
    assert "model.safetensors: 9 tensors of" in capsys.readouterr().out
    model = sys.modules["exported"].net()
    assert not load_safetensors(model, tmp_path / "model.safetensors")
    x = torch.randn(5, 4)
    assert torch.equal(model.eval()(x), trained(folder)(x))


def test_a_program_computes_what_the_model_computes_for_other_batches_too(train: Any, tmp_path: Path) -> None:
    folder = train()
    assert main(["export", str(folder), "--format", "torch_export"]) == 0
    (file,) = tmp_path.glob("*.pt2")
    program = torch.export.load(file).module()
    for rows in (6, 1, 17):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(program(x), trained(folder)(x))


def test_a_checkpoint_may_be_named(train: Any, tmp_path: Path) -> None:
    folder = train()
    first, last = sorted((folder / "checkpoints").glob("0*"))
    assert main(["export", str(first), "--format", "torch_export", "--into", "first.pt2"]) == 0
    x = torch.randn(3, 4)
    found = torch.export.load(tmp_path / "first.pt2").module()(x)
    torch.testing.assert_close(found, trained(folder, f"checkpoints/{first.name}")(x))
    assert not torch.allclose(found, trained(folder, f"checkpoints/{last.name}")(x))


@pytest.mark.slow
def test_a_language_model_is_called_by_name(train: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
    folder = train("llama", "tokens", "pretrain")
    assert main(["export", str(folder), "--format", "torch_export", "--into", "model.pt2"]) == 0
    from pulsetrain.configuration.trained_model import example_inputs, trained_model
    from pulsetrain.engine.checkpoint import resolve

    model = trained_model(resolve(folder))
    inputs = example_inputs(resolve(folder), model)
    program = torch.export.load(tmp_path / "model.pt2").module()
    given = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    with torch.no_grad():
        found = program(**inputs) if isinstance(inputs, dict) else program(inputs)
        torch.testing.assert_close(found["logits"], model(**given).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the packages say of each other
def test_adapters_are_merged_into_the_weights(train: Any, tmp_path: Path, capsys: Any) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not there: pip install {package}")
    folder = train("adapted", "tokens", "pretrain")
    assert main(["export", str(folder), "--format", "safetensors", "--into", "model.safetensors"]) == 0
    assert "adapters merged" in capsys.readouterr().out
    from pulsetrain.configuration.trained_model import trained_model
    from pulsetrain.engine.checkpoint import resolve

    expected, model, x = trained_model(resolve(folder)), sys.modules["exported"].llama(), torch.arange(8)[None]
    assert not load_safetensors(model, tmp_path / "model.safetensors")
    with torch.no_grad():
        found = model.eval()(x).logits
        torch.testing.assert_close(found, expected(x).logits, rtol=0, atol=1e-5)
        with expected.disable_adapter():  # type: ignore[operator]
            assert not torch.allclose(found, expected(x).logits, rtol=0, atol=1e-5)


def test_what_cannot_be_exported_is_one_clear_error_and_leaves_nothing(train: Any, tmp_path: Path, capsys: Any) -> None:
    folder = train("Branching")
    before = set(tmp_path.iterdir())

    def refused(*words: str) -> str:
        assert main(["export", *words]) == 2
        text: str = capsys.readouterr().err
        assert set(tmp_path.iterdir()) == before
        return text

    assert "torch.export: cannot trace Branching with float32 (6, 4)" in refused(
        str(folder), "--format", "torch_export"
    )
    assert "--rank 1: chooses a log" in refused(str(folder), "--format", "safetensors", "--rank", "1")
    assert "is in the run folder" in refused(str(folder), "--format", "safetensors", "--into", str(folder / "a"))
    assert "does not exist; pass a checkpoint" in refused(str(tmp_path / "nowhere"), "--format", "safetensors")
    (tmp_path / "model.pt2").write_text("mine")
    before.add(tmp_path / "model.pt2")
    assert "already exists" in refused(str(folder), "--format", "torch_export", "--into", "model.pt2")
    (folder / "config.yaml").unlink()
    assert (
        "has no config.yaml from which the model could be made; in Python, pass it: pulsetrain.load(path, model)"
        in refused(str(folder), "--format", "torch_export")
    )


def test_onnx_needs_its_packages_and_says_which_extra_has_them(
    train: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train()
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", str(folder), "--format", "onnx"]) == 2
    text = capsys.readouterr().err
    assert "pulsetrain export --format onnx: cannot import onnx" in text
    assert "pip install 'pulsetrain[onnx]'" in text
    assert list(tmp_path.glob("*.onnx")) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the packages say of torch
def test_onnx_computes_what_the_model_computes(train: Any, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not there: pip install 'pulsetrain[onnx]'")
    from onnx.reference import ReferenceEvaluator

    folder = train()
    assert main(["export", str(folder), "--format", "onnx", "--into", "model.onnx"]) == 0
    evaluator = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    for rows in (6, 3):
        x = torch.randn(rows, 4)
        (found,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), trained(folder)(x), rtol=1e-4, atol=1e-5)
