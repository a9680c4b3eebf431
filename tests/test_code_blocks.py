"""Every code block of the README and of the documentation runs, or is read by the program that it is written for."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain.cli import main
from pulsetrain.cli.launch import Launch
from pulsetrain.cli.parser import make_parser
from pulsetrain.cli.settings import split_settings
from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import topology_of
from pulsetrain.configuration.resolve import resolve
from pulsetrain.configuration.sections import SECTIONS
from pulsetrain.engine import Topology
from pulsetrain.sweep.spec import read_spec
from tests.support import programs

ROOT = Path(__file__).parent.parent
PAGES = {
    path.name: path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
LANGUAGES = ("", "bash", "console", "python", "text", "yaml")  # without a name: commands, and what they print

# What the Python of a page takes for granted. The blocks of a page are one program, unless it is in ALONE.
CLASSIFIER = """
import sys
import torch
from torch import nn
from pulsetrain import *
from pulsetrain.testing import tiny_model

rows = torch.randn(32, 4)
loader = val_loader = torch.utils.data.DataLoader([(row, int(row.sum() > 0)) for row in rows], batch_size=8)
model, config = tiny_model(outputs=2), TrainingConfig(max_epochs=3, seed=0)
"""
RECORDED = f"""{CLASSIFIER}
def build_trainer(folder="runs/a"):
    handlers = [Checkpointer(folder, Every(iterations=50), keep_last=5), EventRecorder(folder)]
    config = TrainingConfig(max_iterations=110, seed=0, progress=False)
    return Trainer(tiny_model(outputs=2), loader, val_loader, config=config, handlers=handlers)
"""
GIVEN = {
    "loggers.md": 'import os\nos.environ["TRACKIO_DIR"] = "runs/trackio"  # in place of a folder of the home directory',
    "debugging.md": f"{RECORDED}\nbuild_trainer().train()",
    "recorder.md": CLASSIFIER,
    "resume.md": CLASSIFIER,
    "runs.md": f"{RECORDED}\nbuild_trainer('runs/digits-1').train()",
}
ALONE = ("CONTRIBUTING.md", "architecture.md", "backends.md", "memory.md", "training_step.md")
NEEDED = {
    "backends.md": ("jax",),
    "coming_from_keras.md": ("keras",),
    "coming_from_lightning.md": ("lightning",),
    "coming_from_transformers.md": ("accelerate",),
    "loggers.md": ("tensorboard", "wandb", "mlflow", "trackio"),
    "reinforcement_learning.md": ("transformers", "gymnasium"),
    "strategies.md": ("transformers",),
}
ELSEWHERE = {  # where the Python of a page is tested otherwise
    "README.md": "tests/test_readme.py",
    "testing.md": "tests/test_readme.py",
    "troubleshooting.md": "tests/test_troubleshooting.py",
    **dict.fromkeys(
        ("distributed.md", "model_parallel.md", "virtual_ranks.md"),
        "tests/pulsetrain/training/test_distributed_guide.py",
    ),
}
NOT_RUN = {  # a page, a text that occurs in one of its blocks of Python, and why the block does not run
    (
        "model_parallel.md",
        "tensor_plan",
    ): "a fragment; tests/pulsetrain/training/test_tensor_parallel.py",
    ("model_parallel.md", "MegatronGPT("): "needs a GPU; tests/engine/backends/test_megatron.py",
    ("model_parallel.md", "describe_llama("): "needs a GPU; tests/engine/backends/test_megatron.py",
    ("huggingface.md", "Topology(shard=2)"): "needs two processes; tests/engine/distributed/test_pretrained.py",
    ("huggingface.md", "load_in_4bit"): "needs bitsandbytes; tests/integration/test_quantised_adapters.py",
    ("huggingface.md", "HuggingFaceExporter("): "a fragment; tests/integration/test_hugging_face_exports.py",
    ("huggingface.md", "load_dataset("): "needs files; tests/integration/test_streams_of_datasets.py",
    ("reinforcement_learning.md", "ServerSampler("): "needs a server; tests/engine/rollouts/test_server.py",
}
SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Block:
    """What is between two fences."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str:
        """Why it does not run; empty if it does."""
        found = [why for (page, text), why in NOT_RUN.items() if page == self.page and text in self.code]
        return found[0] if found else ""


def blocks_of(page: str) -> list[Block]:
    text = PAGES[page]
    fenced = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, each.start()) + 1, each[2], each[3]) for each in fenced]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
YAML = [block for block in BLOCKS if block.language == "yaml"]
SHELL = [block for block in BLOCKS if block.language not in ("python", "yaml")]


def test_every_fence_names_a_language_that_is_checked():
    assert {block.language for block in BLOCKS} <= {*LANGUAGES}
    assert len(PYTHON) > 90
    fences = sum(len(re.findall(r"^ *```", text, flags=re.MULTILINE)) for text in PAGES.values())
    assert fences == 2 * len(BLOCKS)


# ---------------------------------------------------------------------------------------------------- Python


def as_program(page: str) -> str:
    return "\n".join([GIVEN.get(page, ""), *(each.code for each in PYTHON if each.page == page and not each.reason)])


