"""Models of transformers are read from their files, by each process what it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    CheckpointError,
    ConfigurationError,
    DPOStrategy,
    PulsetrainError,
    TorchBackend,
    pretrained,
)
from pulsetrain.engine.checkpoint import safetensors_file
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.distributed.shards import local
from pulsetrain.handlers import Checkpointer
from tests.support.pretrained import backend_of, saved, tensors, trainer_of
from tests.support.ranks import in_processes

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
FAMILIES = ["llama", "tied", "gpt2", "renamed", "scaled"]
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:]]


def preferences() -> dict[str, Any]:
    rows = torch.arange(16).reshape(2, 8)
    return {
        f"{side}_{name}": rows + at
        for at, side in enumerate(("chosen", "rejected"))
        for name in ("input_ids", "labels")
    }


def run(layout: str, body: Callable[[], Any]) -> list[Any]:
    """What each process returns."""
    if layout == "one":
        return [body()]
    found = in_processes(lambda rank: body(), 4 if " of " in layout else 2)
    for each in found:
        assert each.error == "", each.error
    return [each.value for each in found]


def compared(model: Any, expected: Any) -> int:
    """How many tensors have the bits of another model's: of shards, the part that this process has."""
    mine, theirs = tensors(model), tensors(expected)
    assert mine.keys() == theirs.keys()
    for name, whole in theirs.items():
        here, there = local(mine[name]), local(sharded_like(whole.detach(), mine[name]))
        assert (here.dtype, here.device) == (whole.dtype, torch.device("cpu")), name
        assert torch.equal(here, there), name
    assert len({id(each) for each in mine.values()}) == len({id(each) for each in theirs.values()}), "tied as there"
    return len(mine)


@pytest.mark.parametrize("family", ["llama", *SLOW])
@pytest.mark.parametrize("layout", ["one", pytest.param("copies", marks=pytest.mark.slow), "shards", "tensor"])
def test_weights_have_the_bits_that_from_pretrained_gives_them(layout: str, family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    def body() -> tuple[int, bool]:
        made = trainer_of(tmp_path, layout)
        count = compared(made.model, expected)
        return count, all(map(torch.isfinite, map(torch.tensor, made.train()["train/loss"])))

    assert set(run(layout, body)) == {(len(tensors(expected)), True)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "tied"])
@pytest.mark.parametrize("layout", ["shards of tensor", "copies of shards"])
def test_four_processes(layout: str, family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    def body() -> tuple[int, list[float]]:
        made = trainer_of(tmp_path, layout)
        return compared(made.model, expected), made.train()["train/loss"]

    first, *others = run(layout, body)
    assert others == [first] * 3
    assert first[0] == len(tensors(expected))


@pytest.mark.parametrize(("layout", "share"), [("one", 1.0), ("shards", 0.5), ("tensor", 0.51)])
def test_a_process_reads_what_it_holds(
    layout: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama", tmp_path)
    read: list[int] = []
    filled = safetensors_file._filled

    def counting(file: Any, buffer: Any) -> Any:
        read.append(len(buffer))
        return filled(file, buffer)

    monkeypatch.setattr(safetensors_file, "_filled", counting)

    def body() -> tuple[int, int]:
        model = pretrained(tmp_path)
        read.clear()  # headers
        made = trainer_of(tmp_path, layout, model=model)
        return sum(read), sum(local(each).nbytes for each in made.model.parameters())

    whole = sum(each.nbytes for each in pretrained(tmp_path).parameters())
    for found, held in run(layout, body):
        assert found == held
        assert found <= share * whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "shards", "tensor"])
def test_they_learn_as_a_model_that_was_read_whole(layout: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def losses(model: Any) -> Any:
        return trainer_of(tmp_path, layout, model=model).train()["train/loss"]

    def body() -> Any:
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return losses(pretrained(tmp_path)), losses(whole)

    for found, expected in run(layout, body):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "shards"])
