import pytest
import torch

from pulsetrain.engine import ConfigurationError
from pulsetrain.handlers import Callback, CallbackList
from tests.support.engines import make_engine, roll_out_before_each_batch, subscriptions, validate_each_epoch


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_train_begin(self, trainer):
        self.calls.append("train begin")

    def on_train_end(self, trainer):
        self.calls.append("train end")

    def on_epoch_begin(self, trainer):
        self.calls.append(f"epoch {trainer.state.epoch} begin")

    def on_epoch_end(self, trainer):
        self.calls.append(f"epoch {trainer.state.epoch} end")

    def on_step_begin(self, trainer):
        self.calls.append(f"step {trainer.state.batch}")

    def on_step_end(self, trainer, loss):
        self.calls.append(f"loss {loss}")

    def on_validation_begin(self, trainer):
        self.calls.append("validation begin")

    def on_validation_end(self, trainer, metrics):
        self.calls.append(f"validation end {metrics}")

    def on_rollout_begin(self, trainer):
        self.calls.append(f"rollout {trainer.state.rollout_round} begin")

    def on_rollout_end(self, trainer, metrics):
        self.calls.append(f"rollout end {metrics}")


class StepEnd(Callback):
    def __init__(self):
        self.losses = []

    def on_step_end(self, trainer, loss):
        self.losses.append(loss)


def test_hooks_are_called_in_the_order_of_a_run():
    engine = make_engine(lambda i: {"loss": i / 2})
    validate_each_epoch(engine, [{"val/loss": 1.5}])
    recorder = Recorder()
    CallbackList([recorder]).attach(engine)
    engine.run(["a", "b"], max_epochs=1)
    assert recorder.calls == [
        "train begin",
        "epoch 1 begin",
        "step a",
        "loss 0.5",
        "step b",
        "loss 1.0",
        "validation begin",
        "validation end {'val/loss': 1.5}",
        "epoch 1 end",
        "train end",
    ]


def test_hooks_of_rollouts_are_called_before_the_batch_that_follows():
    engine, recorder = make_engine(lambda i: {"loss": i}), Recorder()
    roll_out_before_each_batch(engine, [{"rollout/return": 1.5}])
    CallbackList([recorder]).attach(engine)
    engine.run(["a"], max_epochs=1)
    assert recorder.calls[1:5] == [
        "epoch 1 begin",
        "rollout 1 begin",
        "rollout end {'rollout/return': 1.5}",
        "step a",
    ]


def test_the_loss_is_a_detached_scalar_where_it_was_computed():
    weight = torch.ones((), requires_grad=True)
    callback = StepEnd()
    engine = make_engine(lambda i: (weight * i).reshape(1))
    CallbackList([callback]).attach(engine)
    engine.run([0], max_epochs=1)
    (loss,) = callback.losses
    assert isinstance(loss, torch.Tensor)
    assert (loss.requires_grad, loss.shape) == (False, ())


def test_a_step_without_a_loss_gives_none():
    callback = StepEnd()
    engine = make_engine(lambda i: None)
    CallbackList([callback]).attach(engine)
    engine.run([0], max_epochs=1)
    assert callback.losses == [None]


def test_only_overridden_hooks_are_subscribed():
    engine = make_engine()
    CallbackList([Callback(), StepEnd(), StepEnd()]).attach(engine)
    assert sum(subscriptions(engine.bus).values()) == 2


def test_a_hook_set_on_the_instance_is_called():
    engine, seen = make_engine(), []
    callback = Callback()
    callback.on_epoch_end = lambda trainer: seen.append(trainer.state.epoch)
    CallbackList([callback]).attach(engine)
    engine.run([0], max_epochs=2)
    assert seen == [1, 2]


def test_callbacks_are_called_in_the_order_of_the_list():
    order = []

    class Named(Callback):
        def __init__(self, name):
            self.name = name

        def on_train_begin(self, trainer):
            order.append(self.name)

    engine = make_engine()
    CallbackList([Named("first"), Named("second")]).attach(engine)
    engine.run([0], max_epochs=1)
    assert order == ["first", "second"]


def test_callbacks_can_be_added_and_removed_during_the_run():
    engine, late, early = make_engine(), StepEnd(), StepEnd()
    callbacks = CallbackList([early]).attach(engine)

    class Swap(Callback):
        def on_epoch_end(self, trainer):
            if trainer.state.epoch == 1:
                callbacks.add(late)
                callbacks.remove(early)

    callbacks.add(Swap())
    engine.run([0, 0], max_epochs=2)
    assert (len(early.losses), len(late.losses)) == (2, 2)
    assert (len(callbacks), early in list(callbacks)) == (2, False)


def test_a_callback_that_is_invalid_duplicate_or_missing_is_refused():
    callback = StepEnd()
    with pytest.raises(TypeError, match=r"CallbackList.add\(.*needs a Callback"):
        CallbackList([print])
    with pytest.raises(ValueError, match="already"):
        CallbackList([callback, callback])
    with pytest.raises(ValueError, match="not in the list"):
        CallbackList().remove(callback)


def test_a_hook_that_is_misspelt_is_refused_where_the_class_is_written():
    message = r"Printer\(hook='on_epoch_edn'\): unknown; .*did you mean 'on_epoch_end'"
    with pytest.raises(ConfigurationError, match=message):

        class Printer(Callback):
            def on_epoch_edn(self, trainer):
                print(trainer)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("onEpochEnd", "on_epoch_end"),
        ("epoch_end", "on_epoch_end"),
        ("epoch_completed", "on_epoch_end"),
        ("onIterationCompleted", "on_step_end"),
        ("after_epoch", "on_epoch_end"),
        ("On_epoch_end", "on_epoch_end"),
        ("before_validation", "on_validation_begin"),
        ("on_train_start", "on_train_begin"),
        ("onBatchEnd", "on_step_end"),
    ],
)
def test_a_method_that_resembles_a_hook_is_refused_with_the_hooks_name(name: str, hook: str):
    with pytest.raises(
        ConfigurationError, match=rf"Printer\(hook='{name}'\): is not called; the hook's name is '{hook}'"
    ):
        type("Printer", (Callback,), {name: lambda self, trainer: None})


def test_attributes_and_other_methods_are_not_hooks():
    others = {"on_gpu": True, "_epoch_end": lambda self: None, "epoch": 3, "end": lambda self: None, "once": print}
    assert type("Printer", (Callback,), others)().on_gpu
