// Two runs compared, what a handler would have done, and what runs have drawn and written.

import { ask, make, message, number, ofOneRun, runChooser, soon, table } from "/dom.js";

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
  let runs = [], asked = 0, validated = [];
  const handler = make("select", { "aria-label": "Handler", onchange: lay }, make("option", { value: "EarlyStopping" }, "early stopping"), make("option", { value: "LossSpikeGuard" }, "spike guard"));
  const controls = make("span", { class: "tools" });
  const result = make("div");
  view.append(make("div", { class: "tools" }, handler, controls), result);
  let values = () => ({});

  function slider(name, label, low, high, step, value) {
    const shown = make("output", {}, String(value));
    const input = make("input", { type: "range", id: name, min: String(low), max: String(high), step: String(step), value: String(value), oninput: () => { shown.textContent = input.value; load(); } });
    return [make("label", {}, label, input, shown), input];
  }

  function lay() {
    if (handler.value === "EarlyStopping") {
      const metric = make("select", { "aria-label": "Metric", onchange: () => load() }, ...validated.map((name) => make("option", { value: name }, name)));
      const mode = make("select", { "aria-label": "Better", onchange: () => load() }, make("option", { value: "" }, "as the run says"), make("option", { value: "min" }, "smaller is better"), make("option", { value: "max" }, "larger is better"));
      const [patience, input] = slider("patience", "patience", 1, 50, 1, 3);
      const least = make("input", { type: "number", step: "any", value: "0", "aria-label": "min_delta", oninput: () => load() });
      least.style.width = "90px";
      controls.replaceChildren(metric, mode, patience, make("label", {}, "min_delta", least));
      values = () => ({ metric: metric.value, mode: mode.value, patience: input.value, min_delta: least.value });
    } else {
      const [threshold, input] = slider("threshold", "threshold", 2, 40, 0.5, 10);
      const metric = make("input", { value: "loss", "aria-label": "Metric", size: 12, oninput: () => load() });
      controls.replaceChildren(metric, threshold);
      values = () => ({ metric: metric.value, threshold: input.value });
    }
    load();
  }

  const load = soon(async () => {
    if (!runs.length) { result.replaceChildren(message("Select runs at the left.")); return; }
    const mine = ++asked;
    try {
      const found = await ask("whatif", { run: runs, handler: handler.value, ...values() });
      if (mine !== asked) return;
      const early = handler.value === "EarlyStopping";
      const heads = early ? ["run", "stops at", "best", "at", "iterations saved", "of"] : ["run", "spikes", "first at", "rows begin at", "losses"];
      const rows = Object.entries(found).map(([run, each]) => ({ cells: each.error ? [run, each.error] : early
        ? [run, each.stops_at ?? (each.values ? "nowhere" : "has no such metric"), each.best, each.best_at, each.saved, each.last]
        : [run, each.spikes, each.first, each.rows.slice(0, 12).map((at) => number(at)).join(", "), each.values] }));
      const saved = Object.values(found).reduce((sum, each) => sum + (each.saved ?? 0), 0);
      const total = Object.values(found).reduce((sum, each) => sum + (each.last ?? 0), 0);
      result.replaceChildren(early ? make("p", { id: "saved" }, `${number(saved)} of ${number(total)} iterations saved`) : "", table(heads, rows));
    } catch (error) {
      if (mine === asked) result.replaceChildren(make("p", { class: "error" }, error.message));
    }
  }, 40);

  return {
    async select(chosen) {
      runs = chosen;
      if (runs.length) validated = (await ask("names", { run: runs })).validated;
      lay();
    },
  };
}

export function media(view) {
  const tools = make("div", { class: "tools" });
  const shown = make("div");
  let asked = 0;
  view.append(tools, shown);

  async function load(run) {
    const mine = ++asked;
    if (!run) { shown.replaceChildren(message("Select a run at the left.")); return; }
    const found = await ask("media", { run });
    if (mine !== asked) return; // another run has been chosen since
    const address = (path) => `/api/file?${new URLSearchParams({ run, path })}`;
    const pictures = found.files.filter((file) => file.kind === "picture").map((file) =>
      make("figure", {}, make("img", { src: address(file.path), alt: file.path, loading: "lazy" }), make("figcaption", { class: "muted" }, file.path)));
    const texts = Object.entries(found.texts).map(([name, [iteration, text]]) => make("section", {}, make("h2", {}, `${name} at iteration ${number(iteration)}`), make("pre", {}, text)));
    const files = found.files.filter((file) => file.kind === "text").map((file) => {
      const body = make("pre");
      return make("details", { ontoggle: async () => { if (!body.textContent) body.textContent = await (await fetch(address(file.path))).text(); } }, make("summary", {}, file.path), body);
    });
    shown.replaceChildren(...texts, ...pictures, ...files);
    if (!shown.children.length) shown.append(message("This run has no pictures or texts."));
  }

  return { select: ofOneRun(tools, load) };
}
