// Elements from texts that are never read as HTML, and what all views share.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function query(parameters) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") found.append(name, each);
    }
  }
  return found;
}

export async function ask(path, parameters = {}, signal = null) {
  const response = await fetch(`/api/${path}?${query(parameters)}`, { signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// What the server says is wrong; a server that fails says it in no form of ours.
export async function failure(response) {
  const found = await response.json().catch(() => ({}));
  return new Error(found.error ?? `the server answers ${response.status}`);
}

export function number(value, digits = 5) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toString();
}

export function message(text) {
  return make("p", { class: "message" }, text);
}

export function reading(count) {
  return `Reading ${count === 1 ? "a run" : `${count} runs`} for the first time ...`;
}

// A name with its control characters and those that turn its direction spelled out.
export function spelled(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, (character) => `\\u{${character.codePointAt(0).toString(16)}}`);
}

// Calls the last of many requests, once there is a pause.
export function soon(action, pause = 150) {
  let timer = null;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...words), pause);
  };
}

// Above the view: what went wrong in it, or nothing.
export function sayError(text) {
  document.getElementById("view-error").textContent = text;
}

// Acts at once when it is called, and then at most once in each pause, however often it is called; again only once the
// promise that the action returns has settled. What goes wrong in it is said above the view until it works.
export function atMostOnceIn(pause, action) {
  let timer = null, newest = -Infinity, isActing = false, isOutdated = false, hasFailed = false;
  async function begin() {
    timer = null;
    newest = performance.now();
    isActing = true;
    try {
      await action();
      if (hasFailed) sayError("");
      hasFailed = false;
    } catch (error) {
      hasFailed = true;
      sayError(error.message);
    }
    isActing = false;
    if (isOutdated) act();
  }
  function act() {
    isOutdated = isActing;
    if (!isActing) timer ??= setTimeout(begin, newest + pause - performance.now());
  }
  return act;
}

// The `update` of a view of some runs: acts when one of them has changed.
export function whenChanged(runs, action, pause = 500) {
  const act = atMostOnceIn(pause, action);
  return (changed) => { if (runs().some((run) => changed.has(run))) act(); };
}

const PALETTE = ["#2563eb", "#d97706", "#059669", "#9333ea", "#0891b2", "#be185d", "#65a30d", "#78716c", "#dc2626", "#4f46e5"];
const NEUTRAL = "#9ca3af"; // of runs that are not selected
let given = new Map(); // places in the palette

// Colors for the selected runs, of which no two have the same one as long as the palette suffices. A run keeps the one that it
// has, and `places` says which ones they had before the page was loaded again.
export function giveColors(runs, places = "") {
  const had = new Map([...runs].map((run, at) => [run, given.get(run) ?? (places[at] in PALETTE ? Number(places[at]) : undefined)]));
  const most = had.size > PALETTE.length ? Infinity : 1, used = PALETTE.map(() => 0);
  given = new Map();
  const give = (run, place) => { given.set(run, place); used[place]++; };
  for (const [run, place] of had) if (used[place] < most) give(run, place);
  for (const run of had.keys()) if (!given.has(run)) give(run, used.indexOf(Math.min(...used)));
}

export function placesOf(runs) {
  return [...runs].map((run) => given.get(run)).join("");
}

export function colorOf(run) {
  return PALETTE[given.get(run)] ?? NEUTRAL;
}

// Loads plotly, which takes its time: only for the views that draw with it.
let loading = null;
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const failed = () => { loading = null; reject(new Error("plotly.js cannot be loaded from the server")); };
    document.head.append(make("script", { src: "/plotly.js", onload: () => resolve(Plotly), onerror: failed }));
  });
  return loading;
}

// Frees what plotly keeps of the charts in an element, as it listens to the window for each.
export function purge(element) {
  for (const each of [element, ...element.querySelectorAll(".js-plotly-plot")]) if (each.matches(".js-plotly-plot")) Plotly.purge(each);
}

export function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function plainLayout() {
  const ink = isDark() ? "#e5e7eb" : "#1f2937";
  const line = isDark() ? "#374151" : "#e5e7eb";
  const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
    margin: { t: 34, r: 12, b: 34, l: 52 }, showlegend: false, hovermode: "closest",
    xaxis: { ...axis }, yaxis: { ...axis },
  };
}

// A chart's texts must not be read as plotly's markup.
export function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export function runChooser(runs, chosen, onchange) {
  const select = make("select", { "aria-label": "Run", onchange: () => onchange(select.value) }, ...runs.map((run) => make("option", { value: run }, spelled(run))));
  select.value = runs.includes(chosen) ? chosen : runs[0] ?? "";
  return select;
}

// Gives a choice these options, values with their texts; the one that is chosen remains if it is among them.
export function offer(select, options) {
  if (JSON.stringify(options.map(([value]) => value)) === JSON.stringify([...select.options].map((each) => each.value))) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

// What a view of one run shares: a choice among the selected ones, which `load` gets; "" if none is selected.
export function ofOneRun(tools, load, ...others) {
  let run = "";
  return async (runs) => {
    if (!runs.includes(run)) run = runs[0] ?? "";
    tools.replaceChildren(runChooser(runs, run, (to) => { run = to; load(run); }), ...others);
    await load(run);
  };
}

export function table(heads, rows) {
  const numeric = (cell) => typeof cell === "number" || cell === null;
  const classes = heads.map((_, at) => (rows.some((row) => typeof row.cells[at] === "number") ? { class: "number" } : {})); // of columns
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head, at) => make("th", classes[at], spelled(head))))),
    make("tbody", {}, ...rows.map((row) => make("tr", row.differs ? { class: "differs" } : {}, ...row.cells.map((cell, at) =>
      make("td", classes[at] ?? {}, numeric(cell) ? number(cell) : typeof cell === "string" ? spelled(cell) : cell)))))));
}
