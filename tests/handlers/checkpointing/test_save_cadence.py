"""When saves are due, alone and together with other processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.engine.distributed.pulse import SharedFlag
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.checkpointing.save_cadence import SaveCadence

PULSES = (12, 24, 36, 48, 60, 72, 84, 96)


def saves(every: Any, *, is_main: bool = True, shared: bool = True, seconds_of_a_save: float = 0.1) -> list[int]:
    """The iterations after which a run of 96 iterations of one second each saves; pulses are at each twelfth."""
    now = 0.0
    saved: list[int] = []
    flag = SharedFlag() if shared else None
    cadence = SaveCadence(every, lambda: False, lambda: now)
    engine = Engine(lambda engine, batch: None)

    def save(engine: Engine) -> None:
        nonlocal now
        saved.append(engine.state.iteration)
        now += seconds_of_a_save
        cadence.saved(seconds_of_a_save)

    @engine.on(Events.ITERATION_STARTED)
    def tick() -> None:
        nonlocal now
        now += 1.0

    with Attachment("Saver").to(engine) as subscribe:
        cadence.subscribe(subscribe, save, flag, is_main=is_main)

    @engine.on(Events.ITERATION_COMPLETED)
    def pulse() -> None:
        if flag is not None and engine.state.iteration in PULSES:
            flag.is_up, flag.raised = flag.is_up or flag.raised, False

    engine.run(range(96), max_epochs=1)
    return saved


def test_a_timed_save_is_made_at_the_next_pulse_and_once():
    alone, together = saves("auto", shared=False), saves("auto")
    assert alone[0] == 51, "when 50 iterations have been measured"
    assert together[0] == 60, "the first pulse after that"
    assert set(together) <= set(PULSES)
    assert len(together) == len(set(together))
    assert all(later - earlier >= 5 for earlier, later in pairwise(together))
    once = saves("auto", seconds_of_a_save=1000.0)
    assert once == [60], "the next one has to be paid for by many iterations"


def test_the_clock_of_the_main_process_alone_counts():
    assert saves("auto", is_main=False) == []


@pytest.mark.parametrize("every", [Every(iterations=40), Every(iterations=40) | Every(epochs=1)], ids=str)
def test_what_no_clock_decides_needs_no_pulse(every: Every):
    assert saves(every) == saves(every, shared=False) == saves(every, is_main=False)
    assert saves(every)[0] == 40
