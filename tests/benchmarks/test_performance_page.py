"""The tables of the documents come from benchmarks that exist, with options that they accept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness.plan import FOLDER, names
from benchmarks.harness.tables import Block, blocks_of

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "scaling.md")
BLOCKS = [(path.name, block) for path in (*PAGES, ROOT / "README.md") for block in blocks_of(path.read_text())]


def options_of(benchmark: str) -> set[str]:
    source = (FOLDER / f"{benchmark}.py").read_text()
    return set(re.findall(r'"(--[\w-]+)"', source))


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page}-{block.benchmark}-{at}" for at, (page, block) in enumerate(BLOCKS)]
)
def test_the_command_of_each_table_exists(page: str, block: Block):
    assert block.benchmark in names()
    words = block.command
    assert words is not None, f"{page}: measure it, then: python -m benchmarks --write {page}"
    assert words[:4] == ["python", "-m", "benchmarks", block.benchmark]
    assert {word for word in words[4:] if word.startswith("--")} <= options_of(block.benchmark)


def test_every_benchmark_has_a_table_in_one_of_the_pages():
    assert {block.benchmark for page, block in BLOCKS if page != "README.md"} == {*names()}


def test_the_tables_about_many_ranks_name_rows_that_are_measured():
    rows = [row for page, block in BLOCKS if page == "scaling.md" for row in block.rows or ()]
    body = "".join(block.body for page, block in BLOCKS if page == "scaling.md")
    assert rows
    assert [row for row in rows if row not in body] == []


def test_the_readme_names_only_rows_that_are_measured():
    source = (FOLDER / "trainers.py").read_text()
    (block,) = [block for page, block in BLOCKS if page == "README.md"]
    assert block.rows
    assert all(f'"{row}"' in source for row in block.rows)
