"""Each example does what its first lines say, run as a user runs it: by its path, from another folder."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pulsetrain.engine.checkpoint import CheckpointManager
from tests.support.programs_examples import EXAMPLES, lines_of_code, run

SCRIPTS = sorted(EXAMPLES.glob("*.py"))
IN_CONFIGURATIONS = {"sweep_digits.py": "pulsetrain sweep examples/sweep.yaml"}  # modules that a configuration names

LONGER = {  # models and data
    *("byte_lm/data.py", "byte_lm/model.py", "byte_lm_jax/model.py", "ported/models.py"),
    *("byte_lm_tuning/functions.py", "byte_lm_tuning/mutations.py"),
}


def test_only_models_and_data_have_80_lines_or_more() -> None:
    scripts = {path.relative_to(EXAMPLES).as_posix(): path for path in EXAMPLES.rglob("*.py")}
    assert {name for name, path in scripts.items() if len(path.read_text().splitlines()) >= 80} == LONGER


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_is_short_and_says_how_to_run_it(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 80
    assert text.startswith('"""')
    assert IN_CONFIGURATIONS.get(script.name, f"python examples/{script.name}") in text.split('"""')[1]


@pytest.mark.slow
def test_minimal_reaches_95_percent_in_20_lines_and_20_seconds(tmp_path: Path) -> None:
    """From a start from nothing, which takes its part of the seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, EXAMPLES / "minimal.py"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"validation accuracy: (\d\.\d+)", done.stdout.splitlines()[-1])
    assert found is not None, done.stdout
    assert 0.95 < float(found[1]) <= 1.0
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 20  # not wall-clock time: the machine may be busy
    assert lines_of_code(EXAMPLES / "minimal.py") == 20
    assert not list(tmp_path.iterdir()), "it should leave no files"


@pytest.mark.slow
def test_decorators_prints_what_ran_in_order(tmp_path: Path) -> None:
    assert run(tmp_path, EXAMPLES / "decorators.py").output == [
        "epoch 0, iteration 0: joined",
        "epoch 1, iteration 1: once=[1, 8]",
        "epoch 1, iteration 1: event_filter=is_power_of_two",
        "epoch 1, iteration 2: event_filter=is_power_of_two",
        "epoch 1, iteration 2: every=2, until removed",
        "epoch 1, iteration 3: every=3",
        "epoch 1, iteration 4: after=3, before=6",
        "epoch 1, iteration 4: event_filter=is_power_of_two",
        "epoch 1, iteration 4: every=2, until removed",
        "epoch 1, iteration 4: phase=COMPUTE",
        "epoch 1, iteration 4: phase=ACT",
        "epoch 1, iteration 4: phase=OBSERVE",
        "epoch 1, iteration 4: phase=PERSIST",
        "epoch 2, iteration 4: joined",
        "epoch 2, iteration 5: after=3, before=6",
        "epoch 2, iteration 6: every=3",
        "epoch 2, iteration 8: once=[1, 8]",
        "epoch 2, iteration 8: event_filter=is_power_of_two",
        "epoch 2, iteration 8: phase=COMPUTE",
        "epoch 2, iteration 8: phase=ACT",
        "epoch 2, iteration 8: phase=OBSERVE",
        "epoch 2, iteration 8: phase=PERSIST",
        "epoch 2, iteration 8: joined",
    ]


@pytest.mark.slow
def test_custom_events_ends_by_a_handlers_decision_at_every_tenth_rollout(tmp_path: Path) -> None:
    *judged, last = run(tmp_path, EXAMPLES / "custom_events.py").output
    found = [re.fullmatch(r"rollout (\d+): (\d+)% arrive", line) for line in judged]
    rollouts = [int(match[1]) for match in found if match is not None]
    shares = [int(match[2]) for match in found if match is not None]
    assert rollouts == list(range(10, 10 * len(judged) + 1, 10))
    assert rollouts[-1] < 1000, "the run's own bound came first"
    assert shares[0] < 60
    assert max(shares[:-1]) <= 95 < shares[-1]
    assert last == f"terminated: {shares[-1]}% arrive after {rollouts[-1]} rollouts"


@pytest.mark.slow
def test_two_engines_share_one_order(tmp_path: Path) -> None:
    output = run(tmp_path, EXAMPLES / "two_engines_one_bus.py").output
    received = [
        (int(seq), name, event) for line in output if "blinker" not in line for seq, name, event in [line.split()]
    ]
    epoch = [
        ("trainer", "epoch_completed"),
        ("evaluator", "started"),
        ("evaluator", "epoch_completed"),
        ("evaluator", "completed"),
    ]
    muted = [("trainer", "started"), ("trainer", "completed")]
    assert [line[1:] for line in received] == [("trainer", "started"), *epoch, *epoch, ("trainer", "completed"), *muted]

    seq = [line[0] for line in received]
    assert seq == sorted(set(seq))
    assert seq[-1] - seq[-2] == seq[1] - seq[0] + 1  # an epoch without subscribers uses its numbers all the same
    errors = [float(line.split()[-1]) for line in output if "blinker" in line]
    assert len(errors) == 2
    assert errors[1] < errors[0] < 0.1


@pytest.fixture(scope="module")
def byte_lm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder and the output of a short run of the example: 40 updates of a narrower model."""
    folder = tmp_path_factory.mktemp("byte_lm")
    settings = {
        "training.max_tokens": 40960,
        "training.warmup_steps": 5,
        "training.validate_every.updates": 20,
        "model.init_args.width": 64,
        "data.init_args.validation_batches": 1,
    }
    overrides = [word for name, value in settings.items() for word in (f"--{name}", value)]
    config = EXAMPLES / "byte_lm" / "config.yaml"
    finished = run(folder, "-m", "pulsetrain", "train", config, *overrides, "--run", folder / "run")
    assert [path.name for path in folder.iterdir()] == ["run"]
    return folder / "run", finished.output


