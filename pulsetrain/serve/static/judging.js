// Two runs compared, what a handler would have done, and what runs have drawn and written.

import { ask, make, message, number, offer, ofOneRun, query, reading, runChooser, soon, table, whenChanged } from "/dom.js";

export function compare(view) {
  let runs = [], a = "", b = "", asked = 0;
  const tools = make("div", { class: "tools" });
  const report = make("div");
  view.append(tools, report);

  async function load() {
    const mine = ++asked;
    report.replaceChildren(message("Comparing ..."));
    try {
      const [found, rows] = await Promise.all([ask("diff", { a, b }), ask("configurations", { run: [a, b] })]);
      if (mine !== asked) return; // others have been chosen since
      const differing = rows.filter((row) => row.differs);
      report.replaceChildren(
        make("h2", {}, "Events"), make("pre", { id: "difference" }, found.report),
        make("h2", {}, "Configuration and environment"),
        table(["", a, b], rows.map((row) => ({ cells: [row.key, ...row.values], differs: row.differs }))),
        differing.length ? "" : message("No setting differs."));
    } catch (error) {
      if (mine === asked) report.replaceChildren(make("p", { class: "error" }, error.message));
    }
  }

  return {
    async select(chosen) {
      asked++;
      runs = chosen;
      if (runs.length < 2) { tools.replaceChildren(); report.replaceChildren(message("Select two runs at the left.")); return; }
      if (!runs.includes(a)) a = runs[0];
      if (!runs.includes(b) || a === b) b = runs.find((run) => run !== a);
      tools.replaceChildren(runChooser(runs, a, (to) => { a = to; load(); }), runChooser(runs, b, (to) => { b = to; load(); }));
      await load();
    },
  };
}

export function whatif(view) {
  let runs = [], pending = 0, selecting = 0, request = null, isOutdated = false;
  const handler = make("select", { "aria-label": "Handler", onchange: lay }, make("option", { value: "EarlyStopping" }, "early stopping"), make("option", { value: "LossSpikeGuard" }, "spike guard"));
  const controls = make("span", { class: "tools" });
  const result = make("div");
  view.append(make("div", { class: "tools" }, handler, controls), result);

  function slider(name, label, low, high, step, value) {
    const shown = make("output", {}, String(value));
    const input = make("input", { type: "range", id: name, min: String(low), max: String(high), step: String(step), value: String(value), oninput: () => { shown.textContent = input.value; load(); } });
    return [make("label", {}, label, input, shown), input];
  }

  const metric = make("select", { "aria-label": "Metric", onchange: () => load() });
  const mode = make("select", { "aria-label": "Better", onchange: () => load() }, make("option", { value: "" }, "as the run says"), make("option", { value: "min" }, "smaller is better"), make("option", { value: "max" }, "larger is better"));
  const [patienceLabel, patience] = slider("patience", "patience", 1, 50, 1, 3);
  const least = make("input", { type: "number", step: "any", value: "0", "aria-label": "min_delta", oninput: () => load() });
  least.style.width = "90px";
  const [thresholdLabel, threshold] = slider("threshold", "threshold", 2, 40, 0.5, 10);
  const output = make("input", { value: "loss", "aria-label": "Metric", size: 12, oninput: () => load() });
  const CONTROLS = {
    EarlyStopping: [[metric, mode, patienceLabel, make("label", {}, "min_delta", least)], () => ({ metric: metric.value, mode: mode.value, patience: patience.value, min_delta: least.value })],
    LossSpikeGuard: [[output, thresholdLabel], () => ({ metric: output.value, threshold: threshold.value })],
  };

  function lay() {
    controls.replaceChildren(...CONTROLS[handler.value][0]);
    load();
  }

  // One request at a time: of what is chosen while it is answered, the last is asked next.
  const load = soon(async () => {
    isOutdated = request !== null;
    if (isOutdated) return;
    if (!runs.length) { result.replaceChildren(message("Select runs at the left.")); return; }
    if (pending === runs.length) { result.replaceChildren(message(reading(pending))); return; }
    const mine = (request = new AbortController()), name = handler.value;
    try {
      const found = await ask("whatif", { run: runs, handler: name, ...CONTROLS[name][1]() }, mine.signal);
      if (request === mine) result.replaceChildren(...answer(name === "EarlyStopping", found));
    } catch (error) {
      if (request === mine) result.replaceChildren(make("p", { class: "error" }, error.message));
    } finally {
      if (request === mine) { request = null; if (isOutdated) load(); }
    }
  }, 40);

  function answer(early, found) {
    const heads = early ? ["run", "stops at", "best", "at", "iterations saved", "of"] : ["run", "spikes", "first at", "rows begin at", "losses"];
    const rows = Object.entries(found).map(([run, each]) => ({ cells: each.error ? [run, each.error] : early
      ? [run, each.stops_at ?? (each.values ? "nowhere" : "has no such metric"), each.best, each.best_at, each.saved, each.last]
      : [run, each.spikes, each.first, each.rows.slice(0, 12).map((at) => number(at)).join(", "), each.values] }));
    const saved = Object.values(found).reduce((sum, each) => sum + (each.saved ?? 0), 0);
    const total = Object.values(found).reduce((sum, each) => sum + (each.last ?? 0), 0);
    return [early ? make("p", { id: "saved" }, `${number(saved)} of ${number(total)} iterations saved`) : "", table(heads, rows)];
  }

  function abort() {
    request?.abort();
    request = null;
  }

  async function select(chosen) {
    const mine = ++selecting;
    if (chosen !== runs) abort();
    runs = chosen;
    const found = runs.length ? await ask("names", { run: runs }) : { validated: [], pending: [] };
    if (mine !== selecting) return;
    pending = found.pending.length;
    offer(metric, found.validated.map((name) => [name, name]));
    if (controls.children.length) load(); // what is put in again loses the focus
    else lay();
  }

  function close() {
    selecting++;
    runs = [];
    abort();
  }

  return { select, update: whenChanged(() => runs, () => select(runs)), close };
}

