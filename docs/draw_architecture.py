"""Draws docs/architecture.svg: the packages, their folders in layers, and the imports between them.

    python docs/draw_architecture.py            # writes the picture
    python docs/draw_architecture.py --check    # exits with 1 if the picture is out of date, and prints what differs

The layers are those that import-linter checks (pyproject.toml); the arrows are the imports of the code.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path(__file__).with_name("architecture.svg")
WIDTH, BOX, ROW, GAP, MARGIN = 1180, 34, 64, 14, 24
COLOURS = {"pulsetrain": "#e8eefc", "pulsetrain.handlers": "#e9f6ec", "pulsetrain.engine": "#fdf1e3"}
TITLES = {
    "pulsetrain": "pulsetrain: composes a run from a configuration",
    "pulsetrain.handlers": "pulsetrain.handlers: each subscribes to events and decides something",
    "pulsetrain.engine": "pulsetrain.engine: events, loop, training step, recording, checkpoints",
}
Edges = set[tuple[str, str]]


def layers_of(package: str) -> list[list[str]]:
    """The names in each layer of a package, from the top, as pyproject.toml has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in settings if each["type"] == "layers" and each["containers"] == [package]]
    rows = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    return [[name for name in row if f"{package}.{name}" not in COLOURS] for row in rows]


def _lines(names: list[str]) -> list[list[str]]:
    """A layer in rows that are not wider than the picture."""
    lines: list[list[str]] = [[]]
    for name in names:
        if sum(map(_width, [*lines[-1], name])) + GAP * len(lines[-1]) > WIDTH - 4 * MARGIN:
            lines.append([])
        lines[-1].append(name)
    return [line for line in lines if line]


def _width(name: str) -> float:
    return max(70.0, 8.2 * len(name) + 24)


def edges_of(graph: grimp.ImportGraph, package: str, names: set[str]) -> Edges:
    """Which of a package's children import which, without those that follow from others."""
    found: Edges = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            source, target = (each.removeprefix(f"{package}.").split(".")[0] for each in (module, imported))
            inside = module.startswith(f"{package}.") and imported.startswith(f"{package}.")
            if inside and source != target and {source, target} <= names:
                found.add((source, target))
    return {edge for edge in found if not _follows(edge, found - {edge})}


def _follows(edge: tuple[str, str], edges: Edges) -> bool:
    reached, todo = set[str](), [edge[0]]
    while todo:
        new = {target for source, target in edges if source == todo[-1]} - reached
        todo.pop()
        reached |= new
        todo += sorted(new)
    return edge[1] in reached


def draw() -> str:
    """The picture as SVG."""
    graph = grimp.build_graph("pulsetrain")
    parts: list[str] = []
    top = MARGIN
    for package in COLOURS:
        layers = [layer for layer in layers_of(package) if layer]
        rows = [line for layer in layers for line in _lines(layer)]
        height = len(rows) * ROW + 34
        parts.append(
            f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="10" '
            f'fill="{COLOURS[package]}"/>\n'
            f'<text x="{MARGIN + 14}" y="{top + 22}" class="title">{TITLES[package]}</text>'
        )
        places = _places(rows, top + 34)
        ground = set(layers[-1]) if package == "pulsetrain.engine" else set()  # which everything imports
        for source, target in sorted(edges_of(graph, package, set(places) - ground)):
            parts.append(_arrow(places[source], places[target], f"{package}: {source} imports {target}"))
        for name, (x, y, width) in places.items():
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BOX}" rx="5" class="box">'
                f"<title>{package}: {name}</title></rect>\n"
                f'<text x="{x + width / 2:.0f}" y="{y + 22}" class="name">{name}</text>'
            )
        top += height + 26
        if package != "pulsetrain.engine":
            parts.append(f'<path d="M{WIDTH / 2:.0f} {top - 24} v16" class="arrow"/>')
    style = (
        "text{font-family:sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}.name{font-size:13px;"
        "text-anchor:middle}.box{fill:#fff;stroke:#667}.arrow{stroke:#667;stroke-opacity:.55;fill:none;"
        "marker-end:url(#head)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">\n'
        f"<style>{style}</style>\n"
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0 0L6 3L0 6z" fill="#667"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _places(rows: list[list[str]], top: int) -> dict[str, tuple[float, int, float]]:
    """Left edge, top and width of each name's box: rows are centred."""
    places = {}
    for index, row in enumerate(rows):
        widths = [_width(name) for name in row]
        x = (WIDTH - sum(widths) - GAP * (len(row) - 1)) / 2
        for name, width in zip(row, widths, strict=True):
            places[name] = x, top + index * ROW, width
            x += width + GAP
    return places


def _arrow(source: tuple[float, int, float], target: tuple[float, int, float], title: str) -> str:
    x1, x2 = source[0] + source[2] / 2, target[0] + target[2] / 2
    if source[1] == target[1]:  # of one layer: an arc below
        y = source[1] + BOX
        path = f"M{x1:.0f} {y} C{x1:.0f} {y + 22} {x2:.0f} {y + 22} {x2:.0f} {y + 3}"
    else:
        y1, y2 = source[1] + BOX, target[1] - 2
        path = f"M{x1:.0f} {y1} C{x1:.0f} {y1 + 24} {x2:.0f} {y2 - 24} {x2:.0f} {y2}"
    return f'<path d="{path}" class="arrow"><title>{title}</title></path>'


def check(present: str, wanted: str) -> list[str]:
    """What differs, a line each: the folders and imports of one side; nothing if the pictures are equal."""
    if present == wanted:
        return []
    here, there = (set(re.findall(r"<title>(.*?)</title>", text)) for text in (present, wanted))
    found = [f"only in the picture: {title}" for title in sorted(here - there)]
    found += [f"only in the code: {title}" for title in sorted(there - here)]
    return ["docs/architecture.svg is out of date; run `make architecture`", *(found or ["only the layout differs"])]


if __name__ == "__main__":
    text = draw()
    if "--check" in sys.argv:
        lines = check(PICTURE.read_text() if PICTURE.exists() else "", text)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        raise SystemExit(int(bool(lines)))
    PICTURE.write_text(text)
