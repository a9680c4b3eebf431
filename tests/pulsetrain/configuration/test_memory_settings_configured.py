"""Settings of memory in a configuration: the same events, verified and resumed; messages name the file's settings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain.cli import main

MODULE = """
import os, signal
import torch
from torch.utils.data import DataLoader, TensorDataset

def data():
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)

def model():
    layers = [torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers)

def keep(context, operator, *arguments, **named):
    return operator is torch.ops.aten.addmm.default

class Copies:
    def __init__(self, times: int = 1):
        self.times = times

    def pack(self, tensor):
        return [tensor.clone() for _ in range(self.times)]

    def unpack(self, handle):
        return handle[-1]

class Death:
    def __init__(self, at: int):
        self.at = at

    def attach(self, engine):
        from pulsetrain import Events

        def die():
            if engine.state.iteration == self.at and not os.environ.get("SPARED"):
                os.kill(os.getpid(), signal.SIGKILL)

        engine.add_event_handler(Events.ITERATION_STARTED, die)
"""
TRAINING = {
    "max_epochs": 3, "seed": 3, "learning_rate": 0.01, "clip_grad_norm": 1.0, "log_every_n_steps": 5, "device": "cpu",
}  # fmt: skip
MEMORY = {
    "activation_checkpointing": {"modules": "*", "every": 2, "policy": "memory_parts.keep"},
    "activation_offload": {
        "min_bytes": 0,
        "policy": {"class_path": "memory_parts.Copies", "init_args": {"times": 2}},
    },
    "optimizer_offload": {"to": "disk", "part_bytes": 64},
}
HANDLERS = [
    "EventRecorder",
    {"class_path": "Checkpointer", "init_args": {"every": {"iterations": 8}}},
    {"class_path": "Fingerprints", "init_args": {"every": {"updates": 1}}},
]


def write(folder: Path, name: str, training: dict[str, Any], *handlers: Any) -> str:
    (folder / "memory_parts.py").write_text(MODULE)
    config = {
        "model": "memory_parts.model",
        "data": "memory_parts.data",
        "strategy": {"class_path": "supervised", "init_args": {"loss": "mse"}},
        "training": {**TRAINING, **training},
        "handlers": [*HANDLERS, *handlers],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.slow
def test_all_of_it_in_a_configuration_changes_no_event_and_is_verified(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, memory in (("plain", {}), ("memory", MEMORY)):
        assert main(["train", write(tmp_path, name, memory), "--run", f"{name}-run"]) == 0
    assert main(["diff", "plain-run", "memory-run"]) == 0
    assert main(["verify", "memory-run"]) == 0
    assert main(["config", str(tmp_path / "memory.yaml")]) == 0
    written = yaml.safe_load(capsys.readouterr().out.partition("class paths are looked up")[2].partition("\n")[2])
    assert written["training"]["activation_checkpointing"] == MEMORY["activation_checkpointing"]
    assert written["training"]["optimizer_offload"] == MEMORY["optimizer_offload"]
    assert written["training"]["activation_offload"] == MEMORY["activation_offload"]


MESSAGES: dict[str, tuple[str, str]] = {
    "optimizer_offload": ("dsk", "optimizer_offload='dsk': needs to be 'host' or 'disk', or an OptimizerOffload"),
    "optimizer_offload.folder": ("/proc/no", "optimizer_offload.folder='/proc/no': no room there"),
    "activation_checkpointing.keep": ("[softmaxx]", "activation_checkpointing.keep='softmaxx': there is no such"),
    "activation_checkpointing.modules": ("blocks", "activation_checkpointing='blocks': no module of Sequential"),
    "activation_checkpointing.policy": ("memory_parts.no", "policy='memory_parts.no': needs the import path of a"),
    "activation_offload.min_bytes": ("-1", "activation_offload.min_bytes=-1: needs a whole number of at least 0"),
    "optimizer": (
        "muon",
        "training.optimizer_offload={to: 'disk', folder: 'run', part_bytes: 64}: MuonWithAdamW cannot",
    ),
}


@pytest.mark.parametrize("setting", MESSAGES)
def test_messages_name_the_setting(setting: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = MESSAGES[setting]
    memory = {**MEMORY, "activation_checkpointing": {"modules": "*"}}
    config = write(tmp_path, "memory", memory)
    assert main(["train", config, "--run", "run", f"--training.{setting}", value]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_and_resumes_bit_for_bit(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path, "memory", MEMORY, {"class_path": "memory_parts.Death", "init_args": {"at": 19}})

    died = subprocess.run(
        [sys.executable, "-m", "pulsetrain", "train", config, "--run", "killed"], capture_output=True, timeout=300
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert {each.name for each in (tmp_path / "killed").iterdir()} == {
        ".owner", "checkpoints", "config.yaml", "events", "run.json",
    }  # fmt: skip
    monkeypatch.setenv("SPARED", "yes")
    assert main(["train", config, "--run", "whole"]) == 0
    assert main(["train", config, "--run", "killed", "--resume", "latest"]) == 0
    assert main(["diff", "whole", "killed"]) == 0
