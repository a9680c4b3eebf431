"""The page of a sweep, one HTML file that loads nothing: history, settings, importance, and the table of trials."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from pulsetrain.engine.optional import load_optional
from pulsetrain.handlers.run_files.run_folder import replace_file
from pulsetrain.report.style import CHART, document
from pulsetrain.sweep.results import SweepResults, Trial, results_of, text_of
from pulsetrain.sweep.spec import Range, Spec
from pulsetrain.sweep.study import front_of, open_study

__all__ = ["write_pictures"]

_INK, _BLUE, _ORANGE = "#1f2937", "#2563eb", "#ea580c"
_CELLS = "td:not(:last-child) { overflow-wrap: normal; }"  # numbers in one line; the error may be long
_ENOUGH = 4  # completed trials, from which on an importance is estimated


def write_pictures(spec: Spec) -> Path:
    """Write sweep.html into the sweep's folder; returns its path.

    For each metric: its history, its value over each setting, all settings together, and the importance of the
    settings, if there are several and enough trials. With two metrics, their Pareto front.
    """
    plotly = load_optional("sweep", "plotly.graph_objects", "sweep")
    study = open_study(spec, create=False)
    results = results_of(Path(spec.folder), spec.directions, study.get_trials(deepcopy=False))
    parts = []
    for index, metric in enumerate(results.directions):
        completed = [each for each in results.trials if each.state == "completed"]
        parts.append((f"History of {metric}", _history(plotly, completed, results, metric)))
        names = [name for name in spec.space if any(name in each.params for each in completed)]
        parts += [(f"{metric} over {name}", _slice(plotly, completed, spec, name, metric)) for name in names]
        if len(names) > 1:
            parts.append((f"Settings and {metric}", _parallel(plotly, completed, spec, names, metric)))
            if len({each.values[metric] for each in completed}) > 1 and len(completed) >= _ENOUGH:
                parts.append((f"Importance of the settings for {metric}", _importance(plotly, study, index)))
    front = front_of(study)
    if len(results.directions) == 2:
        parts.append(("Pareto front", _front(plotly, results, front)))
    sections = []
    for number, (title, figure) in enumerate(parts):
        drawn = figure.to_html(full_html=False, include_plotlyjs=not number, config=CHART)
        sections.append(f"<section><h2>{html.escape(title)}</h2>{drawn}</section>")
    path = Path(spec.folder) / "sweep.html"
    replace_file(path, _page(results, front, "\n".join(sections)).encode())
    return path


def _layout(figure: Any, x: str, y: str, **options: Any) -> Any:
    return figure.update_layout(
        template="plotly_white", height=320, margin={"l": 70, "r": 20, "t": 20, "b": 50}, font={"color": _INK},
        xaxis_title=x, yaxis_title=y, legend={"orientation": "h", "y": 1.1}, **options,
    )  # fmt: skip


def _history(plotly: Any, completed: Sequence[Trial], results: SweepResults, metric: str) -> Any:
    """The value of each trial, and the best until then."""
    better: Callable[[float, float], float] = min if results.directions[metric] == "min" else max
    numbers, values = [each.number for each in completed], [each.values[metric] for each in completed]
    best = list(accumulate(values, better))
    points = plotly.Scatter(x=numbers, y=values, mode="markers", name="trial", marker={"size": 8, "color": _BLUE})
    line = plotly.Scatter(x=numbers, y=best, mode="lines", name="best so far", line={"shape": "hv", "color": _ORANGE})
    return _layout(plotly.Figure([points, line]), "trial", metric).update_xaxes(dtick=_step(completed))


def _step(completed: Sequence[Trial]) -> int:
    """Between two ticks of an axis of trials, which has whole numbers."""
    return max(1, max((each.number for each in completed), default=0) // 8)


def _slice(plotly: Any, completed: Sequence[Trial], spec: Spec, name: str, metric: str) -> Any:
    having = [each for each in completed if name in each.params]
    values = spec.space[name]
    x = [each.params[name] if isinstance(values, Range) else str(each.params[name]) for each in having]
    marker = {
        "size": 9, "color": [each.number for each in having], "colorscale": "Viridis", "showscale": True,
        "colorbar": {"title": "trial", "thickness": 12, "dtick": _step(completed)},
    }  # fmt: skip
    points = plotly.Scatter(x=x, y=[each.values[metric] for each in having], mode="markers", marker=marker)
    figure = _layout(plotly.Figure([points]), name, metric, xaxis_type="log" if _is_log(spec, name) else None)
    return figure.update_xaxes(exponentformat="power")


def _parallel(plotly: Any, completed: Sequence[Trial], spec: Spec, names: Sequence[str], metric: str) -> Any:
    values = [each.values[metric] for each in completed]
    dimensions = [
        _dimension(name, [each.params.get(name) for each in completed], _is_log(spec, name)) for name in names
    ]
    line = {"color": values, "colorscale": "Viridis", "showscale": True, "colorbar": {"title": metric}}
    drawn = plotly.Parcoords(line=line, dimensions=[*dimensions, {"label": metric, "values": values}])
    return _layout(plotly.Figure([drawn]), "", "").update_layout(margin={"l": 90, "r": 60, "t": 50, "b": 30})


def _is_log(spec: Spec, name: str) -> bool:
    values = spec.space[name]
    return isinstance(values, Range) and values.log


def _dimension(name: str, values: list[Any], is_log: bool) -> dict[str, Any]:
    """An axis; values that are not numbers are numbered in the order in which they come."""
    if is_log and None not in values:
        exponents = [math.log10(each) for each in values]
        low, high = min(exponents), max(exponents)
        ticks = [low + (high - low) * index / 4 for index in range(5)]
        return {
            "label": name,
            "values": exponents,
            "tickvals": ticks,
            "ticktext": [f"{10**each:.2g}" for each in ticks],
        }
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        return {"label": name, "values": values}
    texts = list(dict.fromkeys(map(str, values)))
    places = [texts.index(str(each)) for each in values]
    return {"label": name, "values": places, "tickvals": list(range(len(texts))), "ticktext": texts}


def _importance(plotly: Any, study: Any, index: int) -> Any:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental parts of Optuna
        found = get_param_importances(  # Optuna's default evaluator needs scikit-learn
            study, evaluator=PedAnovaImportanceEvaluator(), target=lambda trial: float(trial.values[index])
        )
    names = sorted(found, key=lambda name: found[name])
    bars = plotly.Bar(x=[found[name] for name in names], y=names, orientation="h", marker={"color": _BLUE})
    return _layout(plotly.Figure([bars]), "share of the variance", "").update_yaxes(automargin=True)


def _front(plotly: Any, results: SweepResults, best: Sequence[int]) -> Any:
    first, second = results.directions
    figure = plotly.Figure()
    for name, color, wanted in (("trial", _BLUE, False), ("on the front", _ORANGE, True)):
        chosen = [each for each in results.trials if each.state == "completed" and (each.number in best) == wanted]
        x, y = ([each.values[metric] for each in chosen] for metric in (first, second))
        figure.add_trace(plotly.Scatter(x=x, y=y, mode="markers", name=name, marker={"size": 9, "color": color}))
    return _layout(figure, first, second)


def _page(results: SweepResults, front: Sequence[int], sections: str) -> str:
    name = results.folder.name
    best = results.best
    hint = "no trial has completed" if best is None else f"best: trial {best.number}, {html.escape(best.values_text)}"
    if len(results.directions) > 1 and best is not None:
        hint = f"Pareto front: trials {', '.join(map(str, front))}"
    header = f"<h1>{html.escape(name)}</h1><small>{hint}</small>"
    return document(f"sweep {name}", header, f"{sections}\n{_table(results)}", style=_CELLS)


def _table(results: SweepResults) -> str:
    names = list(dict.fromkeys(name for each in results.trials for name in each.params))
    counted = ["iterations"] if results.is_replayed else []
    heads = ["trial", "state", *results.directions, *counted, *names, "error"]
    cells = (("".join(f"<td>{html.escape(cell)}</td>" for cell in row)) for row in _rows(results, names))
    rows = "\n".join(f"<tr>{each}</tr>" for each in cells)
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    return (
        f'<section><h2>Trials</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _rows(results: SweepResults, names: Sequence[str]) -> Iterator[list[str]]:
    for each in results.trials:
        values = [text_of(each.values[metric]) if metric in each.values else "" for metric in results.directions]
        settings = [text_of(each.params[name]) if name in each.params else "" for name in names]
        if results.is_replayed:
            values.append("" if each.iterations is None else f"{each.iterations:,}")
        yield [str(each.number), each.state, *values, *settings, each.error]