def run(code: str, folder: Path) -> None:
    done = programs.run("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr


def need_packages_of(page: str) -> None:
    for package in NEEDED.get(page, ()):
        if importlib.util.find_spec(package) is None:  # not imported: keras needs a setting of the page for that
            pytest.skip(f"{package} is not installed")


RUNNING = [page for page in PAGES if page not in ELSEWHERE and any(b.page == page and not b.reason for b in PYTHON)]


@SLOW
@pytest.mark.parametrize("page", [page for page in RUNNING if page not in ALONE])
def test_the_python_of_a_page_runs_as_one_program_and_its_assertions_hold(page: str, tmp_path: Path):
    need_packages_of(page)
    run(as_program(page), tmp_path)


@SLOW
@pytest.mark.parametrize("block", [each for each in PYTHON if each.page in ALONE], ids=str)
def test_a_block_of_python_runs_alone_and_its_assertions_hold(block: Block, tmp_path: Path):
    need_packages_of(block.page)
    run(block.code, tmp_path)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_of_python_imports_only_what_exists(block: Block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pulsetrain":
            module = importlib.import_module(str(node.module))
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize(("page", "text"), NOT_RUN)
def test_a_block_that_does_not_run_is_there_once_and_its_test_exists(page: str, text: str):
    assert sum(text in each.code for each in PYTHON if each.page == page) == 1
    assert all((ROOT / path).exists() for path in re.findall(r"tests/\S+\.py", NOT_RUN[page, text]))


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_is_tested_elsewhere_is_read_there(page: str):
    assert f'"{page}"' in (ROOT / ELSEWHERE[page]).read_text()


# ------------------------------------------------------------------------------------------------------ YAML


def definitions(page: str) -> str:
    """The imports, classes and functions of a page, which its configurations name as my_module."""
    found = []
    for block in PYTHON:
        if block.page == page:
            kinds = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
            found += [ast.unparse(node) for node in ast.parse(block.code).body if isinstance(node, kinds)]
    return "\n".join(found)


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_block_of_yaml_is_a_configuration_whose_settings_exist(block: Block, tmp_path: Path):
    given = yaml.safe_load(block.code)
    path = tmp_path / "config.yaml"
    path.write_text(block.code)
    if "space" in given:  # a sweep
        shutil.copy(ROOT / "examples" / given["config"], tmp_path)
        assert read_spec(path).space.keys() == given["space"].keys()
        return
    assert given.keys() <= SECTIONS.keys()
    (tmp_path / "my_module.py").write_text(definitions(block.page))
    needed = {"model": "pulsetrain.testing.tiny_model", "data": "pulsetrain.testing.tiny_loader"}
    needed = {name: value for name, value in needed.items() if name not in given}
    resolved = resolve(path, needed).config
    topology_of(resolved)
    assert given.keys() <= resolved.keys()


# ----------------------------------------------------------------------------------------------------- shell

PARSER = make_parser()
COMMANDS: dict[str, argparse.ArgumentParser] = PARSER.parse_args(["completion", "bash"]).commands
SETTINGS = {
    "training": {each.name for each in fields(TrainingConfig)},
    "parallel": {each.name for each in fields(Topology)},
    "launch": {each.name for each in fields(Launch)},
}


def commands_in(block: Block) -> list[list[str]]:
    """The words of each call of pulsetrain; in blocks with a prompt, of those after one."""
    lines = re.sub(r"\\\n\s*", " ", block.code).splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    calls = []
    for line in lines:
        found = re.search(r"(?:^|[;|&] *|-m |-- )pulsetrain (?=[a-z])(.*)", re.sub(r"\s{2,}# .*|^# .*", "", line))
        if found:
            reader = shlex.shlex(found[1], posix=True, punctuation_chars=True)
            reader.whitespace_split = True
            words = []
            for word in reader:
                if set(word) <= set("();<>|&"):
                    break
                words.append(word)
            calls.append(words)
    return calls


CALLS = [(f"{block}: {' '.join(words)}", words) for block in SHELL for words in commands_in(block)]


@pytest.mark.parametrize("words", [words for _, words in CALLS], ids=[name for name, _ in CALLS])
def test_a_command_of_the_documentation_is_one_that_the_command_line_takes(words: list[str]):
    assert len(CALLS) > 50
    others, settings = split_settings(words)
    PARSER.parse_args(others)  # exits if it does not
    for name in settings:
        section, setting, *_ = [*name.split("."), ""]
        assert section in {*SECTIONS, "launch"}, name
        assert setting in SETTINGS.get(section, {setting}), name


IN_EXAMPLES = [each for each in SHELL if re.search(r"\bpulsetrain \w+ examples/\w+/", each.code)]


@pytest.mark.parametrize("block", IN_EXAMPLES, ids=str)
def test_a_command_on_an_example_comes_after_the_one_that_copies_it(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    copy, *others = commands_in(block)
    assert main(copy) == 0
    named = [word for words in others for word in words if word.startswith("examples/")]
    assert [path for path in named if not Path(path).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_command_in_the_text_of_a_page_and_its_options_exist(page: str):
    for command in re.findall(r"`pulsetrain ([a-z][^`]*)`", re.sub(r"(?ms)^ *```.*?^ *```$", "", PAGES[page])):
        name, *words = command.split()
        assert name in COMMANDS, command
        options = {word.partition("=")[0] for word in words if word.startswith("--") and "." not in word}
        known: Any = COMMANDS[name]._option_string_actions
        assert options <= {*known, *(f"--{section}" for section in SECTIONS)}, command


@pytest.mark.parametrize("page", PAGES)
def test_a_target_of_make_and_a_benchmark_that_a_page_names_exist(page: str):
    targets = re.findall(r"^([a-z-]+):.* ##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    made = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", PAGES[page], flags=re.MULTILINE)
    assert [name for name in made if name not in targets] == []
    named = re.findall(r"python -m benchmarks ([a-z_0-9]+)", PAGES[page])
    assert [name for name in named if not (ROOT / "benchmarks" / f"{name}.py").exists()] == []


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "bash"], ids=str)
def test_a_block_of_shell_parses(block: Block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
