"""The sources, the tests and the documentation avoid phrases that read as if translated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# underscores count as spaces, so that names of functions and of tests are read as well
AVOIDED = re.compile(
    r"""\b(
    anew | whoever | behind | tells | told | hear | heard | unheard
    | (go|goes|going|went|gone) \W+ on
    | (hang|hangs|hanging) \W+ on
    | (is|are) \W+ another | another \W+ than
    | (?<!there\W) (is|are) \W+ no \W+ (?!longer|better|larger)
    | (stand|stands|standing) \W+ (in|for)
    | (come|comes|came|coming) \W+ again
    | (give|gives|gave|given|giving) \W+ up
    | (take|takes|took|taking|taken) \W+ (over|back)
    | to \W+ the \W+ (last \W+)? bit
    | by \W+ (its|their) \W+ own \W+ (?!names|time|methods)
    | by \W+ clock
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
# names that were replaced, by `unfiltered`, `preserve_rng` and `needs_event`; as words they are plain English
REPLACED = re.compile(r"\b(busy|quiet|rich)(?=\s*=\s)|\bdef kept(?=\()")
OLD_NAMES = {"behind", "take over", "taken back", "go on", "hear"}  # the changelog says what replaces them
EXCEPT = (
    "tests/test_language.py",
    # their names have not been changed yet
    "engine/recording/",
    "tests/engine/recording/",
    "tests/handlers/metric_values/",
    "tests/support/recordings.py",
)


def avoided_in(text: str) -> list[tuple[int, str]]:
    """The line and the words of each phrase to avoid; released notes stay as they are."""
    text = text.partition("\n## [0.1.0]")[0]
    found = [*AVOIDED.finditer(text.replace("_", " ")), *REPLACED.finditer(text)]
    return [(text.count("\n", 0, each.start()) + 1, " ".join(each[0].lower().split())) for each in found]


@pytest.mark.parametrize("folder", ["engine", "handlers", "pulsetrain", "examples", "benchmarks", "docs", "tests", "."])
def test_no_phrase_to_avoid_is_in_use(folder: str) -> None:
    suffixes = {".md", ".toml"} if folder == "." else {".py", ".md", ".yaml", ".ipynb"}
    files = sorted((ROOT / folder).glob("*" if folder == "." else "**/*"))
    names = {path.relative_to(ROOT).as_posix(): path for path in files if path.suffix in suffixes}
    assert names
    found = []
    for name, path in names.items():
        if name.startswith(EXCEPT):
            continue
        for line, words in avoided_in(path.read_text(encoding="utf-8")):
            if name != "CHANGELOG.md" or words not in OLD_NAMES:
                found.append(f"{name}:{line}: {words}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a run that goes\non", "goes on"),
        ("def test_what_hangs_on_a_clock", "hangs on"),
        ("It is no scalar.", "is no"),
        ("quiet = []", "quiet"),
    ],
)
def test_a_phrase_is_found_across_lines_and_in_names(text: str, words: str) -> None:
    assert avoided_in(text) == [(1, words)]


@pytest.mark.parametrize("text", ["it is no longer needed", "if there is no checkpoint", "hears", "value is None"])
def test_plain_english_is_left_alone(text: str) -> None:
    assert avoided_in(text) == []
