"""The examples in docstrings run and print what they show."""

import ast
import doctest
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import pulsetrain
from pulsetrain.engine.data import rng

ROOT = Path(pulsetrain.__file__).parent
OPTIONAL = {  # modules that cannot be imported without these packages are skipped by name
    "flax", "gymnasium", "jax", "lion_pytorch", "mlflow", "optax", "pandas", "prompt_toolkit", "pyarrow", "safetensors",
    "schedulefree", "tensorboard", "torchmetrics", "trackio", "wandb",
}  # fmt: skip
NEEDS = {  # examples that import these packages when they run
    "pulsetrain.engine.backends.jax": ("jax", "optax"),
    "pulsetrain.engine.checkpoint.weights": ("safetensors",),
    "pulsetrain.handlers.loggers.mlflow": ("mlflow",),
    "pulsetrain.handlers.loggers.tensorboard": ("tensorboard",),
    "pulsetrain.handlers.loggers.trackio": ("trackio",),
    "pulsetrain.handlers.loggers.wandb": ("wandb",),
}
AT_LEAST = {"pulsetrain.engine": 241, "pulsetrain.handlers": 57, "pulsetrain": 42}  # docstrings with an example


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the three packages by its import name; `engine` and `handlers` are links inside `pulsetrain`."""
    for folder, _, files in os.walk(ROOT, followlinks=True):
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def docstrings_with_examples(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    if ">>> " not in text:
        return 0
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, documented))
    return sum(bool(doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")) for node in nodes)


EXPECTED = {name: count for name, path in sources() if (count := docstrings_with_examples(path))}


def package_of(name: str) -> str:
    return next(package for package in AT_LEAST if f"{name}.".startswith(f"{package}."))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_print_what_they_show(name, tmp_path, monkeypatch):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in OPTIONAL:
            pytest.skip(f"{name} needs {error.name}, which is not installed")
        raise
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the examples of {name} need {package}, which is not installed")
    monkeypatch.chdir(tmp_path)  # a file that an example writes stays out of the checkout
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    report: list[str] = []
    with rng.preserve_rng():
        for test in found:
            runner.run(test, out=report.append)
    assert not report, "".join(report)
    assert len({test.docstring for test in found}) == EXPECTED[name], (
        "doctest did not find every example, such as one in a nested function"
    )
    assert not any(tmp_path.iterdir()), "an example left a file"


@pytest.mark.parametrize("package", AT_LEAST)
def test_each_package_has_examples(package):
    count = sum(number for name, number in EXPECTED.items() if package_of(name) == package)
    assert count >= AT_LEAST[package], f"{package}: {count} docstrings have an example"