def test_a_reference_is_a_copy_of_what_was_read(layout: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def body() -> int:
        made = Trainer(
            pretrained(tmp_path), [preferences()] * 2, strategy=DPOStrategy(), backend=backend_of(layout),
            config=TrainingConfig(max_epochs=1, learning_rate=0.1, optimizer="sgd", seed=0),
        )  # fmt: skip
        made.train()
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return compared(made.strategy._reference._model, whole)

    assert len(set(run(layout, body))) == 1


def test_the_type_of_the_weights_is_that_of_the_folder_or_the_one_that_is_chosen(tmp_path: Path) -> None:
    saved("llama", tmp_path, torch.bfloat16)
    for dtype in (None, "float32"):
        options = {} if dtype is None else {"dtype": torch.float32}
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        found = TorchBackend("cpu").module_to_device(pretrained(tmp_path, dtype=dtype))
        compared(found, expected)
        assert found.config.dtype == expected.config.dtype
        assert next(found.parameters()).dtype == (torch.bfloat16 if dtype is None else torch.float32)


def renormed(folder: Path) -> Path:
    """A folder in float32 with a model whose norms have weights that half precision would round."""
    saved("scaled", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, each in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(each, std=0.1)
    model.save_pretrained(folder, max_shard_size="6KB")
    return folder


@pytest.mark.parametrize("layout", ["one", "shards", pytest.param("tensor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kept", "dtype"), [("_keep_in_fp32_modules_strict", "bfloat16"), ("_keep_in_fp32_modules", "float16")]
)
def test_what_transformers_keeps_in_float32_is_in_float32(
    kept: str, dtype: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, kept, ["layernorm", "model.norm"])
    expected = transformers.AutoModelForCausalLM.from_pretrained(renormed(tmp_path), dtype=getattr(torch, dtype))
    assert {each.dtype for each in expected.parameters()} == {torch.float32, getattr(torch, dtype)}

    def body() -> tuple[int, bool]:
        made = trainer_of(tmp_path, layout, model=pretrained(tmp_path, dtype=dtype), learning_rate=1e-3)
        count = compared(made.model, expected)
        return count, all(map(torch.isfinite, map(torch.tensor, made.train()["train/loss"])))

    assert set(run(layout, body)) == {(len(tensors(expected)), True)}


def test_without_a_type_in_the_configuration_it_is_that_of_the_files(tmp_path: Path) -> None:
    saved("llama", tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {each.dtype for each in expected.parameters()} == {torch.bfloat16}
    found = TorchBackend("cpu").module_to_device(pretrained(tmp_path))
    assert compared(found, expected) == len(tensors(expected))
    assert found.config.dtype == expected.config.dtype


@pytest.mark.slow
def test_shards_may_stay_in_the_memory_of_the_host(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    def body() -> tuple[int, list[float]]:
        made = trainer_of(tmp_path, "offloaded")
        return compared(made.model, expected), made.train()["train/loss"]

    one, other = run("offloaded", body)
    assert one == other
    assert one[0] == len(tensors(expected))


def test_a_device_that_the_caller_has_chosen_changes_nothing(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with torch.device("meta"):  # as an estimate of its memory makes it
        model = pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert compared(TorchBackend("cpu").module_to_device(model), expected) == len(tensors(expected))


def test_an_optimizer_over_its_parameters_updates_them(tmp_path: Path) -> None:
    model = pretrained(saved("llama", tmp_path))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.arange(16).reshape(2, 8)
    made = Trainer(model, [{"input_ids": rows}], strategy="pretrain", optimizer=optimizer)
    before = [each.detach().clone() for each in made.model.parameters()]
    made.train_epoch()
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


# -------------------------------------------------------------------------------------------------------- adapters

ADAPTERS = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["one", "copies", "shards"])
def test_adapters_learn_over_weights_that_are_read(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    saved("llama", tmp_path, dtype)
    expected = tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))

    def body() -> Any:
        torch.manual_seed(5)
        made = trainer_of(tmp_path, layout, model=pretrained(tmp_path, adapters=ADAPTERS))
        before = {name: local(each).detach().clone() for name, each in tensors(made.model).items()}
        made.train()
        changed = {name for name, each in tensors(made.model).items() if not torch.equal(local(each), before[name])}
        for name, each in tensors(made.model).items():
            if "lora_" not in name:
                whole = expected[name.removeprefix("base_model.model.").replace(".base_layer.", ".")]
                assert torch.equal(local(each), local(sharded_like(whole.detach(), each))), name
        return changed, before

    found = run(layout, body)
    names = {name for name, _ in found[0][1].items() if "lora_" in name}
    assert len(names) == 2 * 2 * 2  # A and B of two layers in two blocks
    for changed, before in found:
        assert changed == names
        assert all(bool(before[name].any()) == ("lora_A" in name) for name in names)


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": False}, {"use_dora": True}])
def test_adapters_without_first_values_of_their_own_are_refused(options: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    saved("llama", tmp_path)
    with pytest.raises(ConfigurationError, match="init_lora_weights"):
        pretrained(tmp_path, adapters={**ADAPTERS, **options})


# ------------------------------------------------------------------------------------------------------- bad input


def test_what_the_files_lack_or_have_too_much_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"num_hidden_layers": 3}, "missing: model.layers.2.self_attn.q_proj.weight (16, 16)"),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1.self_attn.q_proj.weight (16, 16)"),
        ({"intermediate_size": 32}, "model.layers.0.mlp.gate_proj.weight is (24, 16) in the checkpoint, (32, 16)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError) as error:
            pretrained(tmp_path)
        assert words in str(error.value)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json and safetensors files.*nothing is downloaded"):
        pretrained("meta-llama/Llama-3.1-8B")
    file = sorted(saved("llama", tmp_path).glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match=rf"{file.name}: has {len(content) - 8} bytes, .* need {len(content)}"):
        pretrained(tmp_path)
    file.write_bytes(b"no such file")
    with pytest.raises(CheckpointError, match=rf"{file.name}: cannot be read as safetensors"):
        pretrained(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"there is no {file.name}"):
        pretrained(tmp_path)


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "huggingface.md").read_text(), re.DOTALL)
    saved("llama", tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    rows = [{"input_ids": torch.arange(16).reshape(2, 8)}] * 200

    def body() -> int:
        found: dict[str, Any] = {"loader": rows}
        exec(code, found)
        return int(found["trainer"].state.iteration)

    assert run("shards", body) == [100, 100]


def test_arguments_are_checked(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    for arguments, words in (
        ({"dtype": "bfloat17"}, "dtype='bfloat17'"),
        ({"model_class": "AutoModelForPoetry"}, "model_class='AutoModelForPoetry'"),
    ):
        with pytest.raises(ConfigurationError) as error:
            pretrained(tmp_path, **arguments)
        assert words in str(error.value)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigurationError, match="quantised"):
        pretrained(tmp_path)


def test_parameters_without_values_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match=r"0\.bias, 0\.weight have no values"):
        Trainer(model, [(torch.ones(1, 2), torch.ones(1, 1))], strategy="supervised")


def test_a_buffer_that_transformers_does_not_compute_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ConfigurationError, match=r"model\.rotary_emb\.inv_freq"):
        pretrained(saved("llama", tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_in_shards_do_not_resume_over_another_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    saved("llama", tmp_path / "base")
    saved("llama", tmp_path / "other", seed=1)

    def start(base: str, layout: str, epochs: int) -> Trainer:
        torch.manual_seed(5)
        model = pretrained(tmp_path / base, adapters=ADAPTERS)
        return trainer_of(tmp_path, layout, Checkpointer(tmp_path / "run"), model=model, max_epochs=epochs)

    run("shards", lambda: start("base", "shards", 1).train()["train/loss"])

    def resumed(base: str, layout: str) -> str:
        try:
            start(base, layout, 2).train(resume="latest")
        except PulsetrainError as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    main, other = run("shards", lambda: resumed("other", "shards"))
    assert main.startswith(f"CheckpointError: {tmp_path}")
    assert ": the frozen weights of the model are not those that the checkpoint's adapters" in main
    assert other != "trained"
    assert run("shards", lambda: resumed("base", "shards")) == ["trained", "trained"]
    assert resumed("base", "one") == "trained"
