"""Posting: from handlers, other threads and signal handlers, delivered at the loop's next safe point."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

import pytest

from pulsetrain.engine import Engine, EventEnum, Events
from pulsetrain.engine.events.payloads import Preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMeasured:
    mean: float


class RolloutEvents(EventEnum):
    ROLLOUT_STARTED = "rollout_started"
    REWARD_MEASURED = "reward_measured", RewardMeasured


@pytest.fixture
def rollout(engine):
    engine.register_events(*RolloutEvents, event_to_attr={RolloutEvents.REWARD_MEASURED: "reward"})
    return engine


def test_a_post_is_delivered_at_the_next_safe_point(engine, make_recorder):
    story = make_recorder()

    def step(engine, batch):
        if batch == 1:
            engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))

    trainer = Engine(step)
    story.attach(trainer)
    trainer.run(range(3))
    position = story.types.index("preempted")
    assert story.events[position - 1].type == "iteration_completed"
    assert story.events[position].iteration == 2
    assert story.events[position].payload == Preempted(signal="SIGTERM")
    assert story.types.count("preempted") == 1


def test_posts_are_delivered_in_order(rollout):
    seen = []
    rollout.on(RolloutEvents.REWARD_MEASURED)(lambda engine, event: seen.append(event.payload.mean))

    @rollout.on(Events.ITERATION_STARTED)
    def post_three():
        for number in range(3):
            rollout.post(RolloutEvents.REWARD_MEASURED, RewardMeasured(mean=number))
        assert len(seen) % 3 == 0  # not yet

    rollout.run([1, 2])
    assert seen == [0, 1, 2, 0, 1, 2]


def test_a_post_to_an_idle_engine_waits_for_its_next_run(rollout, log_of):
    log = log_of(rollout, Events.STARTED, Events.EPOCH_STARTED)
    rollout.on(RolloutEvents.ROLLOUT_STARTED)(lambda: log.append("posted"))
    rollout.post(RolloutEvents.ROLLOUT_STARTED)
    assert log == []
    rollout.run([1])
    assert log == ["STARTED", "posted", "EPOCH_STARTED"]


def test_a_post_from_the_last_handler_waits_for_the_next_run(rollout):
    seen = []
    rollout.on(RolloutEvents.ROLLOUT_STARTED)(lambda: seen.append(1))
    rollout.on(Events.COMPLETED)(lambda: rollout.post(RolloutEvents.ROLLOUT_STARTED))
    rollout.run([1])
    assert seen == []
    rollout.run([1])
    assert seen == [1]


def test_a_handler_that_posts_its_own_event_does_not_hang_the_loop(rollout):
    seen = []

    @rollout.on(RolloutEvents.ROLLOUT_STARTED)
    def again():
        seen.append(rollout.state.iteration)
        rollout.post(RolloutEvents.ROLLOUT_STARTED)

    rollout.post(RolloutEvents.ROLLOUT_STARTED)
    rollout.run([1, 2])
    assert seen[0] == 0
    assert seen[-1] == 2
    assert len(seen) < 20  # once a safe point


def test_a_posted_handler_may_terminate(rollout):
    rollout.on(RolloutEvents.ROLLOUT_STARTED)(rollout.terminate)
    rollout.on(Events.ITERATION_COMPLETED(once=2))(lambda: rollout.post(RolloutEvents.ROLLOUT_STARTED))
    rollout.run(range(10))
    assert rollout.state.iteration == 2


def test_posts_left_by_a_failing_one_are_delivered_in_the_next_run(rollout):
    seen = []

    @rollout.on(RolloutEvents.REWARD_MEASURED)
    def take(engine, event):
        seen.append(event.payload.mean)
        if event.payload.mean == 0:
            raise KeyError("first")

    for number in range(3):
        rollout.post(RolloutEvents.REWARD_MEASURED, RewardMeasured(mean=number))
    with pytest.raises(KeyError):
        rollout.run([1])
    rollout.run([1], max_epochs=2)
    assert seen == [0, 1, 2]


def test_a_post_from_another_thread_is_delivered_on_the_training_thread(rollout):
    seen = []
    rollout.on(RolloutEvents.REWARD_MEASURED)(
        lambda engine, event: seen.append((event.payload.mean, threading.current_thread()))
    )

    def worker():
        for number in range(100):
            rollout.post(RolloutEvents.REWARD_MEASURED, RewardMeasured(mean=number))

    @rollout.on(Events.ITERATION_STARTED(once=2))
    def work():
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()

    rollout.run(range(3))
    assert seen == [(number, threading.current_thread()) for number in range(100)]
    assert rollout.state.reward == 100


def test_posts_of_many_threads_all_arrive_each_threads_in_order(rollout):
    seen = []
    rollout.on(RolloutEvents.REWARD_MEASURED)(lambda engine, event: seen.append(event.payload.mean))

    def worker(offset):
        for number in range(200):
            rollout.post(RolloutEvents.REWARD_MEASURED, RewardMeasured(mean=offset + number))

    threads = [threading.Thread(target=worker, args=(1000 * i,)) for i in range(4)]
    rollout.on(Events.STARTED)(lambda: [thread.start() for thread in threads])
    rollout.on(Events.ITERATION_COMPLETED)(lambda: [thread.join() for thread in threads])
    rollout.run([1])
    assert len(seen) == 800
    for i in range(4):
        assert [value for value in seen if value // 1000 == i] == [1000 * i + number for number in range(200)]


def test_a_post_from_a_real_signal_handler_is_delivered_at_the_next_safe_point(engine, recorder):
    def handle(number, frame):
        engine.post(Events.PREEMPTED, Preempted(signal=signal.Signals(number).name))

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        recorder.attach(engine)
        engine.on(Events.ITERATION_STARTED(once=2))(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        engine.on(Events.PREEMPTED)(lambda: engine.terminate(reason="preempted"))
        engine.run(range(10))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert recorder.of(Events.PREEMPTED)[0].payload == Preempted(signal="SIGUSR1")
    assert engine.state.iteration == 2
    assert engine.state.stop_reason == "preempted"
    assert recorder.types[-1] == "completed"


def test_a_signal_during_evaluation_is_delivered_by_the_trainer_afterwards(make_engine, recorder):
    trainer = make_engine(name="trainer")
    evaluator = make_engine(
        step=lambda engine, batch: os.kill(os.getpid(), signal.SIGUSR1), name="evaluator", bus=trainer.bus
    )
    previous = signal.signal(signal.SIGUSR1, lambda *_: trainer.post(Events.PREEMPTED, Preempted(signal="SIGUSR1")))
    try:
        recorder.attach(trainer.bus)
        trainer.on(Events.EPOCH_COMPLETED)(lambda: evaluator.run([1]))
        trainer.run([1])
    finally:
        signal.signal(signal.SIGUSR1, previous)
    story = [(event.engine, event.type) for event in recorder.events]
    assert story.index(("trainer", "preempted")) > story.index(("evaluator", "completed"))
    assert story.index(("trainer", "preempted")) < story.index(("trainer", "completed"))
