"""Callbacks written for Lightning, transformers and Keras run on a Trainer, and act as they do there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulsetrain import (
    Checkpointer,
    Engine,
    Every,
    HuggingFaceCallbacks,
    KerasCallbacks,
    LightningCallbacks,
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
            [("epoch", e), *((b, ["loss"]) for b in range(4)), ["val_loss"],
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


@pytest.mark.slow
class TestHuggingFace:
    def test_early_stopping_of_transformers_stops_where_it_does(self):
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
