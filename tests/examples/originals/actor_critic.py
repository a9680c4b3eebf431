"""The actor and its critic with a loop written by hand."""

from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical
from tqdm import trange

from examples.ported.models import ActorCritic

ENVIRONMENTS, STEPS, GAMMA, LAMBDA = 8, 32, 0.99, 0.95


class Actors:
    """Environments in which the policy acts; an episode that ends is followed by the next."""

    def __init__(self, make_environment):
        self.environments = [make_environment() for _ in range(ENVIRONMENTS)]
        self.seen = [each.reset()[0] for each in self.environments]
        self.gained = [0.0] * ENVIRONMENTS

    @torch.no_grad()
    def collect(self, model, device):
        """Steps with advantages and returns, and the returns of the episodes that ended."""
        observations, actions, values, rewards, dones, ended = [], [], [], [], [], []
        for _ in range(STEPS):
            observation = torch.tensor(np.stack(self.seen), device=device)
            logits, value = model(observation)
            action = Categorical(logits=logits).sample()
            reward, done = torch.zeros(ENVIRONMENTS, device=device), torch.zeros(ENVIRONMENTS, device=device)
            for i, environment in enumerate(self.environments):
                self.seen[i], gain, terminated, truncated, _ = environment.step(action[i].item())
                self.gained[i] += gain
                reward[i], done[i] = gain, terminated or truncated
                if truncated and not terminated:  # it would have continued
                    reward[i] += GAMMA * model(torch.tensor(self.seen[i], device=device)[None])[1][0]
                if terminated or truncated:
                    ended.append(self.gained[i])
                    self.seen[i], self.gained[i] = environment.reset()[0], 0.0
            observations.append(observation)
            actions.append(action)
            values.append(value)
            rewards.append(reward)
            dones.append(done)
        next_value, advantage = model(torch.tensor(np.stack(self.seen), device=device))[1], 0.0
        advantages = []
        for reward, value, done in zip(reversed(rewards), reversed(values), reversed(dones), strict=True):
            error = reward + GAMMA * (1 - done) * next_value - value
            advantage = error + GAMMA * LAMBDA * (1 - done) * advantage
            advantages.insert(0, advantage)
            next_value = value
        advantages = torch.cat(advantages)
        return torch.cat(observations), torch.cat(actions), advantages, advantages + torch.cat(values), ended


def train(model, make_environment, folder, rollouts=300):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    last, best = Path(folder, "last.pt"), Path(folder, "best.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    first_rollout, best_return = 0, -float("inf")
    torch.manual_seed(0)
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_rollout, best_return = saved["rollout"], saved["best_return"]
    actors = Actors(make_environment)
    for rollout in trange(first_rollout, rollouts):
        observations, actions, advantages, returns, ended = actors.collect(model, device)
        logits, values = model(observations)
        policy = Categorical(logits=logits)
        policy_loss = -(policy.log_prob(actions) * advantages).mean()
        value_loss = 0.5 * (values - returns).square().mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if ended:
            mean_return = sum(ended) / len(ended)
            print(f"rollout {rollout + 1}: loss {loss.item():.4f}, return {mean_return:.1f}")
            if mean_return > best_return:
                best_return = mean_return
                torch.save(model.state_dict(), best)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "rollout": rollout + 1, "best_return": best_return}, last)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(ActorCritic(), lambda: gymnasium.make("CartPole-v1"), "runs/actor_critic")
