"""docs/architecture.md is right about the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PAGE)))


def test_the_picture_shows_the_imports_as_they_are():
    command = [sys.executable, str(ROOT / "docs" / "draw_architecture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"run `make architecture`\n{done.stderr}"


def test_the_picture_would_be_refused_if_a_folder_were_missing(tmp_path: Path):
    source = (ROOT / "docs" / "draw_architecture.py").read_text()
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "draw_architecture.py").write_text(source)
    (tmp_path / "docs" / "architecture.svg").write_text(picture.replace("checkpoint (", "checkpoints ("))
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = [sys.executable, str(tmp_path / "docs" / "draw_architecture.py"), "--check"]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 1


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[f"{file}:{name}" for file, name in PLACES])
def test_what_the_page_names_is_there(file: str, name: str):
    candidates = [ROOT / file, *(ROOT / "handlers").rglob(file), *(ROOT / "engine").rglob(file)]
    found = [path for path in candidates if path.exists()]
    assert found, file
    body: list[ast.stmt] = ast.parse(found[0].read_text()).body
    for part in filter(None, name.split(".")):
        matches = [each for each in body if getattr(each, "name", None) == part]
        assert matches, f"{file} has no {name}"
        body = getattr(matches[0], "body", [])


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
assert [Halving(1.0, 2).get_lr(step) for step in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]
again = BatchCounter()
other = Trainer(
    torch.nn.Linear(2, 2), inputs, strategy=Denoise(), config=TrainingConfig(max_epochs=2), handlers=[again]
)
other.load_checkpoint_state(trainer.checkpoint_state())
assert again.batches == 6
part.load_state_dict({"count": 3})
assert part.state_dict() == {"count": 3}
"""


@pytest.mark.slow
def test_the_code_on_the_page_runs_and_the_handlers_state_is_in_checkpoints():
    code = "\n".join(CODE) + USED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
