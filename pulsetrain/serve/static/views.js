// What happened: a timeline, the events, forks, and where the processes of a run are.

import { ask, atMostOnceIn, colorOf, make, message, number, offer, ofOneRun, plain, plainLayout, plotly, purge, soon, spelled, whenChanged } from "/dom.js";

const SYMBOLS = { "start and end": "triangle-right", epochs: "line-ns-open", rollouts: "triangle-up", validations: "circle", checkpoints: "square", anomalies: "x" };
const CUSTOM = "hexagon", LONGEST = 22; // events of the user, and characters of a row's name
const KINDS = { // of marks: plotly's symbol, a character like it, and what it means
  completed: ["circle", "●", "completed"], stopped: ["square", "■", "stopped"], failed: ["x", "✖", "failed"],
  fork: ["diamond", "◆", "forked"], best: ["star", "★", "the best checkpoint so far"],
};

export function timeline(view) {
  let runs = [], selecting = 0;
  const chart = make("div", { class: "chart wide" });
  const legend = make("p", { class: "muted legend" });
  view.append(legend, chart);

  async function select(chosen) {
    const mine = ++selecting;
    runs = chosen;
    if (!runs.length) { view.replaceChildren(message("Select runs at the left.")); return; }
    if (!chart.isConnected) view.replaceChildren(legend, chart);
    const [found, Plotly] = await Promise.all([ask("marks", { run: runs }), plotly()]);
    if (mine !== selecting) return;
    const custom = [...new Set(Object.values(found).flatMap((each) => Object.keys(each.custom)))];
    const rows = [
      ...Object.entries(SYMBOLS).map(([name, symbol]) => ({ name, symbol, marks: ({ marks }) => marks[name] ?? [] })),
      ...custom.map((name) => ({ name: name.length > LONGEST ? `${name.slice(0, LONGEST - 3)}...` : name, symbol: CUSTOM, marks: (each) => each.custom[name] ?? [] })),
    ].filter((row, number) => !number || Object.values(found).some((each) => row.marks(each).length));
    const traces = Object.entries(found).flatMap(([run, each], index) =>
      rows.map((row, number) => [row, number, row.marks(each)]).filter(([, , marks]) => marks.length).map(([row, number, marks]) => ({
        type: "scatter", mode: "markers", name: plain(run),
        x: marks.map((mark) => mark[0]),
        y: marks.map(() => rows.length - number - 0.1 - (0.8 * (index + 0.5)) / runs.length),
        text: marks.map((mark) => `${plain(run)}: ${plain(mark[1].slice(0, 300))}`),
        hovertemplate: "%{text}<br>iteration %{x:,}<extra></extra>",
        marker: { symbol: marks.map((mark) => KINDS[mark[2]]?.[0] ?? row.symbol), color: colorOf(run), opacity: 1, size: marks.map((mark) => (mark[2] ? 11 : 8)), line: { color: colorOf(run), width: 1 } },
      })));
    const kinds = new Set(Object.values(found).flatMap((each) => Object.values(each.marks).flat().map((mark) => mark[2])));
    const meanings = Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([, [, character, meaning]]) => `${character} ${meaning}`);
    legend.textContent = ["▶ started or resumed", ...meanings].join("\u2003");
    const layout = plainLayout();
    Object.assign(layout.margin, { l: Math.max(100, 12 + 7 * Math.max(...rows.map((row) => row.name.length))), b: 46 });
    layout.yaxis = { ...layout.yaxis, tickvals: rows.map((row, index) => rows.length - index - 0.5), ticktext: rows.map((row) => plain(row.name)), range: [0, rows.length], showgrid: false, fixedrange: true };
    layout.xaxis.title = { text: "iteration", font: { size: 10 } };
    chart.style.height = `${Math.min(900, 120 + rows.length * (24 + 9 * Object.keys(found).length))}px`;
    Plotly.react(chart, traces, layout, { displayModeBar: false, responsive: true });
  }

  function close() {
    selecting++;
    runs = [];
    purge(chart);
  }

  return { select, update: whenChanged(() => runs, () => select(runs)), close };
}

