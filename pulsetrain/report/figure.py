"""The timeline and the curves of all runs, over one axis of iterations, as a plotly figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pulsetrain.report.curve import POINTS, Floats
from pulsetrain.report.record import EACH_ITERATION, RATES
from pulsetrain.report.reported_run import ReportedRun
from pulsetrain.report.timeline import (
    INK,
    Plotly,
    legend,
    plain,
    timeline_axis,
    timeline_bands,
    timeline_height,
    timeline_margin,
    timeline_rows,
    timeline_traces,
)

__all__ = ["figure_of"]

MUTED, GRID = "#6b7280", "#e5e7eb"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
ALL_POINTS = 240_000  # of all curves together: a browser draws so many without delay
HOVER = "%{y:.6g}  <i>at %{x:,d}</i>"
MARKED = 60  # a curve of at most so many points has a marker for each, and is not smoothed
# label of the button, fraction of the iterations in which a weight falls to 1/e, greatest weight of one point
SMOOTHING = (("light", 0.005, 0.5), ("strong", 0.04, 0.15))
UNITS = {
    "learning_rate": "rate of the last update",
    "grad_norm": "L2 norm, before clipping",
    "samples_per_second": "throughput, samples/s",
    "tokens_per_second": "throughput, tokens/s",
}
# pixels
TOP, BOTTOM, LEFT, RIGHT, GAP = 82, 48, 74, 24, 70
LEGEND_LINE, LEGEND_WIDTH = 20, 1000
PANEL, PANEL_GAP = 216, 66


def figure_of(runs: Sequence[ReportedRun]) -> Plotly:
    """The figure as plain values and arrays."""
    names = _in_order(runs)
    columns = 1 if len(names) == 1 else 2
    rows = timeline_rows(runs)
    timeline = timeline_height(rows, len(runs))
    panel_rows = -(-len(names) // columns)
    top = TOP + LEGEND_LINE * _legend_lines(runs)
    height = top + timeline + GAP + panel_rows * (PANEL + PANEL_GAP) - PANEL_GAP + BOTTOM
    inner = height - top - BOTTOM

    def domain(start: int, size: int) -> list[float]:
        return [max(0.0, 1 - (start + size) / inner), 1 - start / inner]

    traces = list(timeline_traces(runs, rows))
    layout = _layout(height, top, max(LEFT, timeline_margin(rows)))
    layout["xaxis"] = _x_axis("y", title=not names)
    layout["yaxis"] = timeline_axis(rows, domain(0, timeline))
    shapes, annotations = list(timeline_bands(rows)), [_heading("timeline", legend(rows), 0.0, 1.0)]
    chosen = 1 if len(runs) > 1 else 0  # curves drawn over each other are easier to distinguish when they are smooth
    limit = max(200, min(POINTS, ALL_POINTS // max(1, sum(len(run.record.curves) for run in runs))))
    reach = _reach(runs)
    # of each trace: 0 for a curve without smoothing, from 1 on for its smoothings, None if it has none
    roles: list[int | None] = [None] * len(traces)
    for number, name in enumerate(names):
        row, column = divmod(number, columns)
        x, y = f"x{number + 2}", f"y{number + 2}"
        left = column * 0.52
        wide = 1.0 if columns == 1 or (number == len(names) - 1 and column == 0) else left + 0.48
        vertical = domain(timeline + GAP + row * (PANEL + PANEL_GAP), PANEL)
        layout[f"xaxis{number + 2}"] = {
            **_x_axis(y, title=row == panel_rows - 1 or number + columns >= len(names)),
            "matches": "x",
            "domain": [left, wide],
        }
        layout[f"yaxis{number + 2}"] = {**_AXIS, "anchor": x, "domain": vertical, "nticks": 6}
        if name in RATES:
            layout[f"yaxis{number + 2}"]["exponentformat"] = "SI"
        annotations.append(_heading(name, UNITS.get(name.partition(",")[0], ""), left, vertical[1]))
        shapes += _forks(runs, x, y)
        drawn: set[float] = set()
        for run in runs:
            if name in run.record.curves:
                found = list(_curve(run, name, limit, reach))
                drawn |= {*found[0]["y"]}
                for role, trace in enumerate(found):
                    look = _look(role, chosen) if len(found) > 1 else {}
                    traces.append({**trace, **look, "xaxis": x, "yaxis": y})
                    roles.append(role if look else None)
        if len(drawn) == 1 and (value := drawn.pop()):  # else its axis is from -1 to 1 however small it is
            low, high = sorted((0.9 * value, 1.1 * value))
            layout[f"yaxis{number + 2}"]["autorangeoptions"] = {"clipmin": low, "clipmax": high}
    layout["shapes"], layout["annotations"] = shapes, annotations
    if names:
        layout["updatemenus"] = _menus(roles, len(names), chosen)
    return {"data": traces, "layout": layout}


def _in_order(runs: Sequence[ReportedRun]) -> list[str]:
    """The names of all curves: losses first, then other metrics, then the optimizer's and the throughput."""
    names = dict.fromkeys(name for run in runs for name in run.record.curves)

    def rank(name: str) -> tuple[int, int]:
        base = name.partition(",")[0]
        if base in ("learning_rate", "grad_norm"):
            return 3, 0
        if base in RATES:
            return 4, 0
        if base.rpartition("/")[2] == "loss":
            prefix = base.partition("/")[0]
            return 0, 0 if EACH_ITERATION in name else 1 if prefix == "train" else 2
        return (1, 0) if "/" in base or EACH_ITERATION not in name else (2, 0)

    return sorted(names, key=rank)


