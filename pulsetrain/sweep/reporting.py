"""Reports a trial's metric to its sweep, and ends the trial when the pruner or the interval says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pulsetrain.engine import Engine, Event, Events, Phase
from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.training_run import total_iterations_of
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.metric_values.best_value import judged_name, subscribe_judge
from pulsetrain.sweep.spec import read_saved
from pulsetrain.sweep.study import adopted, open_study

if TYPE_CHECKING:
    from pulsetrain.sweep.spec import Spec

__all__ = ["INTERVAL_ENDS", "PRUNED", "SweepTrial"]

PRUNED = "pruned by the sweep"  # how the reasons begin with which this handler terminates a run
INTERVAL_ENDS = "the interval of the population ends"
DECISION = "pruner_decision"  # the trial's attribute with the pruner's last decision, stored before it is acted upon


class SweepTrial(Handler):
    """Reports each validation's metric to the sweep, and terminates the run where its pruner says so.

    `pulsetrain sweep` adds it to the configuration of each trial that may be pruned or is part of a population.

    Args:
        sweep: the sweep's folder.
        trial: the number of the trial.
        until: the run ends at the first validation after so many iterations, counted from the beginning of its
            lineage; None: as its configuration says.

    Raises:
        ConfigurationError: a value out of range, or the folder is not a sweep's; when the run starts: it is too short
            for the generations of the population.
    """

    trial: int
    until: int | None
    reason: str

    def __init__(self, sweep: str, trial: int, until: int | None = None) -> None:
        check_whole_number("SweepTrial", "trial", trial, at_least=0)
        self.trial, self.until = trial, until
        self.spec: Spec = read_saved(Path(sweep))
        self.metric: str = self.spec.metric[0]
        self.reports: int = 0  # validations that reported the metric
        self.reason = ""  # why the run has been ended
        self._trial: Any = None
        self._storage: Any = None

    def attach(self, engine: Engine) -> Self:
        """Report each validation of the engine, in phase ACT."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe_judge(subscribe, self._report, "SweepTrial", self.metric, engine, Phase.ACT)
            subscribe(Events.STARTED, self._on_started, phase=Phase.ACT)
        return self

    def state_dict(self) -> dict[str, object]:
        return {"trial": self.trial, "reports": self.reports, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reports = int(state["reports"])
        # a fork starts with the state of its parent, which has ended
        self.reason = str(state["reason"]) if state["trial"] == self.trial else ""

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration > 0 and self.reason:  # killed after the decision, before the run could end
            engine.terminate(reason=self.reason, alike=True)
        needed, total = self.spec.generations * (self.spec.interval or 0), total_iterations_of(engine)
        if self.until is not None and total is not None and total < needed:
            raise ConfigurationError(
                f"the run ends after {total} iterations, and the population needs generations x interval = {needed}; "
                "raise training.max_epochs, or lower interval or generations",
                "SweepTrial",
                until=self.until,
            )

    def _report(self, engine: Engine, event: Event) -> None:
        name = judged_name("SweepTrial", self.metric, engine, event)
        if name is None:
            return
        self.reports += 1
        if self.spec.pruner != "none" and self._should_prune(float(event.payload.metrics[name])):
            self.reason = f"{PRUNED}: {name} after {self.reports} validations, by {self.spec.pruner}"
        elif self.until is not None and engine.state.iteration >= self.until:
            self.reason = f"{INTERVAL_ENDS}: {self.until} iterations"
        if self.reason:
            engine.terminate(reason=self.reason, alike=True)

    def _should_prune(self, value: float) -> bool:
        """What the pruner decides at this report, which it is asked once: the decision outlives the process."""
        if self._trial is None:
            study = open_study(self.spec, create=False)
            study._storage = self._storage = _HeldBack(study._storage)  # noqa: SLF001  # there is no public way
            self._trial = adopted(study, self.trial)
        trial, storage = self._trial, self._storage
        stored = storage.get_trial(trial._trial_id)  # noqa: SLF001
        if self.reports not in stored.intermediate_values:
            trial.report(value, self.reports)
        if any(each > self.reports for each in stored.intermediate_values):  # killed later, and not pruned here
            return False
        decision = stored.user_attrs.get(DECISION)
        if decision is None or decision["report"] != self.reports:
            pruned = bool(trial.should_prune())
            decision = {"report": self.reports, "pruned": pruned, "attributes": storage.held_back}
            trial.set_user_attr(DECISION, decision)
        storage.write(trial._trial_id, decision["attributes"])  # noqa: SLF001
        return bool(decision["pruned"])


class _HeldBack:
    """Optuna's storage, in which a pruner's attributes of a trial wait until the decision is stored.

    ASHA notes that a trial has reached a rung before it decides there, and does not decide there again. If the process
    were killed between the two, the trial would pass the rung.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.held_back: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Hold an attribute back; pruners set those of the trial that they judge."""
        self.held_back[key] = value

    def write(self, trial_id: int, attributes: Mapping[str, Any]) -> None:
        """Store attributes that were held back."""
        for key, value in attributes.items():
            self._storage.set_trial_system_attr(trial_id, key, value)
        self.held_back = {}
