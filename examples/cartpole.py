"""PPO learns to balance a pole on a cart in about ten seconds, and stops when it succeeds.

    python examples/cartpole.py [--seed N] [--rollouts N] [--run-dir FOLDER] [--resume]

Needs gymnasium (pip install 'pulsetrain[gymnasium]'). An episode has at most 500 steps, each with reward 1.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.handlers import Checkpointer, EventRecorder


def net(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    hidden = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class ActorCritic(nn.Module):
    """An actor and a critic, two small networks over one observation."""

    def __init__(self, observation: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = net(observation, actions), net(observation, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, actions) and values (batch,) of observations (batch, observation)."""
        return self.actor(observations), self.critic(observations).squeeze(-1)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of weights, actions and episodes [%(default)s]")
    parser.add_argument("--rollouts", type=int, default=100, help="of 8 x 128 steps, at most [%(default)s]")
    parser.add_argument("--run-dir", default="runs/cartpole", help="log and checkpoints go there [%(default)s]")
    parser.add_argument("--resume", action="store_true", help="continue that run; give it the same --rollouts")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    rollouts = EnvironmentRollouts("CartPole-v1", environments=8, steps=128)
    config = TrainingConfig(max_epochs=options.rollouts, optimizer="adam", learning_rate=2.5e-3, seed=options.seed,
                            schedule="linear", min_lr_ratio=0.05, clip_grad_norm=0.5)  # fmt: skip
    strategy = PPOStrategy(minibatch_size=256, minibatch_epochs=4, gamma=0.99, lam=0.95)
    handlers = [EventRecorder(options.run_dir), Checkpointer(options.run_dir, every=Every(epochs=10))]
    trainer = Trainer(ActorCritic(4, 2), rollouts, strategy=strategy, config=config, handlers=handlers)

    @trainer.on(Events.POLICY_UPDATED(every=5))
    def report(trainer: Trainer) -> None:
        found, number = trainer.state.metrics, trainer.state.rollout_round
        print(f"rollout {number:3}  return {found.get('rollout/return', 0.0):5.1f}  kl {found['policy/kl']:.4f}")

    @trainer.on(Events.EPOCH_COMPLETED(every=10))
    def judge(trainer: Trainer) -> None:
        if min(rollouts.evaluate(episodes=5)) == 500.0:
            trainer.terminate(reason="five episodes in a row were as long as can be")

    begun = time.process_time()
    trainer.train(resume="latest" if options.resume else None)
    seconds = time.process_time() - begun
    print(f"stopped: {trainer.state.stop_reason or 'all rollouts made'}; {seconds:.0f} s of CPU time")
    returns = rollouts.evaluate(episodes=20, seed=options.seed + 1)
    average = sum(returns) / len(returns)
    print(f"average return over 20 episodes: {average:.1f}")
    return average


if __name__ == "__main__":
    main()
