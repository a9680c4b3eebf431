"""TrainingArguments become a TrainingConfig that gives transformers' losses, or are refused or listed by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn

from pulsetrain import Every, PretrainStrategy, Trainer, TrainingConfig, from_huggingface, handlers
from pulsetrain.adapters.hugging_face_fields import ELSEWHERE, OF_THE_RUN, REFUSED
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed")

BATCHES, ROWS, LENGTH, VOCABULARY = 8, 4, 12, 32
QUIET = {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "use_cpu": True}
CASES: dict[str, dict[str, Any]] = {
    "as they come": {"learning_rate": 1e-2, "num_train_epochs": 2},
    "cosine, warm-up, decay, clipping, accumulation": {
        "learning_rate": 2e-2, "num_train_epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "weight_decay": 0.3, "max_grad_norm": 0.5, "gradient_accumulation_steps": 4, "adam_beta2": 0.95,
    },
    "a fraction of an epoch, a warm-up as a share": {
        "learning_rate": 1e-2, "num_train_epochs": 2.5, "lr_scheduler_type": "polynomial", "warmup_steps": 0.2,
        "lr_scheduler_kwargs": {"power": 2.0},
    },
    "sgd, lowest rate": {
        "learning_rate": 0.3, "max_steps": 11, "optim": "sgd", "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.2}, "weight_decay": 0.01,
    },
    "inverse square root": {
        "learning_rate": 1e-2, "max_steps": 12, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 4,
        "max_grad_norm": 0.0, "optim": "adamw_torch",
    },
    "constant after a warm-up": {
        "learning_rate": 1e-2, "max_steps": 9, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5,
    },
}  # fmt: skip


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(BATCHES)]
    # The first label is never predicted, but for GPT-2 transformers 5.23 counts it among those that the loss is a mean
    # over, unless it is ignored.
    return [{"input_ids": each, "labels": each.index_fill(1, torch.tensor([0]), -100)} for each in tokens]


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def noted(network: nn.Module) -> list[float]:
    """The loss of each forward pass over the next batch, appended as they are made."""
    losses: list[float] = []
    batches = data()

    def note(module: nn.Module, inputs: object, outputs: Any) -> None:
        tokens = batches[len(losses) % BATCHES]["input_ids"]
        logits = outputs.logits[:, : LENGTH - 1].detach()
        losses.append(float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())))

    network.register_forward_hook(note)
    return losses


def theirs(arguments: Any) -> tuple[list[float], nn.Module]:
    network = model()
    losses = noted(network)

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return data_loader()

    Trainer(network, arguments, train_dataset=data()).train()
    return losses, network


def data_loader() -> Any:
    return torch.utils.data.DataLoader(data(), batch_size=None)


def ours(arguments: Any) -> tuple[list[float], nn.Module]:
    network = model()
    losses = noted(network)
    config = from_huggingface(arguments, network, batches_per_epoch=BATCHES)
    loader = [{"input_ids": each["input_ids"]} for each in data()]
    Trainer(network, loader, strategy=PretrainStrategy(), config=config).train()
    return losses, network


@pytest.mark.parametrize("fields", CASES.values(), ids=[*CASES])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_the_losses_are_those_of_transformers_trainer(fields: dict[str, Any], tmp_path: Path):
    arguments = transformers.TrainingArguments(str(tmp_path), **QUIET, **fields)
    (expected, other), (found, network) = theirs(arguments), ours(arguments)
    assert len(found) == len(expected) >= 9
    assert found == pytest.approx(expected, abs=1e-6)
    for name, value in network.state_dict().items():
        if name.endswith("c_attn.bias"):  # the loss does not depend on the keys' biases: Adam follows rounding errors
            continue
        torch.testing.assert_close(value, other.state_dict()[name], atol=2e-6, rtol=1e-5)
    assert max(found) - min(found) > 0.05, "the weights learn: a comparison of constant losses would show nothing"


def convert(**fields: Any) -> TrainingConfig:
    more = {name: fields.pop(name) for name in ("model", "batches_per_epoch") if name in fields}
    return from_huggingface(transformers.TrainingArguments("out", **{"save_strategy": "no", **fields}), **more)


def test_the_settings_have_their_values():
    config = convert(
        max_steps=7, eval_strategy="steps", eval_steps=3, logging_steps=5, gradient_accumulation_steps=2, seed=9,
        use_cpu=True, disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    assert (config.max_updates, config.max_epochs, config.seed, config.device) == (7, None, 9, "cpu")
    assert config.validate_every == Every(updates=3)
    assert (config.log_every_n_steps, config.accumulate, config.progress, config.clip_grad_norm) == (10, 2, False, None)
    saving = convert(save_strategy="epoch", eval_strategy="epoch")
    assert (saving.run_dir, saving.save_every_n_epochs, saving.validate_every) == ("out", 1, Every(epochs=1))
    assert convert(num_train_epochs=2, warmup_steps=0.1, batches_per_epoch=25).warmup_steps == 5
    assert convert().validate_every is None
    assert (convert(torch_compile=True).compile, convert().compile) == (True, False)
    assert convert(bf16=True, use_cpu=True).precision == "bf16"


def test_every_field_of_transformers_is_known():
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    places = [OF_THE_RUN, REFUSED.keys(), ELSEWHERE.keys()]
    assert names - {"save_strategy"} == set().union(*places) - {"save_strategy"}
    assert sum(map(len, places)) == len(set().union(*places)), "a field has one place"


def test_the_remedies_name_handlers_that_exist():
    named = set(re.findall(r"\b([A-Z]\w+)\(", " ".join([*REFUSED.values(), *ELSEWHERE.values()])))
    others = {"Trainer", "TrainingConfig", "TorchBackend", "Topology", "DataLoader", "ITERATION_COMPLETED"}
    assert len(named - others) >= 6
    assert named - others <= set(handlers.__all__)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1\): leave it out, and use a loss"),
        ({"torch_compile_mode": "max-autotune"}, r"torch_compile_mode='max-autotune'\): leave it out, and call model"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0\): adds noise"),
        (
            {"optim": "adafactor"},
            r"optim='adafactor'\): has no counterpart by name \(adamw_torch, .*Trainer\(optimizer=",
        ),
        ({"optim_args": "momentum=0.9"}, r"optim_args=.*Trainer\(optimizer="),
        ({"activation_checkpointing": True}, r"activation_checkpointing=True\): .*activation_checkpointing="),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, r"ReduceLROnPlateau\(metric\)"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, r"'num_cycles' has no counterpart"),
        ({"num_train_epochs": 1.5}, r"num_train_epochs=1.5\): is a fraction; pass batches_per_epoch"),
        ({"warmup_steps": 0.1}, r"warmup_steps=0.1\): is a share of the run; pass batches_per_epoch"),
        ({"weight_decay": 0.1}, r"weight_decay=0.1\): .* pass model"),
        (
            {"gradient_accumulation_steps": 3, "batches_per_epoch": 8},
            r"gradient_accumulation_steps=3\): does not divide",
        ),
        ({"logging_steps": 0.1, "max_steps": 10}, r"logging_steps=0.1\): is a share"),
        ({"batches_per_epoch": 0}, r"batches_per_epoch=0\): needs to be a whole number"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        convert(**fields)


def test_other_objects_and_other_librarys_arguments_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"arguments=TrainingConfig\): needs a transformers"):
        from_huggingface(TrainingConfig())
    kind = type("SFTConfig", (transformers.TrainingArguments,), {"__module__": "trl.trainer"})
    with pytest.raises(ConfigurationError, match="a trainer of another library"):
        from_huggingface(kind("out"))


def test_fields_of_other_parts_are_listed():
    with structlog.testing.capture_logs() as logs:
        convert(per_device_train_batch_size=4, save_total_limit=2, save_strategy="steps", save_steps=20)
        convert()
    [entry] = logs
    assert entry["fields"] == [
        "per_device_train_batch_size=4: the batch size of the DataLoader",
        "save_total_limit=2: add the handler Checkpointer(folder, keep_last=...)",
        "save_strategy='steps': add the handler Checkpointer('out', every=Every(updates=20))",
    ]
