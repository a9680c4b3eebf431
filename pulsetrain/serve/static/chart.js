// A chart of lines on a canvas, which draws 200 lines in a few milliseconds. Dragging selects a part of the x axis.

import { make, spelled } from "/dom.js";

const TOP = 6, RIGHT = 14, BOTTOM = 32, NEAR = 40; // pixels
const MARKED = 40; // points of a line, up to which each has a mark
const FEW = 5000; // points of all lines: of more, lines are one pixel wide, which is drawn ten times as fast
const LEAST_DRAG = 6;

// The element has `lines`, what is drawn, and `data-x` and `data-y`, the ranges of the axes.
export function lineChart(title, zoom) {
  const canvas = make("canvas", { role: "img", "aria-label": title });
  const part = make("div", { class: "part", hidden: true }), tip = make("div", { class: "tip", hidden: true }), dot = make("div", { class: "point", hidden: true });
  const area = make("div", { class: "area" }, canvas, part, dot, tip);
  const element = make("div", { class: "chart" }, make("h3", { title }, title), area);
  let drawn = null, box = null, dragged = null;

  function draw(next) {
    drawn = next;
    paint();
  }

  function paint() {
    const { clientWidth: width, clientHeight: height } = area;
    if (!drawn || !width || !height) return;
    hide();
    element.lines = drawn.lines;
    const x = xRange(drawn), y = yRange(drawn, x);
    const context = canvas.getContext("2d"), scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    const rows = y ? ticks(y[0], y[1], Math.max(2, height / 45), drawn.log) : [];
    const left = 12 + Math.max(20, ...rows.map((row) => context.measureText(row.text).width));
    box = { left, top: TOP, width: Math.max(1, width - left - RIGHT), height: Math.max(1, height - TOP - BOTTOM), x, y, log: drawn.log };
    if (x && y) {
      axes(context, box, rows, ticks(x[0], x[1], Math.max(2, box.width / 80), false), drawn.xTitle);
      lines(context, box, drawn.lines);
    }
    element.dataset.x = JSON.stringify(x);
    element.dataset.y = JSON.stringify(y);
  }

  function hide() {
    tip.hidden = dot.hidden = true;
  }

  const placeOf = (event) => event.clientX - area.getBoundingClientRect().left;
  const inside = (at) => Math.min(Math.max(at, box.left), box.left + box.width);

  area.addEventListener("pointerdown", (event) => {
    if (!box?.x || event.button !== 0) return;
    dragged = inside(placeOf(event));
    area.setPointerCapture(event.pointerId);
    hide();
  });
  area.addEventListener("pointermove", (event) => {
    if (!box?.x) return;
    if (dragged === null) { if (box.y) point(event); return; }
    const [from, to] = [dragged, inside(placeOf(event))].sort((a, b) => a - b);
    part.hidden = to - from < LEAST_DRAG;
    Object.assign(part.style, { left: `${from}px`, width: `${to - from}px`, top: `${box.top}px`, height: `${box.height}px` });
  });
  area.addEventListener("pointerup", (event) => {
    if (dragged === null) return;
    const [from, to] = [dragged, inside(placeOf(event))].sort((a, b) => a - b);
    dragged = null;
    part.hidden = true;
    const value = (at) => box.x[0] + ((at - box.left) / box.width) * (box.x[1] - box.x[0]);
    if (to - from >= LEAST_DRAG && box.x) zoom([value(from), value(to)]);
  });
  area.addEventListener("pointercancel", () => { dragged = null; part.hidden = true; });
  area.addEventListener("pointerleave", hide);
  area.addEventListener("dblclick", () => zoom(null));

  // Shows the nearest point.
  function point(event) {
    const bounds = area.getBoundingClientRect(), place = placer(box);
    const atX = event.clientX - bounds.left, atY = event.clientY - bounds.top;
    let least = NEAR * NEAR, found = null;
    for (const line of drawn.lines) {
      for (let index = 0; index < line.x.length; index++) {
        const across = place.x(line.x[index]) - atX;
        if (across > NEAR) break;
        if (across < -NEAR) continue;
        const down = place.y(line.y[index]) - atY, distance = across * across + down * down;
        if (distance < least) { least = distance; found = { line, x: line.x[index], y: line.y[index] }; }
      }
    }
    tip.hidden = dot.hidden = found === null;
    if (found === null) return;
    const [x, y] = [place.x(found.x), place.y(found.y)];
    tip.textContent = `${spelled(found.line.name)}\n${Number(found.y.toPrecision(6))} at ${found.x.toLocaleString("en", { maximumFractionDigits: 2 })}`;
    tip.style.borderColor = dot.style.background = found.line.color;
    Object.assign(dot.style, { left: `${x}px`, top: `${y}px` });
    Object.assign(tip.style, x > bounds.width / 2 ? { left: "auto", right: `${bounds.width - x + 8}px` } : { left: `${x + 8}px`, right: "auto" });
    tip.style.top = `${Math.max(0, y - 44)}px`;
  }

  new ResizeObserver(paint).observe(area);
  return { element, draw };
}