export function events(view) {
  let run = "", next = 0, end = 0, resumed = 0; // where the next page begins, and the events that are not complete yet
  let asked = 0, isAsking = false, isOutdated = false, isShown = false; // the first page of what is asked
  const tools = make("div", { class: "tools" });
  const where = make("input", { class: "code", size: 44, placeholder: 'event == "validation_completed"', "aria-label": "Condition on events", spellcheck: false, oninput: soon(() => load(), 350) });
  const kind = make("select", { "aria-label": "Type", onchange: () => load() }), rank = make("select", { "aria-label": "Rank", onchange: () => load() });
  const newest = make("input", { type: "checkbox", onchange: () => load() }), order = make("label", {}, newest, "newest first");
  const note = make("p", { class: "error", role: "alert" });
  const body = make("tbody");
  const more = make("button", { onclick: () => load("more") }, "More");
  const head = make("thead", {}, make("tr", {}, ...["seq", "event", "engine", "epoch", "iteration", "time", "values"].map((name) => make("th", {}, name))));
  view.append(tools, note, make("div", { class: "scroll" }, make("table", { class: "events" }, head, body)), more);

  // Shows the first page, adds the next one, or adds what was written since.
  async function load(part = "first") {
    const mine = ++asked;
    if (!run) { body.replaceChildren(); more.hidden = true; return; }
    isAsking = true;
    isShown = isShown && part !== "first";
    const isBackwards = newest.checked && part !== "new";
    const from = part === "new" ? { after: end } : part === "more" ? { [isBackwards ? "before" : "after"]: next } : {};
    try {
      const found = await ask("events", { run, rank: rank.value, where: where.value, event: kind.value, newest: isBackwards ? "1" : "", ...from });
      if (mine !== asked) { if (part === "new") follow(); return; } // another question has been asked since
      if (part === "new" && (found.resumed !== resumed || (newest.checked && found.next !== null))) { load(); return; }
      note.textContent = found.damage.join("; ");
      offer(kind, [["", "all types"], ...found.kinds.map((name) => [name, name])]);
      offer(rank, found.ranks.map((each) => [String(each), `rank ${each}`]));
      rank.hidden = found.ranks.length < 2;
      const rows = found.events.map(row);
      const isStale = (line) => part === "first" || line.className === "none" || (part === "new" && Number(line.dataset.seq) >= end);
      [...body.children].filter(isStale).forEach((line) => line.remove());
      if (part === "new" && newest.checked) body.prepend(...rows.reverse()); else body.append(...rows);
      if (part !== "new" || !newest.checked) { next = found.next; more.hidden = next === null; }
      if (part !== "more" || !isBackwards) end = found.end;
      resumed = found.resumed;
      isShown = true;
      if (!body.children.length) body.append(make("tr", { class: "none" }, make("td", { class: "wide", colSpan: 7 }, `No event matches among ${number(found.looked)}.`)));
    } catch (error) {
      if (mine === asked) note.textContent = error.message;
    } finally {
      if (mine === asked) { isAsking = false; if (isOutdated) follow(); }
    }
  }

  // The newest events are added unless older ones that "More" shows would be missing before them.
  function follow() {
    isOutdated = isAsking;
    if (isAsking) return;
    if (!isShown) retry();
    else if (newest.checked || more.hidden) load("new");
  }

  const retry = atMostOnceIn(3000, () => (isShown || isAsking ? null : load())); // a condition may take long to fail

  function row(event) {
    const { seq, event: name, engine, epoch = 0, iteration = 0, t, ord, ...rest } = event;
    for (const key of Object.keys(rest)) if (rest[key] === null || (Array.isArray(rest[key]) && !rest[key].length)) delete rest[key];
    const text = JSON.stringify(rest);
    const values = text.length > 160 ? make("details", {}, make("summary", { class: "code" }, `${text.slice(0, 150)} ...`), make("pre", {}, JSON.stringify(rest, null, 1))) : make("span", { class: "code" }, text === "{}" ? "" : text);
    const line = make("tr", {}, ...[number(seq), name, engine, number(epoch), number(iteration), new Date(t / 1e6).toLocaleString("sv")].map((cell, at) => make("td", { class: at === 1 ? "time event" : "time" }, cell)), make("td", { class: "wide" }, values));
    line.dataset.seq = seq;
    return line;
  }

  const select = ofOneRun(tools, (chosen) => {
    if (chosen !== run) { rank.replaceChildren(); body.replaceChildren(); more.hidden = true; } // another run may have fewer ranks
    run = chosen;
    return load();
  }, rank, kind, order, where);

  function close() {
    asked++;
    run = "";
  }

  return { select, update: whenChanged(() => [run], follow), close };
}

