"""The frame of a page, which loads nothing, its style sheet, and what its figures offer.

In dark, the figures are inverted as a whole with their hues kept: so they follow a change of the preference without a
script, and what their camera button saves remains dark on white, as papers need it.
"""

from __future__ import annotations

from html import escape

__all__ = ["CHART", "document"]

CHART: dict[str, bool | list[str]] = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"],
}
"""The settings of plotly for a figure: nothing is sent anywhere."""

# The browser may load nothing but the page itself, whatever text the names in a run contain.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """\
:root { color-scheme: light; --ink: #1f2937; --muted: #6b7280; --line: #e5e7eb; --ground: #f3f4f6; --raised: #fff;
  --differs: #fffbeb; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 24px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 16px; margin-bottom: 16px; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
small, .made, .hint { color: var(--muted); font-weight: 400; font-size: 12px; }
.made { margin: 0; }
.hint { margin: 0 0 10px; }
section, article, .damage { background: var(--raised); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; margin-bottom: 16px; }
.cards { display: grid; grid-template-columns:
  repeat(auto-fit, minmax(min(260px, 100%), 1fr)); gap: 16px; margin-bottom: 16px; }
article { border-top: 3px solid; margin: 0; }
i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 10px 0 0; font-size: 13px; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
article span { font-size: 11.5px; font-weight: 600; border-radius: 10px;
  padding: 2px 9px; margin-left: 6px; white-space: nowrap; }
.completed { background: #dcfce7; color: #166534; }
.stopped { background: #fef3c7; color: #92400e; }
.failed { background: #fee2e2; color: #991b1b; }
.open { background: var(--line); color: var(--ink); }
.damage { background: #fef2f2; border-color: #fca5a5; color: #7f1d1d; }
.damage ul { margin: 6px 0 0; padding-left: 20px; }
summary { cursor: pointer; }
summary h2 { display: inline; }
.scroll { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; font-size: 13px; min-width: 50%; }
th, td { text-align: left; vertical-align: top; padding: 4px 18px 4px 8px;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
thead th { white-space: nowrap; border-bottom: 1px solid var(--line); }
tbody th { font-weight: 500; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; max-width: 420px; }
.differs th, .differs td { background: var(--differs); }
.differs th:first-child { box-shadow: inset 3px 0 #f59e0b; }
.best td { white-space: nowrap; }
.top { font-weight: 700; }
.texts td { white-space: pre-wrap; max-width: 900px; }
.processes .failed { white-space: pre-wrap; font: 12px/1.5 ui-monospace, monospace; padding: 0 6px; }
@media (max-width: 800px) { /* the tool bar above the figure, not over its legend */
  main { padding: 12px; }
  .js-plotly-plot { margin-top: 30px; }
  .js-plotly-plot .modebar-container { top: -30px !important; }
}
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ink: #e5e7eb; --muted: #9ca3af; --line: #374151; --ground: #111827; --raised: #1f2937;
    --differs: #3b3420; }
  .completed { background: #14532d; color: #bbf7d0; }
  .stopped { background: #713f12; color: #fef08a; }
  .failed { background: #7f1d1d; color: #fecaca; }
  .damage { background: #450a0a; border-color: #b91c1c; color: #fecaca; }
  i, .js-plotly-plot { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }
}
@media print { body { background: #fff; } section, article { break-inside: avoid; } }
"""


def document(title: str, header: str, body: str, *, style: str = "") -> str:
    """A page as one HTML file.

    >>> "<title>a &lt; b</title>" in document("a < b", "<h1>a</h1>", "<p>b</p>")
    True

    Args:
        title: text.
        header: HTML.
        body: HTML.
        style: rules besides those of all pages.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header>{header}</header>\n{body}\n</main>\n</body>\n</html>\n"
    )
