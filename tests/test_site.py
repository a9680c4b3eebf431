"""The documentation as a site: every page is in it, and no page loads anything from elsewhere."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.cli.launch import Launch
from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import BACKENDS, STRATEGIES
from pulsetrain.configuration.sections import SECTIONS
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.engine import (
    Accumulate,
    ActivationCheckpointing,
    ActivationOffload,
    Every,
    OptimizerOffload,
    Topology,
)
from pulsetrain.sweep.spec import ENTRIES, Range, Spec
from tests.support.chromium import headless, needs_chromium, until

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_navigation_names_every_page():
    named = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted([*PAGES, "index.md"])


def test_the_page_about_events_is_what_the_code_says():
    command = [sys.executable, str(ROOT / "docs" / "draw_events.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


REFERENCE = runpy.run_path(str(ROOT / "docs" / "configuration_reference.py"))
CONFIGURED = (TrainingConfig, Accumulate, ActivationCheckpointing, ActivationOffload, OptimizerOffload, Every, Topology)


@pytest.mark.parametrize("kind", [*CONFIGURED, Launch, Spec, Range], ids=lambda kind: kind.__name__)
def test_the_page_about_the_configuration_describes_every_field_and_its_default(kind: type):
    names = ENTRIES if kind is Spec else [field.name for field in fields(kind)]
    assert REFERENCE["fields_of"](kind, names) in REFERENCE["page"]()
    rows = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in REFERENCE["fields_of"](kind, names).splitlines()[2:]]
    assert [row[0] for row in rows] == [f"`{name}`" for name in names]
    assert all(len(row[-1]) > 5 for row in rows)
    assert not [row for row in rows if re.search(r"\[[^\]]*\]$", row[-1])]  # the default has a column of its own


def test_the_page_about_the_configuration_names_every_section_and_every_name_without_a_path():
    page = REFERENCE["page"]()
    assert [f"| `{name}` |" for name in SECTIONS if f"| `{name}` |" not in page] == []
    names = [*STRATEGIES, *BACKENDS, *HANDLERS]
    assert [name for name in names if f"[`{name}`][pulsetrain." not in page] == []


@pytest.mark.parametrize("picture", sorted(path.name for path in (ROOT / "docs").glob("*.png")))
def test_each_picture_is_on_a_page_and_is_drawn_by_a_command(picture: str):
    assert picture in (ROOT / "docs" / "draw_pictures.py").read_text()
    pages = [(ROOT / "README.md").read_text(), *((ROOT / "docs" / page).read_text() for page in PAGES)]
    assert any(re.search(rf"!\[[^\]]+\]\((docs/)?{picture}\)", page) for page in pages)


def test_a_field_without_a_description_is_refused():
    @dataclass
    class Settings:
        """Settings.

        Args:
            first: what comes first [1].
        """

        first: int = 1
        second: int = 2

    assert REFERENCE["fields_of"](Settings, ["first"]).endswith("| `first` | `int` | `1` | what comes first |")
    with pytest.raises(ValueError, match=r"Settings\.second: has no description"):
        REFERENCE["fields_of"](Settings)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert not done.stderr.strip(), done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) + 20  # with the reference
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(https?:[^\"]*)\"", text)
        loaded += re.findall(r"<link[^>]* href=\"(https?:[^\"]*)\"", text)
        assert loaded == [], page.name
    trainer = (site / "reference" / "pulsetrain.html").read_text()
    assert 'id="pulsetrain.trainer.Trainer"' in trainer
    assert "&gt;&gt;&gt;" in trainer


@pytest.mark.slow
def test_the_site_has_a_list_of_all_examples(site: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["examples"]) == 0
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()]
    listed = [name for name, _ in printed if name != "copy"]
    page = (site / "examples.html").read_text()
    assert re.findall(r"<td><code>(\w+)</code></td>", page) == listed
    assert 'href="examples.html"' in (site / "tutorial.html").read_text()


@needs_chromium[0]
@needs_chromium[1]
def test_the_search_works_on_pages_that_are_opened_from_disk(site: Path):
    with headless() as browser:
        browser.get((site / "tutorial.html").as_uri())
        field = browser.find_element("css selector", "[data-md-component=search-query]")
        browser.execute_script("arguments[0].focus()", field)
        field.send_keys("early stopping")
        found = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"
        links = until(browser, lambda: browser.execute_script(f"return {found}"))
        assert any("/handlers.html" in link for link in links)
        assert all(link.startswith(site.as_uri()) for link in links)
        loaded = "[...document.querySelectorAll('script[src], link, img')].map(each => each.src || each.href)"
        assert all(each.startswith("file:") for each in browser.execute_script(f"return {loaded}"))
        assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
