"""A recurrent layer for policies that act in episodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_whole_number

__all__ = ["EpisodicLSTM"]


class EpisodicLSTM(nn.Module):
    """An LSTM over sequences of steps, whose state is 0 at the first step of each episode.

    >>> lstm = EpisodicLSTM(3, 4)
    >>> starts = torch.tensor([[False, True]])
    >>> hidden, state = lstm(torch.ones(1, 2, 3), (torch.ones(1, 4), torch.ones(1, 4)), starts)
    >>> from_zero, _ = lstm(torch.ones(1, 1, 3), lstm.initial_state(1), starts[:, 1:])
    >>> torch.equal(hidden[:, 1:], from_zero)
    True

    Args:
        inputs: the width of its inputs.
        hidden: the width of its state.

    Raises:
        ConfigurationError: a width is not a whole number of at least 1.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        check_whole_number("EpisodicLSTM", "inputs", inputs)
        check_whole_number("EpisodicLSTM", "hidden", hidden)
        self.cell: nn.LSTMCell = nn.LSTMCell(inputs, hidden)

    def initial_state(self, count: int) -> tuple[Tensor, Tensor]:
        """The state before an episode, for that many environments: two tensors (count, hidden)."""
        zeros = self.cell.weight_hh.new_zeros(count, self.cell.hidden_size)
        return zeros, zeros

    def forward(
        self, inputs: Tensor, state: tuple[Tensor, Tensor], starts: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden values of each step, and the state after the last.

        Args:
            inputs: shape (batch, steps, inputs).
            state: before the first step, two tensors (batch, hidden).
            starts: whether a step is the first of its episode, shape (batch, steps).
        """
        hidden, memory = state
        found = []
        for step, keep in zip(inputs.unbind(1), (~starts).unsqueeze(-1).unbind(1), strict=True):
            hidden, memory = self.cell(step, (hidden * keep, memory * keep))
            found.append(hidden)
        return torch.stack(found, 1), (hidden, memory)
