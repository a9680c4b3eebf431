"""The contract of every handler."""

import inspect
import io
import warnings
from collections.abc import Callable, Iterator

import pytest
import structlog
import torch

from pulsetrain import TrainingConfig, handlers
from pulsetrain.engine import EventBus, Events, Every, Phase, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.model_store import InPlaceStore
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.events.payloads import GradientsReady
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import (
    EMA,
    SWA,
    Alert,
    BestModel,
    Callback,
    CallbackList,
    Checkpointer,
    ConsoleLogger,
    CrashBundle,
    CSVLogger,
    EarlyStopping,
    EventRecorder,
    Fingerprints,
    Garbage,
    GradientMonitor,
    HangWatchdog,
    HuggingFaceExporter,
    JSONLinesLogger,
    KerasCallbacks,
    LossSpikeGuard,
    LRFinder,
    LRMonitor,
    LRScheduler,
    MemoryMonitor,
    MLflowLogger,
    NaNGuard,
    Plots,
    Profiler,
    ProgressBar,
    ReduceLROnPlateau,
    SampleText,
    StepLimit,
    TensorBoardLogger,
    Throughput,
    TimeLimit,
    TrackioLogger,
    WandbLogger,
)
from pulsetrain.handlers.loggers.text_file import TextFileLogger
from pulsetrain.training.stepper import Stepper
from tests.support.cases import slow_but
from tests.support.engines import UpdatingEngine, log_each_iteration, subscriptions, validate_each_epoch


class Saving(UpdatingEngine):
    def _step(self, engine, batch):
        if self.hears(Events.GRADIENTS_READY):
            self.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(1.0)))
            self.state.update -= 1
        return super()._step(engine, batch)

    def skip_update(self, where): ...

    """Also has what an LRFinder needs of a trainer."""

    strategy, config, seed = SupervisedStrategy("mse"), TrainingConfig(), 0
    train_loader = ((torch.ones(3, 2), torch.ones(3, 1)),) * 2

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.model.save_pretrained = lambda folder: None  # as a model of transformers has it
        self.backend = TorchBackend("cpu")
        store = InPlaceStore(self.backend, self.model, self.optimizer)
        self.stepper = Stepper(self.backend, self.strategy, store, accumulate=self.config.accumulation)

    def checkpoint_state(self):
        return {"weights": self.model.state_dict()}


