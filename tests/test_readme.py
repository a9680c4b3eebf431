"""The Python of the README runs and prints what its comments promise; the tables of the guides leave nothing out."""

from __future__ import annotations

import ast
import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import pulsetrain
from pulsetrain import handlers
from pulsetrain.adapters import hugging_face_fields, lightning_checks
from pulsetrain.engine import schedules
from pulsetrain.engine.metric_words import KNOWN_WORDS, mode_of_words
from pulsetrain.engine.schedules.named import _NAMED, _NEEDED, keywords_of
from tests.support import programs
from tests.support.training_jobs import until

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


OUTPUTS = re.findall(r"```\n((?:Training|\$ python line\.py\n).*?)```", README, flags=re.DOTALL)
CHECKPOINTS = "runs/line/checkpoints/0*"


def run(code: str, folder: Path) -> list[str]:
    done = programs.run("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def without_figures(line: str) -> str:
    """The line with N for each number: times and last digits differ between machines."""
    return re.sub(r" \(best N\)", "", re.sub(r"\d+([.,]\d+)*(e-?\d+)?", "N", line))


def check_shown(output: str, printed: list[str]) -> None:
    shown = [line for line in output.splitlines() if line not in ("$ python line.py", "^C", "...")]
    assert [line for line in shown if without_figures(line) not in map(without_figures, printed)] == []


@pytest.mark.slow
def test_the_first_program_of_the_readme_prints_what_it_shows(tmp_path: Path):
    done = programs.run("-c", BLOCKS[0], cwd=tmp_path)
    check_shown(OUTPUTS[0], f"{done.stdout}{done.stderr}".splitlines())
    loss = re.search(r"epoch 20/20, .*loss ([\d.e-]+),", done.stderr)
    assert loss is not None
    assert float(loss[1]) < 1e-6


@pytest.mark.slow
def test_the_run_of_the_readme_continues_after_ctrl_c_with_the_losses_of_one_that_nobody_interrupted(tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    (parts / "line.py").write_text(BLOCKS[1])
    first = programs.Program("line.py", cwd=parts)
    try:
        until(lambda: list(parts.glob(CHECKPOINTS)))
        first.send_signal(signal.SIGINT)
        interrupted = "".join(first.communicate()).splitlines()
    finally:
        first.close()
    check_shown(OUTPUTS[1], interrupted)
    done = programs.run("line.py", cwd=parts)
    continued = f"{done.stdout}{done.stderr}".splitlines()
    check_shown(OUTPUTS[2], continued)
    losses = [line for line in [*interrupted, *continued] if re.fullmatch(r"\d+ \S+", line)]
    assert losses == [line for line in run(BLOCKS[1], whole) if re.fullmatch(r"\d+ \S+", line)]
    assert len(losses) == 10


def test_the_events_of_the_readme_end_the_run_with_their_reason(tmp_path: Path):
    assert run(BLOCKS[2], tmp_path) == ["reward 0.5 50"]


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


CALLS_OF_HANDLERS = sorted(set(re.findall(r"`([A-Z]\w+\([^`]*\))", TABLE_OF_HANDLERS)))


@pytest.mark.parametrize("call", CALLS_OF_HANDLERS)
def test_the_calls_in_the_table_of_handlers_have_the_arguments_that_the_handlers_take(call: str):
    made = ast.parse(call, mode="eval").body
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):  # LRFinder().run(trainer)
        made = made.func.value
    assert isinstance(made, ast.Call)
    assert isinstance(made.func, ast.Name)
    keywords: dict[str, ast.expr] = {str(each.arg): each.value for each in made.keywords}
    bound = inspect.signature(getattr(handlers, made.func.id)).bind(*made.args, **keywords)
    names = {name: value.id for name, value in bound.arguments.items() if isinstance(value, ast.Name)}
    assert names == {name: name for name in names}  # a name in the table is that of its parameter


def test_the_page_about_handlers_names_the_words_that_decide_which_values_are_better():
    rule = HANDLERS[HANDLERS.index("Whether smaller or larger") :].partition("\n\n")[0]
    assert [word for word in KNOWN_WORDS if f"`{word}`" not in rule] == []
    changing = re.findall(r"`(\w+)`", rule.partition("Such words are")[2].partition("others")[0])
    assert "gap" in changing
    assert [word for word in changing if mode_of_words(f"val/loss_{word}") is not None] == []


def test_the_table_of_handlers_leaves_none_out():
    reported = set(re.findall(r"`([A-Z]\w+)\(", HANDLERS))
    missing = set(handlers.__all__) - reported - {"Callback", "CallbackList", "MetricLogger"}
    assert not missing, f"add to the table in docs/handlers.md: {', '.join(sorted(missing))}"


def test_every_schedule_is_in_the_table_of_schedules():
    missing = [
        name for name in schedules.__all__ if name[0].isupper() and name != "Schedule" and f"{name}(" not in PARTS
    ]
    assert not missing, f"add to the table in docs/training_step.md: {', '.join(missing)}"


def test_the_table_of_schedules_by_name_has_every_name_its_class_and_its_keywords():
    rows = []
    for name, kind in _NAMED.items():
        needed = {each.name for each in fields(kind) if each.default is MISSING}
        words = keywords_of("test", name)
        shown = [f"**`{word}`**" if word in needed and word in _NEEDED else f"`{word}`" for word in words]
        rows.append(f"| `{name}` | `{kind.__name__}` | {', '.join(shown)} |".replace("|  |", "| |"))
    assert "\n".join(["|---|---|---|", *rows, "", "`warmup_steps`"]) in PARTS


def test_the_setting_schedule_names_every_schedule():
    described = str(pulsetrain.TrainingConfig.__doc__).partition(" schedule: ")[2].partition(";")[0]
    assert re.findall(r"[a-z]\w+", described.replace(" or ", " ")) == list(_NAMED)


TESTING = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()


@pytest.mark.slow
def test_the_tests_on_the_page_about_testing_pass(tmp_path: Path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", TESTING, flags=re.DOTALL))
    (tmp_path / "test_page.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "6 passed" in done.stdout, f"{done.stdout}{done.stderr}"


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


def rows_by_remedy(remedies: Mapping[str, str]) -> list[str]:
    """The rows of a table: the names with one remedy, and the remedy."""
    groups: dict[str, list[str]] = {}
    for name, remedy in remedies.items():
        groups.setdefault(remedy.replace("*", r"\*"), []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {remedy} |" for remedy, names in groups.items()]


@pytest.mark.parametrize(
    ("framework", "remedies"),
    [
        ("transformers", hugging_face_fields.REFUSED),
        ("transformers", hugging_face_fields.ELSEWHERE),
        ("lightning", lightning_checks._REFUSED),
    ],
    ids=["refused fields", "fields elsewhere", "refused methods"],
)
def test_the_table_of_what_is_refused_or_belongs_elsewhere_is_that_of_the_code(
    framework: str, remedies: Mapping[str, str]
):
    assert "\n".join(["|---|---|", *rows_by_remedy(remedies), ""]) in COMING_FROM[framework]
