"""The cost of recording, and the speed of reading a log, compared with TensorBoard's SummaryWriter if installed.

    python -m benchmarks recorder                     # prints a table and exits with 1 if a bound is missed
    python -m benchmarks recorder --log-events 1e7    # the log whose figures have the bounds

Recording is measured inside the recorder: the time of its receiver for an event with a payload of one float, sealing
included. The time per iteration is what a recorder adds to a Trainer with a linear model and SGD, whose iterations have
events with rates and outputs; sealing included. The rows below it are the same for receivers that do less: nothing;
reading the values; writing one line an iteration, to which each event adds its part; or a line for each event. They
check no value, keep no order and seal nothing.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants.receivers import LineForEach, Nothing, OneLine, Values
from benchmarks.harness.results import Kind, Row, make_parser, report
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine, EventEnum, SupervisedStrategy
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.handlers import EventRecorder

BOUNDS = {
    "recording, us per event": 2.6,
    "recording, bytes per event": 30.0,
    "recording, us per iteration": 45.0,
    "opening a log, ms": 20.0,
    "opening a log without table, ms": 200.0,
    "seek by seq, ms": 5.0,
    "seek by iteration, ms": 5.0,
    "memory while reading, MB": 16.0,
}
AT_LEAST = {
    "reading, million events/s": 1.0,
    "SummaryWriter / recording": 11.0,
}
GOALS = {
    "recording, us per event": 1.2,
    "recording, us per iteration": 6.0,
    "recording, us per iteration with a norm": 6.0,
    "share of a 1 ms step, %": 0.7,
    "SummaryWriter / recording": 20.0,
}
T = 1_790_000_000_000_000_000
FIRST, ITERATIONS = 500, 3_000  # the iterations before those that are measured, and these
LESS: dict[str, Callable[[], Nothing]] = {
    "receivers that do nothing, us per iteration": Nothing,
    "that read the values, us per iteration": Values,
    "that write one line, us per iteration": OneLine,
    "that write a line each, us per iteration": LineForEach,
}
LONGER, WIDTH = 1_000, 256  # iterations of about 1 ms, and the size of their model's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One float."""

    mean: float


class Measured(EventEnum):
    """The recorded event."""

    REWARD = "reward", Reward


def timed(work: Callable[[], Any]) -> float:
    """The duration of a call in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def recording(folder: Path, events: int, rounds: int) -> dict[str, float]:
    """The cost of the recorder and of a SummaryWriter, which take turns, and bytes per event after sealing."""
    engine = Engine(lambda engine, batch: None, name="trainer")
    engine.register_events(*Measured)
    recorder = EventRecorder(folder).attach(engine)
    receive, least = recorder._on_event, LineForEach().receive
    engine.fire(Measured.REWARD, Reward(mean=0.5))
    seconds, ratios, leasts, seq = list[float](), list[float](), list[float](), 10
    write = summary_writer(folder / "peer", min(events, 5000))
    for _ in range(rounds):
        made = []
        for number in range(events):
            seq += 1
            payload = Reward(mean=number * 0.1234567)
            made.append(Event(seq, "trainer", "reward", 1, number, payload, T + 1_000_003 * seq))

        def receive_all(receive: Callable[..., None], made: list[Event] = made) -> None:
            for event in made:
                receive(engine, event)

        seconds.append(timed(partial(receive_all, receive)) / events)
        leasts.append(timed(partial(receive_all, least)) / events)
        if write is not None:
            ratios.append(write() / seconds[-1])
    recorder.detach()
    size = (folder / "events" / "events.jsonl.zst").stat().st_size
    found = {
        "recording, us per event": statistics.median(seconds) * 1e6,
        "a receiver that writes a line, us per event": statistics.median(leasts) * 1e6,
        "recording, bytes per event": size / (events * rounds),
    }
    return found | {"SummaryWriter / recording": statistics.median(ratios) if ratios else math.nan}


def summary_writer(folder: Path, events: int) -> Callable[[], float] | None:
    """Measures the seconds of TensorBoard's writer per scalar; None if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(str(folder))

    def write() -> None:
        for number in range(events):
            writer.add_scalar("reward", number * 0.1234567, number)
        writer.flush()

    write()
    return lambda: timed(write) / events


class Batches:
    """One epoch of equal batches, which notes the time before its measured iterations and after them."""

    def __init__(self, batch: tuple[Tensor, Tensor], measured: int) -> None:
        self.batch, self.measured = batch, measured
        self.noted: list[float] = []

    def __len__(self) -> int:
        return FIRST + self.measured

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            if number in (FIRST, len(self) - 1):
                self.noted.append(time.perf_counter())
            yield self.batch

    def seconds(self) -> float:
        """Of an iteration."""
        return (self.noted[1] - self.noted[0]) / (self.measured - 1)


