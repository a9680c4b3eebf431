// Charts of all curves of the selected runs. A zoom of one zooms all, and fetches the points of the part.

import { ask, colorOf, make, message, number, plain, plainLayout, soon } from "/dom.js";

const SHOWN = 12; // charts at first
const SEPARATE = 40; // runs in a chart, each with a line of its own
const FIRST = ["val/loss", "train/loss", "loss, each iteration"];

export function curves(view, page) {
  let runs = [], names = [], closed = false, range = null;
  const charts = new Map();
  const settings = { x: "iteration", smoothing: 0, log: false, filter: "" };

  const tools = make("div", { class: "tools" });
  const grid = make("div", { class: "charts" });
  const note = make("div");
  const choice = make("select", { "aria-label": "X axis", onchange: () => { settings.x = choice.value; range = null; redraw(); } },
    make("option", { value: "iteration" }, "iteration"), make("option", { value: "tokens" }, "tokens"), make("option", { value: "time" }, "time"));
  const slider = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", id: "smoothing", oninput: () => { settings.smoothing = Number(slider.value); charts.forEach((chart) => chart.draw()); } });
  const log = make("input", { type: "checkbox", id: "log", onchange: () => { settings.log = log.checked; charts.forEach((chart) => chart.draw()); } });
  const filter = make("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", oninput: soon(() => { settings.filter = filter.value.toLowerCase(); layOut(); }, 120) });
  const reset = make("button", { onclick: () => zoom(null) }, "Reset zoom");
  tools.append(filter, make("label", {}, "x", choice), make("label", {}, "smoothing", slider), make("label", {}, log, "log"), reset);
  view.append(tools, note, grid);

  async function select(chosen) {
    runs = chosen;
    if (!runs.length) {
      charts.clear();
      grid.replaceChildren(message("Select runs at the left."));
      return;
    }
    const found = await ask("names", { run: runs });
    if (closed) return;
    page.forget(found.gone);
    choice.options[1].disabled = !found.tokens;
    choice.options[1].title = found.tokens ? "" : "none of these runs has counted tokens";
    const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : found.validated.includes(name) ? 3 : 4);
    names = found.names.sort((a, b) => rank(a) - rank(b));
    note.replaceChildren(...Object.entries(found.errors).map(([run, why]) => make("p", { class: "error" }, `${run}: ${why}`)));
    if (!names.length) note.append(message(found.pending.length ? `Reading ${found.pending.length} runs for the first time ...` : "These runs have recorded no values."));
    layOut();
    redraw();
  }

  function layOut() {
    const wanted = names.filter((name) => name.toLowerCase().includes(settings.filter)).slice(0, page.allCharts ? undefined : SHOWN);
    const total = names.filter((name) => name.toLowerCase().includes(settings.filter)).length;
    for (const name of [...charts.keys()]) if (!wanted.includes(name)) charts.delete(name);
    for (const name of wanted) if (!charts.has(name)) { const made = chart(name); charts.set(name, made); made.fetch(); }
    grid.replaceChildren(...wanted.map((name) => charts.get(name).element));
    if (total > wanted.length) grid.append(make("button", { onclick: () => { page.allCharts = true; layOut(); } }, `Show ${total - wanted.length} more`));
  }

  function redraw() {
    charts.forEach((each) => each.fetch());
  }

  function zoom(to) {
    range = to;
    redraw();
  }

  // plotly shows a constant rate of 0.001 on an axis from -1 to 1
  function nearConstant(drawnRuns) {
    let low = Infinity, high = -Infinity;
    for (const { y } of drawnRuns) for (const value of y) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    const margin = Math.abs(low) / 10;
    return low === high && low !== 0 ? { clipmin: low - margin, clipmax: low + margin } : {};
  }

  function chart(name) {
    const element = make("div", { class: "chart" });
    element.dataset.metric = name;
    let data = {}, asked = 0, drawn = false;

    async function fetchPoints() {
      const mine = ++asked;
      const found = await ask("curves", { run: runs, name, x: settings.x, low: range?.[0], high: range?.[1] }).catch(() => null);
      if (found === null || mine !== asked || closed) return;
      data = found.curves;
      draw();
    }

    function draw() {
      const drawnRuns = Object.entries(data).map(([run, { x, y }]) => ({ run, x, y: smoothed(y, settings.smoothing) }));
      const traces = drawnRuns.length > SEPARATE ? together(drawnRuns) : drawnRuns.map(({ run, x, y }) => ({
        type: "scatter", mode: x.length <= 40 ? "lines+markers" : "lines", name: plain(run), x, y,
        line: { color: colorOf(run), width: 1.4 }, marker: { size: 4 },
        hovertemplate: `${plain(run)}<br>%{y:.6g} at %{x:,}<extra></extra>`,
      }));
      const layout = plainLayout();
      layout.title = { text: plain(name), font: { size: 12 }, x: 0.02, xanchor: "left" };
      layout.yaxis.type = settings.log ? "log" : "linear";
      layout.xaxis.title = { text: { time: "seconds", tokens: "tokens" }[settings.x] ?? "", font: { size: 10 } };
      layout.yaxis.autorangeoptions = nearConstant(drawnRuns);
      if (range) layout.xaxis.range = range;
      Plotly.react(element, traces, layout, { displayModeBar: false, responsive: true });
      if (!drawn) {
        drawn = true;
        element.on("plotly_relayout", (change) => {
          if (change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
          else if (change["xaxis.autorange"]) zoom(null);
        });
      }
      element.dataset.runs = String(drawnRuns.length);
      element.dataset.points = String(drawnRuns.reduce((sum, each) => sum + each.x.length, 0));
      element.dataset.last = String(Math.max(...drawnRuns.map((each) => each.x.at(-1) ?? 0)));
    }

    return { element, fetch: fetchPoints, draw };
  }

  const again = soon(() => select(runs), 100);
  let newest = 0;
  return {
    select,
    update(changed) {
      if (!runs.some((run) => changed.has(run))) return;
      if (performance.now() - newest > 600) { newest = performance.now(); select(runs); } else again();
    },
    close() { closed = true; },
  };
}

// Many runs in one line for each colour, with gaps between them: plotly takes its time for each line.
function together(drawnRuns) {
  const lines = new Map();
  for (const { run, x, y } of drawnRuns) {
    const color = colorOf(run), name = plain(run);
    if (!lines.has(color)) lines.set(color, { x: [], y: [], customdata: [] });
    const line = lines.get(color);
    for (let index = 0; index < x.length; index++) {
      line.x.push(x[index]);
      line.y.push(y[index]);
      line.customdata.push(name);
    }
    line.x.push(null);
    line.y.push(null);
    line.customdata.push(name);
  }
  return [...lines].map(([color, line]) => ({
    type: "scatter", mode: "lines", ...line, connectgaps: false, line: { color, width: 1.4 },
    hovertemplate: "%{customdata}<br>%{y:.6g} at %{x:,}<extra></extra>",
  }));
}

// An exponential average, divided by the sum of its weights; a gap stays a gap.
export function smoothed(values, share) {
  if (!share) return values;
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = share * total + (1 - share) * value;
    weight = share * weight + (1 - share);
    return total / weight;
  });
}
