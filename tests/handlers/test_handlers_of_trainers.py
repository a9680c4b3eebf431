"""The contract of the handlers that need a trainer."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pulsetrain import (
    Checkpointer,
    EarlyStopping,
    EventRecorder,
    HuggingFaceCallbacks,
    LightningCallbacks,
    RunSummary,
    Trainer,
    TrainingConfig,
)
from pulsetrain.engine import Engine, EventBus, Events, SupervisedStrategy
from pulsetrain.testing import tiny_loader, tiny_model
from tests.handlers.test_handler_contract import OF_TRAINERS
from tests.support.engines import subscriptions


class OfLightning:
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...


def of_hugging_face() -> HuggingFaceCallbacks:
    pytest.importorskip("transformers")
    return HuggingFaceCallbacks([])


MAKE: dict[str, Callable[[], Any]] = {
    "RunSummary": lambda: RunSummary(stream=io.StringIO()),
    "HuggingFaceCallbacks": of_hugging_face,
    "LightningCallbacks": lambda: LightningCallbacks([OfLightning()]),
}


def make_trainer() -> Trainer:
    config = TrainingConfig(progress=False, seed=0)
    return Trainer(tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config)


def test_each_is_in_this_suite():
    assert MAKE.keys() == OF_TRAINERS


@pytest.mark.parametrize("name", list(MAKE))
def test_attach_subscribes_and_detach_removes_every_subscription(name: str):
    handler, trainer = MAKE[name](), make_trainer()
    before = subscriptions(trainer.bus)
    assert handler.attach(trainer) is handler
    assert subscriptions(trainer.bus) != before
    with pytest.raises(RuntimeError, match="already attached"):
        handler.attach(trainer)
    trainer.train()
    handler.detach()
    handler.detach()
    assert subscriptions(trainer.bus) == before
    handler.attach(trainer)


@pytest.mark.parametrize("name", list(MAKE))
def test_what_is_not_a_trainer_is_refused(name: str):
    for other in ("trainer", EventBus(), Engine(lambda engine, batch: None)):
        with pytest.raises(TypeError, match=f"{name}.attach.*needs a Trainer"):
            MAKE[name]().attach(other)


class TestRunSummary:
    def test_the_lines_say_what_is_trained_and_what_was_reached(self):
        stream = io.StringIO()
        config = TrainingConfig(progress=False, seed=3, max_epochs=2, schedule="cosine", optimizer="sgd")
        model = tiny_model()
        next(model.parameters()).requires_grad_(False)
        trainer = Trainer(
            model, tiny_loader(), {"val": tiny_loader(batches=1)}, strategy=SupervisedStrategy("mse"), config=config,
            handlers=[RunSummary(stream)],
        )  # fmt: skip
        trainer.train()
        lines = stream.getvalue().splitlines()
        assert lines[0] == "Training Sequential with 49 parameters, of which 17 are trained, on cpu in fp32, seed 3."
        assert lines[1] == (
            "SGD(lr=0.001, momentum=0.9, weight_decay=0), schedule cosine, 8 iterations in 2 epochs, 32 samples an "
            "epoch, 8 samples in 'val'."
        )
        assert lines[2].startswith("Ended after 8 iterations (8 in ")
        assert lines[3].startswith("val/loss ")
        assert lines[4].startswith("Nothing was kept; handlers=[Checkpointer(")
        assert len(lines) == 5

    def test_one_iteration_is_in_the_singular(self):
        stream = io.StringIO()
        config = TrainingConfig(progress=False, max_iterations=1)
        strategy = SupervisedStrategy("mse")
        Trainer(tiny_model(), tiny_loader(), strategy=strategy, config=config, handlers=[RunSummary(stream)]).train()
        assert "Ended after 1 iteration (1 in " in stream.getvalue()

    @pytest.mark.parametrize(
        ("count", "where"), [(0, "cpu in"), (2, "cpu and 1 more process in"), (3, "cpu and 2 more processes in")]
    )
    def test_the_other_processes_are_counted(self, count: int, where: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("pulsetrain.training.run_view.RunView.processes", property(lambda run: [{}] * count))
        stream = io.StringIO()
        config = TrainingConfig(progress=False, max_iterations=1)
        handlers = [RunSummary(stream, ending=False)]
        Trainer(
            tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config, handlers=handlers
        ).train()
        assert f"on {where} fp32" in stream.getvalue()

    def test_the_best_value_is_named_where_the_last_is_not_the_best(self):
        stream = io.StringIO()
        trainer = Trainer(
            tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"),
            config=TrainingConfig(progress=False, seed=0, max_epochs=4, learning_rate=1.0, optimizer="sgd"),
            handlers=[RunSummary(stream)],
        )  # fmt: skip
        history = trainer.train()["val/loss"]
        best = min(history)
        assert history[-1] != best, "the test needs a run that gets worse"
        expected = f"val/loss {history[-1]:.4g} (best {best:.4g})."
        assert expected in stream.getvalue()

    def test_the_last_lines_say_how_to_continue_and_to_predict(self, tmp_path: Path):
        def lines(run: Path) -> list[str]:
            stream = io.StringIO()
            trainer = Trainer(
                tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"),
                config=TrainingConfig(progress=False, seed=0), handlers=[Checkpointer(run), RunSummary(stream)],
            )  # fmt: skip
            if run.name == "stopped":
                trainer.on(Events.ITERATION_COMPLETED(once=2))(lambda: trainer.terminate(reason="SIGINT was received"))
            trainer.train()
            return stream.getvalue().splitlines()

        bound = (
            "Continue: trainer.train(resume='latest'), with a larger max_epochs. Predict: pulsetrain.load(path, model)"
        )
        assert bound in lines(tmp_path / "ended")
        assert bound.replace(", with a larger max_epochs", "") in lines(tmp_path / "stopped")
        (tmp_path / "configured").mkdir()
        (tmp_path / "configured" / "config.yaml").touch()
        assert bound.replace("path, model", "path") in lines(tmp_path / "configured")

    def test_after_early_stopping_a_larger_patience_continues(self, tmp_path: Path):
        def trained(patience: int) -> tuple[Trainer, str]:
            stream = io.StringIO()
            trainer = Trainer(
                tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"),
                config=TrainingConfig(progress=False, seed=0, max_epochs=30, learning_rate=1e-9, optimizer="sgd"),
                handlers=[
                    Checkpointer(tmp_path), EarlyStopping("val/loss", patience=patience, min_delta=1.0),
                    RunSummary(stream),
                ],
            )  # fmt: skip
            trainer.train(resume="latest")
            return trainer, stream.getvalue()

        first, said = trained(2)
        assert first.state.epoch == 3
        assert "Continue: trainer.train(resume='latest'), with a larger patience. " in said
        assert trained(4)[0].state.epoch == 5

    @pytest.mark.parametrize(("there", "needs"), [(True, ""), (False, " (first: pip install plotly)")])
    def test_the_last_line_names_the_report_and_what_it_needs(
        self, there: bool, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("pulsetrain.handlers.loggers.run_summary.find_spec", lambda name: there or None)
        stream, folder = io.StringIO(), tmp_path / "a run"
        Trainer(
            tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(progress=False),
            handlers=[type("MyRecorder", (EventRecorder,), {})(folder), RunSummary(stream)],
        ).train()  # fmt: skip
        assert stream.getvalue().splitlines()[-1] == f"Look at it: pulsetrain report '{folder}'{needs}"

    @pytest.mark.parametrize(("progress", "kinds"), [(True, ["RunSummary", "ProgressBar"]), (False, [])])
    def test_a_trainer_has_one_by_default(self, progress: bool, kinds: list[str]):
        trainer = Trainer(tiny_model(), tiny_loader(), config=TrainingConfig(progress=progress))
        names = [type(each).__name__ for each in trainer.handlers]
        assert [name for name in names if name in ("RunSummary", "ProgressBar")] == kinds
