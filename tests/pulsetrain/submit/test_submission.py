"""What a job needs, as the command line and the configuration say it."""

from __future__ import annotations

import pytest

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.submit.submission import check_words, job_name, memory_of, minutes_of
from pulsetrain.submit.topology import Layout, layout_of


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("4:00:00", 240), ("0:00:30", 1), ("1-0", 1440), ("2-12:30", 3630), ("1-00:00:01", 1441)],
)
def test_times_are_those_of_slurm(text: str, minutes: int) -> None:
    assert minutes_of("--time", text) == minutes


@pytest.mark.parametrize("text", ["4:00", "0", "-1", "4h", "", "1:99:00", "1:00:00:00", "$(date)"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--time"):
        minutes_of("--time", text)


def test_memory_has_a_unit() -> None:
    assert [memory_of("--memory", text) for text in ("500M", "2g", "1TiB", "3GB")] == [500, 2048, 1024**2, 3072]
    for text in ("64", "0G", "1.5G", "G", ""):
        with pytest.raises(ConfigurationError, match="--memory"):
            memory_of("--memory", text)


@pytest.mark.parametrize("text", ["a", "A b", "x" * 200, "--", "", "é", "9", "a" * 39 + "-b"])
def test_every_name_becomes_one_that_kubernetes_accepts(text: str) -> None:
    name = job_name(text)
    assert name[0].isalpha()
    assert name[-1].isalnum()
    assert len(name) <= 40
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize(
    "word",
    ["--data.init_args.api_key=x7", "--data.init_args.url=https://me:hunter2@host/a", "--model.init_args.password=a"],
)
def test_a_credential_is_refused_and_not_shown(word: str) -> None:
    with pytest.raises(ConfigurationError, match="looks like a credential") as caught:
        check_words(["train", "base.yaml", word])
    assert "x7" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_line_break_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has a control character"):
        check_words(["train", "a\nb.yaml"])


@pytest.mark.parametrize(
    ("parallel", "settings", "layout"),
    [
        ({}, {}, Layout(1)),
        ({}, {"nnodes": "2"}, Layout(1, 2)),
        ({"shard": 2}, {"nnodes": "4"}, Layout(1, 4)),
        ({"shard": 4}, {}, Layout(4)),
        ({"shard": 2, "tensor": 2}, {"nnodes": "2"}, Layout(2, 2)),
        ({"replicate": 2, "pipeline": 2}, {}, Layout(4)),
        ({"tensor": 2}, {"nproc": "8", "nnodes": "2"}, Layout(8, 2)),
        ({}, {"nproc": "4", "min_nproc": "2"}, Layout(4, 1, 2)),
    ],
)
def test_the_processes_are_those_of_the_topology(
    parallel: dict[str, int], settings: dict[str, str], layout: Layout
) -> None:
    assert layout_of({"parallel": parallel}, {f"launch.{name}": text for name, text in settings.items()}) == layout


@pytest.mark.parametrize(
    ("parallel", "settings", "words"),
    [
        ({"shard": 4}, {"nproc": "2"}, "needs 4 processes or a multiple"),
        ({"shard": 3}, {"nnodes": "2"}, "cannot share evenly"),
        ({}, {"nproc": "0"}, "at least 1"),
        ({}, {"nprocs": "2"}, "did you mean 'nproc'"),
        ({}, {"nproc": "2", "nnodes": "2", "min_nproc": "1"}, "is for one machine"),
        ({}, {"nproc": "2", "min_nproc": "3"}, "is more than"),
    ],
)
def test_what_does_not_fit_is_refused(parallel: dict[str, int], settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layout_of({"parallel": parallel}, {f"launch.{name}": text for name, text in settings.items()})
