"""Between two pulses, an iteration of a run on several processes costs what one of a single process does."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from pulsetrain.engine import Events
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make


def test_the_engine_looks_for_a_pulse_where_there_is_one_alone():
    def run(rank: int) -> Any:
        made = make(linear(), DataLoader(pairs(480), 4), max_epochs=1, log_every_n_steps=50, progress=False)
        ended, pulses, looked = made.dispatch(Events.ITERATION_COMPLETED), [], []
        beat = made.agreement.pulse.beat
        made.agreement.pulse.beat = lambda iteration, **options: pulses.append(iteration) or beat(iteration, **options)  # type: ignore[func-returns-value, method-assign]

        @made.on(Events.ITERATION_STARTED)
        def note() -> None:
            at = made.state.iteration
            if ended.always or not ended.low <= at < ended.high:
                looked.append(at)

        made.train()
        return pulses, looked

    (pulses, looked), other = (each.value for each in in_processes(run))
    assert (pulses, looked) == other
    assert {1, 50, 100, 120} <= set(pulses) <= {*range(1, 6), 50, 100, 120}
    log_points = (50, 100, 120)  # before which the strategy's metrics are asked for
    assert set(looked) <= {*pulses, *(each + 1 for each in pulses), *(each - 1 for each in log_points)}
