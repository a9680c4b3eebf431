"""What the wheel and the source distribution hold, and what they say about the project."""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.programs_installs import ROOT, checked, copy_tree, modules, source_files


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    tree = copy_tree(folder / "tree")
    build = "from setuptools.build_meta import {0}; {0}({1!r})"
    for name in ("build_sdist", "build_wheel"):
        checked(sys.executable, "-c", build.format(name, str(folder)), cwd=tree)
    return folder


def contents(built: Path, form: str) -> set[str]:
    """The names of all files, below the folder that an archive has at its top."""
    if form == "wheel":
        return set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        return {each.name.partition("/")[2] for each in archive if each.isfile()}


def metadata(built: Path, form: str) -> Message:
    if form == "wheel":
        archive = zipfile.ZipFile(next(built.glob("*.whl")))
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        (member,) = (each for each in archive if each.name.endswith("/PKG-INFO") and each.name.count("/") == 1)
        file = archive.extractfile(member)
        assert file is not None
        return Parser().parsestr(file.read().decode())


def documents() -> set[str]:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".png", ".svg")}
    return {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"} | pages


@pytest.mark.slow
def test_the_wheel_holds_the_documentation(built: Path):
    names = contents(built, "wheel")
    shared = {name.partition(".data/data/share/doc/pulsetrain/")[2] for name in names} - {""}
    assert shared == documents()


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages_and_of_the_examples(built: Path):
    files = {name for name in source_files() if not (ROOT / name).is_symlink()}
    wanted = {name for name in files if name.startswith("pulsetrain/")}
    wanted |= {f"pulsetrain/{name}" for name in files if name.startswith(("engine/", "handlers/"))}
    wanted |= {f"pulsetrain/_{name}" for name in files if name.startswith("examples/")}
    assert {Path(name).suffix for name in wanted} > {".py", ".yaml", ".js"}
    assert not wanted - contents(built, "wheel")


@pytest.mark.slow
def test_the_source_distribution_holds_all_that_the_checks_need(built: Path):
    links = {name for name in source_files() if (ROOT / name).is_symlink()}
    not_needed = {".gitignore"} | {name for name in source_files() if name.startswith(".github/")}
    assert not set(source_files()) - links - not_needed - contents(built, "source")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wheel", "source"])
def test_the_project_claims_no_address_and_the_python_versions_that_are_tested(built: Path, form: str):
    found = metadata(built, form)
    assert found.get_all("Project-URL") is None  # it has no public address yet
    assert found["Home-page"] is None
    assert found["Requires-Python"] == ">=3.11"
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(found.get_all("Classifier") or ()))
    assert versions == re.findall(r"3\.\d+", re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[0])


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from nodes_at_run_time(node)


def imported() -> dict[str, set[str]]:
    """Each package of others that a module of ours imports by a statement, and where."""
    found: dict[str, set[str]] = {}
    for module in modules():
        path = re.sub("^pulsetrain/(?=engine/|handlers/|examples/)", "", module)
        for node in nodes_at_run_time(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path)
    return {name: paths for name, paths in found.items() if name not in sys.stdlib_module_names | {"pulsetrain"}}


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    declared = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in lines}
    of_module = packages_distributions()
    # those that an example imports from its own folder, or from the folder that holds all examples
    # or that are there wherever the module runs: in a notebook's kernel
    beside = {"examples", "IPython"} | {path.stem for path in (ROOT / "examples").rglob("*.py")}
    undeclared = {
        name: sorted(paths)
        for name, paths in imported().items()
        if name not in beside
        and not {each.lower().replace("_", "-") for each in of_module.get(name, [name])} & declared
    }
    assert undeclared == {}


def test_the_documents_say_what_each_package_is_for():
    text = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "docs" / "extras.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.split(r"[^\w.-]", line)[0] for line in project["dependencies"]]
    assert [name for name in needed if f"\n| {name} |" not in text] == []
    assert [extra for extra in project["optional-dependencies"] if f"\n| `{extra}` |" not in text] == []
