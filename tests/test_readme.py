"""The Python of the README runs and prints what its comments promise; the tables of the guides leave nothing out."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pulsetrain
from pulsetrain import handlers
from pulsetrain.engine import schedules
from tests.support import programs

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str, folder: Path) -> list[str]:
    done = programs.run("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "[info " not in line]  # without what the run logs


@pytest.mark.slow
def test_the_trainer_of_the_readme_trains_resumes_and_prints(tmp_path: Path):
    lines = run(BLOCKS[0], tmp_path)
    first, last = (float(line.split()[1]) for line in (lines[0], lines[-1]))
    assert last < first
    assert list((tmp_path / "runs" / "line" / "checkpoints").glob("0*"))
    assert run(BLOCKS[0], tmp_path) == []  # the second time there is nothing left to train


def test_the_events_of_the_readme_end_the_run_with_their_reason(tmp_path: Path):
    assert run(BLOCKS[1], tmp_path) == ["reward 0.5 50"]


PARTS = (Path(__file__).parent.parent / "docs" / "training_step.md").read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:docs|examples)/[\w./]+)`|\]\((docs/[\w.]+)\)", README))))
def test_the_readmes_links_exist(path: tuple[str, str]):
    assert (Path(__file__).parent.parent / (path[0] or path[1])).exists()


BACKENDS = (Path(__file__).parent.parent / "docs" / "backends.md").read_text()


WORKS = BACKENDS[BACKENDS.index("\n| | in place") :]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", WORKS))))
def test_the_tests_that_the_table_of_backends_names_are_there(path: str):
    tests = Path(__file__).parent
    assert (tests / path).exists() or (tests / "integration" / path).exists()


HANDLERS = (Path(__file__).parent.parent / "docs" / "handlers.md").read_text()


TABLE_OF_HANDLERS = HANDLERS[HANDLERS.index("| goal |") : HANDLERS.index("## Guards")]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Z]\w+)\(", TABLE_OF_HANDLERS))))
def test_the_table_of_handlers_names_only_what_exists(name: str):
    assert name in handlers.__all__, f"docs/handlers.md names {name}, which handlers/__init__.py does not export"


def test_the_table_of_handlers_leaves_none_out():
    reported = set(re.findall(r"`([A-Z]\w+)\(", HANDLERS))
    missing = set(handlers.__all__) - reported - {"Callback", "CallbackList", "MetricLogger"}
    assert not missing, f"add to the table in docs/handlers.md: {', '.join(sorted(missing))}"


def test_every_schedule_is_in_the_table_of_schedules():
    missing = [
        name for name in schedules.__all__ if name[0].isupper() and name != "Schedule" and f"{name}(" not in PARTS
    ]
    assert not missing, f"add to the table in docs/training_step.md: {', '.join(missing)}"


TESTING = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()


@pytest.mark.slow
def test_the_tests_on_the_page_about_testing_pass(tmp_path: Path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", TESTING, flags=re.DOTALL))
    (tmp_path / "test_page.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "5 passed" in done.stdout, f"{done.stdout}{done.stderr}"


STRATEGIES = (Path(__file__).parent.parent / "docs" / "strategies.md").read_text()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", STRATEGIES[STRATEGIES.index("| | torch") :])))
)
def test_the_table_of_strategies_names_only_what_exists(path: str):
    assert (Path(__file__).parent.parent / path).exists()


OWN_STRATEGY = (Path(__file__).parent.parent / "docs" / "your_own_strategy.md").read_text()
PROGRAM = "\n".join(re.findall(r"```python\n(.*?)```", OWN_STRATEGY, flags=re.DOTALL))


def test_each_strategy_of_the_guide_takes_fewer_than_30_lines():
    sizes = {
        part.name: part.end_lineno - part.lineno + 1
        for part in ast.parse(PROGRAM).body
        if isinstance(part, ast.ClassDef | ast.FunctionDef)
    }
    strategies = {"Contrastive", "Diffusion", "EvidenceBound", "Distillation", "DecayEquation", "after_adapting"}
    assert strategies <= sizes.keys()
    assert {name: size for name, size in sizes.items() if size >= 30} == {}


COMING_FROM = {
    path.stem.removeprefix("coming_from_"): path.read_text()
    for path in sorted((Path(__file__).parent.parent / "docs").glob("coming_from_*.md"))
}


@pytest.mark.parametrize("framework", COMING_FROM)
def test_a_page_about_another_framework_ends_with_an_assertion_about_both(framework: str):
    blocks = re.findall(r"```python\n(.*?)```", COMING_FROM[framework], flags=re.DOTALL)
    assert len(blocks) >= 2
    assert "\nassert " in blocks[-1] or "assert_close" in blocks[-1]


def test_the_names_that_other_frameworks_are_compared_with_exist():
    rows = [row.split("|") for page in COMING_FROM.values() for row in page.splitlines() if row.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)\(?", row[2])}
    assert len(named) > 15
    assert named <= {*handlers.__all__, *pulsetrain.__all__, "Topology", "DataLoader"}


def test_the_index_of_other_frameworks_leaves_none_out():
    index = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text()
    assert sorted(re.findall(r"\(coming_from_(\w+)\.md\)", index)) == sorted(COMING_FROM)