export function media(view) {
  const tools = make("div", { class: "tools" });
  const shown = make("div");
  const opened = new Set(); // paths of texts
  let run = "", asked = 0, before = "";
  view.append(tools, shown);

  async function load() {
    const mine = ++asked;
    if (!run) { before = ""; shown.replaceChildren(message("Select a run at the left.")); return; }
    try {
      const found = await ask("media", { run }), now = JSON.stringify([run, found]);
      if (mine !== asked || now === before) return; // another run has been chosen since, or nothing has changed
      before = now;
      draw(found);
    } catch (error) {
      if (mine === asked) { before = ""; shown.replaceChildren(make("p", { class: "error" }, error.message)); }
    }
  }

  function draw(found) {
    const address = ({ path, changed }) => `/api/file?${query({ run, path, changed })}`; // a changed file has another address
    const pictures = found.files.filter((file) => file.kind === "picture").map((file) =>
      make("figure", {}, make("img", { src: address(file), alt: file.path, loading: "lazy" }), make("figcaption", { class: "muted" }, file.path)));
    const texts = Object.entries(found.texts).map(([name, [iteration, text]]) => make("section", {}, make("h2", {}, `${name} at iteration ${number(iteration)}`), make("pre", {}, text)));
    const files = found.files.filter((file) => file.kind === "text").map((file) => {
      const body = make("pre"), key = `${run}\n${file.path}`;
      const toggled = async () => {
        opened[details.open ? "add" : "delete"](key);
        if (details.open && !body.textContent) body.textContent = await (await fetch(address(file))).text();
      };
      const details = make("details", { open: opened.has(key), ontoggle: toggled }, make("summary", {}, file.path), body);
      return details;
    });
    shown.replaceChildren(...texts, ...pictures, ...files);
    if (!shown.children.length) shown.append(message("This run has no pictures or texts."));
  }

  const select = ofOneRun(tools, (chosen) => { run = chosen; return load(); });
  return { select, update: whenChanged(() => [run], load, 2000) };
}
