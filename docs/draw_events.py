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
from pulsetrain.testing import tiny_loader, tiny_model

PAGE = Path(__file__).with_name("events.md")
OF_IGNITE = 13  # the first events have the names and the meaning of ignite's


def page() -> str:
    """The page as the code says it is."""
    return "\n".join([*_beginning(), *_table(), *_run(), ""])


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
    for number, event in enumerate(Events):
        kind = event.payload_type
        what = ""
        if kind is not None:
            fields = ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind))
            text = (kind.__doc__ or "").splitlines()[0].partition(": ")[2]
            what = f"{text[:1].upper()}{text[1:]} {fields}"
        of_ignite = "" if number >= OF_IGNITE else " (ignite's)"
        yield f"| `{event.name}`{of_ignite} | {COUNTERS.get(event, '')} | {what} |"
    yield ""


def _run() -> Iterator[str]:
    yield from ["## A run", ""]
    yield (
        "Two epochs of two batches, two of which make one update, with a validation after each epoch and a checkpoint "
        "at the end. Each line is one event, as it was recorded; those of the evaluator are indented."
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
