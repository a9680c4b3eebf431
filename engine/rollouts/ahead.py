"""Texts of the next rollouts, drawn while the policy learns from the current one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.rollouts.completions import Completion

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["Ahead", "WeightsCopy"]


class WeightsCopy:
    """A copy of a model, in eval mode, which keeps the weights that it was last given.

    >>> model = nn.Linear(1, 1)
    >>> kept = WeightsCopy(model)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> kept.update(model)
    >>> _ = nn.init.constant_(model.weight, 3.0)
    >>> kept.model.weight.item()
    2.0
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Module = copy.deepcopy(model).eval().requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        """Takes the current weights of the model that it is a copy of."""
        with torch.no_grad():
            self.model.load_state_dict(model.state_dict())


class Ahead:
    """The texts of rollouts by their number, drawn in a thread or when they are asked for.

    >>> ahead = Ahead(prepare=lambda number: None, draw=lambda number: [Completion([number])], background=False)
    >>> ahead.begin(2, update=7)
    >>> ahead.texts(2, update=9)
    ([Completion(tokens=[2], log_probs=None, written=None)], 2)

    Args:
        prepare: called with the number of a rollout before its texts are drawn, in the thread that asks for them.
        draw: the texts of a rollout.
        background: whether a thread draws them; otherwise `begin` does.
    """

    def __init__(
        self, prepare: Callable[[int], None], draw: Callable[[int], list[Completion]], background: bool
    ) -> None:
        self._prepare, self._draw, self._background = prepare, draw, background
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[int, tuple[Future[list[Completion]], int]] = {}

    def begin(self, number: int, update: int) -> None:
        """Draws the texts of a rollout by the present weights; `update` is the number of updates that made those."""
        if number in self._begun:
            return
        self._prepare(number)
        if self._background:
            self._pool = self._pool or ThreadPoolExecutor(1, "TextRollouts")
            self._begun[number] = self._pool.submit(self._draw, number), update
        else:
            self._begun[number] = _done(self._draw(number)), update

    def texts(self, number: int, update: int) -> tuple[list[Completion], int]:
        """The texts of a rollout, and how many updates ago the weights were current that drew them; it waits for them.

        They are kept until the next rollout's are asked for, in case this one has to start again.

        Raises:
            Exception: the exception of `draw`; the next call draws once more.
        """
        for other in [each for each in self._begun if each < number]:
            del self._begun[other]
        self.begin(number, update)
        future, then = self._begun[number]
        try:
            return future.result(), update - then
        except BaseException:
            if future.done() and future.exception() is not None:  # otherwise the wait was interrupted
                del self._begun[number]
            raise

    def wait(self) -> None:
        """Returns when no texts are being drawn; an error is raised by `texts`."""
        for future, _ in self._begun.values():
            future.exception()

    def reset(self) -> None:
        """Forgets all texts, after those that are being drawn."""
        self.wait()
        self._begun = {}

    def state_dict(self, after: int) -> list[dict[str, Any]]:
        """The texts of rollouts after this one; it waits for them. Those that could not be drawn are left out."""
        return [
            {
                "number": number,
                "update": update,
                "tokens": [torch.tensor(each.tokens) for each in future.result()],
                "log_probs": [_as_tensor(each.log_probs) for each in future.result()],
            }
            for number, (future, update) in sorted(self._begun.items())
            if number > after and future.exception() is None
        ]

    def load_state_dict(self, state: list[Mapping[str, Any]]) -> None:
        """Restores the result of `state_dict`."""
        self.reset()
        for each in state:
            pairs = zip(each["tokens"], each["log_probs"], strict=True)
            texts = [
                Completion(tokens.tolist(), None if likely is None else likely.tolist()) for tokens, likely in pairs
            ]
            self._begun[each["number"]] = _done(texts), each["update"]


def _as_tensor(log_probs: list[float] | None) -> Tensor | None:
    return None if log_probs is None else torch.tensor(log_probs, dtype=torch.float64)


def _done(texts: list[Completion]) -> Future[list[Completion]]:
    future: Future[list[Completion]] = Future()
    future.set_result(texts)
    return future
