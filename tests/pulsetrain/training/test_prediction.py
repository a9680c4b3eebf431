"""`Trainer.predict`, `Trainer.test` and `Trainer.validate(loader)`: outputs and metrics of data outside of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import EarlyStopping, EventLog, EventRecorder, Events, Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, SupervisedStrategy
from pulsetrain.engine.metrics import Accuracy
from pulsetrain.testing import RecordedEvents, tiny_loader, tiny_model
from tests.support.models import Tokens, torch_model

QUIET = TrainingConfig(progress=False, seed=0)


def make(model: nn.Module | None = None, **arguments: Any) -> Trainer:
    return Trainer(model or tiny_model(), **{"strategy": SupervisedStrategy("mse"), "config": QUIET, **arguments})


class TestPredict:
    def test_the_outputs_are_those_of_the_model_in_eval_mode_in_order(self):
        model = tiny_model(dropout=0.5)
        rows = torch.randn(10, 4)
        found = make(model).predict(DataLoader(rows, batch_size=3))
        assert model.training
        with torch.no_grad():
            assert torch.equal(found, torch.cat([model.eval()(part) for part in rows.split(3)]))
        assert not found.requires_grad

    def test_targets_of_a_pair_or_a_mapping_are_left_out(self):
        rows = torch.randn(6, 4)
        expected = make().predict([rows])
        assert torch.equal(make().predict([(rows, torch.zeros(6, 1))]), expected)
        named = Named()
        named.load_state_dict(tiny_model().state_dict(prefix="layers."))
        for batch in ({"x": rows, "labels": torch.zeros(6)}, {"x": rows}):
            assert torch.equal(make(named).predict([batch]), expected)

    def test_a_data_set_of_inputs_alone_gives_lists_of_one(self):
        rows = torch.randn(6, 4)
        loader = DataLoader(TensorDataset(rows), batch_size=4)
        assert torch.equal(make().predict(loader), make().predict([rows]))

    def test_a_function_may_choose_the_inputs(self):
        rows = torch.randn(6, 4)
        found = make().predict([{"deep": [rows]}], inputs=lambda batch: batch["deep"][0])
        assert torch.equal(found, make().predict([rows]))

    def test_a_callback_gets_each_batch_and_nothing_is_kept(self):
        seen: list[Tensor] = []
        assert make().predict([torch.ones(2, 4), torch.ones(3, 4)], seen.append) is None
        assert [each.shape[0] for each in seen] == [2, 3]

    def test_structures_are_joined_leaf_by_leaf(self):
        found = make(Several()).predict([torch.ones(2, 4), torch.ones(3, 4)])
        assert found["pair"][0].shape == (5, 4)
        assert found["number"].shape == (2,)

    def test_outputs_that_cannot_be_joined_are_refused_with_the_remedy(self):
        tokens = [torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)]
        with pytest.raises(ConfigurationError, match=r"callback=outputs\.append"):
            make(Tokens(), strategy="pretrain").predict(tokens)

    def test_a_language_model_predicts_every_token(self):
        tokens = torch.zeros(2, 5, dtype=torch.long)
        assert make(Tokens(), strategy="pretrain").predict([tokens]).shape == (2, 5, 8)

    def test_no_batch_is_an_error_and_the_generators_stay(self):
        trainer = make()
        before = torch.get_rng_state()
        with pytest.raises(ConfigurationError, match="gave no batch"):
            trainer.predict([])
        trainer.predict(tiny_loader())
        assert torch.equal(torch.get_rng_state(), before)

    def test_batches_of_three_parts_say_how_the_inputs_are_chosen(self):
        rows = [(torch.randn(4, 4), torch.zeros(4), torch.zeros(4))]
        with pytest.raises(TypeError, match="positional arguments") as caught:
            make().predict(rows)
        assert (
            "predict(loader, inputs=lambda batch: batch[0]) chooses what the model is given" in caught.value.__notes__
        )
        assert not any("targets" in note for note in caught.value.__notes__)
        assert make().predict(rows, inputs=lambda batch: batch[0]).shape[0] == 4

    def test_predicting_in_the_middle_of_a_run_changes_nothing(self):
        runs = []
        for predicts in (False, True):
            trainer = Trainer(tiny_model(dropout=0.5), tiny_loader(), strategy=SupervisedStrategy("mse"), config=QUIET)
            if predicts:
                trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.predict([torch.ones(2, 4)]))
            trainer.train()
            runs.append(trainer.model.state_dict())
        assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])

    def test_jax_predicts_what_torch_does(self):
        pytest.importorskip("jax")
        from pulsetrain import JaxBackend
        from tests.support.models import function_model

        model = torch_model()
        rows = torch.randn(6, 4)
        theirs = make(function_model(model.state_dict()), backend=JaxBackend(), train_loader=[(rows, rows[:, :3])])
        found = theirs.predict([rows])
        assert torch.allclose(found, make(model).predict([rows]), atol=1e-6)

    @pytest.mark.parametrize("loader", [None, 3])
    def test_what_is_not_a_loader_is_refused(self, loader: Any):
        with pytest.raises(TypeError, match=r"Trainer\.predict\(loader="):
            make().predict(loader)


class TestTest:
    def test_the_metrics_are_those_of_a_validation_under_the_name_test(self):
        loader = tiny_loader()
        trainer = make(val_loader=loader)
        validated = trainer.validate()
        assert trainer.test(loader) == {"test/loss": validated["val/loss"]}
        assert trainer.validate(loader) == validated

    def test_several_sets_by_name_and_metrics(self):
        rows = [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))]
        trainer = make(tiny_model(outputs=3), strategy="supervised", metrics={"accuracy": Accuracy()})
        assert list(trainer.test({"easy": rows, "hard": rows})) == [
            "easy/loss", "easy/accuracy", "hard/loss", "hard/accuracy"
        ]  # fmt: skip

    def test_handlers_that_judge_see_nothing_and_loggers_see_the_metrics(self):
        stopping = EarlyStopping(patience=1)
        trainer = make(train_loader=tiny_loader(), val_loader=tiny_loader(), handlers=[stopping])
        trainer.train()
        counted, metrics = stopping.state_dict(), dict(trainer.state.metrics)
        events = RecordedEvents(trainer)
        found = trainer.test(tiny_loader(seed=1))
        assert stopping.state_dict() == counted
        assert trainer.state.metrics == metrics
        assert Events.VALIDATION_COMPLETED.value not in events.names
        (payload,) = events.payloads(Events.METRICS_LOGGED)
        assert payload.metrics == found

    def test_a_test_after_the_run_is_in_the_log(self, tmp_path):
        trainer = make(train_loader=tiny_loader(), handlers=[EventRecorder(tmp_path)])
        trainer.train()
        found = trainer.test(tiny_loader(seed=1))
        logged = [each.payload["metrics"] for each in EventLog(tmp_path).read(event="metrics_logged")]
        assert logged[-1] == found

    def test_an_empty_set_is_refused(self):
        with pytest.raises(ConfigurationError, match="'test': gave no batch"):
            make().test([])


class TestWithoutTrainingData:
    def test_a_trainer_evaluates(self):
        trainer = make(val_loader=tiny_loader())
        assert trainer.validate().keys() == {"val/loss"}

    @pytest.mark.parametrize("method", ["train", "train_epoch"])
    def test_training_is_refused_with_the_remedy(self, method: str):
        with pytest.raises(ConfigurationError, match=r"pass|Trainer\(model, train_loader\)"):
            getattr(make(), method)()

    def test_settings_of_a_run_do_not_matter(self):
        config = TrainingConfig(progress=False, max_tokens=100, schedule="cosine")
        assert make(config=config).test(tiny_loader()).keys() == {"test/loss"}

    def test_data_that_is_set_later_is_trained_on(self):
        trainer = make()
        trainer.train_loader = tiny_loader()
        trainer.train()
        assert trainer.state.iteration == 4


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"pair": (x, -x), "number": x.sum()}
