"""Custom events with typed payloads: a policy learns to walk, and a handler decides when to stop.

    python examples/custom_events.py

64 walkers have 12 steps to reach the right end of a corridor, 5 cells away; they learn by REINFORCE (Williams 1992).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pulsetrain.engine import Engine, Event, EventEnum

CELLS, START, STEPS, WALKERS = 11, 5, 12, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCompleted:
    """ROLLOUT_COMPLETED: every walker has arrived or run out of steps."""

    arrived: Tensor  # whether each walker reached the end, shape (WALKERS,), on the policy's device


class WalkEvents(EventEnum):
    """Each event's value and the type of its payload, if it has one."""

    ROLLOUT_STARTED = "rollout_started"
    ROLLOUT_COMPLETED = "rollout_completed", RolloutCompleted


def walk(policy: nn.Module) -> tuple[Tensor, Tensor]:
    """Lets every walker walk; returns which arrived, and the log-probability of each walk, both (WALKERS,)."""
    cells, log_probability = torch.full((WALKERS,), START), torch.zeros(WALKERS)
    for _ in range(STEPS):
        choice = torch.distributions.Categorical(logits=policy(cells))
        steps = choice.sample()  # 0: to the left, 1: to the right
        walking = cells < CELLS - 1  # walkers that have arrived stay there
        log_probability = log_probability + choice.log_prob(steps) * walking
        cells = torch.where(walking, (cells + 2 * steps - 1).clamp(min=0), cells)
    return cells == CELLS - 1, log_probability


def main() -> Engine:
    torch.manual_seed(0)
    policy = nn.Embedding.from_pretrained(torch.zeros(CELLS, 2), freeze=False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)

    def learn(engine: Engine, batch: None) -> None:
        engine.fire(WalkEvents.ROLLOUT_STARTED)
        arrived, log_probability = walk(policy)
        engine.fire(WalkEvents.ROLLOUT_COMPLETED, RolloutCompleted(arrived=arrived))
        loss = -((arrived.float() - arrived.float().mean()) * log_probability).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    engine = Engine(learn)
    # Filters read state.rollout: the first of the two events increments it, and both share it.
    engine.register_events(*WalkEvents, event_to_attr=dict.fromkeys(WalkEvents, "rollout"))

    @engine.on(WalkEvents.ROLLOUT_STARTED(once=20))
    def slow_down() -> None:
        optimizer.param_groups[0]["lr"] /= 2

    @engine.on(WalkEvents.ROLLOUT_COMPLETED(every=10))
    def judge(engine: Engine, event: Event) -> None:
        share = event.payload.arrived.float().mean().item()  # copies to the host, so it waits for the device
        print(f"rollout {engine.state.rollout}: {share:.0%} arrive")
        if share > 0.95:
            engine.terminate(reason=f"{share:.0%} arrive after {engine.state.rollout} rollouts")

    engine.run(max_epochs=1, epoch_length=1000)  # no data: the batch is None
    print(f"terminated: {engine.state.stop_reason}")
    return engine


if __name__ == "__main__":
    main()