def _curve(run: ReportedRun, name: str, limit: int, reach: float) -> Iterator[Plotly]:
    """A curve and its smoothings; no smoothings if it has few points, or is a schedule."""
    curve = run.record.curves[name]
    at, values = curve.points(limit)
    few = len(at) <= MARKED
    marked = len(at) <= max(1.0, MARKED * (at[-1] - at[0]) / max(reach, 1.0))
    alone = few or name.startswith("learning_rate")
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if marked else "lines",
        "name": plain(run.name),
        "legendgroup": run.name,
        "showlegend": False,
        "marker": {"size": 5},
        "line": {"color": run.color, "width": 1.2},
    }
    if alone:
        trace["hovertemplate"] = HOVER
    yield {**trace, "x": _whole(at), "y": values}
    for label, share, most in () if alone else SMOOTHING:
        at, values = curve.smoothed(max(share * reach, 1.0), most, limit)
        smooth = {"mode": "lines", "name": f"{plain(run.name)}, {label}ly smoothed"}
        yield {**trace, **smooth, "line": {"color": run.color, "width": 2.2}, "x": _whole(at), "y": values}


def _forks(runs: Sequence[ReportedRun], x: str, y: str) -> Iterator[Plotly]:
    for run in runs:
        if run.facts.parent is not None:
            at, line = run.fork_iteration, {"color": run.color, "width": 1, "dash": "dot"}
            yield {"type": "line", "xref": x, "yref": f"{y} domain", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


_AXIS = {
    "gridcolor": GRID,
    "zeroline": False,
    "linecolor": "#d1d5db",
    "showline": True,
    "tickfont": {"size": 10.5, "color": MUTED},
    "automargin": False,
    "exponentformat": "power",
}


def _x_axis(anchor: str, title: bool) -> Plotly:
    axis = {
        **_AXIS,
        "anchor": anchor,
        "tickformat": ",d",
        "hoverformat": ",d",
        "unifiedhovertitle": {"text": "iteration %{x:,d}"},
        "showspikes": True,
        "spikemode": "across",
        "spikesnap": "data",
        "spikethickness": 1,
        "spikedash": "solid",
        "spikecolor": "#9ca3af",
    }
    if title:
        axis["title"] = {"text": "iteration", "font": {"size": 11, "color": MUTED}, "standoff": 6}
    return axis


def _layout(height: int, top: int, left: int) -> Plotly:
    return {
        "height": height,
        "margin": {"t": top, "b": BOTTOM, "l": left, "r": RIGHT},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": FONT, "size": 12, "color": INK},
        "hovermode": "x unified",
        "hoverdistance": 15,
        "hoverlabel": {
            "bgcolor": "rgba(255,255,255,0.96)",
            "bordercolor": "#d1d5db",
            "font": {"size": 12},
            "namelength": 40,
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "groupclick": "togglegroup",
            "itemsizing": "constant",
            "font": {"size": 13},
        },
        "dragmode": "zoom",
    }


def _legend_lines(runs: Sequence[ReportedRun]) -> int:
    """The approximate number of lines that the names of the runs need."""
    return 1 + sum(60 + 8 * len(run.name) for run in runs) // LEGEND_WIDTH


def _heading(name: str, unit: str, left: float, top: float) -> Plotly:
    grey = f'  <span style="color:{MUTED};font-size:11px">{unit}</span>' if unit else ""
    text = {"text": f"<b>{plain(name)}</b>{grey}", "showarrow": False, "font": {"size": 13, "color": INK}}
    anchor = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 6}
    return {**anchor, "x": left, "y": top, **text}


def _menus(roles: Sequence[int | None], panels: int, chosen: int) -> list[Plotly]:
    """Buttons for the smoothing of the curves, and for a linear or logarithmic axis."""
    curves = [index for index, role in enumerate(roles) if role is not None]
    smooth = []
    for choice, label in enumerate(("no smoothing", *(name for name, _, _ in SMOOTHING))):
        looks = [_look(roles[index] or 0, choice) for index in curves]
        changed = {name: [look[name] for look in looks] for name in ("opacity", "hoverinfo", "hovertemplate")}
        smooth.append({"label": label, "method": "restyle", "args": [changed, curves]})
    scales = [
        {"label": scale, "method": "relayout", "args": [{f"yaxis{panel + 2}.type": scale for panel in range(panels)}]}
        for scale in ("linear", "log")
    ]
    look = {
        "type": "buttons",
        "direction": "right",
        "showactive": True,
        "yanchor": "bottom",
        "y": 1,
        "pad": {"b": 34, "t": 0, "l": 0, "r": 0},
        "bgcolor": "#ffffff",
        "bordercolor": "#d1d5db",
        "font": {"size": 11.5},
    }
    return [
        {**look, "name": "smoothing", "x": 1, "xanchor": "right", "active": chosen, "buttons": smooth},
        {**look, "name": "scale", "x": 0, "xanchor": "left", "active": 0, "buttons": scales},
    ]


def _look(role: int, choice: int) -> Plotly:
    """How a curve, unsmoothed (role 0) or smoothed, looks when a smoothing is chosen; choice 0 turns smoothing off."""
    if role not in (0, choice):
        return {"opacity": 0.0, "hoverinfo": "skip", "hovertemplate": ""}  # a template would override "skip"
    return {"opacity": 0.22 if choice and not role else 1.0, "hoverinfo": "all", "hovertemplate": HOVER}


def _reach(runs: Sequence[ReportedRun]) -> float:
    """The number of iterations that the runs span together."""
    first = min(run.record.first_iteration or 0 for run in runs)
    return float(max(run.record.iteration for run in runs) - first)


def _whole(at: Floats) -> NDArray[np.signedinteger]:
    return at.astype(np.int32 if at.max(initial=0) < 2**31 else np.int64)
