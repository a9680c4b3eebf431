// The page: the list of runs at the left, and the view that is chosen for the selected ones.

import { ask, atMostOnceIn, giveColors, make, offer, placesOf, sayError, soon } from "/dom.js";
import { runList } from "/runs.js";
import { curves } from "/curves.js";
import { timeline, events, lineage, processes } from "/views.js";
import { compare, media, whatif } from "/judging.js";
import { sweeps } from "/sweeps.js";

const VIEWS = { Curves: curves, Timeline: timeline, Events: events, Compare: compare, "What if": whatif, Media: media, Lineage: lineage, Sweeps: sweeps, Processes: processes };
const at = (id) => document.getElementById(id);

const page = { runs: [], columns: [], selected: new Set(), view: "Curves", current: null, known: new Set(), reading: 0, isDescending: false, forget, open };
const drawRuns = runList(at("runs"), page, toggle);

function remembered() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (VIEWS[found.get("view")]) page.view = found.get("view");
  found.getAll("run").forEach((run) => page.selected.add(run));
  giveColors(page.selected, found.get("colors") ?? "");
  at("where").value = found.get("where") ?? "";
}

function remember() {
  const kept = new URLSearchParams([["view", page.view]]);
  if (at("where").value) kept.append("where", at("where").value);
  if (page.selected.size && page.selected.size <= 50) {
    page.selected.forEach((run) => kept.append("run", run));
    kept.append("colors", placesOf(page.selected));
  }
  history.replaceState(null, "", `#${kept}`);
}

let loading = 0, listed = "", newer = {}; // what the server has said of runs since it was asked for the list
async function load() {
  const mine = ++loading;
  newer = {};
  try {
    const found = await ask("runs", { where: at("where").value });
    if (mine !== loading) return;
    at("where-error").textContent = "";
    const text = JSON.stringify(found);
    if (text === listed) return; // an element that is replaced loses a click, and the focus
    listed = found.runs.some((run) => newer[run.id]) ? "" : text;
    const first = page.known.size === 0 && page.selected.size === 0;
    page.runs = found.runs;
    page.runs.forEach((run) => Object.assign(run, newer[run.id]));
    page.columns = found.columns;
    at("root").textContent = found.root;
    sorting();
    if (first) [...page.runs].sort((a, b) => (a.updated ?? 0) - (b.updated ?? 0)).slice(-8).forEach((run) => page.selected.add(run.id));
    page.runs.forEach((run) => page.known.add(run.id));
    list();
    if (first || !page.current) show();
    else page.current.relist?.();
  } catch (error) {
    if (mine === loading) at("where-error").textContent = error.message;
  }
}

function sorting() {
  offer(at("sort"), page.columns.map((name) => [name, name]));
}

function visible() {
  const words = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = page.runs.filter((run) => {
    const text = `${run.id} ${run.status} ${run.tags.join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const column = at("sort").value;
  // what a running run changes is in its messages, which bring no cells
  const key = (run) => (["status", "progress", "updated"].includes(column) ? run[column] : run.best[column] ?? run.cells[column]);
  const direction = page.isDescending ? -1 : 1;
  return found.sort((a, b) => {
    const [one, other] = [key(a), key(b)];
    if (one === other) return 0;
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    return direction * (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
  });
}

function list() {
  giveColors(page.selected);
  const runs = visible();
  at("count").textContent = `${[...page.selected].filter((id) => page.runs.some((run) => run.id === id)).length} of ${page.runs.length}`;
  at("all").checked = runs.length > 0 && runs.every((run) => page.selected.has(run.id));
  drawRuns(runs);
}

function toggle(id, on) {
  if (on) page.selected.add(id);
  else page.selected.delete(id);
  list();
  changed();
}

const changed = soon(() => {
  remember();
  select();
}, 80);

// Gives the selected runs to the view, and says there what went wrong.
let selecting = 0;
async function select() {
  const mine = ++selecting;
  let error = "";
  try {
    await page.current?.select([...page.selected]);
  } catch (caught) {
    error = caught.message;
  }
  if (mine === selecting) sayError(error);
}

// Shows the curves of some runs alone.
function open(ids) {
  page.selected = new Set(ids);
  page.view = "Curves";
  list();
  show();
}

// Runs that were removed: nothing is asked about them any more.
function forget(ids) {
  const had = ids.filter((id) => page.selected.delete(id));
  if (had.length) { list(); changed(); }
}

function show() {
  page.current?.close?.();
  at("tabs").replaceChildren(
    ...Object.keys(VIEWS).map((name) =>
      make("button", { role: "tab", "aria-selected": String(name === page.view), onclick: () => { page.view = name; show(); } }, name)),
  );
  const view = make("div"); // of its own, which answers that come late do not leave
  at("view").replaceChildren(view);
  page.current = VIEWS[page.view](view, page);
  select();
  remember();
}

const again = atMostOnceIn(1000, load);
let stream = null;

// Only while the page is shown: of a server, a browser keeps six connections for all its tabs.
function follow() {
  if (document.hidden) { stream?.close(); stream = null; return; }
  stream ??= listen();
}

function listen() {
  const source = new EventSource("/api/live");
  let isFirst = true; // the message that is sent once the server notes what changes for this page
  source.onopen = () => {
    isFirst = true;
    at("state").className = "";
    at("state").textContent = "live";
  };
  source.onerror = () => {
    at("state").className = "lost";
    at("state").textContent = "connection lost; trying again";
    if (source.readyState === EventSource.CLOSED) setTimeout(() => { if (stream === source) { stream = null; follow(); } }, 3000); // it does not itself
  };
  source.onmessage = ({ data }) => {
    const { runs, reading } = JSON.parse(data);
    at("state").className = "";
    at("state").textContent = reading ? `reading ${reading} runs` : "live";
    let unknown = isFirst;
    if (isFirst && at("view-error").textContent) select();
    else if (isFirst) page.current?.update?.(page.selected); // what has changed before
    isFirst = false;
    Object.assign(newer, runs);
    for (const [id, status] of Object.entries(runs)) {
      const run = page.runs.find((each) => each.id === id);
      if (!run || !status) unknown = true;
      else { Object.assign(run, status); listed = ""; }
    }
    if (unknown) again();
    forget(Object.keys(runs).filter((id) => !runs[id]));
    if (Object.keys(runs).length) {
      list();
      page.current?.update?.(new Set(Object.keys(runs)));
    }
  };
  return source;
}

at("search").addEventListener("input", soon(list, 60));
at("where").addEventListener("input", soon(() => { remember(); load(); }, 350));
at("sort").addEventListener("change", list);
at("direction").addEventListener("click", () => {
  page.isDescending = !page.isDescending;
  at("direction").textContent = page.isDescending ? "↓" : "↑";
  at("direction").title = page.isDescending ? "from the greatest to the least" : "from the least to the greatest";
  at("direction").setAttribute("aria-pressed", String(page.isDescending));
  list();
});
at("all").addEventListener("change", () => {
  const on = at("all").checked;
  visible().forEach((run) => (on ? page.selected.add(run.id) : page.selected.delete(run.id)));
  list();
  changed();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
document.addEventListener("visibilitychange", follow);
remembered();
await load();
follow();
