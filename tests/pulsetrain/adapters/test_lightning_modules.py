"""A LightningModule trains on our Trainer as on Lightning's: the same losses, rates and weights, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from pulsetrain import Checkpointer, EarlyStopping, Events, Every, Trainer, TrainingConfig, from_lightning  # noqa: E402
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError  # noqa: E402
from tests.support.lightning_modules import BATCHES, Adversarial, Classifier, loader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
EPOCHS = 4


def theirs(module: Any, folder: Path, val: bool = True, missing: int = 0, **options: Any) -> Any:
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, loader(missing=missing), loader(2, 3) if val else None)
    return trainer


def ours(module: Any, val: bool = True, handlers: Any = (), missing: int = 0, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"max_epochs": EPOCHS, "device": "cpu", "progress": False, "seed": 0, **settings})
    data = loader(missing=missing), loader(2, 3) if val else None
    trainer = from_lightning(module, *data, config=config, handlers=handlers)
    trainer.train()
    return trainer


def assert_same(found: Any, expected: Any) -> None:
    assert found.losses == expected.losses
    assert found.rates == expected.rates
    assert len(found.losses) >= EPOCHS * BATCHES
    assert len(set(found.losses)) > EPOCHS
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize(
    "form", ["optimizer", "lists", "by step", "every two epochs", "plateau", "plateau in training"]
)
def test_a_classifier_trains_as_in_lightning_whatever_configure_optimizers_returns(form: str, tmp_path: Path):
    expected, found = Classifier(form), Classifier(form)
    other = theirs(expected, tmp_path)
    trainer = ours(found)
    assert_same(found, expected)
    assert form == "optimizer" or len(set(found.rates)) > 1, "the schedule changes the rate"
    for name in ("val_loss", "val_acc", "train_loss"):
        ours_now = trainer.state.metrics[name.replace("val_", "val/")]
        assert float(ours_now) == pytest.approx(float(other.callback_metrics[name]), abs=1e-6)
    assert trainer.state.update == other.global_step == EPOCHS * BATCHES


@pytest.mark.parametrize("missing", [0, 5])
def test_accumulated_gradients_make_the_updates_of_lightning(missing: int, tmp_path: Path):
    expected, found = Classifier("by step"), Classifier("by step")
    other = theirs(expected, tmp_path, missing=missing, accumulate_grad_batches=3)
    trainer = ours(found, missing=missing, accumulate=3)
    logged = float(other.callback_metrics["train_loss"])  # a mean over samples: the last batch may be smaller
    assert float(trainer.state.metrics["train_loss"]) == pytest.approx(logged, abs=1e-6)
    assert trainer.state.update == EPOCHS * BATCHES // 3
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert found.rates == pytest.approx(expected.rates, abs=1e-12)


def test_clipped_gradients_make_the_updates_of_lightning(tmp_path: Path):
    expected, found = Classifier("lists"), Classifier("lists")
    theirs(expected, tmp_path, gradient_clip_val=0.3)
    ours(found, clip_grad_norm=0.3)
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    free = Classifier("lists")
    ours(free)
    assert free.losses != found.losses, "the bound has an effect"


def test_several_optimizers_by_hand_train_as_in_lightning(tmp_path: Path):
    expected, found = Adversarial(), Adversarial()
    other = theirs(expected, tmp_path, val=False)
    trainer = ours(found, val=False, log_every_n_steps=2)
    assert_same(found, expected)
    assert found.steps == expected.steps
    assert trainer.state.update == other.global_step == 2 * EPOCHS * BATCHES
    assert len(trainer.history["g_loss"]) == len(trainer.history["train/loss"]) == EPOCHS


@pytest.mark.parametrize(("kind", "options"), [(Classifier, {"form": "plateau"}), (Adversarial, {})])
def test_a_run_that_was_stopped_continues_exactly(kind: Any, options: dict[str, Any], tmp_path: Path):
    whole, first, rest = kind(**options), kind(**options), kind(**options)
    val = kind is Classifier
    ours(whole, val)
    ours(first, val, [Checkpointer(tmp_path, every=Every(epochs=1))], max_epochs=2)
    config = TrainingConfig(max_epochs=EPOCHS, device="cpu", progress=False, seed=0)
    resumed = from_lightning(
        rest, loader(), loader(2, 3) if val else None, config=config,
        handlers=[Checkpointer(tmp_path, every=Every(epochs=1))],
    )  # fmt: skip
    resumed.train(resume="latest")
    assert first.losses + rest.losses == whole.losses
    assert (first.rates + rest.rates) == whole.rates
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_logged_metric_stops_the_run_early():
    module = Classifier()
    trainer = ours(module, handlers=[EarlyStopping("val/acc", patience=1, mode="max", min_delta=2.0)])
    assert trainer.state.epoch == 2
    assert "val/acc" in (trainer.state.stop_reason or "")


def test_the_hooks_are_called_in_lightnings_order(tmp_path: Path):
    names = (
        "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step",
        "on_train_batch_end", "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end",
        "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
    )  # fmt: skip

    def hook(name: str) -> Any:
        def note(self: Any, *arguments: Any) -> None:
            self.called.append((name, self.current_epoch, self.global_step))

        return note

    kind = type("Noting", (Classifier,), {name: hook(name) for name in names})
    called = []
    for train in (lambda module: theirs(module, tmp_path), ours):
        module = kind()
        module.called = []
        train(module)
        called.append(module.called)
    expected, found = called
    # Lightning ends the epoch's count before on_train_end
    assert [each for each in found if each[0] not in ("on_train_end", "on_fit_end")] == [
        each for each in expected if each[0] not in ("on_train_end", "on_fit_end")
    ]
    assert [each[0] for each in found] == [each[0] for each in expected]


class Metrics(Classifier):
    """Logs a torchmetrics metric, and a value of a hook."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        self.accuracy(outputs, batch[1])
        self.log("val_acc", self.accuracy, on_epoch=True)
        return nn.functional.cross_entropy(outputs, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_twice", 2 * self.accuracy.compute())


def test_metrics_of_torchmetrics_and_values_of_hooks_are_logged(tmp_path: Path):
    expected = theirs(Metrics(), tmp_path).callback_metrics
    found = ours(Metrics())
    assert found.state.metrics["val/acc"] == pytest.approx(float(expected["val_acc"]), abs=1e-6)
    assert found.state.metrics["val/twice"] == pytest.approx(2 * float(expected["val_acc"]), abs=1e-6)
    assert found.history["val/loss"][-1] > 0


class ByStep(Classifier):
    """Logs metrics of torchmetrics by step, by step and epoch, and one that is only updated."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.of_step, self.of_both, self.updated = (MulticlassAccuracy(3, average="micro") for _ in range(3))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.seen.append(int(self.of_step._update_count))
        self.of_step(outputs, batch[1])
        self.log("acc", self.of_step)
        self.of_both(outputs, batch[1])
        self.log("both", self.of_both, on_step=True, on_epoch=True)
        self.updated.update(outputs, batch[1])
        self.log("updated", self.updated, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_metrics_of_torchmetrics_by_step_have_the_values_and_names_of_lightning(tmp_path: Path):
    names = ("acc", "both_step", "both_epoch", "updated_step", "updated_epoch")
    expected: list[dict[str, float]] = []
    found: list[dict[str, float]] = []

    class Collect(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            expected.append({name: float(value) for name, value in trainer.callback_metrics.items() if name in names})

    other, own = ByStep(), ByStep()
    lightning_trainer = theirs(other, tmp_path, callbacks=[Collect()])
    config = TrainingConfig(max_epochs=EPOCHS, device="cpu", progress=False, seed=0)
    trainer = from_lightning(own, loader(), loader(2, 3), config=config)

    @trainer.on(Events.ITERATION_COMPLETED)
    def collect(engine: Any) -> None:
        found.append({name: float(value) for name, value in engine.state.metrics.items() if name in names})

    trainer.train()
    by_step = [{name: each[name] for name in ("acc", "both_step")} for each in expected]
    assert [{name: each[name] for name in ("acc", "both_step")} for each in found] == by_step
    assert len({each["acc"] for each in found}) > 2
    assert own.seen == other.seen  # the metric starts again in each epoch
    for name in ("both_epoch", "updated_epoch"):
        assert float(trainer.state.metrics[name]) == pytest.approx(float(lightning_trainer.callback_metrics[name]))
    assert "updated_step" not in trainer.state.metrics
    assert "updated_step" not in lightning_trainer.callback_metrics


def test_a_copy_of_the_module_makes_its_own_steps():
    module = Classifier()
    trainer = ours(module, max_epochs=1)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.layers[0].weight.zero_()
    inputs = torch.ones(2, 5)
    assert not torch.equal(copied(inputs), module(inputs))
    assert torch.equal(trainer.predict([inputs]), module(inputs))


class TestRefused:
    def test_what_lightning_would_call_is_named(self):
        class Own(Classifier):
            def optimizer_step(self, *arguments: Any, **options: Any) -> None: ...

        with pytest.raises(
            ConfigurationError, match=r"module=Own\): has optimizer_step, .*automatic_optimization = Fa"
        ):
            from_lightning(Own(), loader())

    def test_several_optimizers_without_manual_optimization(self):
        class Two(Classifier):
            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD([each], lr=0.1) for each in self.parameters()]

        with pytest.raises(ConfigurationError, match=r"optimizers=4 optimizers; .*automatic_optimization = False"):
            from_lightning(Two(), loader())

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (None, "returned=NoneType"),
            ({"optimizer": "SGD"}, "returned=dict"),
            ("plateau", "follows a metric; name it"),
            ("interval", r"interval='batch'\): choose 'step' or 'epoch'"),
            ("key", "has the key 'freq'"),
        ],
    )
    def test_what_configure_optimizers_may_not_return(self, returned: Any, message: str):
        class Wrong(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                schedulers = torch.optim.lr_scheduler
                step, plateau = schedulers.StepLR(optimizer, 1), schedulers.ReduceLROnPlateau(optimizer)
                known = {
                    "plateau": {"optimizer": optimizer, "lr_scheduler": plateau},
                    "interval": {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "interval": "batch"}},
                    "key": {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "freq": 1}},
                }
                return known.get(returned, returned) if isinstance(returned, str) else returned

        with pytest.raises((ArgumentTypeError, ConfigurationError), match=message):
            from_lightning(Wrong(), loader())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"learning_rate": 0.1}, r"learning_rate=0.1\): is decided by the module"),
            ({"schedule": "cosine"}, r"schedule='cosine'\): is decided by the module.*return a scheduler"),
            ({"compile": True}, r"compile=True\)"),
            ({"accumulate": 4}, r"accumulate=4\): does not divide the 6 batches"),
        ],
    )
    def test_settings_that_the_module_decides(self, settings: Any, message: str):
        with pytest.raises(ConfigurationError, match=message):
            from_lightning(Classifier(), loader(), config=TrainingConfig(**settings))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"accumulate": 2}, r"accumulate=2\): has no effect on a module that makes its steps itself"),
            ({"clip_grad_norm": 1.0}, r"clip_grad_norm=1.0\): has no effect in a Loop, whose body does that"),
            ({"precision": "bf16"}, r"precision='bf16'\): has no effect in a Loop"),
        ],
    )
    def test_settings_of_steps_that_the_module_makes(self, settings: Any, message: str):
        with pytest.raises(ConfigurationError, match=message):
            from_lightning(Adversarial(), loader(), config=TrainingConfig(**settings))

    def test_other_objects(self):
        with pytest.raises(ArgumentTypeError, match=r"module=Linear\): needs an object of a class that derives"):
            from_lightning(nn.Linear(1, 1), loader())
        with pytest.raises(ConfigurationError, match=r"from_lightning\(strategy\): is decided by the module"):
            from_lightning(Classifier(), loader(), strategy="supervised")
        with pytest.raises(ConfigurationError, match="takes one validation set"):
            from_lightning(Classifier(), loader(), {"a": loader()})  # type: ignore[arg-type]

    def test_a_step_by_hand_outside_of_manual_optimization(self):
        class Both(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.manual_backward(super().training_step(batch, batch_idx))

        with pytest.raises(ConfigurationError, match=r"Both: manual_backward: set self.automatic_optimization = False"):
            ours(Both())

    def test_a_step_that_returns_no_loss(self):
        class Nothing(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return None

        with pytest.raises(ArgumentTypeError, match=r"training_step.*needs to return the loss"):
            ours(Nothing())

    def test_what_a_module_asks_of_its_trainer_is_named(self):
        class Asking(Classifier):
            def on_train_start(self) -> None:
                self.trainer.datamodule  # noqa: B018

        with pytest.raises(AttributeError, match="asks the trainer for 'datamodule'"):
            ours(Asking())

    def test_a_metric_that_a_scheduler_follows_and_nobody_logs(self):
        module = Classifier("plateau")
        with pytest.raises(ConfigurationError, match="follows 'val_loss', which nothing has logged"):
            ours(module, val=False)


def test_a_step_may_name_its_arguments_as_it_likes():
    class Named(Classifier):
        def training_step(self, samples: Any, number: int) -> Any:
            numbers.append(number)
            return super().training_step(samples, number)

    class Any_(Classifier):
        def training_step(self, *arguments: Any) -> Any:
            numbers.append(arguments[1])
            return super().training_step(*arguments)

    for kind in (Named, Any_):
        numbers: list[int] = []
        ours(kind(), max_epochs=1)
        assert numbers == list(range(BATCHES))


def test_events_of_updates_name_the_optimizer():
    names: list[str] = []
    module = Adversarial()
    config = TrainingConfig(max_epochs=1, device="cpu", progress=False)
    trainer = from_lightning(module, loader(), config=config)
    trainer.on(Events.OPTIMIZER_STEP_COMPLETED)(lambda engine, event: names.append(event.payload.optimizer))
    trainer.train()
    assert names == ["0", "1"] * BATCHES


class Nested(Metrics):
    """Logs from a module inside of it, has dropout, tests, and logs a metric over the training epoch."""

    class Part(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def forward(self, inputs: Tensor) -> Tensor:
            self.log("mean_input", inputs.mean(), on_step=True, on_epoch=True)
            return nn.functional.dropout(inputs, 0.3, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.form = "by step"
        self.part, self.of_training = self.Part(), copy.deepcopy(self.accuracy)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(self.part(inputs))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.of_training(self(batch[0]), batch[1])
        self.log("train_acc", self.of_training, on_step=False, on_epoch=True)
        return {"loss": super().training_step(batch, batch_idx)}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test_loss": 0.25, "test_batch": float(batch_idx)})


def test_a_run_that_was_stopped_in_an_epoch_continues_exactly_with_what_was_logged(tmp_path: Path):
    def run(folder: str, stop: int | None = None) -> Trainer:
        config = TrainingConfig(max_epochs=3, device="cpu", progress=False, seed=0, log_every_n_steps=2)
        saver = Checkpointer(tmp_path / folder, every=Every(iterations=1))
        trainer = from_lightning(Nested(), loader(), loader(2, 3), config=config, handlers=[saver])
        if stop is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda engine: engine.terminate())
        trainer.train(resume="latest")
        return trainer

    whole = run("whole")
    assert run("stopped", BATCHES + 3).state.iteration == BATCHES + 3
    resumed = run("stopped")
    assert resumed.history.get_history() == whole.history.get_history()
    assert {"train_acc", "mean_input_step", "mean_input_epoch"} <= whole.history.get_history().keys()
    assert all(torch.equal(value, resumed.model.state_dict()[name]) for name, value in whole.model.state_dict().items())
    assert whole.test(loader(3, 2)) == {"test/loss": 0.25, "test/batch": 0.5}


def test_the_module_can_go_back_to_lightning(tmp_path: Path):
    expected, found = Classifier("plateau"), Classifier("plateau")
    theirs(expected, tmp_path)
    theirs(expected, tmp_path)
    ours(found)
    other = theirs(found, tmp_path)
    assert_same(found, expected)
    assert "val_acc" in other.callback_metrics
