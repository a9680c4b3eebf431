// The list of runs. A run keeps its element, so that neither a click on it nor the focus is lost while others train.

import { colorOf, make, message, number, spelled } from "/dom.js";

const SHOWN = 1000;

export function runList(list, page, toggle) {
  const items = new Map(); // by the ids of the runs
  const note = message("");

  // Shows these runs, in this order.
  function draw(runs) {
    const focused = document.activeElement, shown = runs.slice(0, SHOWN), ids = new Set(shown.map((run) => run.id));
    for (const [id, { line }] of items) if (!ids.has(id)) { line.remove(); items.delete(id); }
    note.remove();
    let next = list.firstElementChild;
    for (const run of shown) {
      if (!items.has(run.id)) items.set(run.id, item(run.id));
      const { line, show } = items.get(run.id);
      show(run);
      if (line === next) next = line.nextElementSibling;
      else list.insertBefore(line, next);
    }
    if (focused !== document.activeElement && list.contains(focused)) focused.focus({ preventScroll: true });
    if (runs.length > SHOWN) note.textContent = `and ${runs.length - SHOWN} more: search, or write a condition`;
    else note.textContent = page.runs.length ? "" : "No run matches. A run appears here once it has a run folder.";
    if (note.textContent) list.append(note);
  }

  function item(id) {
    const box = make("input", { type: "checkbox", onchange: () => toggle(id, box.checked) });
    const dot = make("span", { class: "dot" }), name = make("span", { class: "name", title: spelled(id) }, spelled(id));
    const status = make("span"), detail = make("span", { class: "detail" }), tags = make("span", { class: "detail" }), done = make("i"), bar = make("span", { class: "bar" }, done);
    const line = make("li", {}, make("label", {}, box, dot, name, status, detail, tags, bar));
    line.dataset.run = id;
    let before = "";

    function show(run) {
      const best = Object.entries(run.best).slice(0, 2).map(([name, value]) => `${name} ${number(value, 4)}`).join(", ");
      const own = run.tags.join(", ");
      const isSelected = page.selected.has(id), share = run.status === "running" ? run.progress : null;
      const color = isSelected ? colorOf(id) : "", now = JSON.stringify([isSelected, color, run.status, run.reason, best, own, share]);
      if (now === before && box.checked === isSelected) return;
      before = now;
      box.checked = isSelected;
      dot.style.background = color;
      status.className = `status ${run.status}`;
      status.textContent = run.status;
      detail.textContent = best || run.reason;
      status.title = detail.title = run.reason;
      detail.hidden = !detail.textContent;
      tags.textContent = tags.title = own;
      tags.hidden = !own;
      bar.hidden = share === null;
      done.style.width = `${100 * share}%`;
    }

    return { line, show };
  }

  return draw;
}
