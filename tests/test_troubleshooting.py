"""Each mistake of the page about troubleshooting ends with the message that the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
BEGINNING = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
OTHERS = re.findall(r"\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
MISTAKES = re.findall(r"## ([^\n]*)\n\n```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_the_eleven_likeliest_mistakes():
    assert len(MISTAKES) == 11


@pytest.mark.slow
@pytest.mark.parametrize(("title", "code", "message"), MISTAKES, ids=[title for title, _, _ in MISTAKES])
def test_a_mistake_ends_with_the_message_of_the_page(title: str, code: str, message: str, tmp_path: Path):
    done = programs.run("-c", f"{BEGINNING}\n{code}", cwd=tmp_path)
    assert done.returncode == 1
    assert message.strip() in "\n".join(done.stderr.splitlines()[-4:])  # a note may follow


WITHOUT_SKLEARN = """
import sys
from pulsetrain.cli import main

class Absent:
    def find_spec(self, name, *others):
        if name == "sklearn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
main(["init", "digits"])
sys.exit(main(["train", "digits/config.yaml"]))
"""


def test_a_missing_package_ends_with_the_message_of_the_page(tmp_path: Path):
    (message,) = (each for each in OTHERS if "sklearn" in each)
    done = programs.run("-c", WITHOUT_SKLEARN, cwd=tmp_path)
    assert done.returncode == 2
    assert message.strip() in done.stderr


@pytest.mark.slow
def test_workers_that_run_the_script_again_end_with_the_messages_of_the_page(tmp_path: Path):
    messages = [each for each in OTHERS if "bootstrapping" in each or "DataLoader worker" in each]
    assert len(messages) == 2
    data = 'tiny_loader(num_workers=1, multiprocessing_context="spawn")'
    (tmp_path / "script.py").write_text(f"{BEGINNING}\nTrainer(model, {data}, strategy=mse, config=once).train()")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    printed = re.sub(r"\d+", "N", re.sub(r"(?m)^ +", "", done.stderr))
    assert [each for each in messages if re.sub(r"\d+", "N", each) not in printed] == []
