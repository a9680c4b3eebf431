"""Draws the texts of rollouts: by the model, by a copy of it ahead of time, or by a given sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts.ahead import Ahead, WeightsCopy
from pulsetrain.engine.rollouts.base import PolicyTrainer
from pulsetrain.engine.rollouts.completions import Completion, check_completions
from pulsetrain.engine.rollouts.drawing import Sampling
from pulsetrain.engine.rollouts.sampling import Sampler, sampler_of, takes
from pulsetrain.engine.rollouts.sharing import SharedRollout
from pulsetrain.engine.step.backend import InPlaceBackend
from pulsetrain.engine.step.precision import autocast_of

__all__ = ["TextWriter"]

_PLACE = "TextRollouts"


class TextWriter:
    """The part of `TextRollouts` that draws texts of its trainer's policy, and keeps those that were drawn ahead.

    Args:
        trainer: whose policy writes.
        sharing: the processes that share a rollout out.
        draw_rollout: this process's texts of the rollout with this number; it calls `draw`.
        max_new_tokens: the largest number of tokens of a completion.
        end_token, pad_token, pad_to, sampler, sampling, staleness, background, temperature: see `TextRollouts`.

    Raises:
        ConfigurationError: the sampler, the model or the backend does not fit the options.
    """

    age: int

    def __init__(
        self,
        trainer: PolicyTrainer,
        sharing: SharedRollout,
        draw_rollout: Callable[[int], list[Completion]],
        *,
        max_new_tokens: int,
        end_token: int | Sequence[int] | None,
        pad_token: int,
        pad_to: int | None,
        sampler: Sampler | None,
        sampling: Sampling | None,
        staleness: int,
        background: bool,
        temperature: float | None = None,
    ) -> None:
        self.age = 0  # how many updates ago the weights were current that drew the latest texts
        self._trainer, self._sharing, self._draw_rollout = trainer, sharing, draw_rollout
        self._max_new_tokens, self._sampling, self._temperature = max_new_tokens, sampling, temperature
        self._end_token = tuple(end_token) if isinstance(end_token, (list, tuple)) else end_token
        self._copies: list[WeightsCopy] = []  # one for each rollout that is drawn ahead
        self._ahead: Ahead | None = None
        self._staleness, given = staleness, sampler
        models = [trainer.model]
        if staleness:
            self._check_staleness(sampler)
            self._ahead = Ahead(self.update, self._drawn_ahead, background)
            if sampler is None:
                self._copies = [WeightsCopy(trainer.model) for _ in range(staleness)]
                models = [each.model for each in self._copies]
        samplers = [sampler] if sampler is not None else []
        needs: dict[str, object] = {} if sampling is None else {"sampling": sampling}
        if sampler is None:
            agree = sharing.any if is_sharded(trainer.model) else None
            inputs_of, device = trainer.strategy.model_inputs, trainer.backend.device
            samplers = [sampler_of(model, inputs_of, device, pad_token, pad_to, agree) for model in models]
            sampler = samplers[0]
            needs |= {"end_token": end_token} if isinstance(end_token, (list, tuple)) else {}
            needs |= {"staleness": staleness} if staleness else {}
        if needs and not takes(sampler, "sampling"):
            lacks = f"the sample() of {type(models[0]).__name__} does not take draw="
            lacks = lacks if given is None else "sampler= does not take sampling="
            raise ConfigurationError(f"{lacks}, which this needs; add it, or leave this out", _PLACE, **needs)
        if is_sharded(trainer.model) and hasattr(sampler, "update_weights"):
            rule = "it saves the whole model, and each process holds a part; leave the model whole in each process"
            raise ConfigurationError(rule, _PLACE, sampler=type(sampler))
        self._samplers = samplers

    def _check_staleness(self, sampler: Sampler | None) -> None:
        trainer, rule = self._trainer, ""
        if self._sharing.rank.count > 1 or is_sharded(trainer.model) or not isinstance(trainer.backend, InPlaceBackend):
            rule = "needs one process, and a backend that updates the model in place; pass 0"
        elif sampler is not None and not hasattr(sampler, "update_weights"):
            rule = "the sampler may read weights while they change; give it a method update_weights, or pass 0"
        if rule:
            raise ConfigurationError(rule, _PLACE, staleness=self._staleness)

    # -------------------------------------------------------------------------------------------------------- a rollout

    def texts(self, rollout: int) -> list[Completion]:
        """This process's texts of a rollout: drawn now, or before."""
        if self._ahead is None:
            self.update(rollout)
            return self._draw_rollout(rollout)
        texts, self.age = self._ahead.texts(rollout, self._trainer.state.update)
        return texts

    def begin_next(self, rollout: int) -> dict[str, float]:
        """Begins to draw this rollout, the next one, and further ones, if they are drawn ahead.

        Returns:
            Metrics of the latest rollout.
        """
        if self._ahead is None:
            return {}
        for number in range(rollout, rollout + self._staleness):
            self._ahead.begin(number, self._trainer.state.update)
        return {"staleness": float(self.age)}

    def draw(self, prompts: list[list[int]], seeds: Sequence[int], rollout: int) -> list[Completion]:
        """One completion of each prompt, by random numbers from its seed, for the rollout of this number.

        Raises:
            Exception: the exception of the sampler, with a note about the prompts.
            TypeError, ValueError: it returned something else than texts, or the model does not know a token.
        """
        self._check_known("a prompt, or what follows it,", prompts)
        sampler = self._samplers[rollout % len(self._samplers)]
        temperature = self._trainer.strategy.temperature if self._temperature is None else self._temperature
        options: dict[str, Any] = {"temperature": temperature, "end_token": self._end_token}
        offered: dict[str, Any] = {"sampling": self._sampling, "seeds": list(seeds)}
        offered |= {} if self._ahead is None else {"log_probs": True}
        options |= {name: value for name, value in offered.items() if takes(sampler, name)}
        try:
            with autocast_of(self._trainer.backend)():
                found = sampler([list(each) for each in prompts], self._max_new_tokens, **options)
        except Exception as error:
            low, high = min(map(min, prompts), default=0), max(map(max, prompts), default=0)
            error.add_note(f"in {_PLACE}, while drawing texts for {len(prompts)} prompts of tokens {low} to {high}")
            raise
        texts = check_completions(_PLACE, found, len(prompts), self._max_new_tokens)
        self._check_known("a text of the sampler", [each.tokens for each in texts])
        return texts

    def _check_known(self, what: str, rows: Sequence[list[int]]) -> None:
        """Rejects tokens that the model does not know, which would bring a GPU down."""
        most = self._trainer.strategy.vocabulary
        wrong = [token for row in rows for token in (min(row), max(row)) if token < 0 or (most and token >= most)]
        if wrong:
            known = "tokens are numbered from 0" + (f", and the model's vocabulary has {most}" if most else "")
            raise ValueError(f"{_PLACE}: {what} has the token {wrong[0]}; {known}; use the model's own tokenizer")

    def _drawn_ahead(self, rollout: int) -> list[Completion]:
        with torch.no_grad():  # a thread has its own mode
            return self._draw_rollout(rollout)

    def update(self, rollout: int) -> None:
        """Gives a sampler with weights of its own the policy's; the other processes wait for the main one."""
        if self._copies:  # nothing is drawn by this copy any more: that rollout has been learnt from
            self._copies[rollout % len(self._copies)].update(self._trainer.model)
        update = getattr(self._samplers[0], "update_weights", None)
        if update is None:
            return
        if self._ahead is not None:
            self._ahead.wait()  # texts that are being drawn by the weights from before
        if self._sharing.rank.rank == 0:
            update(self._trainer.model, rollout)
        self._sharing.any(False)

    # ------------------------------------------------------------------------------------------------------------ state

    def restart(self) -> None:
        """Returns to the state before the first rollout."""
        if self._ahead is not None:
            self._ahead.reset()

    def state_dict(self, rollout: int) -> dict[str, Any]:
        """The texts of rollouts after this one that were drawn ahead; it waits for them."""
        return {} if self._ahead is None else {"ahead": self._ahead.state_dict(rollout)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        if self._ahead is not None:
            self._ahead.load_state_dict(state.get("ahead", []))
