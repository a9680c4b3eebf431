"""`pulsetrain memory`: what it prints, what it refuses, and that it allocates nothing of the model."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import main
from pulsetrain.cli import memory as command
from tests.support.programs_command_line import files

Streams = pytest.CaptureFixture[str]

MORE = """
    import torch
    from torch import nn

    class Deep(nn.Module):
        def __init__(self, width: int = 64, depth: int = 6):
            super().__init__()
            self.entry = nn.Linear(4, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for _ in range(depth)
            )
            self.head = nn.Linear(width, 1)

        def forward(self, x):
            x = self.entry(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Reading(Deep):
        def __init__(self):
            super().__init__()
            self.first = float(self.head.weight[0, 0])

    class Selecting(Deep):
        def forward(self, x):
            y = super().forward(x)
            return y[y > -1e9].reshape(len(x), 1)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.layer(x[:, None])[0][:, -1])

    def no_loader():
        return 3

    def no_batch():
        return iter(())

    class Broken(Deep):
        def __init__(self):
            raise KeyError("nothing works")
"""


def needs(*words: str) -> int:
    return main(["memory", "config.yaml", *words])


def answer(capsys: Streams, *words: str) -> dict[str, Any]:
    assert needs("--json", *words) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def deep(folder: Path) -> Path:
    (folder / "deep.py").write_text(textwrap.dedent(MORE))
    return folder


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """What the system is said to have left."""
    said: dict[str, int | None] = {"bytes": 10**12}
    monkeypatch.setattr(command, "available", lambda device: said["bytes"])
    return said


def test_it_prints_components_phases_and_modules_and_leaves_no_files(folder: Path, capsys: Streams) -> None:
    before = files()
    assert needs() == 0
    output = capsys.readouterr().out
    assert output.startswith("Net, 49 parameters, fp32 on cpu\na batch of (float32 (4, 4), float32 (4, 1))\n")
    lines = [line.split() for line in output.splitlines()]
    assert ["estimated", "forward", "backward", "update"] in lines
    assert ["parameters", *["196", "B"] * 3] in lines
    assert "estimated peak  " in output
    assert "it fits" in output
    assert "layers.*" in output
    assert "measured" not in output
    assert files() == before


def test_a_measurement_stands_beside_it(folder: Path, capsys: Streams) -> None:
    found = answer(capsys, "--measure", "--data.init_args.rows", "64")
    assert found["measured"]["allocated"] == pytest.approx(found["estimated"]["peak"], rel=0.1)
    assert found["measured"]["components"]["parameters"] == found["estimated"]["components"]["parameters"] == 196
    assert needs("--measure") == 0
    assert "measured peak   " in capsys.readouterr().out


def test_settings_change_the_estimate(folder: Path, capsys: Streams) -> None:
    plain = answer(capsys, "--training.optimizer_options", "{momentum: 0}")["estimated"]["components"]
    assert plain["optimizer"] == 0
    with_state = answer(capsys, "--training.optimizer", "adamw")["estimated"]["components"]
    assert with_state["optimizer"] == pytest.approx(2 * 196, abs=8 * 4)
    wide = answer(capsys, "--model.init_args.width", "16")["estimated"]["components"]
    assert wide["parameters"] == (4 * 16 + 16 + 16 + 1) * 4


def test_what_does_not_fit_comes_with_changes_and_their_effect(
    deep: Path, capsys: Streams, left: dict[str, int | None]
) -> None:
    (deep / "big.py").write_text(
        "import torch\n"
        "def loader(rows: int = 8192, batch_size: int = 2048):\n"
        "    return [(torch.ones(batch_size, 4), torch.ones(batch_size, 1))] * (rows // batch_size)\n"
    )
    words = ("--model", "deep.Deep", "--data", "big.loader", "--data.init_args.batch_size", "2048")
    peak = answer(capsys, *words)["estimated"]["peak"]
    left["bytes"] = int(0.7 * peak)
    found = answer(capsys, *words)
    assert found["fits"] is False
    changes = {next(iter(each["settings"])): each for each in found["changes"]}
    smaller = changes["training.accumulate"]
    assert (smaller["rows"], smaller["settings"], smaller["fits"]) == (1024, {"training.accumulate": 2}, True)
    assert smaller["peak"] <= left["bytes"]
    again = changes["training.activation_checkpointing"]
    assert again["settings"] == {"training.activation_checkpointing": "blocks.*"}
    assert changes["training.precision"]["peak"] < peak
    assert changes["parallel.shard"]["settings"]["parallel.shard"] == 2
    assert needs(*words) == 1
    output = capsys.readouterr().out
    assert "does not fit" in output
    assert "--training.accumulate 2 --data.init_args.batch_size 1024" in output
    assert "--training.activation_checkpointing 'blocks.*'" in output
    # each change, made by the option that is printed, has the peak that is printed
    assert answer(capsys, *words[:-1], "1024", "--training.accumulate", "2")["estimated"]["peak"] == smaller["peak"]
    with_option = answer(capsys, *words, "--training.activation_checkpointing", "blocks.*")
    assert with_option["estimated"]["peak"] == again["peak"]
    low = answer(capsys, *words, "--training.precision", "bf16")
    assert low["estimated"]["peak"] == changes["training.precision"]["peak"]


def test_what_is_not_known_to_fit_does_not_fail(folder: Path, capsys: Streams, left: dict[str, int | None]) -> None:
    left["bytes"] = None
    found = answer(capsys)
    assert found["fits"] is None
    assert found["changes"] == []
    assert needs() == 0


def test_what_does_not_fit_is_not_measured(folder: Path, capsys: Streams, left: dict[str, int | None]) -> None:
    left["bytes"] = 10
    found = answer(capsys, "--measure")
    assert found["measured"] is None
    assert "not measured, since it does not fit" in found["notes"]


def test_a_constructor_that_needs_values_is_called_with_them_and_a_note_says_so(deep: Path, capsys: Streams) -> None:
    found = answer(capsys, "--model", "deep.Reading")
    assert (
        found["estimated"]["components"]["parameters"]
        == answer(capsys, "--model", "deep.Deep")["estimated"]["components"]["parameters"]
    )
    (note,) = found["notes"]
    assert note.startswith("the model's constructor needs values, so it was made with them (")


def test_what_cannot_be_estimated_is_measured(deep: Path, capsys: Streams) -> None:
    words = ("--model", "deep.Selecting")
    assert needs(*words) == 2
    assert "Selecting cannot be estimated: aten." in capsys.readouterr().err
    found = answer(capsys, *words, "--measure")
    assert found["estimated"] is None
    assert found["measured"]["peak"] > 0
    assert found["notes"][0].startswith("not estimated: Selecting cannot be estimated: aten.")
    assert needs(*words, "--measure") == 0
    output = capsys.readouterr().out
    assert "measured peak " in output
    assert "estimated peak" not in output


def test_memory_of_unknown_size_is_noted(deep: Path, capsys: Streams) -> None:
    found = answer(capsys, "--model", "deep.Recurrent")
    assert found["estimated"]["unknown"] == ["aten.mkldnn_rnn_layer.default"]
    assert "may keep more than is known without values" in found["notes"][0]


def test_shards_are_worked_out_for_one_process(folder: Path, capsys: Streams) -> None:
    found = answer(capsys, "--parallel", "{shard: 2}")
    assert "each of 2, with shard: 2, needs about" in found["notes"][0]
    assert found["processes"] == 2


def test_the_share_of_a_process_decides_whether_it_fits(
    deep: Path, capsys: Streams, left: dict[str, int | None]
) -> None:
    words = ("--model", "deep.Deep", "--parallel", "{shard: 2}", "--training.optimizer", "adamw")
    found = answer(capsys, *words)
    share, whole = found["needed_by_each"], found["estimated"]["peak"]
    assert share < whole
    left["bytes"] = share
    assert needs(*words) == 0
    output = capsys.readouterr().out
    assert "it fits" in output
    assert "each process    " in output
    assert answer(capsys, *words, "--measure")["notes"][-1] == "not measured, since it does not fit into one process"
    left["bytes"] = share - 1
    assert needs(*words) == 1
    assert "does not fit" in capsys.readouterr().out
    changes = answer(capsys, *words)["changes"]
    assert changes[-1]["settings"]["parallel.shard"] == 4
    assert changes[-1]["peak"] < share
    assert all(each["peak"] < share for each in changes), "each is that of one of the processes"


def test_what_other_ways_to_share_a_model_out_save_is_noted(folder: Path, capsys: Streams) -> None:
    found = answer(capsys, "--parallel", "{tensor: 2}")
    assert found["notes"] == ["what parallel.tensor saves is not counted"]
    assert found["processes"] == 1


def test_offloaded_optimizer_state_is_not_counted_and_nothing_is_written(folder: Path, capsys: Streams) -> None:
    def files() -> list[Path]:
        return sorted(each for each in folder.rglob("*") if "__pycache__" not in each.parts)

    before = files()
    adamw = ("--training.optimizer", "adamw")
    phases = answer(capsys, "--training.optimizer_offload", "disk", *adamw)["estimated"]["phases"]
    with_state = answer(capsys, *adamw)["estimated"]["phases"]
    size = with_state["update"]["optimizer"]
    assert [phases[name]["optimizer"] for name in ("forward", "backward", "update")] == [0, 0, size // 32]
    assert phases["backward"]["gradients"] == with_state["backward"]["gradients"]
    on_host = answer(capsys, "--training.optimizer_offload", "host", *adamw)["estimated"]["phases"]
    assert on_host == with_state, "the host's memory is that of the CPU"
    measured = answer(capsys, "--training.optimizer_offload", "disk", *adamw, "--measure")["measured"]
    assert measured["components"]["optimizer"] < size / 4, "the steps of four parameters are not offloaded"
    assert files() == before


def test_a_compiled_model_is_estimated_as_it_is_without(folder: Path, capsys: Streams) -> None:
    found = answer(capsys, "--training.compile", "true")
    assert found["estimated"]["peak"] == answer(capsys)["estimated"]["peak"]
    assert "not compiled" in found["notes"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.optimiser", "sgd"], "did you mean 'optimizer'?"),
        (["--training.optimizer", "sdg"], "training.optimizer='sdg': unknown"),
        (["--model", "model.Nett"], "model.Nett"),
        (["--model.init_args.width", "7"], "needs an even width"),
        (["--model", "deep.Broken"], "in model: KeyError: 'nothing works'"),
        (["--data", "data.nothing"], "data: the training set has no batch"),
        (["--data", "deep.no_loader"], "data: train_loader=3: needs an iterable of batches"),
        (["--data", "deep.no_batch"], "data: the training set has no batch"),
        (["--data", "data.loaders", "--data.init_args.features", "5"], "RuntimeError: "),
        (["--training.activation_checkpointing", "blocks.*"], "no module of Net has such a name"),
        (["--backend", "jax"], "backend: JaxBackend computes with values"),
        (["--training.device", "gpu"], "no such device"),
        (["--resume", "latest"], "unrecognized arguments: --resume latest"),
    ],
)
def test_bad_input_is_reported_without_a_traceback(deep: Path, capsys: Streams, words: list[str], message: str) -> None:
    if "jax" in words:
        pytest.importorskip("jax")
    before = files()
    assert needs(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert files() == before


def test_a_missing_configuration_is_refused(folder: Path, capsys: Streams) -> None:
    assert main(["memory", "other.yaml"]) == 2
    assert "other.yaml: there is no such file" in capsys.readouterr().err


def test_an_error_of_the_model_says_how_to_see_where(deep: Path, capsys: Streams) -> None:
    assert needs("--data.init_args.features", "5") == 2
    assert "--traceback shows where in the code" in capsys.readouterr().err
    assert needs("--data.init_args.features", "5", "--traceback") == 2
    assert "Traceback" in capsys.readouterr().err


LARGE = """
    import torch

    def llama():
        import transformers

        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        ))

    def tokens():
        return [torch.randint(0, 1000, (1, 2049))]
