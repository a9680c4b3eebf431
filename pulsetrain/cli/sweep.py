"""`pulsetrain sweep`: trains a configuration with many settings, and finds the best."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from pulsetrain.cli import main
from pulsetrain.cli.interrupts import sigterm_interrupts
from pulsetrain.cli.reports import FAILED, OK, STOPPED, until_closed
from pulsetrain.engine.metrics import infer_mode
from pulsetrain.engine.plain_text import plain
from pulsetrain.runs.summary import is_in_progress, is_run, summarize
from pulsetrain.sweep.population import lineage_of
from pulsetrain.sweep.results import SweepResults, Trial, read_results, text_of
from pulsetrain.sweep.spec import Spec, read_saved, read_spec

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the sweep, or print its table."""
    if arguments.status:
        folder = arguments.sweep if arguments.sweep.is_dir() else Path(_read(arguments).folder)
        with until_closed():
            found = read_results(folder)
            print(_table(replace(found, trials=tuple(map(_noting_killed, found.trials)))))
        return OK
    spec = _read(arguments)
    from pulsetrain.sweep.coordinator import check_sweep, run_sweep

    check_sweep(spec)
    if not arguments.train:
        _note_replay(arguments.sweep, spec)
    for metric, mode in spec.directions.items():
        if infer_mode(metric) not in (None, mode):
            other = "smaller" if mode == "max" else "larger"
            print(f"pulsetrain: note: mode={mode} for {metric}, of which {other} values are usually better",
                  file=sys.stderr)  # fmt: skip
    try:
        with sigterm_interrupts():
            results = run_sweep(
                spec, main, lambda trial: print(_line(trial), file=sys.stderr, flush=True), arguments.worker
            )
    except KeyboardInterrupt:
        print(f"\npulsetrain: stopped; the same command continues the sweep in {spec.folder}", file=sys.stderr)
        return STOPPED
    others_train = any(trial.state == "running" for trial in results.trials)  # workers, or another machine
    is_last = results.best is not None and not (others_train and arguments.worker is not None)
    written = _written(spec, results) if is_last else {}  # before the output, whose reader may have left
    with until_closed():
        print(_table(results))
        if others_train:
            print("\nother processes train the rest; the last one writes the results", file=sys.stderr)
        elif results.best is None:
            print("pulsetrain: error: no trial has completed; the table has the errors", file=sys.stderr)
        if written:
            print("\n" + "\n".join(f"{name:14} {text}" for name, text in written.items()))
    return FAILED if results.best is None and not others_train else OK


def _written(spec: Spec, results: SweepResults) -> dict[str, object]:
    """Write the configuration of the best trial, or of each on the Pareto front, and the page."""
    from pulsetrain.sweep.pictures import write_pictures
    from pulsetrain.sweep.study import front_of, open_study

    folder = Path(spec.folder)
    spec = replace(spec, study=read_saved(folder).study)  # the folder may have been renamed since the sweep began
    said: dict[str, object] = {}
    if len(spec.metric) > 1:  # none of the front is better than the others
        front = front_of(open_study(spec, create=False))
        for trial in results.trials:
            if trial.number in front:
                _write_config(spec, trial, folder / "front" / f"{trial.number:04d}.yaml")
        said |= {"Pareto front": f"trials {', '.join(map(str, front))}", "configurations": folder / "front"}
    elif (best := results.best) is not None:
        _write_config(spec, best, folder / "best.yaml")
        where = f"replayed from {', '.join(spec.replay)}" if spec.replay else best.folder
        said |= {"best trial": f"{best.number}: {where}"}
        if spec.sampler == "population":
            said |= {"lineage": " -> ".join(map(str, lineage_of(best.folder)))}
        said |= {"configuration": folder / "best.yaml"}
    return {**said, "pictures": write_pictures(spec)}


def _read(arguments: argparse.Namespace) -> Spec:
    given = {name: getattr(arguments, name) for name in ("trials", "workers", "folder")}
    given["replay"] = [] if arguments.train else None
    return read_spec(arguments.sweep, {name: value for name, value in given.items() if value is not None})


def _note_replay(path: Path, spec: Spec) -> None:
    """Print that recorded runs answer, or how they could."""
    from pulsetrain.sweep.replayed import notable_differences, recorded_runs

    text = f"answered from the logs of {len(spec.replay)} run(s), without training; --train trains"
    if not spec.replay:
        if (Path(spec.folder) / "trials").exists() or (found := recorded_runs(spec)) is None:
            return
        text = (
            "the settings that vary only decide where a run ends, and recorded runs can answer that without training; "
            f"to use those of the same configuration, add to {path}:\n    replay: [{', '.join(found) or 'RUN, ...'}]"
        )
    for note in (text, *notable_differences(spec)):
        print(f"pulsetrain: note: {note}", file=sys.stderr)


def _noting_killed(trial: Trial) -> Trial:
    """The trial; one whose process was killed or stopped, which the storage does not notice, is "interrupted"."""
    if trial.state != "running" or not is_run(trial.folder) or is_in_progress(trial.folder):
        return trial
    return replace(trial, state=trial.state_with(summarize(trial.folder).status))


def _line(trial: Trial) -> str:
    params = ", ".join(f"{name} {text_of(value)}" for name, value in trial.params.items())
    ended = f"{trial.values_text} ({params})" if trial.values else trial.error or params
    return plain(f"trial {trial.number} {trial.state}: {ended}")


def _table(results: SweepResults) -> str:
    """The trials, the best first by the first metric; then those without values."""
    metrics = list(results.directions)
    params = list(dict.fromkeys(name for trial in results.trials for name in trial.params))
    replayed = results.is_replayed
    rows = [("trial", "state", *metrics, *(["iterations"] if replayed else []), *params, "error")]
    for trial in results.ordered:
        values = [text_of(trial.values[name]) if name in trial.values else "-" for name in metrics]
        values += ["-" if trial.iterations is None else f"{trial.iterations:,}"] if replayed else []
        given = [text_of(trial.params[name]) if name in trial.params else "-" for name in params]
        rows.append((str(trial.number), trial.state, *values, *given, trial.error))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(plain("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip()) for row in rows)


def _write_config(spec: Spec, trial: Trial, path: Path) -> None:
    """The base configuration with the values of a trial."""
    from pulsetrain.configuration.parse import read_config
    from pulsetrain.configuration.yaml_text import dump_yaml
    from pulsetrain.handlers.run_files.redaction import redacted
    from pulsetrain.sweep.trials import settings_of

    config = read_config(Path(spec.config), settings_of(spec, trial.params))
    name = path.stem if path.parent == Path(spec.folder) else f"trial-{trial.number}"
    text = f"# trial {trial.number} of {spec.folder}: {trial.values_text} at its {spec.value} validation\n"
    if spec.replay:
        text += f"# replayed from {', '.join(spec.replay)}; values are means over the runs, iterations their sum\n"
    if spec.sampler == "population":
        text += "# the last settings of its lineage; the run folders of the lineage have those before\n"
    path.parent.mkdir(exist_ok=True)
    text += dump_yaml({**redacted(config), "run": f"runs/{name}-{{n}}"})
    path.write_text(text, encoding="utf-8")