export function lineage(view, page) {
  async function select() {
    const parents = new Map();
    for (const run of page.runs) if (run.parent) parents.set(run.id, run.parent.listed ?? run.parent.run);
    if (!parents.size) { view.replaceChildren(message("No listed run was forked from another. `pulsetrain fork` makes one from a checkpoint.")); return; }
    const children = new Map();
    parents.forEach((parent, run) => children.set(parent, [...(children.get(parent) ?? []), run]));
    const roots = [...new Set(parents.values())].filter((parent) => !parents.has(parent));
    const branch = (run, seen) => {
      const found = page.runs.find((each) => each.id === run);
      const changed = [found?.parent?.changed ?? []].flat().join("; "); // a run.json may hold anything
      const text = found?.parent ? ` at iteration ${number(found.parent.iteration)}${changed ? `: ${changed}` : ""}` : "";
      const best = found ? Object.entries(found.best).slice(0, 2).map(([key, value]) => `${key} ${number(value, 4)}`).join(", ") : "not in this folder";
      const below = seen.has(run) ? [] : (children.get(run) ?? []).map((each) => branch(each, new Set([...seen, run])));
      return make("li", {}, make("strong", {}, spelled(run)), text, make("span", { class: "muted" }, best ? `  ${best}` : ""), below.length ? make("ul", { class: "tree" }, ...below) : null);
    };
    view.replaceChildren(make("ul", { class: "tree" }, ...roots.map((run) => branch(run, new Set()))));
  }

  return { select, relist: select };
}

export function processes(view) {
  let run = "", isAsking = false;
  const tools = make("div", { class: "tools" });
  const found = make("div");
  view.append(tools, found);
  async function load() {
    const mine = run;
    if (!run) { found.replaceChildren(message("Select a run at the left.")); return; }
    isAsking = true;
    try {
      const ranks = await ask("where", { run });
      if (mine !== run) return; // another run has been chosen since
      found.replaceChildren(...ranks.map((rank) => make("section", {},
        make("h2", {}, `rank ${rank.rank}: ${rank.event} at iteration ${number(rank.iteration)}`),
        make("p", { class: rank.waited_for && ranks.length > 1 ? "error" : "muted" }, rank.ended ? "the run has ended" : !rank.time ? "no event of it can be read" : `${number((Date.now() / 1000 - rank.time), 3)} s ago, ${rank.activity}${rank.waited_for && ranks.length > 1 ? "; the others wait for it" : ""}`),
        rank.stack.length ? make("pre", {}, rank.stack.join("\n")) : null)));
    } catch (error) {
      if (mine === run) found.replaceChildren(make("p", { class: "error" }, error.message));
    } finally {
      if (mine === run) isAsking = false;
    }
  }
  const timer = setInterval(() => { if (!document.hidden && !isAsking) load(); }, 3000);
  return {
    select: ofOneRun(tools, (chosen) => { run = chosen; return load(); }),
    close() { clearInterval(timer); },
  };
}