"""


@pytest.mark.slow
def test_a_llama_of_70_billion_parameters_is_estimated_in_2_gb(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "large.py").write_text(textwrap.dedent(LARGE))
    settings = ["--model", "large.llama", "--data", "large.tokens", "--strategy", "PretrainStrategy"]
    program = (
        "import pathlib, sys\n"
        "from pulsetrain.cli import main\n"
        f"status = main(['memory', 'config.yaml', '--json', *{settings!r}, '--training.optimizer', 'adamw'])\n"
        # not ru_maxrss, which a process inherits from the one that has started it
        "peak = pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]\n"
        "print(int(peak) * 1024, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    use = json.loads(done.stdout)["estimated"]
    assert use["components"]["parameters"] == 70_553_706_496 * 4
    assert use["peak"] > 70_553_706_496 * 16
    assert int(done.stderr.split()[-1]) < 2e9


def test_help_of_the_command_needs_no_torch() -> None:
    probe = "import sys; from pulsetrain.cli import main; main(['memory', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("{shard: 0}", "parallel.shard"),
        ("{shard: two}", "parallel.shard"),
        ("{shards: 2}", "parallel"),
    ],
)
def test_a_wrong_topology_is_refused_as_it_is_for_training(
    folder: Path, capsys: Streams, parallel: str, message: str
) -> None:
    assert needs("--parallel", parallel) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["activation_offload", "optimizer_offload"])
@pytest.mark.parametrize("parallel", ["{shard: 2}", "{tensor: 2}", "{pipeline: 2}"])
def test_what_a_sharded_model_is_refused_with_is_not_estimated(
    folder: Path, capsys: Streams, setting: str, parallel: str
) -> None:
    assert needs("--parallel", parallel, f"--training.{setting}", "host") == 2
    assert f"{setting}=" in (error := capsys.readouterr().err)
    assert "is not known to work with a sharded model" in error
    assert needs("--parallel", "{replicate: 2}", f"--training.{setting}", "host") == 0
