"""Callbacks written for Lightning, transformers and Keras run on a Trainer, and act as they do there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain import (
    Checkpointer,
    Engine,
    Every,
    HuggingFaceCallbacks,
    KerasCallbacks,
    LightningCallbacks,
    Throughput,
    Trainer,
    TrainingConfig,
)
from pulsetrain.engine import ConfigurationError, SupervisedStrategy
from pulsetrain.testing import tiny_loader, tiny_model


def make(handler: Any, *more: Any, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"max_epochs": 2, "seed": 0, "progress": False, "log_every_n_steps": 2, **settings})
    return Trainer(
        tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
        handlers=[handler, *more],
    )  # fmt: skip


class TestKeras:
    def test_the_hooks_come_in_keras_order_with_its_numbers(self):
        calls: list[Any] = []

        class Noting:
            def on_train_begin(self, logs: Any = None) -> None:
                calls.append("train")

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                calls.append(("epoch", epoch))

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                calls.append((batch, list(logs)))

            def on_test_end(self, logs: Any = None) -> None:
                calls.append(sorted(logs))

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                calls.append(("end", epoch, sorted(logs)))

            def on_train_end(self, logs: Any = None) -> None:
                calls.append("over")

        make(KerasCallbacks([Noting()])).train()
        epochs = [
            [("epoch", e), *((b, ["loss"]) for b in range(4)), ["loss"],
             ("end", e, ["learning_rate", "loss", "val_loss"])]
            for e in range(2)
        ]  # fmt: skip
        assert calls == ["train", *epochs[0], *epochs[1], "over"]

    def test_stop_training_ends_the_run_and_the_model_is_at_hand(self):
        class Stopping:
            model: Any

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                assert self.model.optimizer.param_groups
                assert len(list(self.model.parameters())) == 4
                self.model.stop_training = True

        trainer = make(KerasCallbacks([Stopping()]))
        trainer.train()
        assert trainer.state.epoch == 1
        assert trainer.state.stop_reason == "a callback has set model.stop_training"

    @pytest.mark.parametrize("value", [object(), dict], ids=["object", "class"])
    def test_what_has_no_hook_is_refused(self, value: Any):
        with pytest.raises(TypeError, match=r"KerasCallbacks\(callbacks="):
            KerasCallbacks([value])

    def test_states_are_in_the_checkpoints(self, tmp_path: Path):
        class Counting:
            epochs = 0

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.epochs += 1

            def state_dict(self) -> dict[str, int]:
                return {"epochs": self.epochs}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.epochs = state["epochs"]

        class Stateless:
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                pass

        make(KerasCallbacks([Stateless(), Counting()]), Checkpointer(tmp_path)).train()
        counting = Counting()
        resumed = make(KerasCallbacks([Stateless(), counting]), Checkpointer(tmp_path), max_epochs=3)
        resumed.train(resume="latest")
        assert resumed.state.epoch == counting.epochs == 3


class Shift(nn.Module):
    """One number; transformers' Trainer passes labels and reads the loss, ours computes it from the output."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(3.0))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        output = self.value + inputs
        return output if labels is None else {"loss": (output - labels).square().mean(), "logits": output}


