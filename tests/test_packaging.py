"""Every way of installing gives one complete package, `pulsetrain`, under no second name."""

from __future__ import annotations

import configparser
import json
import pickle
import re
import shutil
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests.support.programs_installs import (
    BUILD,
    ROOT,
    checked,
    copy_tree,
    make_environment,
    modules,
    run,
    source_files,
)

slow = pytest.mark.slow

# ------------------------------------------------------------------------------------------ what is installed


def test_setup_cfg_lists_every_folder_of_modules_and_no_other():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = settings["options"]["packages"].split()
    folders = {str(Path(module).parent).replace("/", ".") for module in modules()}
    assert sorted(listed) == sorted(folders)


def as_zip(tree: Path, folder: Path) -> Path:
    """As repository hosts create archives: a link is a file that contains its target."""
    with zipfile.ZipFile(folder / "pulsetrain-main.zip", "w") as archive:
        for name in source_files():
            source = tree / name
            text = str(source.readlink()) if source.is_symlink() else source.read_bytes()
            archive.writestr(f"pulsetrain-main/{name}", text)
    return folder / "pulsetrain-main.zip"


def as_tar(tree: Path, folder: Path) -> Path:
    with tarfile.open(folder / "pulsetrain-main.tar.gz", "w:gz") as archive:
        for name in source_files():
            archive.add(tree / name, f"pulsetrain-main/{name}", recursive=False)
    return folder / "pulsetrain-main.tar.gz"


def as_git(tree: Path, folder: Path) -> str:
    return f"git+file://{repository(tree)}"


def as_clone_without_links(tree: Path, folder: Path) -> Path:
    checked("git", "clone", "-q", "-c", "core.symlinks=false", repository(tree), folder / "clone")
    assert not (folder / "clone" / "pulsetrain" / "engine").is_symlink()
    return folder / "clone"


