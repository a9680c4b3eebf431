// Charts of all curves of the selected runs. A zoom of one zooms all, and fetches the points of the part.

import { query, colorOf, ask, failure, make, message, number, reading, soon, spelled, whenChanged } from "/dom.js";
import { lineChart } from "/chart.js";

const SHOWN = 12; // charts at first
const FEW_ERRORS = 4;
const FIRST = ["val/loss", "train/loss", "loss, each iteration"];

export function curves(view, page) {
  let runs = [], names = [], closed = false, range = null, selecting = 0, request = null;
  const charts = new Map(), seen = new Set(), stale = new Set(); // names: all, those in the window, those to be fetched
  const settings = { x: "iteration", smoothing: 0, log: false, filter: "" };

  const tools = make("div", { class: "tools" });
  const grid = make("div", { class: "charts" });
  const note = make("div"), omitted = make("p", { class: "muted", id: "omitted", role: "status" }), failed = make("p", { class: "error", role: "alert" });
  const choice = make("select", { "aria-label": "X axis", onchange: () => { settings.x = choice.value; zoom(null); } },
    make("option", { value: "iteration" }, "iteration"), make("option", { value: "tokens" }, "tokens"), make("option", { value: "time" }, "time"));
  const slider = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", id: "smoothing", oninput: () => { settings.smoothing = Number(slider.value); drawSeen(); } });
  const log = make("input", { type: "checkbox", id: "log", onchange: () => { settings.log = log.checked; drawSeen(); } });
  const filter = make("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", oninput: soon(() => { settings.filter = filter.value.toLowerCase(); layOut(); }, 120) });
  const reset = make("button", { onclick: () => zoom(null) }, "Reset zoom");
  tools.append(filter, make("label", {}, "x", choice), make("label", {}, "smoothing", slider), make("label", {}, log, "log"), reset);
  view.append(tools, note, omitted, failed, grid);

  // Only charts in the window are fetched and drawn; the others once they get there.
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) seen.add(target.dataset.metric);
      else seen.delete(target.dataset.metric);
    }
    drawSeen();
    fetchSeen();
  }, { root: null, rootMargin: "100px" });

  async function select(chosen) {
    const mine = ++selecting;
    if (chosen !== runs) abort();
    runs = chosen;
    if (!runs.length) {
      clear();
      grid.replaceChildren(message("Select runs at the left."));
      return;
    }
    const found = await ask("names", { run: runs });
    if (closed || mine !== selecting) return;
    page.forget(found.gone);
    choice.options[1].disabled = !found.tokens;
    choice.options[1].title = found.tokens ? "" : "none of these runs has counted tokens";
    const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : found.validated.includes(name) ? 3 : 4);
    names = found.names.sort((a, b) => rank(a) - rank(b));
    sayErrors(Object.entries(found.errors).map(([run, why]) => make("p", { class: "error" }, spelled(`${run}: ${why}`))));
    if (!names.length) note.append(message(found.pending.length ? reading(found.pending.length) : "These runs have recorded no values."));
    layOut();
    refetch();
  }

  function clear() {
    charts.forEach((each) => watcher.unobserve(each.element));
    for (const each of [charts, seen, stale]) each.clear();
    note.replaceChildren();
    omitted.textContent = failed.textContent = "";
  }

  function layOut() {
    const matching = names.filter((name) => name.toLowerCase().includes(settings.filter));
    const wanted = matching.slice(0, page.allCharts ? undefined : SHOWN);
    for (const [name, { element }] of charts) if (!wanted.includes(name)) { watcher.unobserve(element); for (const each of [charts, seen, stale]) each.delete(name); }
    for (const name of wanted) if (!charts.has(name)) { charts.set(name, chart(name)); stale.add(name); watcher.observe(charts.get(name).element); }
    const shown = wanted.map((name) => charts.get(name).element);
    if (matching.length > wanted.length) shown.push(make("button", { onclick: () => { page.allCharts = true; layOut(); } }, `Show ${matching.length - wanted.length} more`));
    if (shown.length !== grid.children.length || shown.some((each, index) => each !== grid.children[index])) grid.replaceChildren(...shown);
  }

  function refetch() {
    for (const name of charts.keys()) stale.add(name);
    fetchSeen();
  }

  function zoom(to) {
    range = to;
    abort();
    refetch();
  }

  function abort() {
    request?.abort();
    request = null;
  }

  function drawSeen() {
    for (const name of seen) charts.get(name)?.draw();
  }

  // One request for all charts in the window, one at a time; what they show remains until its answer has arrived.
  async function fetchSeen() {
    const wanted = [...stale].filter((name) => seen.has(name));
    if (request || !wanted.length || closed) return;
    const mine = (request = new AbortController()), of = { range, xTitle: { time: "seconds", tokens: "tokens" }[settings.x] ?? "" };
    wanted.forEach((name) => stale.delete(name));
    try {
      const found = await points({ run: runs, name: wanted, x: settings.x, low: range?.[0], high: range?.[1] }, mine.signal);
      if (request !== mine || closed) return;
      for (const name of wanted) charts.get(name)?.show(found.charts[name], of);
      sayOmitted(found.uncounted);
      failed.textContent = "";
    } catch (error) {
      if (request === mine && !closed) failed.textContent = `The points cannot be fetched: ${error.message}`;
    } finally {
      if (request === mine) { request = null; fetchSeen(); }
    }
  }

  function sayErrors(lines) {
    const more = lines.slice(FEW_ERRORS);
    note.replaceChildren(...lines.slice(0, FEW_ERRORS));
    if (more.length) note.append(make("details", {}, make("summary", { class: "error" }, `and ${number(more.length)} more runs that cannot be read`), ...more));
  }

  function sayOmitted(found) {
    const names = `${found.slice(0, 5).map(spelled).join(", ")}${found.length > 5 ? ", ..." : ""}`;
    omitted.textContent = found.length ? `Without ${number(found.length)} of ${number(runs.length)} runs, whose logs have no token counts: ${names}. By iteration or time they are drawn.` : "";
  }

  function chart(name) {
    const made = lineChart(name, zoom);
    const { element } = made;
    element.dataset.metric = name;
    let lines = null, of = null, drawnWith = null;

    function show(found, given) {
      [lines, of, drawnWith] = [found, given, null];
      draw();
      element.dataset.runs = String(lines.length);
      element.dataset.points = String(lines.reduce((sum, each) => sum + each.x.length, 0));
    }

    function draw() {
      const wanted = `${settings.smoothing} ${settings.log}`;
      if (!lines || drawnWith === wanted) return;
      drawnWith = wanted;
      made.draw({ ...of, log: settings.log, lines: lines.map((line) => ({ ...line, color: colorOf(line.name), y: smoothed(line.y, settings.smoothing) })) });
    }

    return { element, show, draw };
  }

  const now = () => select(runs).catch((error) => { failed.textContent = error.message; });
  return {
    select,
    update: whenChanged(() => runs, now, 300),
    close() { closed = true; abort(); watcher.disconnect(); },
  };
}

// Lines of several charts: a length, a description as JSON, and then the numbers that it lists, as they are in memory.
async function points(parameters, signal) {
  const response = await fetch(`/api/curves?${query(parameters)}`, { signal });
  if (!response.ok) throw await failure(response);
  const bytes = await response.arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const found = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length)));
  let at = 8 + length;
  const next = (count) => { at += 8 * count; return new Float64Array(bytes, at - 8 * count, count); };
  for (const [name, lines] of Object.entries(found.charts)) found.charts[name] = lines.map(([run, count]) => ({ name: run, x: next(count), y: next(count) }));
  return found;
}

// An exponential average, divided by the sum of its weights; a gap stays a gap.
export function smoothed(values, share) {
  if (!share) return values;
  let total = 0, weight = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return NaN;
    total = share * total + (1 - share) * value;
    weight = share * weight + (1 - share);
    return total / weight;
  });
}
