"""A trainer and an evaluator on one bus: one order of events, and four ways to subscribe.

    python examples/two_engines_one_bus.py

Both are plain Engines; pulsetrain.Trainer is built like this. The model learns y = 3x + 1 by gradient descent.
"""

import torch
from torch import Tensor, nn

from pulsetrain.engine import Engine, Event, EventBus, Events

Batch = tuple[Tensor, Tensor]


def main() -> list[tuple[int, str, str]]:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    batches = list(zip(x.split(16), (3 * x + 1).split(16), strict=True))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def train(engine: Engine, batch: Batch) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate(engine: Engine, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    bus = EventBus()
    trainer = Engine(train, name="trainer", bus=bus)
    evaluator = Engine(evaluate, name="evaluator", bus=bus)
    received: list[tuple[int, str, str]] = []

    # 1. The whole bus: no sender given. `seq` counts the events of both engines in one order, with or without handlers.
    def note(engine: Engine, event: Event) -> None:
        received.append((event.seq, event.engine, event.type))
        print(f"{event.seq:>4}  {event.engine:<10}{event.type}")

    for event in (Events.STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED):
        bus.subscribe(event, note)

    # 2. One engine of the bus: the evaluator's epochs do not start another evaluation.
    def start_evaluation() -> None:
        evaluator.run(batches)

    bus.subscribe(Events.EPOCH_COMPLETED, start_evaluation, sender=trainer)

    # 3. A plain blinker receiver, held weakly: removed with the last reference to it.
    def receive(sender: Engine, event: Event) -> None:
        print(f"      blinker: the {sender.name}'s mean squared error is {sender.state.output:.5f}")

    bus.signal(Events.COMPLETED).connect(receive, sender=evaluator)

    trainer.run(batches, max_epochs=2)

    # 4. Muted for a while: the event's receivers are not called on any engine, but `seq` continues to count.
    with bus.signal(Events.EPOCH_COMPLETED).muted():
        trainer.run(batches, max_epochs=3)  # continues with a third epoch
    return received


if __name__ == "__main__":
    main()
