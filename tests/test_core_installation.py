"""The engine with only the packages that it needs: what works there, and what the rest says is missing."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

from tests.support.programs_installs import ROOT, checked, copy_tree, make_environment, run

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()


def core() -> list[str]:
    """What the README installs for the engine alone."""
    (line,) = re.findall(r"^pip install (torch .*?)(?:\s+#.*)?$", README, re.MULTILINE)
    return line.split()


def with_what_they_need(names: list[str]) -> set[str]:
    """The names of these distributions and of all that they require, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += [re.split(r"[^\w.-]", line)[0] for line in requires(name) or () if ";" not in line]
    return found


def test_the_readme_says_how_many_packages_each_choice_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    default = [re.split(r"[^\w.-]", line)[0] for line in project["dependencies"]]
    default += re.findall(r"[\w.-]+", "docstring-parser typeshed-client")  # of jsonargparse[signatures]
    counts = [len(with_what_they_need(names) - with_what_they_need(["torch"])) + 1 for names in (core(), default)]
    found = re.findall(r"\((\d+) packages besides torch and its dependencies instead of (\d+)\)", README)
    assert [tuple(map(str, counts))] == found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with pulsetrain, the packages of its core, and no others."""
    folder = tmp_path_factory.mktemp("core")
    packages = folder / "packages"
    packages.mkdir()
    for name in with_what_they_need(core()):
        installed = distribution(name)
        for top in {str(file).partition("/")[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(installed.locate_file(top))))
    return make_environment(folder / "environment", copy_tree(folder / "tree"), packages=packages)


ENGINE = """
import torch
from pulsetrain import EventRecorder
from pulsetrain.engine import Engine, Events
from pulsetrain.engine.recording import EventLog, Replay

trained = Engine(lambda engine, batch: float(torch.tensor(batch)))
EventRecorder("runs/a").attach(trained)
seen = []

@trained.on(Events.ITERATION_COMPLETED(every=2))
def note(engine, event):
    seen.append(event.seq)

trained.run([1.0, 2.0, 3.0, 4.0], max_epochs=2)
assert len(seen) == 4
assert [each.iteration for each in EventLog("runs/a").read(event="iteration_completed")] == [*range(1, 9)]
replayed = []
replay = Replay("runs/a")
replay.on(Events.ITERATION_COMPLETED(every=2))(lambda engine: replayed.append(engine.state.iteration))
replay.run()
assert replayed == [2, 4, 6, 8]
"""
TRAINER = """
import torch
from pulsetrain import Checkpointer, ConsoleLogger, EventRecorder, SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.testing import tiny_loader, tiny_model

trainer = Trainer(tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"),
                  config=TrainingConfig(max_epochs=2),
                  handlers=[Checkpointer("runs/b", metric="val/loss"), ConsoleLogger(), EventRecorder("runs/b")])
assert len(trainer.train()["train/loss"]) == 2
"""
DEFAULT = """
from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.testing import tiny_loader, tiny_model

loader = tiny_loader()
trainer = Trainer(tiny_model(), loader, loader, strategy=SupervisedStrategy("mse"), config=TrainingConfig(max_epochs=2))
assert len(trainer.train()["val/loss"]) == 2
"""
NOTHING_ELSE = "import sys; print(sorted({'matplotlib', 'yaml', 'jsonargparse', 'tqdm', 'pandas'} & {*sys.modules}))"


@pytest.mark.parametrize("program", [ENGINE, TRAINER, DEFAULT], ids=["engine", "trainer", "default"])
def test_the_engine_trains_records_and_replays(python: Path, program: str, tmp_path: Path):
    assert checked(python, "-c", program + NOTHING_ELSE, cwd=tmp_path).splitlines()[-1] == "[]"


HANDLERS = {
    "pulsetrain.Plots('a')": "pip install matplotlib",
    "pulsetrain.LRFinder(folder='a')": "pip install matplotlib",
    "schedules.plot(schedules.Cosine(0.1, 10))": "pip install matplotlib",
    "pulsetrain.ProgressBar()": "pip install tqdm",
    "pulsetrain.TensorBoardLogger('a')": "pip install 'pulsetrain[tensorboard]'",
    "pulsetrain.MLflowLogger('http://127.0.0.1:1', 'a')": "pip install 'pulsetrain[mlflow]'",
    "pulsetrain.WandbLogger('a', 'a')": "pip install 'pulsetrain[wandb]'",
    "pulsetrain.TrackioLogger('a')": "pip install 'pulsetrain[trackio]'",
    "pulsetrain.JaxBackend()": "pip install 'pulsetrain[jax]'",
    "optimizers.create_optimizer(torch.nn.Linear(1, 1), 'lion', 0.1)": "pip install 'pulsetrain[lion]'",
    "optimizers.create_optimizer(torch.nn.Linear(1, 1), 'schedule_free_adamw', 0.1)":
        "pip install 'pulsetrain[schedule-free]'",
    "checkpoint.save_safetensors(torch.nn.Linear(1, 1), 'a')": "pip install 'pulsetrain[safetensors]'",
    "recording.EventLog('runs/a').to_pandas()": "pip install 'pulsetrain[pandas]'",
    "recording.EventLog('runs/a').to_arrow()": "pip install 'pulsetrain[arrow]'",
}  # fmt: skip
MISSING = """
import torch, pulsetrain
from pulsetrain.engine import ConfigurationError, checkpoint, optimizers, recording, schedules
for code in {codes}:
    try:
        eval(code)
    except ConfigurationError as error:
        print(code, "->", error)
"""


def test_what_needs_an_absent_package_says_how_to_install_it(python: Path, tmp_path: Path):
    checked(python, "-c", ENGINE, cwd=tmp_path)
    lines = checked(python, "-c", MISSING.format(codes=[*HANDLERS]), cwd=tmp_path).splitlines()
    found = dict(line.split(" -> ") for line in lines if " -> " in line)
    assert {code: found.get(code, "")[-len(end) :] for code, end in HANDLERS.items()} == HANDLERS


WORKING = ["--version", "events runs/a", "diff runs/a runs/a", "examples minimal"]
STOPPING = {
    "train config.yaml": "jsonargparse[signatures] matplotlib tqdm PyYAML",
    "replay runs/a --handler step_limit:iterations=1": "jsonargparse[signatures] matplotlib tqdm PyYAML",
    "report runs/a": "jsonargparse[signatures] matplotlib tqdm PyYAML",
}


@pytest.mark.parametrize("words", WORKING)
def test_commands_that_read_an_event_log_work(python: Path, words: str, tmp_path: Path):
    checked(python, "-c", ENGINE, cwd=tmp_path)
    assert checked(python, "-m", "pulsetrain", *words.split(), cwd=tmp_path)


@pytest.mark.parametrize("words", STOPPING)
def test_commands_that_need_an_absent_package_say_how_to_install_it(python: Path, words: str, tmp_path: Path):
    done = run(python, "-m", "pulsetrain", *words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"pip install {STOPPING[words]}" in done.stderr.replace("'", "")