class EveryHook(Callback):
    def on_train_begin(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_epoch_begin(self, trainer): ...
    def on_epoch_end(self, trainer): ...
    def on_step_begin(self, trainer): ...
    def on_step_end(self, trainer, loss): ...
    def on_validation_begin(self, trainer): ...
    def on_validation_end(self, trainer, metrics): ...


class OfKeras:
    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def unconnected(package, make):
    """A logger to a service, without the service, to which its own tests connect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such packages emit warnings when they are imported
        pytest.importorskip(package)
    handler = make()
    handler.connect = lambda key, values: len
    return handler


MAKE: dict[str, Callable] = {
    "NaNGuard": lambda folder: NaNGuard(every=Every(iterations=2)),
    "LossSpikeGuard": lambda folder: LossSpikeGuard(every=Every(iterations=2)),
    "LRScheduler": lambda folder: LRScheduler(Cosine(initial_lr=1.0, total_steps=10)),
    "LRScheduler of torch": lambda folder: LRScheduler(
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), step_size=2),
        by="epoch",
    ),
    "EarlyStopping": lambda folder: EarlyStopping(patience=50),
    "ConsoleLogger": lambda folder: ConsoleLogger(stream=io.StringIO()),
    "ConsoleLogger every": lambda folder: ConsoleLogger(
        every=Every(iterations=2, epochs=1, updates=3, seconds=5), format="json", stream=io.StringIO()
    ),
    "CSVLogger": CSVLogger,
    "CSVLogger every": lambda folder: CSVLogger(folder, every=Every(updates=2)),
    "JSONLinesLogger": JSONLinesLogger,
    "TensorBoardLogger": TensorBoardLogger,
    "MLflowLogger": lambda folder: unconnected("mlflow", lambda: MLflowLogger(folder=folder)),
    "WandbLogger": lambda folder: unconnected("wandb", lambda: WandbLogger("digits", folder, "offline")),
    "TrackioLogger": lambda folder: unconnected("trackio", lambda: TrackioLogger("digits")),
    "ProgressBar": lambda folder: ProgressBar(stream=io.StringIO()),
    "Plots": Plots,
    "Plots every": lambda folder: Plots(folder, every=Every(iterations=5)),
    "EventRecorder": EventRecorder,
    "EventRecorder with batches": lambda folder: EventRecorder(folder, include_batches=True, every=3),
    "CallbackList": lambda folder: CallbackList([EveryHook(), Callback()]),
    "Checkpointer": lambda folder: Checkpointer(folder, metric="val/loss"),
    "HuggingFaceExporter": lambda folder: HuggingFaceExporter(folder, metric="val/loss"),
    "Checkpointer in the background": lambda folder: Checkpointer(folder, "auto", background=True, metric="val/loss"),
    "Fingerprints": lambda folder: Fingerprints(Every(iterations=1), batches=True, model=torch.nn.Linear(2, 1)),
    "CrashBundle": CrashBundle,
    "EMA": lambda folder: EMA(model=torch.nn.Linear(2, 1), every=Every(iterations=2, epochs=1)),
    "EMA of the engine's model": lambda folder: EMA(),
    "SWA": lambda folder: SWA(after_epoch=1),
    "ReduceLROnPlateau": lambda folder: ReduceLROnPlateau(patience=0),
    "BestModel": lambda folder: BestModel(),
    "BestModel in a folder": lambda folder: BestModel(folder=folder, restore=False),
    "TimeLimit": lambda folder: TimeLimit("1h"),
    "StepLimit": lambda folder: StepLimit(iterations=100),
    "Alert": lambda folder: Alert(["true"]),
    "Garbage": lambda folder: Garbage(),
    "GradientMonitor": lambda folder: GradientMonitor(histograms=True, updates=True),
    "Throughput": lambda folder: Throughput(every=Every(iterations=2)),
    "MemoryMonitor": lambda folder: MemoryMonitor(every=Every(iterations=2)),
    "Profiler": lambda folder: Profiler(folder, start=2, iterations=2, warmup=1),
    "SampleText": lambda folder: SampleText("a", folder, generate=lambda *given, **named: "b"),
    "HangWatchdog": HangWatchdog,
    "LRFinder": lambda folder: LRFinder(iterations=20, folder=folder),
    "LRMonitor": lambda folder: LRMonitor(Every(iterations=1)),
    "KerasCallbacks": lambda folder: KerasCallbacks([OfKeras()]),
}
OF_TRAINERS = {"RunSummary", "HuggingFaceCallbacks", "LightningCallbacks"}  # test_handlers_of_trainers.py
QUICK = MAKE.keys() - {"Plots every", "LRFinder"}  # these spend a second on pictures in each test, as Plots does
KINDS = {name: getattr(handlers, name.split()[0]) for name in MAKE}
# the state of these says how far their file had come; their own tests show what a resume makes of it
OF_A_FILE = TextFileLogger, EventRecorder
STATEFUL = [name for name, kind in KINDS.items() if hasattr(kind, "state_dict") and not issubclass(kind, OF_A_FILE)]
LOGGERS = ["CSVLogger", "JSONLinesLogger", "TensorBoardLogger", "MLflowLogger", "WandbLogger", "TrackioLogger"]
ON_A_BUS = ["ConsoleLogger", *LOGGERS, "Plots", "EventRecorder", "HangWatchdog"]


def comparable(value):
    """A state with its tensors as lists: `==` between tensors does not give a bool."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return type(value)(map(comparable, value)) if isinstance(value, (list, tuple)) else value


@pytest.fixture(params=slow_but(QUICK, MAKE))
def make(request, tmp_path) -> Iterator[Callable]:
    numbers = iter(range(9))
    return lambda: MAKE[request.param](tmp_path / str(next(numbers)))


@pytest.fixture
def engine():
    engine = Saving()
    if engine.optimizer.param_groups:
        log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i, "learning_rate": 0.1})
        validate_each_epoch(engine, [{"val/loss": 1.0 / (1 + epoch)} for epoch in range(4)])
    return engine


@pytest.fixture
def fitting(make, engine):
    """A handler, with the engine's optimizer being its own where it brings one."""
    handler = make()
    scheduler = getattr(handler, "schedule", None)
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        engine.optimizer = scheduler.optimizer
    return handler


def test_every_exported_handler_is_in_this_suite():
    exported, tested = (
        set(handlers.__all__) - {"Callback", "MetricLogger"} - OF_TRAINERS,
        {name.split()[0] for name in MAKE},
    )
    assert not exported - tested, f"add to MAKE above a function that makes: {', '.join(sorted(exported - tested))}"
    assert not tested - exported, f"export in handlers/__init__.py: {', '.join(sorted(tested - exported))}"


@pytest.mark.parametrize("name", sorted(set(handlers.__all__) - {"Callback", "CallbackList"}))
def test_a_misspelt_keyword_is_answered_with_the_nearest(name):
    kind = getattr(handlers, name)
    keyword = list(inspect.signature(kind).parameters)[-1]
    rule = rf"\w+\({keyword}_=1\): is not an argument; did you mean '{keyword}'\?$"
    with pytest.raises(ArgumentTypeError, match=rule):
        kind(**{f"{keyword}_": 1})


def test_attach_returns_the_handler(fitting, engine):
    assert fitting.attach(engine) is fitting
    fitting.detach()


def test_attach_subscribes_and_detach_removes_every_subscription(fitting, engine):
    before = subscriptions(engine.bus)
    fitting.attach(engine)
    assert subscriptions(engine.bus) != before
    engine.run([0, 1, 2], max_epochs=2)
    fitting.detach()
    assert subscriptions(engine.bus) == before