function xRange({ lines, range }) {
  if (range) return range;
  let low = Infinity, high = -Infinity;
  for (const { x } of lines) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
  return low > high ? null : low === high ? [low - 1, high + 1] : [low, high];
}

function yRange({ lines, log }, x) {
  if (!x) return null;
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (let index = 0; index < line.x.length; index++) {
      const value = line.y[index];
      if (line.x[index] < x[0] || line.x[index] > x[1] || !Number.isFinite(value) || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return null;
  if (log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
  const margin = low === high ? Math.abs(low) / 10 || 1 : (high - low) / 20;
  return [low - margin, high + margin];
}

function placer({ left, top, width, height, x, y, log }) {
  const [low, high] = log ? y.map(Math.log10) : y;
  return {
    x: (value) => left + ((value - x[0]) / (x[1] - x[0])) * width,
    y: (value) => top + height - (((log ? Math.log10(value) : value) - low) / (high - low)) * height,
  };
}

function axes(context, box, rows, columns, title) {
  const style = getComputedStyle(document.documentElement), place = placer(box), bottom = box.top + box.height;
  context.lineWidth = 1;
  context.strokeStyle = style.getPropertyValue("--line");
  context.fillStyle = style.getPropertyValue("--muted");
  context.beginPath();
  for (const { value } of rows) { context.moveTo(box.left, place.y(value)); context.lineTo(box.left + box.width, place.y(value)); }
  for (const { value } of columns) { context.moveTo(place.x(value), box.top); context.lineTo(place.x(value), bottom); }
  context.stroke();
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const { value, text } of rows) context.fillText(text, box.left - 6, place.y(value));
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const { value, text } of columns) context.fillText(text, place.x(value), bottom + 5);
  context.textAlign = "right";
  if (title) context.fillText(title, box.left + box.width, bottom + 18);
}

function lines(context, box, all) {
  const place = placer(box);
  context.save();
  context.beginPath();
  context.rect(box.left - 3, box.top - 3, box.width + 6, box.height + 6);
  context.clip();
  context.lineWidth = all.reduce((sum, line) => sum + line.x.length, 0) > FEW ? 1 / (devicePixelRatio || 1) : 1.4;
  context.lineJoin = "bevel"; // a miter would draw a spike above its value
  for (const { x, y, color } of all) {
    context.strokeStyle = context.fillStyle = color;
    context.beginPath();
    let open = false;
    for (let index = 0; index < x.length; index++) {
      const down = place.y(y[index]);
      if (!Number.isFinite(down)) { open = false; continue; }
      if (open) context.lineTo(place.x(x[index]), down);
      else context.moveTo(place.x(x[index]), down);
      open = true;
    }
    context.stroke();
    if (x.length > MARKED) continue;
    for (let index = 0; index < x.length; index++) {
      const down = place.y(y[index]);
      if (Number.isFinite(down)) context.fillRect(place.x(x[index]) - 2, down - 2, 4, 4);
    }
  }
  context.restore();
}

// Round numbers between two values, with their texts.
export function ticks(low, high, count, log) {
  if (log && high / low >= 10) {
    const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
    const every = Math.max(1, Math.ceil((last - first + 1) / count));
    const found = [];
    for (let power = first; power <= last; power += every) {
      const value = Number(`1e${power}`);
      found.push({ value, text: power >= -3 && power <= 3 ? String(value) : `1e${power}` });
    }
    return found;
  }
  const rough = (high - low) / count, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * ten).find((each) => each >= rough * 0.999) ?? 10 * ten;
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9 && found.length < 100; number++) found.push({ value: number * step, text: textOf(number * step, step, Math.max(Math.abs(low), Math.abs(high))) });
  return found;
}

function textOf(value, step, most) {
  if (value === 0) return "0";
  if (most < 1e-3 || most >= 1e15) return value.toExponential(Math.min(10, Math.max(0, Math.floor(Math.log10(most)) - Math.floor(Math.log10(step)))));
  const [unit, name] = most >= 1e12 ? [1e12, "T"] : most >= 1e9 ? [1e9, "G"] : most >= 1e6 ? [1e6, "M"] : most >= 1e4 ? [1e3, "k"] : [1, ""];
  return (value / unit).toFixed(Math.min(15, Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)))) + name;
}