def seconds_of_step(*handlers: Any, norm: bool = False, width: int = 0) -> float:
    """The time of an iteration of a Trainer with these handlers.

    Args:
        handlers: of the Trainer.
        norm: whether gradients are clipped, so that their norm is an event, too.
        width: of two layers that take about 1 ms; 0 is a small linear model.
    """
    torch.manual_seed(0)
    if width:
        model: nn.Module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 4))
        batches = Batches((torch.ones(64, width), torch.ones(64, 4)), LONGER)
    else:
        model, batches = nn.Linear(16, 4), Batches((torch.ones(8, 16), torch.ones(8, 4)), ITERATIONS)
    Trainer(
        model,
        batches,
        strategy=SupervisedStrategy("mse"),
        optimizer="sgd",
        config=TrainingConfig(max_epochs=1, device="cpu", seed=0, clip_grad_norm=1.0 if norm else None),
        handlers=list(handlers),
    ).train()
    return batches.seconds()


def recorded_iteration(folder: Path, rounds: int) -> dict[str, float]:
    """What recording, and parts of it, add to an iteration of a Trainer: medians over the rounds."""
    found = defaultdict[str, list[float]](list)
    for number in range(rounds):
        into = folder / str(number)
        recorded, alone = seconds_of_step(EventRecorder(into / "three")), seconds_of_step()
        found["recording, us per iteration"].append(1e6 * (recorded - alone))
        for name, receivers in LESS.items():
            found[name].append(1e6 * (seconds_of_step(receivers()) - alone))
        recorded, alone = seconds_of_step(EventRecorder(into / "four"), norm=True), seconds_of_step(norm=True)
        found["recording, us per iteration with a norm"].append(1e6 * (recorded - alone))
        recorded, alone = seconds_of_step(EventRecorder(into / "1 ms"), width=WIDTH), seconds_of_step(width=WIDTH)
        found["share of a 1 ms step, %"].append(1e5 * (recorded - alone))
        found["the step of about 1 ms, ms"].append(1e3 * alone)
    return {name: statistics.median(each) for name, each in found.items()}


def write_log(folder: Path, events: int) -> None:
    """The log of a run with this many iterations."""
    writer = LogWriter(folder)
    for n in range(events):
        logged = LoggedEvent(n, "trainer", "iteration_completed", 1 + n // 10_000, n, output={"loss": n * 0.37 % 7})
        logged.seq, logged.t = n, T + 1_000_003 * n
        writer.add(logged)
    writer.end()
    writer.close()


def seconds_to_find(log: EventLog, field: str, value: int) -> float:
    """The time to read the event of this seq or iteration."""
    bounds: dict[str, Any] = {field: (value, value)}
    return timed(lambda: list(log.read(**bounds)))


def anonymous_memory() -> int:
    """The process's private memory in bytes, without pages of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1])


def reading(folder: Path, events: int) -> dict[str, float]:
    """Opening, reading every field, and seeking."""
    results: dict[str, float] = {}
    results["opening a log, ms"] = 1e3 * statistics.median(timed(lambda: EventLog(folder)) for _ in range(5))
    log = EventLog(folder)
    before = anonymous_memory()
    most = before
    for number, _ in enumerate(log.read()):
        if number % 100_000 == 0:
            most = max(most, anonymous_memory())
    results["memory while reading, MB"] = (most - before) / 1e6
    rates = [events / timed(lambda: deque(log.read(), maxlen=0)) for _ in range(3)]
    results["reading, million events/s"] = statistics.median(rates) / 1e6
    for name, field in (("seek by seq, ms", "seq"), ("seek by iteration, ms", "iteration")):
        log = EventLog(folder)  # a new one, which has read no block
        values = range(0, events, events // 50)
        results[name] = 1e3 * statistics.median(seconds_to_find(log, field, value) for value in values)
    sealed = folder / "events.jsonl.zst"
    content = sealed.read_bytes()
    sealed.write_bytes(content[: content.rfind(b"PTLT") - 8])
    results["opening a log without table, ms"] = 1e3 * statistics.median(
        timed(lambda: EventLog(folder)) for _ in range(3)
    )
    sealed.write_bytes(content)
    return results


def measure(events: int, log_events: int, rounds: int) -> dict[str, float]:
    """All figures by name; those with a bound have the names of BOUNDS and AT_LEAST."""
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results.update(recording(folder / "recording", events, rounds))
        results.update(recorded_iteration(folder / "step", rounds))
        write_log(folder / "log", log_events)
        results.update(reading(folder / "log", log_events))
    return results


def kind_of(name: str) -> Kind:
    """What a figure depends on."""
    if name == "SummaryWriter / recording":
        return "ratio"
    return "size" if name.endswith(("bytes per event", "MB")) else "absolute"


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("recorder", __doc__)
    parser.add_argument("--events", type=int, default=20_000, help="events to record per round [%(default)s]")
    parser.add_argument(
        "--log-events",
        type=lambda text: int(float(text)),
        default=1_000_000,
        help="events of the log to open and read [%(default)s]",
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    def rows() -> tuple[list[Row], list[str]]:
        figures = measure(options.events, options.log_events, options.rounds)
        bounds = BOUNDS | AT_LEAST
        return [
            Row(
                name=name,
                measured=value,
                kind=kind_of(name),
                bound=bounds.get(name),
                goal=GOALS.get(name),
                at_least=name in AT_LEAST,
            )
            for name, value in figures.items()
        ], [] if not math.isnan(figures["SummaryWriter / recording"]) else [
            "SummaryWriter: absent: TensorBoard is not installed"
        ]

    return report(options, f"a log of {options.log_events:,} events", rows)


if __name__ == "__main__":
    raise SystemExit(main())
