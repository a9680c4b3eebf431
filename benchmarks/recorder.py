"""The cost of recording, and the speed of reading a log, compared with TensorBoard's SummaryWriter if installed.

    python -m benchmarks recorder                     # prints a table and exits with 1 if a bound is missed
    python -m benchmarks recorder --log-events 1e7    # the log whose figures have the bounds

Recording is measured inside the recorder: the time of its receiver for an event with a payload of one float, sealing
included. The time per iteration is what a recorder adds to a Trainer with a linear model and SGD, whose iterations have
events with rates and outputs; sealing included. "The least" is the same for receivers that do nothing but make the
line of an event with its checksum, and copy it into a mapped file: no check of values, no order, no sealing.
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.results import Kind, Row, make_parser, report
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import FIRST as FIRST_OF_ALL
from pulsetrain.engine import Engine, EventEnum, Events, Phase, SupervisedStrategy
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.handlers import EventRecorder
from pulsetrain.handlers.metric_values.event_values import encode_plain

BOUNDS = {
    "recording, us per event": 2.6,
    "recording, bytes per event": 30.0,
    "recording, us per iteration": 45.0,
    "share of a 1 ms step, %": 4.5,
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
    "share of a 1 ms step, %": 0.7,
    "SummaryWriter / recording": 20.0,
}
T = 1_790_000_000_000_000_000
FIRST, ITERATIONS = 500, 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One float."""

    mean: float


class Measured(EventEnum):
    """The recorded event."""

    REWARD = "reward", Reward


class Lines:
    """The least that can be done for a log from which no event is lost: a line with a checksum in a mapped file."""

    SIZE = 1 << 18  # bytes; the mapped file begins again when it is full

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "lines"
        path.write_bytes(b"\n" * self.SIZE)
        with path.open("r+b") as file:
            self.mapped = mmap.mmap(file.fileno(), self.SIZE)
        self.end, self.ord = 0, 0

    def attach(self, engine: Engine) -> None:
        """Write a line for each event that a recorder writes in an iteration."""
        for event in (Events.ITERATION_STARTED, Events.OPTIMIZER_STEP_COMPLETED):
            engine.bus.subscribe(event, self.receive, phase=Phase.COMPUTE, order=FIRST_OF_ALL)
        engine.bus.subscribe(Events.ITERATION_COMPLETED, self.completed, phase=Phase.COMPUTE, order=FIRST_OF_ALL)

    def receive(self, engine: Engine, event: Event) -> None:
        """An event with its payload."""
        self.write(event, None, None)

    def completed(self, engine: Any, event: Event) -> None:
        """An iteration, with its loss and the learning rates."""
        self.write(event, engine.state.output.metrics, engine.learning_rates)

    def write(self, event: Event, output: Any, rates: Any) -> None:
        """The line."""
        self.ord = ord = self.ord + 1
        line = encode_plain(
            LoggedEvent(
                ord, event.engine, event.type, event.epoch, event.iteration, event.payload, output, None, rates,
                seq=event.seq, t=event.time_ns,
            )
        )  # fmt: skip
        content = b'%b,"c":%d}\n' % (line[:-1], zlib.adler32(line))
        end = self.end + len(content)
        if end > self.SIZE:
            self.end, end = 0, len(content)
        self.mapped[self.end : end] = content
        self.end = end


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
    receive, least = recorder._on_event, Lines(folder / "least").receive
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
        "the least, us per event": statistics.median(leasts) * 1e6,
        "recording, bytes per event": size / (events * rounds),
    }
    return found | ({"SummaryWriter / recording": statistics.median(ratios)} if ratios else {})


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

    def __init__(self) -> None:
        self.batch = torch.ones(8, 16), torch.ones(8, 4)
        self.noted: list[float] = []

    def __len__(self) -> int:
        return FIRST + ITERATIONS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            if number in (FIRST, len(self) - 1):
                self.noted.append(time.perf_counter())
            yield self.batch


def seconds_of_steps(handlers: list[Any]) -> float:
    """The time of ITERATIONS - 1 iterations of a Trainer with these handlers."""
    torch.manual_seed(0)
    batches = Batches()
    trainer = Trainer(
        nn.Linear(16, 4),
        batches,
        strategy=SupervisedStrategy("mse"),
        optimizer="sgd",
        config=TrainingConfig(max_epochs=1, device="cpu", seed=0),
        handlers=handlers,
    )
    trainer.train()
    return batches.noted[1] - batches.noted[0]


def recorded_iteration(folder: Path, rounds: int) -> tuple[float, float]:
    """Microseconds that recording, and the least of it, add to an iteration of a Trainer: medians over the rounds."""
    costs, leasts = [], []
    for number in range(rounds):
        recorded = seconds_of_steps([EventRecorder(folder / str(number))])
        alone = seconds_of_steps([])
        costs.append((recorded - alone) / (ITERATIONS - 1))
        leasts.append((seconds_of_steps([Lines(folder / str(number))]) - alone) / (ITERATIONS - 1))
    return 1e6 * statistics.median(costs), 1e6 * statistics.median(leasts)


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
        iteration, least = recorded_iteration(folder / "step", rounds)
        results["recording, us per iteration"] = iteration
        results["the least, us per iteration"] = least
        results["share of a 1 ms step, %"] = iteration / 10
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
        ], [] if "SummaryWriter / recording" in figures else ["SummaryWriter: absent: TensorBoard is not installed"]

    return report(options, f"a log of {options.log_events:,} events", rows)


if __name__ == "__main__":
    raise SystemExit(main())
