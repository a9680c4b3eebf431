"""What the command line answers before there is a run."""

from __future__ import annotations

import pytest

from pulsetrain.cli import main
from pulsetrain.cli.settings import split_settings


class TestHelp:
    def test_alone_it_shows_its_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert "train what a configuration file describes" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "status", "told"),
        [
            (["--help"], 0, "Begin with: pulsetrain train"),
            (["train", "--help"], 0, "--training.learning_rate 3e-4"),
            (["--version"], 0, "pulsetrain 0.1.0 (torch "),
            (["nonsense"], 2, "invalid choice: 'nonsense'"),
            (["train"], 2, "the following arguments are required: CONFIG"),
            (["train", "a.yaml", "--bogus"], 2, "unrecognized arguments: --bogus"),
            (["train", "a.yaml", "--res", "latest"], 2, "unrecognized arguments: --res latest"),
        ],
    )
    def test_answers(self, words: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(words) == status
        captured = capsys.readouterr()
        assert told in captured.out + captured.err

    def test_settings_are_told_from_options(self) -> None:
        words = ["train", "--training.a", "-1", "c.yaml", "--run", "x.y", "--model=m.N", "--metrics.b.c={d: e=f}"]
        assert split_settings(words) == (
            ["train", "c.yaml", "--run", "x.y"],
            {"training.a": "-1", "model": "m.N", "metrics.b.c": "{d: e=f}"},
        )
