"""When a handler runs: filters, phases, several events at once, and removing a handler.

    python examples/decorators.py

A Trainer is an Engine, so all of this works on both. The engine here trains nothing: 2 epochs of 4 batches.
"""

from pulsetrain.engine import Engine, Events, Phase


def main() -> list[str]:
    ran: list[str] = []
    engine = Engine(lambda engine, batch: None)

    def note(what: str) -> None:
        ran.append(f"epoch {engine.state.epoch}, iteration {engine.state.iteration}: {what}")
        print(ran[-1])

    # Filters read the event's own counter: iterations here, epochs below.
    @engine.on(Events.ITERATION_COMPLETED(every=3))
    def at_each_third() -> None:
        note("every=3")

    @engine.on(Events.ITERATION_COMPLETED(once=[1, 8]))
    def at_these() -> None:
        note("once=[1, 8]")

    @engine.on(Events.ITERATION_COMPLETED(after=3, before=6))  # both ends are exclusive: 4 and 5
    def between() -> None:
        note("after=3, before=6")

    def is_power_of_two(engine: Engine, value: int) -> bool:
        return value.bit_count() == 1

    @engine.on(Events.ITERATION_COMPLETED(event_filter=is_power_of_two))
    def at_powers_of_two() -> None:
        note("event_filter=is_power_of_two")

    # Within an event the phase decides, not the order of registration: COMPUTE, ACT (the default), OBSERVE, PERSIST.
    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PERSIST)
    def save() -> None:
        note("phase=PERSIST")

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.OBSERVE)
    def log() -> None:
        note("phase=OBSERVE")

    @engine.on(Events.EPOCH_COMPLETED)
    def decide() -> None:
        note("phase=ACT")

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.COMPUTE)
    def measure() -> None:
        note("phase=COMPUTE")

    # One handler for several events; further arguments are passed on to it.
    engine.add_event_handler(Events.STARTED | Events.COMPLETED | Events.EPOCH_STARTED(once=2), note, "joined")

    # Registering returns a handle that removes the handler: here another handler does so after the first epoch.
    removable = engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), note, "every=2, until removed")
    engine.add_event_handler(Events.EPOCH_COMPLETED(once=1), removable.remove)

    engine.run(range(4), max_epochs=2)
    return ran


if __name__ == "__main__":
    main()
