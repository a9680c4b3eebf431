// The sweeps below the folder: each trial with its values and settings, the best one first.

import { ask, atMostOnceIn, colorOf, make, message, number, plain, plainLayout, plotly, purge, table } from "/dom.js";

const SHOWN = 500; // trials of a sweep
const GOING = ["running", "waiting"]; // whose end may change no run

export function sweeps(view, page) {
  let closed = false, asked = 0, shown = "", timer = null;
  const update = atMostOnceIn(1000, load);

  async function load() {
    if (closed) return;
    const mine = ++asked;
    let found = null;
    try {
      found = await ask("sweeps");
    } finally {
      if (mine === asked && !closed) askLater(found);
    }
    if (mine !== asked || closed) return;
    const now = JSON.stringify(found);
    if (now === shown) return;
    shown = now;
    purge(view);
    view.replaceChildren(...found.map(sweep));
    if (!found.length) view.append(message("There is no sweep in this folder. `pulsetrain sweep` trains one configuration with many settings."));
    try {
      const Plotly = found.length ? await plotly() : null;
      if (now === shown && !closed) found.forEach((each) => draw(each, Plotly));
    } catch (error) {
      shown = ""; // the next answer is drawn, though it may be the same
      throw error;
    }
  }

  // Of a hidden page, the first message once it is shown asks.
  function askLater(found) {
    clearTimeout(timer);
    const mayChange = found === null || found.some((each) => each.error || each.trials.some((trial) => GOING.includes(trial.state)));
    if (mayChange) timer = setTimeout(() => { if (!document.hidden) update(); }, 3000);
  }

  function sweep(each) {
    const heading = make("h2", {}, each.id);
    if (each.error) return make("section", {}, heading, make("p", { class: "error" }, each.error));
    const count = {};
    each.trials.forEach((trial) => { count[trial.state] = (count[trial.state] ?? 0) + 1; });
    const states = Object.entries(count).map(([state, trials]) => `${trials} ${state}`).join(", ");
    const best = each.trials.find((trial) => trial.number === each.best);
    const values = best ? each.metrics.map((name) => `${name} ${number(best.values[name])}`).join(", ") : "";
    const runs = each.trials.map((trial) => trial.run).filter(Boolean);
    const names = [...new Set(each.trials.flatMap((trial) => Object.keys(trial.params)))];
    const replayed = each.trials.some((trial) => trial.iterations !== null);
    const rows = each.trials.slice(0, SHOWN).map((trial) => ({
      differs: trial === best,
      cells: [link(trial), trial.state, ...each.metrics.map((name) => trial.values[name] ?? null), ...(replayed ? [trial.iterations] : []), ...names.map((name) => trial.params[name] ?? null), trial.error],
    }));
    const chart = make("div", { class: "chart" });
    chart.dataset.sweep = each.id;
    return make("section", {}, heading,
      make("p", { class: "summary" }, `${each.trials.length} trials: ${states}${best ? `; the best is trial ${best.number}: ${values}` : ""} `,
        runs.length ? make("button", { onclick: () => page.open(runs) }, "Curves of all") : null),
      chart, table(["trial", "state", ...each.metrics, ...(replayed ? ["iterations"] : []), ...names, ""], rows),
      each.trials.length > SHOWN ? message(`and ${each.trials.length - SHOWN} more`) : null);
  }

  function link(trial) {
    if (!trial.run) return String(trial.number);
    const button = make("button", { class: "link", title: `the curves of ${trial.run}`, onclick: () => page.open([trial.run]) }, String(trial.number));
    button.style.borderColor = colorOf(trial.run);
    return button;
  }

  // The values of the first metric in the order of the trials, and the best one so far.
  function draw(each, Plotly) {
    const chart = view.querySelector(`.chart[data-sweep="${CSS.escape(each.id)}"]`);
    const [metric] = each.metrics ?? [];
    const trials = (each.trials ?? []).filter((trial) => trial.values[metric] !== undefined && trial.values[metric] !== null).sort((a, b) => a.number - b.number);
    if (!trials.length) { chart?.remove(); return; }
    const better = each.directions[metric] === "min" ? Math.min : Math.max;
    const x = trials.map((trial) => trial.number), y = trials.map((trial) => trial.values[metric]);
    const layout = plainLayout();
    layout.title = { text: plain(metric), font: { size: 12 }, x: 0.02, xanchor: "left" };
    layout.margin.b = 46;
    layout.xaxis.title = { text: "trial", font: { size: 10 } };
    const hover = "trial %{x}: %{y:.6g}<extra></extra>";
    Plotly.react(chart, [
      { type: "scatter", mode: "lines", x, y: y.map((_, index) => better(...y.slice(0, index + 1))), line: { shape: "hv", width: 1.4, color: "#78716c" }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x, y, marker: { size: 7, color: trials.map((trial) => colorOf(trial.run ?? "")) }, hovertemplate: hover },
    ], layout, { displayModeBar: false, responsive: true });
  }

  function select() {
    shown = ""; // runs have other colors
    return load();
  }

  function close() {
    closed = true;
    clearTimeout(timer);
    purge(view);
  }

  return { select, update, close };
}