@pytest.mark.slow
class TestHuggingFace:
    def test_callbacks_follow_the_run_under_transformers_names(self):
        transformers = pytest.importorskip("transformers")
        seen: list[Any] = []

        class Watching(transformers.TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
                seen.append((state.global_step, state.epoch, sorted(metrics)))

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                seen.append(("log", "loss" in logs or "eval_loss" in logs))

        trainer = make(HuggingFaceCallbacks([Watching()]))
        trainer.train()
        assert [each for each in seen if each[0] != "log"] == [(4, 1.0, ["eval_loss"]), (8, 2.0, ["eval_loss"])]
        assert ("log", True) in seen
        assert ("log", False) not in seen

    def test_early_stopping_of_transformers_stops_where_it_does(self, tmp_path: Path):
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        args = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, disable_tqdm=True, report_to="none", optim="sgd", learning_rate=0.02,
            lr_scheduler_type="constant", max_grad_norm=0.0, num_train_epochs=20, per_device_train_batch_size=1,
            eval_strategy="epoch", save_strategy="epoch", metric_for_best_model="loss", save_only_model=True,
        )  # fmt: skip
        training, held_out = [(torch.zeros(1), torch.zeros(1))] * 4, [(torch.zeros(1), torch.ones(1))]
        named = [[dict(zip(("inputs", "labels"), row, strict=True)) for row in rows] for rows in (training, held_out)]
        stopping, other = (transformers.EarlyStoppingCallback(early_stopping_patience=2) for _ in range(2))
        theirs = transformers.Trainer(
            Shift(), args, train_dataset=named[0], eval_dataset=named[1], callbacks=[stopping]
        )
        theirs.train()

        model = Shift()
        trainer = Trainer(
            model, DataLoader(training, 1), DataLoader(held_out, 1), strategy=SupervisedStrategy("mse"),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
            config=TrainingConfig(max_epochs=20, schedule=None, seed=0, progress=False, device="cpu"),
            handlers=[handler := HuggingFaceCallbacks([other], args)],
        )  # fmt: skip
        trainer.train()
        assert trainer.state.update == theirs.state.global_step == 36
        found, expected = handler._state, theirs.state
        assert found.best_global_step == expected.best_global_step == 28, "the loss falls first, then rises"
        assert found.best_metric == pytest.approx(expected.best_metric, abs=1e-6)
        assert trainer.state.stop_reason == "EarlyStoppingCallback has set control.should_training_stop"

    def test_a_resumed_run_stops_early_where_one_that_was_not_interrupted_does(self, tmp_path: Path):
        transformers = pytest.importorskip("transformers")
        args = SimpleNamespace(
            metric_for_best_model="loss", greater_is_better=True, load_best_model_at_end=True, eval_strategy="epoch"
        )

        def run(epochs: int, resume: str | None = None) -> Trainer:
            handler = HuggingFaceCallbacks([transformers.EarlyStoppingCallback(early_stopping_patience=3)], args)
            trainer = make(handler, Checkpointer(tmp_path, Every(epochs=1)), max_epochs=epochs)
            trainer.train(resume=resume)
            return trainer

        run(2)
        assert run(10, resume="latest").state.epoch == 4

    def test_a_metric_that_no_validation_gives_is_named(self):
        pytest.importorskip("transformers")
        args = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True)
        with pytest.raises(ValueError, match=r"metric_for_best_model.*eval_accuracy.*eval_loss"):
            make(HuggingFaceCallbacks([], args)).train()

    def test_a_callback_with_an_attribute_named_state_is_saved_without_a_state(self):
        transformers = pytest.importorskip("transformers")

        class Holding(transformers.TrainerCallback):
            state = "waiting"

        assert HuggingFaceCallbacks([Holding()]).state_dict()["callbacks"] == [{}]

    def test_what_a_clock_has_measured_is_passed_to_callbacks_and_is_not_in_the_history_of_checkpoints(self):
        transformers = pytest.importorskip("transformers")
        logged: set[str] = set()

        class Watching(transformers.TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                logged.update(logs)

        histories = []
        for _ in range(2):
            handler = HuggingFaceCallbacks([Watching()])
            make(handler, Throughput(Every(iterations=2))).train()
            histories.append(handler.state_dict()["log_history"])
        assert {"samples_per_second", "throughput/step_seconds", "loss", "eval_loss"} <= logged
        assert histories[0] == histories[1]
        assert {name for entry in histories[0] for name in entry} == logged - {
            name for name in logged if "second" in name or name.startswith("throughput/")
        } | {"step", "epoch"}

    def test_control_is_obeyed(self, tmp_path: Path):
        transformers = pytest.importorskip("transformers")
        validated: list[int] = []

        class Controlling(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                control.should_evaluate = state.global_step == 1
                control.should_save = state.global_step == 2
                control.should_training_stop = state.global_step == 3
                return control

            def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                validated.append(state.global_step)

        checkpointer = Checkpointer(tmp_path, every=Every(epochs=100), at_end=False)
        trainer = make(HuggingFaceCallbacks([Controlling()]), checkpointer)
        trainer.train()
        assert validated[0] == 1
        assert trainer.state.iteration == 3
        assert [each.name.split("-")[0].lstrip("0") for each in (tmp_path / "checkpoints").glob("*-*")] == ["2"]
        assert trainer.state.stop_reason == "Controlling has set control.should_training_stop"

    def test_accumulated_batches_are_substeps(self):
        transformers = pytest.importorskip("transformers")
        calls: list[str] = []

        class Counting(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                calls.append(f"step {state.global_step}")

            def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                calls.append("substep")

        make(HuggingFaceCallbacks([Counting()]), max_epochs=1, accumulate=2).train()
        assert calls == ["substep", "step 1", "substep", "step 2"]

    def test_what_is_not_a_callback_is_refused(self):
        pytest.importorskip("transformers")
        with pytest.raises(TypeError, match="derives from transformers"):
            HuggingFaceCallbacks([object()])
        with pytest.raises(TypeError, match="needs a Trainer"):
            HuggingFaceCallbacks([]).attach(Engine(lambda engine, batch: None))


class TestLightning:
    def test_the_hooks_come_in_lightnings_order(self):
        calls: list[Any] = []

        class Noting:
            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                calls.append("fit")

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                calls.append(("epoch", trainer.current_epoch))

            def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
                calls.append((index, trainer.global_step, "loss" in outputs))

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                calls.append("val_loss" in trainer.callback_metrics)

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                calls.append(("end", trainer.current_epoch))

        make(LightningCallbacks([Noting()])).train()
        assert calls == [
            "fit",
            ("epoch", 0), (0, 1, True), (1, 2, True), (2, 3, True), (3, 4, True), True, ("end", 0),
            ("epoch", 1), (0, 5, True), (1, 6, True), (2, 7, True), (3, 8, True), True, ("end", 1),
        ]  # fmt: skip

    @pytest.mark.slow
    def test_lightnings_early_stopping_stops_and_keeps_its_state(self):
        callbacks = pytest.importorskip("lightning.pytorch.callbacks")
        stopping = callbacks.EarlyStopping(monitor="val/loss", mode="max", patience=1)
        trainer = make(handler := LightningCallbacks([stopping]), max_epochs=10)
        trainer.train()
        assert trainer.state.epoch == 2
        assert trainer.state.stop_reason == "a callback has set trainer.should_stop"
        other = LightningCallbacks([callbacks.EarlyStopping(monitor="val/loss", mode="max", patience=1)])
        other.load_state_dict(handler.state_dict())
        assert other.callbacks[0].wait_count == stopping.wait_count > 0

    @pytest.mark.slow
    def test_callbacks_of_lightnings_own_trainer_are_refused_with_the_remedy(self, tmp_path: Path):
        callbacks = pytest.importorskip("lightning.pytorch.callbacks")
        with pytest.raises(ConfigurationError, match="use Checkpointer"):
            LightningCallbacks([callbacks.ModelCheckpoint(dirpath=tmp_path)])

    def test_what_the_run_does_not_have_is_named(self):
        class Asking:
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                trainer.datamodule  # noqa: B018

        with pytest.raises(AttributeError, match="asks the trainer for 'datamodule'"):
            make(LightningCallbacks([Asking()])).train()
