"""Writes docs/events.md: the events with their payloads, and those of a small run in their order.

python docs/draw_events.py            # writes the page
python docs/draw_events.py --check    # exits with 1 if the page is out of date, and prints what differs
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pulsetrain import EventLog, Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.events.names import COUNTERS
from pulsetrain.handlers import Checkpointer, EventRecorder
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents
from pulsetrain.testing import tiny_loader, tiny_model

PAGE = Path(__file__).with_name("events.md")
OF_IGNITE = 13  # the first events have the names and the meaning of ignite's

_FILTERS = """\
## Filters, and cadences: `Every`

An event that is called with a filter is due at some of its firings. The counter is the one in the table above.

| filter | due at |
|---|---|
| `Events.ITERATION_COMPLETED(every=10)` | iterations 10, 20, 30 ... |
| `(once=3)`, `(once=[3, 7])` | these values of the counter only |
| `(after=100)`, `(before=200)` | the values above or below the bound |
| `(after=100, before=200, every=10)` | 101, 111 ... 191: `every` counts from `after` |
| `(event_filter=function)` | those for which `function(engine, value)` is true |

`Every` is a cadence as a value: what `Checkpointer`, loggers, monitors and `TrainingConfig(validate_every=...)` take.
It names the unit, and the handler subscribes to the event that counts it:

| cadence | the same as |
|---|---|
| `Every(iterations=10)`: batches | `Events.ITERATION_COMPLETED(every=10)` |
| `Every(updates=10)`: optimizer steps | `Events.OPTIMIZER_STEP_COMPLETED(every=10)` |
| `Every(epochs=2)` | `Events.EPOCH_COMPLETED(every=2)` |
| `Every(seconds=600)`: wall time | checked after each iteration; no event's filter |
| `Every(epochs=1, seconds=600)` | both |

`Every(epochs=1) | Every(seconds=600)` is the same as the last line; `|` also joins events. `events()` returns what to
subscribe to, so a function can have a cadence as well:

```python
from pulsetrain import Events, Every, SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.testing import tiny_loader, tiny_model

trainer = Trainer(tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(max_epochs=3))


def iterations_of(events):
    found = []
    trainer.on(events)(lambda engine: found.append(engine.state.iteration))
    return found


third = iterations_of(Events.ITERATION_COMPLETED(every=3))
also_third = iterations_of(Every(iterations=3).events())
joined = iterations_of((Every(iterations=5) | Every(epochs=1)).events())
events = iterations_of(Events.ITERATION_COMPLETED(every=5) | Events.EPOCH_COMPLETED)
trainer.train()
assert third == also_third == [3, 6, 9, 12]
assert joined == events == [4, 5, 8, 10, 12]
```
"""


def page() -> str:
    """The page as the code says it is."""
    return "\n".join([*_beginning(), *_table(), _FILTERS, *_run(), ""])


def _beginning() -> Iterator[str]:
    yield from ["# Events", ""]
    yield (
        "Written by `docs/draw_events.py` from the code. An iteration is one batch; an update is one optimizer step, "
        "of one or several iterations. A filter such as `Events.GRADIENTS_READY(every=10)` reads the counter in the "
        "second column."
    )
    yield ""


def _table() -> Iterator[str]:
    yield from ["## Names and payloads", "", "| event | counter | payload |", "|---|---|---|"]
    for number, event in enumerate((*Events, *FingerprintEvents)):
        kind = event.payload_type
        what = ""
        if kind is not None:
            fields = ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind))
            text = (kind.__doc__ or "").splitlines()[0].partition(": ")[2]
            what = f"{text[:1].upper()}{text[1:]} {fields}"
        origin = " (ignite's)" if number < OF_IGNITE else " (the handler Fingerprints)" if event not in Events else ""
        yield f"| `{event.name}`{origin} | {COUNTERS.get(event, '')} | {what} |"
    yield ""


def _run() -> Iterator[str]:
    yield from ["## A run", ""]
    yield (
        "Two epochs of two batches, two of which make one update, with a validation after each epoch and a checkpoint "
        "at the end. Each line is one event, as it was recorded; those of the evaluator are indented. "
        "`GET_BATCH_STARTED` and `GET_BATCH_COMPLETED`, which are fired around each batch that an engine gets, are "
        "missing: the recorder writes them only on request, or if several processes train together "
        "([Which events](recorder.md#which-events))."
    )
    yield from ["", "```text", "event                        engine     epoch  iteration"]
    for each in _recorded():
        name = each.event if each.engine == "trainer" else f"    {each.event}"
        yield f"{name:<28} {each.engine:<10} {each.epoch:>5} {each.iteration:>10}"
    yield "```"


def _recorded() -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            tiny_model(),
            tiny_loader(batches=2),
            tiny_loader(batches=1),
            strategy=SupervisedStrategy("mse"),
            config=TrainingConfig(
                max_epochs=2,
                seed=0,
                device="cpu",
                accumulate=2,
                clip_grad_norm=1.0,
                log_every_n_steps=2,
                progress=False,
            ),
            handlers=[EventRecorder(folder, grad_norm=True), Checkpointer(folder, Every(epochs=2))],
        ).train()
        return list(EventLog(Path(folder)).read())


def main() -> int:
    """Write the page, or compare it."""
    found = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(found, encoding="utf-8")
        return 0
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    lines = difflib.unified_diff(before.splitlines(), found.splitlines(), PAGE.name, "the code", lineterm="")
    print("\n".join(lines))
    return int(before != found)


if __name__ == "__main__":
    raise SystemExit(main())
