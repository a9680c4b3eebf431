"""Every learning-rate schedule in one picture, and three ways to use one.

    python examples/schedules.py            (or with a folder for schedules.png: python examples/schedules.py FOLDER)

A schedule is a pure function of the updates already made: it can be evaluated, composed and drawn without an optimizer.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from pulsetrain.engine.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Scaled,
    Step,
    Warmup,
    create_scheduler,
    plot,
    update_optimizer,
)

PEAK = 1e-3
SCHEDULES = {
    "constant": Constant(PEAK),
    "linear": Linear(PEAK, 1000),
    "polynomial": Polynomial(PEAK, 1000, power=3.0),
    "step": Step(PEAK, step_size=250, gamma=0.5),
    "multi-step": MultiStep(PEAK, milestones=(600, 850), gamma=0.3),
    "exponential": Exponential(PEAK, gamma=0.997),
    "cosine": Cosine(PEAK, 1000, min_lr=1e-4),
    "cosine with restarts": CosineRestarts(PEAK, first_cycle=150, multiplier=2),
    "warm-up, inverse root": Warmup(PEAK, 100) >> InverseSqrt(PEAK, timescale=100),
    "warm-up, stable, decay": WSD(PEAK, 1000, decay_steps=200, warmup_steps=100, decay="sqrt"),
    "one cycle": OneCycle(PEAK, 1000),
    "half of warm-up, cosine": Scaled(Warmup(PEAK, 100) >> Cosine(PEAK, 900), 0.5),
}


def main(folder: Path) -> None:
    for name, schedule in SCHEDULES.items():
        print(f"{name:24}", *(f"{schedule.get_lr(step):.6f}" for step in (0, 50, 100, 500, 999)))

    # >> switches when the first one ends; the second one counts from 0.
    composed = Warmup(PEAK, 100) >> Linear(PEAK, 400, min_lr=5e-4) >> Cosine(5e-4, 500)
    print(f"{'composed':24}", *(f"{composed.get_lr(step):.6f}" for step in (0, 50, 100, 500, 999)))

    # In a custom loop: set the rate, then make the update. Groups keep their ratio to the default rate.
    weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": PEAK / 10}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK)
    update_optimizer(optimizer, composed.get_lr(50))
    print("two groups at update 50:", *(f"{group['lr']:.6f}" for group in optimizer.param_groups))

    # Or as a torch scheduler, which any other trainer can step.
    scheduler = create_scheduler(torch.optim.SGD([weight], lr=PEAK), "cosine", 10, 100, warmup_steps=100)
    print("a torch scheduler:", isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler))

    plot(SCHEDULES, steps=1000, path=folder / "schedules.png")
    print("drawn:", folder / "schedules.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
