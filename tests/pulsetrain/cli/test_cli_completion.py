"""`pulsetrain completion`: the completions that a shell offers with the script."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.cli.completed_settings import SETTINGS
from pulsetrain.config import PRECISIONS, TrainingConfig
from pulsetrain.configuration.assemble import STRATEGIES
from pulsetrain.configuration.sections import NAMED, SECTIONS
from pulsetrain.engine.optimizers.registry import NAMES as OPTIMIZERS
from pulsetrain.engine.schedules.named import NAMES as SCHEDULES

pytest.importorskip("shtab")

ASK = """
. ./script
complete -p pulsetrain > /dev/null || exit 9
COMP_WORDS=({words}); COMP_CWORD={last}; COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
$(complete -p pulsetrain | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "config.yaml").touch()
    (folder / "runs").mkdir()
    return folder


def offered(folder: Path, line: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    if not (folder / "script").exists():
        assert main(["completion", "bash"]) == 0
        (folder / "script").write_text(capsys.readouterr().out)
    words = line.split()
    script = ASK.format(words=line, last=len(words) - 1)
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("pulsetrain tr", {"train"}),
        ("pulsetrain de", {"debug"}),
        ("pulsetrain train conf", {"config.yaml"}),
        ("pulsetrain events ru", {"runs"}),
        ("pulsetrain train --dr", {"--dry-run"}),
        ("pulsetrain train --training.opt", {"--training.optimizer", "--training.optimizer_offload",
                                             "--training.optimizer_options"}),
        ("pulsetrain train --training.optimizer adamw --training.sched", {"--training.schedule",
                                                                          "--training.schedule_options"}),
        ("pulsetrain train --training.optimizer ada", {"adadelta", "adagrad", "adam", "adamw"}),
        ("pulsetrain config config.yaml --training.precision ", {"bf16", "fp16", "fp32"}),
        ("pulsetrain config config.yaml --training.precision b", {"bf16"}),
        ("pulsetrain fork runs --training.schedule cosine_", {"cosine_with_restarts"}),
        ("pulsetrain export runs --format t", {"tensorboard", "torch_export"}),
        ("pulsetrain memory conf", {"config.yaml"}),
        ("pulsetrain memory config.yaml --mea", {"--measure"}),
        ("pulsetrain memory config.yaml --training.precision b", {"bf16"}),
        ("pulsetrain completion f", {"fish"}),
    ],
)  # fmt: skip
def test_bash_offers_completions(
    line: str, wanted: set[str], scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if line.endswith(" "):
        line += '""'
    assert offered(scripts, line, capsys) == wanted


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "training.learning_rate" in script
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)


def test_an_unknown_shell_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "powershell"]) == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_without_the_package_its_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'pulsetrain[completion]'" in capsys.readouterr().err


def test_the_script_knows_every_setting_and_its_choices():
    choices: dict[str, Iterable[str]] = {
        "training.optimizer": OPTIMIZERS,
        "training.schedule": SCHEDULES,
        "training.precision": PRECISIONS,
        "training.compile": ("true", "false"),
        "training.activation_offload": ("host",),
        "training.optimizer_offload": ("host", "disk"),
        "training.log_strategy_metrics": ("true", "false"),
        "training.progress": ("true", "false"),
        "strategy": STRATEGIES,
        "strategy.class_path": STRATEGIES,
    }
    names = [
        *(f"training.{each.name}" for each in fields(TrainingConfig)),
        *(section for section in SECTIONS if section not in ("run", "training")),
        *(f"{section}.class_path" for section in NAMED),
    ]
    assert {name: tuple(sorted(choices[name])) if name in choices else None for name in names} == SETTINGS