def as_sdist(tree: Path, folder: Path) -> Path:
    checked(sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')", cwd=tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    return sdist


def as_tree_without_links(tree: Path, folder: Path) -> Path:
    return copy_tree(folder / "plain", links=False)


def repository(tree: Path) -> Path:
    if not (tree / ".git").exists():
        checked("git", "init", "-q", cwd=tree)
        checked("git", "add", "-A", cwd=tree)
        names = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
        checked("git", *names, "commit", "-q", "-m", "all", cwd=tree)
    return tree


@slow
@pytest.mark.parametrize(
    "form",
    [as_zip, as_tar, as_git, as_clone_without_links, as_sdist, as_tree_without_links],
    ids=lambda form: form.__name__,
)
def test_each_form_of_the_sources_builds_a_wheel_with_all_three_packages(form, tmp_path: Path):
    requirement = form(copy_tree(tmp_path / "tree"), tmp_path)
    checked(
        sys.executable, *BUILD, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", requirement
    )
    (wheel,) = (tmp_path / "wheels").glob("pulsetrain-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == modules()
    assert {name for name in names if name.endswith("py.typed")} == {
        "pulsetrain/py.typed", "pulsetrain/engine/py.typed", "pulsetrain/handlers/py.typed"
    }  # fmt: skip
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pulsetrain"}
    notebooks = {f"pulsetrain/_{path.relative_to(ROOT)}" for path in (ROOT / "examples").rglob("*.ipynb")}
    assert {name for name in names if name.endswith(".ipynb")} == notebooks != set()


# -------------------------------------------------------------------------------------------- a user's project


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment into which a copy of the tree is installed."""
    folder = tmp_path_factory.mktemp(request.param)
    tree = copy_tree(folder / "tree")
    installed = make_environment(folder / "environment", tree, editable=request.param == "editable")
    if request.param == "wheel":
        shutil.rmtree(tree)
    return installed


USER_ENGINE = 'HORSE_POWER = 90\n"""The user\'s own engine."""\n'
USER_HANDLERS = "def handle() -> int:\n    return 7\n"
TRAIN = """
import engine
from handlers.mine import handle

import torch
from torch import nn
from pulsetrain import EarlyStopping, Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy

inputs = torch.randn(32, 4)
batches = [(inputs[i : i + 8], inputs[i : i + 8].sum(1, keepdim=True)) for i in range(0, 32, 8)]
trainer = Trainer(
    nn.Linear(4, 1), batches, batches, strategy=SupervisedStrategy("mse"),
    config=TrainingConfig(max_epochs=2, optimizer="sgd", learning_rate=0.1),
    handlers=[EarlyStopping(metric="val/loss", patience=3)],
)
seen: list[int] = []
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(handle()))
history: dict[str, list[float]] = trainer.train()
print(engine.HORSE_POWER, seen, len(history["train/loss"]))
"""
CONFIG = """
run: runs/a
model: {class_path: model.Net}
data: {class_path: model.loaders}
strategy: {class_path: SupervisedStrategy, init_args: {loss: mse}}
training: {max_epochs: 1, learning_rate: 0.1, seed: 0}
"""
MODEL = """
import engine
import torch
from handlers.mine import handle
from torch import nn


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)


def loaders() -> list[tuple[torch.Tensor, torch.Tensor]]:
    assert (engine.HORSE_POWER, handle()) == (90, 7)
    return [(torch.ones(8, 4), torch.ones(8, 1))] * 4
"""


@pytest.fixture
def project(request: pytest.FixtureRequest, python: Path, tmp_path: Path) -> Path:
    """A user's project whose own modules have our folders' names: beside a wheel a package, else a namespace."""
    files = {"engine.py": USER_ENGINE, "handlers/mine.py": USER_HANDLERS, "train.py": TRAIN, "model.py": MODEL}
    files |= {"config.yaml": CONFIG, "tests/test_training.py": f"def test_trains():\n{textwrap.indent(TRAIN, '    ')}"}
    if request.node.callspec.params["python"] == "wheel":
        files["handlers/__init__.py"] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@slow
def test_a_project_with_its_own_engine_and_handlers_trains(python: Path, project: Path):
    assert checked(python, "train.py", cwd=project).splitlines()[-1] == "90 [7, 7] 2"


@slow
def test_a_project_with_its_own_engine_and_handlers_is_trained_from_the_command_line(python: Path, project: Path):
    checked(python, "-m", "pulsetrain", "train", "config.yaml", cwd=project)
    assert (project / "runs" / "a" / "run.json").exists()


@slow
@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_a_project_with_its_own_engine_and_handlers_passes_pytest(python: Path, project: Path, mode: str):
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}")
    assert "1 passed" in checked(*command, cwd=project, PYTHONPATH=str(project))


@slow
def test_a_project_with_its_own_engine_and_handlers_type_checks(python: Path, project: Path, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "mypy"
    done = run(python, "-m", "mypy", "--cache-dir", cache, "--explicit-package-bases", "train.py", cwd=project)
    assert "Success" in done.stdout, done.stdout + done.stderr
    (project / "wrong.py").write_text(
        "from pulsetrain import EarlyStopping\nfrom pulsetrain.engine import Engin\n\nEarlyStopping(patience='three')\n"
    )
    done = run(python, "-m", "mypy", "--cache-dir", cache, "--explicit-package-bases", "wrong.py", cwd=project)
    assert 'expected "int"' in done.stdout, done.stdout + done.stderr  # our types are seen, not Any
    assert 'maybe "Engine"?' in done.stdout, done.stdout + done.stderr


LOADED_ONCE = """
import importlib, pathlib, pkgutil, sys
import pulsetrain
for each in pkgutil.walk_packages(pulsetrain.__path__, "pulsetrain."):
    if each.name != "pulsetrain.__main__":
        importlib.import_module(each.name)
files = {}
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None):
        files.setdefault(pathlib.Path(module.__file__).resolve(), []).append(name)
top = {"pulsetrain", "engine", "handlers"}
ours = [names for names in files.values() if top & {name.split(".")[0] for name in names}]
others = [name for names in ours for name in names if not name.startswith("pulsetrain")]
print(len(ours), [names for names in ours if len(names) > 1], others)
"""


@slow
def test_no_module_is_loaded_under_two_names_and_the_checkout_is_not_on_the_path(python: Path, tmp_path: Path):
    ours = [name for name in modules() if not name.startswith("pulsetrain/_examples/")]
    count = len(ours) - 1  # all but __main__
    assert checked(python, "-c", LOADED_ONCE, cwd=tmp_path).strip() == f"{count} [] []"
    roots = "import sys, pathlib; print([p for p in sys.path if (pathlib.Path(p) / 'engine' / '__init__.py').exists()])"
    assert checked(python, "-c", roots, cwd=tmp_path).strip() == "[]"


@slow
def test_in_the_checkout_itself_the_folders_refuse_to_be_packages_of_their_own(python: Path):
    for name in ("engine", "handlers"):
        done = run(python, "-c", f"import {name}", cwd=ROOT)
        assert done.returncode == 1
        assert f"import pulsetrain.{name}" in done.stderr.splitlines()[-1]


WORKERS = """
import multiprocessing, pickle
import torch
from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1, multiprocessing_context=method)
        settings = TrainingConfig(max_epochs=1)
        trainer = Trainer(nn.Linear(4, 1), loader, strategy=SupervisedStrategy("mse"), config=settings)
        print(method, len(trainer.train()["train/loss"]))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(pickle.loads, (pickle.dumps(TrainingConfig(max_epochs=3)),)).max_epochs)
"""


@slow
def test_workers_of_every_start_method_find_the_package(python: Path, tmp_path: Path):
    (tmp_path / "train.py").write_text(WORKERS)
    assert checked(python, "train.py", cwd=tmp_path).split() == ["spawn", "1", "forkserver", "1", "3"]


def test_pickles_name_the_one_package():
    from pulsetrain import EarlyStopping, Events, Every, TrainingConfig

    for value in (TrainingConfig(), Every(epochs=2), Events.STARTED(every=2), EarlyStopping):
        assert re.findall(rb"(?:engine|handlers|pulsetrain)[.\w]*", pickle.dumps(value, 0))[0].startswith(b"pulsetrain")


# ------------------------------------------------------------------------------- tools that read the sources


def test_every_handler_strategy_and_backend_is_a_name_of_the_package():
    import pulsetrain
    from pulsetrain import engine, handlers

    wanted = {name for name in engine.__all__ if name.endswith(("Strategy", "Backend"))} | set(handlers.__all__)
    wanted -= {"Backend", "FunctionalBackend", "TrainingStrategy", "AlternatingStrategy"}  # protocols and bases
    missing = wanted - set(pulsetrain.__all__)
    assert not missing, f"add to the names in pulsetrain/__init__.py: {', '.join(sorted(missing))}"


def test_ruff_checks_the_real_folders_once():
    shown = checked(sys.executable, "-m", "ruff", "check", "--show-files", ROOT).split()
    files = {str(Path(each).relative_to(ROOT)) for each in shown if each.endswith(".py")}
    assert {"engine/__init__.py", "handlers/__init__.py", "pulsetrain/__init__.py"} <= files
    assert not {name for name in files if name.startswith(("pulsetrain/engine/", "pulsetrain/handlers/"))}


@slow
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        (
            "engine/environment.py",
            "from pulsetrain import handlers",
            "pulsetrain composes, handlers decide, engine does",
        ),
        ("handlers/callback.py", "from pulsetrain import config", "pulsetrain composes, handlers decide, engine does"),
        ("engine/data/rng.py", "import pulsetrain.engine.strategies", "Layers of the engine"),
        ("handlers/metric_values/best_value.py", "import pulsetrain.handlers.loggers", "Layers of the handlers"),
        (
            "engine/data/rng.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pulsetrain.engine.strategies",
            "Layers of the engine",
        ),
        (
            "engine/losses/masks.py",
            "import pulsetrain.engine.losses.tokens",
            "No circles among the files of a package",
        ),
    ],
    ids=["engine", "handlers", "layer of the engine", "layer of the handlers", "for type checkers alone", "circle"],
)
def test_an_import_against_the_layers_breaks_a_contract(file: str, line: str, contract: str, tmp_path: Path):
    tree = copy_tree(tmp_path / "tree")
    linter = Path(sys.executable).with_name("lint-imports")
    (tree / file).write_text((tree / file).read_text() + f"\n{line}\n")
    done = run(linter, "--no-logo", cwd=tree, PYTHONPATH=str(tree))
    assert done.returncode == 1
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())


@slow
def test_coverage_sees_files_of_all_three_packages(tmp_path: Path):
    (tmp_path / "program.py").write_text("from pulsetrain import Trainer, EarlyStopping\n")
    environment = {"COVERAGE_FILE": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    checked(sys.executable, "-m", "coverage", "run", tmp_path / "program.py", cwd=ROOT, **environment)
    checked(sys.executable, "-m", "coverage", "json", "-q", "-o", tmp_path / "report.json", cwd=ROOT, **environment)
    report = json.loads((tmp_path / "report.json").read_text())
    files = {re.sub("^pulsetrain/(?=engine/|handlers/)", "", name) for name in report["files"]}
    for package in ("engine", "handlers", "pulsetrain"):
        assert f"{package}/__init__.py" in files
    assert 0 < report["totals"]["percent_covered"] < 100


def test_the_sources_that_the_documents_link_to_are_there():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
