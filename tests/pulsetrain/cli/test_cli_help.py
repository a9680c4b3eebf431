"""What the command line answers before there is a run."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from pulsetrain.cli import main
from pulsetrain.cli.parser import COMMANDS
from pulsetrain.cli.settings import split_settings

NAMES = [each.__name__.rpartition(".")[2].replace("_", "-") for each in COMMANDS]


class TestHelp:
    def test_without_a_command_it_lists_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert "train a run from a configuration file" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "status", "output"),
        [
            (["--help"], 0, "Begin with: pulsetrain init"),
            (["train", "--help"], 0, "--training.learning_rate 3e-4"),
            (["--version"], 0, f"pulsetrain {version('pulsetrain')} (torch "),
            (["nonsense"], 2, "invalid choice: 'nonsense'"),
            (["train"], 2, "the following arguments are required: CONFIG"),
            (["train", "a.yaml", "--bogus"], 2, "unrecognized arguments: --bogus"),
            (["train", "a.yaml", "--res", "latest"], 2, "unrecognized arguments: --res latest"),
            (["tarin", "a.yaml"], 2, "invalid choice: 'tarin'; did you mean 'train'?"),
            (["Events"], 2, "invalid choice: 'Events'; did you mean 'events'?"),
            (["lrfind"], 2, "invalid choice: 'lrfind'; did you mean 'lr-find'?"),
            (["train", "a.yaml", "--resum", "latest"], 2, "arguments: --resum latest; did you mean '--resume'?"),
            (["events", "a", "--filds=epoch"], 2, "arguments: --filds=epoch; did you mean '--fields'?"),
            (["--verson"], 2, "arguments: --verson; did you mean '--version'?"),
            (["events", "a", "--format", "jsn"], 2, "invalid choice: 'jsn'; did you mean 'json'?"),
        ],
    )
    def test_a_command_prints_its_help(
        self, words: list[str], status: int, output: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == status
        captured = capsys.readouterr()
        assert output in captured.out + captured.err

    @pytest.mark.parametrize("command", NAMES)
    def test_every_command_has_an_example_and_its_exit_statuses(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, "--help"]) == 0
        output = capsys.readouterr().out
        assert f"usage: pulsetrain {command} " in output
        _, _, end = output.partition("\nexamples:\n")
        examples, _, statuses = end.partition("\nexit status: 0 ")
        assert f"pulsetrain {command} " in examples
        assert "2 " in statuses
        assert not [line for line in output.splitlines() if len(line) > 130]

    def test_the_list_has_a_line_for_each(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        listed = [line for line in lines[lines.index("  COMMAND") + 1 :] if line.startswith("    ")]
        assert [line.split()[0] for line in listed] == NAMES
        assert len({line.index(line.split()[1], 14) for line in listed}) == 1

    @pytest.mark.parametrize(
        "command", ["events RUN", "diff A B", "verify RUN", "debug RUN", "export RUN --format csv"]
    )
    def test_settings_of_a_configuration_are_rejected_without_one(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*command.split(), "--training.seed", "1"]) == 2
        output = capsys.readouterr().err
        name = command.split()[0]
        commands = "train, config, lr-find, memory, fork and submit"
        assert f"--training.seed: {name} has no such option; {commands} take settings of a configuration" in output

    def test_settings_are_separated_from_options(self) -> None:
        words = ["train", "--training.a", "-1", "c.yaml", "--run", "x.y", "--model=m.N", "--metrics.b.c={d: e=f}"]
        assert split_settings(words) == (
            ["train", "c.yaml", "--run", "x.y"],
            {"training.a": "-1", "model": "m.N", "metrics.b.c": "{d: e=f}"},
        )
