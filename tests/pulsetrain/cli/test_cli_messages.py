"""Messages about settings that the parts of a trainer reject: they name the setting, not the part."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pulsetrain.cli import main


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(4, 4), torch.ones(4, 1))] * 5


CONFIG = f"""
model: {__name__}.Net
data: {__name__}.batches
strategy: {{class_path: SupervisedStrategy, init_args: {{loss: mse}}}}
training: {{max_epochs: 2, learning_rate: 1e-2, optimizer: sgd}}
handlers: []
"""

# arguments added to the command -> the start of the message
CASES = {
    "schedule without its parameter": (
        "--training.schedule exponential",
        "training.schedule='exponential': needs training.schedule_options.gamma, the factor",
    ),
    "schedule without its milestones": (
        "--training.schedule multi_step",
        "training.schedule='multi_step': needs training.schedule_options.milestones, the numbers of updates",
    ),
    "step_size": (
        "--training.schedule step --training.schedule_options.step_size 0",
        "training.schedule_options.step_size=0: needs at least 1 optimizer update between two drops",
    ),
    "milestones": (
        "--training.schedule multi_step --training.schedule_options.milestones [4,2]",
        "training.schedule_options.milestones=[4, 2]: needs ascending milestones; sort them",
    ),
    "milestones in the warm-up": (
        "--training.schedule multi_step --training.schedule_options.milestones [2,4] --training.warmup_steps 2",
        "training.schedule_options.milestones=[2, 4]: counts from the start of the run, and is not after "
        "training.warmup_steps=2",
    ),
    "min_lr": (
        "--training.schedule cosine --training.schedule_options.min_lr 0.5",
        "training.schedule_options.min_lr=0.5: is above training.learning_rate=0.01",
    ),
    "first_cycle": (
        "--training.schedule cosine_with_restarts --training.schedule_options.first_cycle 10.0",
        "training.schedule_options.first_cycle=10.0: needs a whole number",
    ),
    "decay_steps": (
        "--training.schedule wsd --training.schedule_options.decay_steps 9 --training.warmup_steps 2",
        "training.schedule_options.decay_steps=9: is more than the 8 updates that training.warmup_steps=2 leaves",
    ),
    "decay": (
        "--training.schedule wsd --training.schedule_options.decay cubic",
        "training.schedule_options.decay='cubic': unknown; choose one of cosine, linear, sqrt",
    ),
    "no schedule": ("--training.schedule null --training.warmup_steps 3", "training.warmup_steps=3: has no effect"),
    "options of constant": (
        "--training.schedule_options.gamma 0.5",
        "training.schedule_options.gamma=0.5: unknown to the schedule 'constant'",
    ),
    "floor of constant": ("--training.min_lr_ratio 0.5", "training.min_lr_ratio=0.5: the schedule 'constant' has no"),
    "setting as an option": (
        "--training.schedule_options.min_lr_ratio 0.1",
        "training.schedule_options.min_lr_ratio=0.1: is a setting of its own; set training.min_lr_ratio",
    ),
    "torch's name": (
        "--training.schedule_options.eta_min 0.1",
        "training.schedule_options.eta_min=0.1: is torch's name",
    ),
    "betas": (
        "--training.optimizer adamw --training.optimizer_options.betas [0.9,1.0]",
        "training.optimizer_options.betas[1]=1.0: needs a number from 0",
    ),
    "both spellings": (
        "--training.optimizer adamw --training.optimizer_options '{adam_beta1: 0.9,betas: [0.9,0.99]}'",
        "training.optimizer_options={adam_beta1: 0.9, betas: [0.9, 0.99]}: pass only one of",
    ),
    "layer rates": (
        "--training.optimizer_options.layer_rates '{\"7\": 0.1}'",
        "training.optimizer_options.layer_rates['7']=0.1: ",
    ),
    "optimizer's own error": (
        "--training.optimizer_options '{nesterov: true,momentum: 0}'",
        "training.optimizer='sgd', training.optimizer_options={nesterov: true, momentum: 0}: ",
    ),
    "nothing to train": ("--model torch.nn.Flatten", "model=Flatten: has no parameters"),
    "accumulated tokens": (
        "--training.accumulate '{tokens: 64}'",
        "training.accumulate.tokens=64: SupervisedStrategy counts no tokens",
    ),
    "accumulated batches": ("--training.accumulate '{batches: 0}'", "training.accumulate.batches=0: needs a whole"),
    "two accumulations": (
        "--training.accumulate '{batches: 1,tokens: 1}'",
        "training.accumulate.batches=1, training.accumulate.tokens=1: needs",
    ),
    "too much accumulated": ("--training.accumulate 99", "training.accumulate=99: the run has 10 batches"),
    "cadence": ("--training.validate_every '{epochs: 0}'", "training.validate_every.epochs=0: needs a positive"),
    "empty cadence": ("--training.validate_every {}", "training.validate_every={}: needs at least one of"),
    "tokens as bound": (
        "--training.max_epochs null --training.max_tokens 9",
        "training.max_tokens=9: SupervisedStrategy counts no tokens",
    ),
    "activation checkpointing": (
        "--training.activation_checkpointing blocks",
        "training.activation_checkpointing='blocks': no module of Net has such a name",
    ),
    "metric's name": (
        "--metrics.loss.class_path pulsetrain.engine.metrics.Accuracy",
        "metrics.loss: the name of the strategy's",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_message_begins_with_the_setting(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    words, message = CASES[case]
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["train", str(tmp_path / "config.yaml"), "--run", str(tmp_path / "run"), *shlex.split(words)]) == 2
    assert capsys.readouterr().err.startswith(f"pulsetrain: error: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train config.yaml --lr 0.1", "--lr 0.1; give it as --training.learning_rate"),
        ("train config.yaml --num-epochs 3", "--num-epochs 3; give it as --training.max_epochs"),
        ("runs --epochs 3", "unrecognized arguments: --epochs"),
        ("--traceback train config.yaml", "--traceback; it belongs after the command"),
        ("train confg.yaml", "confg.yaml: there is no such file; did you mean 'config.yaml'?"),
        ("train other/a.yaml", "other/a.yaml: there is no such file; `pulsetrain init` writes a project with one"),
        ("events runs/nope", "runs/nope: does not exist; `pulsetrain runs` lists the runs"),
        ("report runs/nope", "runs/nope: does not exist; `pulsetrain runs` lists the runs"),
    ],
)
def test_what_a_newcomer_types_is_answered_with_the_remedy(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: torch.nn.Linear\n")
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


def test_an_error_in_the_data_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_of_mine.py").write_text("def load():\n    return load_digit()\n")
    (tmp_path / "config.yaml").write_text(
        "model: {class_path: torch.nn.Linear, init_args: {in_features: 1, out_features: 1}}\n"
        "data: rows_of_mine.load\ntraining: {max_epochs: 1}\n"
    )
    assert main(["train", "config.yaml"]) == 2
    error = capsys.readouterr().err
    assert f"in data: NameError: name 'load_digit' is not defined ({tmp_path / 'rows_of_mine.py'}, line 2)" in error
