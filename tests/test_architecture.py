"""docs/architecture.md is right about the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pulsetrain import EventLog

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PAGE)))


def test_the_picture_shows_the_imports_as_they_are():
    command = [sys.executable, str(ROOT / "docs" / "draw_architecture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_a_picture_that_names_another_folder_is_refused_with_what_differs(tmp_path: Path):
    source = (ROOT / "docs" / "draw_architecture.py").read_text()
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "draw_architecture.py").write_text(source)
    (tmp_path / "docs" / "architecture.svg").write_text(
        picture.replace("engine: checkpoint</title>", "engine: checkpoints</title>")
    )
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = [sys.executable, str(tmp_path / "docs" / "draw_architecture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "docs/architecture.svg is out of date; run `make architecture`",
        "only in the picture: pulsetrain.engine: checkpoints",
        "only in the code: pulsetrain.engine: checkpoint",
    ]


CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("contract", ["packages", "engine"])
def test_the_table_of_layers_leaves_none_out(contract: str):
    (layers,) = (each["layers"] for each in CONTRACTS if each["id"] == contract)
    table = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {name for layer in layers for name in re.findall(r"\w+", layer)} - table == (
        {"engine"} if contract == "packages" else set()
    )


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[f"{file}:{name}" for file, name in PLACES])
def test_what_the_page_names_is_there(file: str, name: str):
    candidates = [ROOT / file, *(ROOT / "handlers").rglob(file), *(ROOT / "engine").rglob(file)]
    found = [path for path in candidates if path.exists()]
    assert found, f"docs/architecture.md names {file}, which is not there"
    body: list[ast.stmt] = ast.parse(found[0].read_text()).body
    for part in filter(None, name.split(".")):
        matches = [each for each in body if part in names_of(each)]
        assert matches, f"docs/architecture.md names {name}, which {file} does not define"
        body = getattr(matches[0], "body", [])


def names_of(statement: ast.stmt) -> list[str]:
    """What a definition or an assignment defines."""
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    return [getattr(statement, "name", "")]


CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
USED = """
import torch
from pulsetrain import Trainer, TrainingConfig

inputs = [(torch.ones(4, 2), torch.zeros(4, 2))] * 3
counter, part = BatchCounter(), Restarts()
trainer = Trainer(
    torch.nn.Linear(2, 2), inputs, strategy=Denoise(), config=TrainingConfig(max_epochs=2), handlers=[counter]
)
trainer.train()
assert counter.batches == 6
trainer.train()
assert counter.batches == 6  # a new run counts its own
assert [Halving(1.0, 2).get_lr(step) for step in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]
again = BatchCounter()
other = Trainer(
    torch.nn.Linear(2, 2), inputs, strategy=Denoise(), config=TrainingConfig(max_epochs=2), handlers=[again]
)
other.load_checkpoint_state(trainer.checkpoint_state())
assert again.batches == 6
part.load_state_dict({"count": 3})
assert part.state_dict() == {"count": 3, "reason": ""}
part.attach(trainer)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.terminate(reason="enough"))
trainer.train()
assert part.state_dict() == {"count": 4, "reason": "enough"}
"""


@pytest.mark.slow
def test_the_code_on_the_page_runs_and_the_handlers_state_is_in_checkpoints():
    code = "\n".join(CODE) + USED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


DATA = """
import torch
from torch import nn


def linear():
    return nn.Linear(2, 1)


def batches():
    return [(torch.ones(4, 2), torch.zeros(4, 1))] * 501
"""
REST = """
model: my_module.linear
data: my_module.batches
strategy: {class_path: SupervisedStrategy, init_args: {loss: mse}}
training: {max_epochs: 2, device: cpu, optimizer: sgd, schedule: constant}
"""


@pytest.mark.slow
def test_the_settings_on_the_page_make_the_handler_that_they_describe(tmp_path: Path):
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (schedule,) = (block for block in CODE if "class Halving" in block)
    (tmp_path / "my_module.py").write_text(schedule + DATA)
    (tmp_path / "config.yaml").write_text(REST + settings + "  - EventRecorder\n")
    command = [sys.executable, "-m", "pulsetrain", "train", "config.yaml", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    updates = EventLog(tmp_path / "run").read(event="optimizer_step_completed")
    assert [each.payload["learning_rates"] for each in updates] == [[0.1]] * 1000 + [[0.05]] * 2
