"""Folders that HuggingFaceExporter writes are loaded by transformers and peft, with the logits of the run's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.cli import main
from pulsetrain.engine import ConfigurationError, Every, pretrained
from pulsetrain.handlers import HuggingFaceExporter
from tests.support.pretrained import VOCABULARY, saved, trainer_of
from tests.support.ranks import in_processes

transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
peft = pytest.importorskip("peft", reason="peft is not there: pip install peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what the packages say of each other

ROWS = torch.randint(2, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(2))
ADAPTERS = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def train(model: Any, *handlers: Any) -> Trainer:
    config = TrainingConfig(max_epochs=3, optimizer="adamw", learning_rate=0.02, seed=0, device="cpu")
    rows = [{"input_ids": each} for each in ROWS.split(2)]
    run = Trainer(model, rows, rows, strategy="pretrain", config=config, handlers=handlers)
    run.train()
    return run


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(ROWS, use_cache=False).logits
    return found


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"<{at}>": at for at in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<0>")


def test_a_whole_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before = model.config.to_dict()
    with structlog.testing.capture_logs() as logs:
        run = train(model, HuggingFaceExporter(tmp_path, tokenizer=tokenizer(), metric="val/loss"))
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == []
    assert model.config.to_dict() == before
    for name in ("last", "best"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained" / name)
        assert torch.equal(logits(again), logits(run.model))
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / "pretrained" / name)
        assert words("<3> <5>")["input_ids"] == [3, 5]


def test_a_tokenizer_may_be_given_by_its_folder(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "words")
    exporter = HuggingFaceExporter(tmp_path, tokenizer=tmp_path / "words")
    assert exporter.tokenizer("<7>")["input_ids"] == [7]


def adapted(folder: Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS))


@pytest.mark.parametrize("merge", [False, True], ids=["adapters", "merged"])
def test_adapters_are_written_alone_or_merged_and_training_does_not_notice(merge: bool, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "base")
    alone = train(adapted(folder))
    with structlog.testing.capture_logs() as logs:
        run = train(adapted(folder), HuggingFaceExporter(tmp_path, Every(iterations=1), merge=merge))
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == []
    assert run.history.get_history() == alone.history.get_history()
    written = tmp_path / "pretrained" / "last"
    size = sum(each.stat().st_size for each in written.glob("*.safetensors"))
    if merge:
        again = transformers.AutoModelForCausalLM.from_pretrained(written)
        assert not hasattr(again, "peft_config")
        torch.testing.assert_close(logits(again), logits(run.model), rtol=0, atol=1e-5)
    else:
        assert size < 10_000
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        again = peft.PeftModel.from_pretrained(base, written)
        assert torch.equal(logits(again), logits(run.model))
    assert not torch.allclose(logits(transformers.AutoModelForCausalLM.from_pretrained(folder)), logits(again))


@pytest.mark.parametrize("layout", ["copies", "shards", "tensor"])
def test_several_processes_write_one_whole_model(layout: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "base")
    whole = trainer_of(folder, "one")
    whole.train()

    def run(rank: int) -> None:
        trainer_of(folder, layout, HuggingFaceExporter(tmp_path / "run")).train()

    for each in in_processes(run):
        assert not each.error, each.error
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "pretrained" / "last")
    torch.testing.assert_close(logits(again), logits(whole.model), rtol=0, atol=1e-4)


def test_adapters_in_shards_are_written_and_not_merged(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "base")

    def model() -> Any:
        torch.manual_seed(5)
        return pretrained(folder, adapters=ADAPTERS)

    whole = trainer_of(folder, "one", model=model())
    whole.train()

    def run(rank: int) -> str:
        exporter = HuggingFaceExporter(tmp_path / "run")
        trainer_of(folder, "shards", exporter, model=model()).train()
        merging = HuggingFaceExporter(tmp_path / "merged", merge=True)
        with pytest.raises(ConfigurationError) as refused:
            trainer_of(folder, "shards", merging, model=model())
        return str(refused.value)

    for each in in_processes(run):
        assert not each.error, each.error
        assert "HuggingFaceExporter(merge=True): no process has the weights" in each.value
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "pretrained" / "last")
    torch.testing.assert_close(logits(again), logits(whole.model), rtol=0, atol=1e-4)


CONFIG = """
run: {folder}
model: {{class_path: pulsetrain.engine.pretrained, init_args: {{folder: {base}}}}}
data: {{class_path: rows.data}}
strategy: pretrain
training: {{max_iterations: 3, device: cpu, seed: 0}}
handlers: [{{class_path: HuggingFaceExporter, init_args: {{tokenizer: {base}, every: {{iterations: 2}}}}}}]
"""


def test_a_configuration_names_the_tokenizer_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = saved("llama", tmp_path / "base")
    tokenizer().save_pretrained(base)
    code = "import torch\n\ndef data():\n    return [{'input_ids': torch.arange(8)[None] + 2}] * 3\n"
    (tmp_path / "rows.py").write_text(code)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path / "run", base=base))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", str(tmp_path / "config.yaml")]) == 0
    found = tmp_path / "run" / "pretrained" / "last"
    assert json.loads((found / "export.json").read_text()) == {"iteration": 3, "update": 3}
    assert transformers.AutoTokenizer.from_pretrained(found)("<4>")["input_ids"] == [4]
    assert not torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(found)),
        logits(transformers.AutoModelForCausalLM.from_pretrained(base)),
    )