@pytest.mark.slow
class TestByteLM:
    def test_the_model_learns(self, byte_lm: tuple[Path, list[str]]) -> None:
        with (byte_lm[0] / "metrics.csv").open(newline="") as file:
            losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
        assert len(losses) == 2
        assert losses[1] < losses[0] < 5.0  # a guess among 256 bytes costs 5.55 nats
        assert losses[1] < 3.2

    def test_the_output_names_the_results_and_the_folder(self, byte_lm: tuple[Path, list[str]]) -> None:
        folder, output = byte_lm
        text = "\n".join(output)
        loss = re.search(r"^val/loss +(\d\.\d+) nats/byte$", text, re.MULTILINE)
        bits = re.search(r"^val/bits_per_byte +(\d\.\d+)$", text, re.MULTILINE)
        assert loss is not None
        assert bits is not None
        assert float(bits[1]) == pytest.approx(float(loss[1]) / 0.693147, abs=1e-3)
        assert "max_tokens=40960 was reached" in text
        assert ["run", "folder", str(folder)] in [line.split(maxsplit=2) for line in output]
        assert output[-1].split()[0] == "verify"

    def test_the_losses_are_drawn(self, byte_lm: tuple[Path, list[str]]) -> None:
        assert (byte_lm[0] / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    def test_a_valid_checkpoint_of_the_last_update_is_kept(self, byte_lm: tuple[Path, list[str]]) -> None:
        manager = CheckpointManager(byte_lm[0] / "checkpoints")
        latest = manager.get_latest()
        assert latest is not None
        assert latest == manager.get_best()
        assert manager.load(latest)["model"]["embedding.weight"].shape == (256, 64)

    def test_the_run_is_described(self, byte_lm: tuple[Path, list[str]]) -> None:
        folder = byte_lm[0]
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["training"]["max_tokens"] == 40960
        assert config["model"]["init_args"]["width"] == 64
        assert json.loads((folder / "run.json").read_text())["seed"] == config["training"]["seed"]

    def test_a_sample_is_written(self, byte_lm: tuple[Path, list[str]]) -> None:
        (sample,) = (byte_lm[0] / "samples").iterdir()
        text = sample.read_text(encoding="utf-8")
        assert text.startswith("def ")
        assert len(text) > 100
        assert "    def " in byte_lm[1][byte_lm[1].index("sample") + 1]


@pytest.mark.slow
def test_guards_lose_nothing_where_the_unguarded_run_is_lost(tmp_path: Path) -> None:
    output = run(tmp_path, EXAMPLES / "guards.py").output
    reported = [line.split(":")[0].strip() for line in output if " at iteration " in line and line.startswith("  ")]
    errors = [line.rpartition(" ")[2] for line in output if "mean squared error" in line]
    assert errors[0] == "nan"
    assert float(errors[1]) < 1.0  # the targets' variance
    assert any(line.startswith("nan_gradient") for line in reported)
    assert any(line.startswith("loss_spike") for line in reported)
    rows = "".join(line.partition("rows ")[2] for line in output if line.startswith("  nan_gradient"))
    assert "100" in re.findall(r"\d+", rows)
    assert "went back 2 time(s)" in output[-1]