def test_attaching_twice_is_an_error_and_changes_nothing(fitting, engine):
    fitting.attach(engine)
    before = subscriptions(engine.bus)
    with pytest.raises(RuntimeError, match=rf"{type(fitting).__name__}.*attached already|already attached"):
        fitting.attach(engine)
    assert subscriptions(engine.bus) == before
    fitting.detach()


def test_detaching_twice_is_once_and_attaching_again_works(fitting, engine):
    fitting.detach()
    fitting.attach(engine)
    fitting.detach()
    fitting.detach()
    fitting.attach(engine)
    engine.run([0, 1], max_epochs=1)
    fitting.detach()


def test_a_detached_handler_receives_nothing(fitting, engine):
    fitting.attach(engine)
    fitting.detach()
    before = comparable(fitting.state_dict()) if hasattr(fitting, "state_dict") else None
    engine.run([0, 1], max_epochs=1)
    assert before is None or comparable(fitting.state_dict()) == before


def test_what_is_not_an_engine_is_refused_and_leaves_no_trace(make):
    handler = make()
    with pytest.raises(TypeError, match=type(handler).__name__):
        handler.attach("trainer")
    handler.detach()


@pytest.mark.parametrize("name", slow_but(QUICK, STATEFUL))
def test_state_goes_round_through_safe_loading(name, tmp_path, engine):
    handler, fresh = MAKE[name](tmp_path / "a"), MAKE[name](tmp_path / "b")
    if name == "LRScheduler of torch":
        engine.optimizer = handler.schedule.optimizer
    handler.attach(engine)
    engine.run([0, 1, 2], max_epochs=3)
    saved = handler.state_dict()
    assert comparable(saved) != comparable(fresh.state_dict())
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert comparable(fresh.state_dict()) == comparable(saved)


@pytest.mark.parametrize("name", list(MAKE))
def test_a_handler_that_saves_a_state_loads_it(name):
    kind = KINDS[name]
    both = "define state_dict and load_state_dict, or neither"
    assert hasattr(kind, "state_dict") == hasattr(kind, "load_state_dict"), f"{kind.__name__}: {both}"


@pytest.mark.parametrize("name", ON_A_BUS)
def test_loggers_and_recorders_attach_to_a_bus(name, tmp_path, engine):
    handler = MAKE[name](tmp_path)
    before = subscriptions(engine.bus)
    assert handler.attach(engine.bus) is handler
    engine.run([0, 1], max_epochs=1)
    handler.detach()
    assert subscriptions(engine.bus) == before


@pytest.mark.parametrize("name", slow_but(QUICK, [name for name in MAKE if name.split()[0] not in ON_A_BUS]))
def test_policies_refuse_a_bus(name, tmp_path):
    handler = MAKE[name](tmp_path)
    with pytest.raises(TypeError, match=type(handler).__name__):
        handler.attach(EventBus())


def test_loggers_look_after_policies_have_acted(engine, tmp_path):
    order = []
    for name in ("ConsoleLogger", "CSVLogger", "Plots"):
        MAKE[name](tmp_path).attach(engine)
    EarlyStopping().attach(engine)
    for subscription in engine.bus.signal(Events.VALIDATION_COMPLETED).subscriptions(id(engine)):
        order.append(subscription.phase)
    assert order == [Phase.ACT, Phase.OBSERVE, Phase.OBSERVE, Phase.OBSERVE]


@pytest.mark.parametrize("name", ["EventRecorder", "Checkpointer", "Profiler", "SampleText", "HuggingFaceExporter"])
def test_a_folder_that_cannot_be_written_is_one_clear_error_and_no_subscription(name, tmp_path, engine):
    (tmp_path / "file").write_text("in the way")
    before = subscriptions(engine.bus)
    with pytest.raises(OSError, match=r"\(.*file.*: cannot be|Checkpoint\w+\(.*file.*: cannot be"):
        MAKE[name](tmp_path / "file").attach(engine)
    assert subscriptions(engine.bus) == before


@pytest.mark.parametrize(
    "name",
    [
        *LOGGERS[:-1],
        *("EventRecorder", "Plots", "Profiler", "SampleText", "HangWatchdog", "CrashBundle", "LRFinder"),
        "HuggingFaceExporter",
        "BestModel in a folder",
    ],
)
def test_a_url_is_refused_where_files_are_written_on_this_machine(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=rf"{name.split()[0]}\(folder='memory://a'\): is a URL, and these files"
    ):
        MAKE[name]("memory://a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*LOGGERS[:-1], "Plots", "HangWatchdog", "CrashBundle"])
def test_an_observer_whose_folder_cannot_be_written_is_left_out_and_reported(name, tmp_path, engine):
    (tmp_path / "file").write_text("in the way")
    before = subscriptions(engine.bus)
    with structlog.testing.capture_logs() as logs:
        MAKE[name](tmp_path / "file").attach(engine)
    assert [line["event"] for line in logs] == [f"the run continues without {name}"]
    assert subscriptions(engine.bus) == before
