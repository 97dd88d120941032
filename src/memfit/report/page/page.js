"use strict";
// Draws the report from the data in #data. No library; texts of users enter as text nodes only.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NS = $("defs").namespaceURI;
const h = (tag, props = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) value === null || made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const s = (tag, props = {}, text = null) => {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(props)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
};

// ---- numbers ----

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
function bytes(n) {
  const [unit, size] = UNITS.find(([, size]) => Math.abs(n) >= size) || UNITS[4];
  const shown = n / size;
  return `${size === 1 ? Math.round(shown) : shown.toFixed(Math.abs(shown) < 10 ? 2 : Math.abs(shown) < 100 ? 1 : 0)} ${unit}`;
}
function seconds(t) {
  if (t === 0) return "0 s";
  if (Math.abs(t) >= 7200) return `${(t / 3600).toFixed(1)} h`;
  if (Math.abs(t) >= 100) return `${t.toFixed(0)} s`;
  if (Math.abs(t) >= 1) return `${t.toFixed(2)} s`;
  return Math.abs(t) >= 1e-3 ? `${(t * 1e3).toPrecision(3)} ms` : `${(t * 1e6).toPrecision(3)} µs`;
}
const tick = (t) => (t >= 1 || t === 0 ? `${+t.toPrecision(4)} s` : seconds(t));
const count = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(2)} billion` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} million` : n.toLocaleString("en");
const FLOPS = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];
function operations(n) {
  const [unit, size] = FLOPS.find(([, size]) => n >= size) || FLOPS[5];
  return n ? `${+(n / size).toPrecision(3)} ${unit}FLOP` : "0";
}
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
function sums(differences) {
  let at = 0;
  return differences.map((d) => (at += d));
}
function tickStep(range, wanted, binary) {
  if (binary) return 2 ** Math.ceil(Math.log2(range / wanted));
  const base = 10 ** Math.floor(Math.log10(range / wanted));
  return [1, 2, 5, 10].map((f) => f * base).find((step) => range / step <= wanted) || base * 10;
}

// ---- data ----

function readTimeline(raw) {
  if (!raw) return null;
  const t = { ...raw, n: raw.actions.length, peak: sums(raw.peak_bytes), after: sums(raw.after_bytes), by: {}, away: {} };
  for (const [name, column] of Object.entries(raw.by_category)) t.by[name] = sums(column);
  for (const [name, column] of Object.entries(raw.tiers)) t.away[name] = sums(column);
  const scale = 1 / raw.ticks_per_s;
  for (const name of ["begin", "start", "end"]) t[name] = sums(raw[name]).map((x) => x * scale);
  t.lanes = raw.lanes.map((lane) => {
    const start = sums(lane.start).map((x) => x * scale);
    return { ...lane, start, end: start.map((x, i) => x + lane.ticks[i] * scale), moment: sums(lane.moment) };
  });
  t.total = Math.max(raw.seconds - raw.commit_s, 0);
  return t;
}
const P = readTimeline(D.predicted);
const M = readTimeline(D.measured);
const hasSeconds = P.total > 0;
const base = D.base_bytes;

const blockName = (b) => D.blocks[b] || "(model)";
const callName = (c) => D.calls[c] || "(model)";
function inWords(action) {
  return action.replace(/\bB(\d+)\b/g, (_, b) => blockName(+b))
    .replace(/\bC(\d+)-(\d+)\b/g, (_, a, b) => `${callName(+a)} to ${callName(+b)}`)
    .replace(/\bC(\d+)\b/g, (_, c) => callName(+c))
    .replace(/\bm(\d+)-(\d+)\b/g, "microbatches $1 to $2").replace(/\bm(\d+)\b/g, "microbatch $1");
}
const KINDS = { start: "forward", forward: "forward", seed: "backward", joint: "backward", backward: "backward", update: "update", norm: "update", accumulate: "update", clear: "update", unscale: "update", check: "update", commit: "update" };
const kindOf = (action) => KINDS[action.split(" ", 1)[0]] || "other";
const color = (name) => `var(--${name})`;
const STALLS = ["fetch", "reload", "offload", "accumulate"];
const CATEGORIES = { weight: "weights", state: "optimizer states", gradient: "gradients", activation: "saved activations", logits: "logits and loss", transient: "transients", staging: "staging", base: "held before tensors" };
const known = Object.keys(CATEGORIES).filter((c) => P.by[c]);
const categories = [...known, ...Object.keys(P.by).filter((c) => !CATEGORIES[c])];
const categoryColor = (c) => color(CATEGORIES[c] ? c : "other");

// ---- patterns for what only waits: told apart without colour too ----

for (const cause of [...STALLS, "stall"]) {
  const pattern = s("pattern", { id: `p-${cause}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(s("rect", { width: 6, height: 6, fill: color(cause), opacity: .35 }), s("rect", { width: 2.5, height: 6, fill: color(cause) }));
  $("defs").append(pattern);
}
const stallFill = (cause) => `url(#p-${STALLS.includes(cause) ? cause : "stall"})`;

function swatch(fill) {
  const made = s("svg", { width: 14, height: 14, "aria-hidden": "true" });
  made.append(s("rect", { width: 14, height: 14, rx: 2, style: `fill:${fill}` }));
  return made;
}

// ---- tables ----

// columns: [name, "text" or ""]; cells: text, number of bytes as {bytes}, {meter, of, color}
function table(caption, columns, rows, total = false) {
  const head = h("tr", {}, ...columns.map(([name, kind]) => (name ? h("th", { scope: "col", class: kind || null }, name) : h("td"))));
  const body = rows.map((cells, r) => h("tr", { class: total && r === rows.length - 1 ? "total" : null }, ...cells.map((cell, i) => {
    if (i === 0) return h("th", { scope: "row", class: String(cell).length > 48 ? "long" : null }, String(cell));
    if (cell && cell.of !== undefined) {
      const meter = h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: `width:${clamp(100 * cell.meter / (cell.of || 1), 0, 100)}%;background:${cell.color || color("weight")}` }));
      return h("td", { class: "text" }, meter);
    }
    return h("td", { class: columns[i][1] ? `${columns[i][1]}${String(cell).length > 32 ? " long" : ""}` : null }, String(cell));
  })));
  const made = h("table", {}, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, ...body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}

// ---- tooltip ----

function showTip(parent, x, y, title, lines, rows) {
  const tip = $("tip");
  tip.replaceChildren(h("strong", {}, title), ...lines.map((line) => h("div", {}, line)));
  if (rows.length) tip.append(h("table", {}, h("tbody", {}, ...rows.map(([fill, name, value]) => h("tr", {}, h("td", {}, fill ? swatch(fill) : ""), h("td", { class: "text" }, name), h("td", {}, value))))));
  tip.hidden = false;
  const box = parent.getBoundingClientRect();
  const left = box.left + window.scrollX + x, width = tip.offsetWidth;
  const right = window.scrollX + document.documentElement.clientWidth - 8;
  tip.style.left = `${left + 16 + width < right ? left + 16 : Math.max(8, left - 16 - width)}px`;
  tip.style.top = `${box.top + window.scrollY + y + 12}px`;
}
const hideTip = () => ($("tip").hidden = true);

// ---- the memory of the step ----

const seconds_view = { from: 0, to: Math.max(P.total, M ? M.total : 0) || 1 };
const actions_view = { from: 0, to: P.n };
const whole = { seconds: { ...seconds_view }, actions: { ...actions_view } };
// A measured step lies on the predicted one action by action, and in seconds only where those were predicted rightly.
const memory = { axis: hasSeconds && !M ? "seconds" : "actions", hidden: new Set(), cursor: -1, columns: [] };
const view = () => (memory.axis === "seconds" ? seconds_view : actions_view);
const MARGIN = { left: 74, right: 18, top: 26, bottom: 50 };

function span(t, i, axis) {
  if (axis === "actions") return [i, i + 1];
  return [t.begin[i], i + 1 < t.n ? t.begin[i + 1] : Math.max(t.total, t.begin[i])];
}
// For each pixel column the action with the most bytes in it; -1 where there is none.
function columnsOf(t, axis, v, width) {
  const columns = new Int32Array(width).fill(-1);
  const per = width / (v.to - v.from);
  for (let i = 0; i < t.n; i++) {
    const [a, b] = span(t, i, axis);
    if (b < v.from || a > v.to) continue;
    const first = clamp(Math.floor((a - v.from) * per), 0, width - 1);
    const last = clamp(Math.max(first, Math.ceil((b - v.from) * per) - 1), 0, width - 1);
    for (let c = first; c <= last; c++) if (columns[c] < 0 || t.peak[i] > t.peak[columns[c]]) columns[c] = i;
  }
  return columns;
}
function stepPath(columns, value, left, y) {
  let path = "", before = null;
  for (let c = 0; c < columns.length; c++) {
    const at = columns[c] < 0 ? null : value(columns[c]).toFixed(1);
    if (at === before) continue;
    path += before === null ? `M${left + c} ${y(at)}` : at === null ? `H${left + c}` : `H${left + c}V${y(at)}`;
    before = at;
  }
  return before === null ? path : `${path}H${left + columns.length}`;
}

function drawMemory() {
  const chart = $("memory-chart"), width = Math.max(320, chart.clientWidth), height = 400;
  const w = Math.floor(width - MARGIN.left - MARGIN.right), hgt = height - MARGIN.top - MARGIN.bottom;
  const v = view(), columns = columnsOf(P, memory.axis, v, w);
  memory.columns = columns; memory.width = w;
  const shown = categories.filter((c) => !memory.hidden.has(c));
  const floor = base && !memory.hidden.has("base") ? base : 0;
  const all = floor + Math.max(...P.peak, M ? M.peak.reduce((a, b) => Math.max(a, b), 0) : 0);
  const limit = D.limit_bytes, isHigh = limit !== null && limit > 1.6 * (all + D.reserve_bytes);
  const lowered = base && !floor ? base : 0;
  const top = Math.max(all, limit !== null && !isHigh ? limit - lowered : 0) * 1.06 || 1;
  const y = (n) => MARGIN.top + hgt * (1 - n / top);
  const x = (p) => MARGIN.left + (p - v.from) / (v.to - v.from) * w;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  const unit = tickStep(top, 6, true);
  for (let n = 0; n <= top; n += unit) {
    svg.append(s("line", { class: "grid", x1: MARGIN.left, x2: MARGIN.left + w, y1: y(n), y2: y(n) }), s("text", { class: "soft", x: MARGIN.left - 8, y: y(n) + 4, "text-anchor": "end" }, bytes(n).replace(/\.0+ /, " ")));
  }
  // Stacked columns, from the bottom.
  const below = new Float64Array(w).fill(floor);
  if (floor) svg.append(s("rect", { x: MARGIN.left, width: w, y: y(floor), height: y(0) - y(floor), style: `fill:${color("base")}` }));
  for (const c of shown) {
    const column = P.by[c];
    let up = "", down = "", previous = null, lastTop = null;
    const back = [];
    for (let k = 0; k < w; k++) {
      const bottom = below[k], upper = bottom + (columns[k] < 0 ? 0 : Math.max(0, column[columns[k]]));
      const a = y(upper).toFixed(1), b = y(bottom).toFixed(1);
      if (a !== lastTop) { up += lastTop === null ? `M${MARGIN.left} ${a}` : `H${MARGIN.left + k}V${a}`; lastTop = a; }
      if (b !== previous) { back.push([k, b]); previous = b; }
      below[k] = upper;
    }
    down = `H${MARGIN.left + w}`;
    for (let k = back.length - 1; k >= 0; k--) down += `V${back[k][1]}H${MARGIN.left + back[k][0]}`;
    svg.append(s("path", { d: `${up}${down}Z`, style: `fill:${categoryColor(c)}` }));
  }
  drawAlong(svg, columns, w, height - MARGIN.bottom + 4, v, x);
  drawScale(svg, v, x, w, height, memory.axis);
  if (limit !== null && !isHigh) {
    for (const [n, name, dash] of [[limit - lowered, `limit ${bytes(limit)}`, ""], [limit - D.reserve_bytes - lowered, `without the reserve of ${bytes(D.reserve_bytes)}`, "6 4"]]) {
      if (dash && !D.reserve_bytes) continue;
      svg.append(s("line", { x1: MARGIN.left, x2: MARGIN.left + w, y1: y(n), y2: y(n), "stroke-dasharray": dash, "stroke-width": dash ? 1.2 : 2, style: `stroke:${color("limit")}` }));
      if (!dash || y(n) - y(limit - lowered) > 15) svg.append(label(MARGIN.left + 6, y(n) + (dash ? 14 : -5), name, "start", "limit"));
    }
  }
  const p = P.peak_index;
  if (p >= 0 && shown.length) {
    const [a, b] = span(P, p, memory.axis), middle = (a + b) / 2;
    if (middle >= v.from && middle <= v.to) {
      const at = x(middle), isRight = at > MARGIN.left + w * .6;
      svg.append(s("line", { x1: at, x2: at, y1: MARGIN.top - 8, y2: MARGIN.top + hgt, "stroke-dasharray": "3 3", style: `stroke:${color("ink")}` }));
      svg.append(s("circle", { cx: at, cy: y(floor + shown.reduce((sum, c) => sum + P.by[c][p], 0)), r: 4, "stroke-width": 1.5, style: `fill:${color("ink")};stroke:${color("back")}` }));
      svg.append(label(at + (isRight ? -5 : 5), MARGIN.top - 10, `predicted peak ${bytes(P.peak[p])} of tensors: ${P.actions[p]}`, isRight ? "end" : "start"));
    }
  }
  if (M) {
    const line = stepPath(columnsOf(M, memory.axis, v, w), (i) => M.peak[i] + floor, MARGIN.left, (n) => y(n).toFixed(1));
    svg.append(s("path", { d: line, fill: "none", "stroke-width": 4.5, style: `stroke:${color("back")};opacity:.75` }));
    svg.append(s("path", { d: line, fill: "none", "stroke-width": 2, style: `stroke:${color("measured")}` }));
  }
  const cursor = s("line", { y1: MARGIN.top, y2: MARGIN.top + hgt, style: `stroke:${color("ink")}`, visibility: "hidden" });
  const band = s("rect", { y: MARGIN.top, height: hgt, width: 0, style: `fill:${color("focus")}`, opacity: .18, visibility: "hidden" });
  svg.append(band, cursor);
  Object.assign(memory, { x, cursorLine: cursor, band });
  chart.replaceChildren(svg);
  drawCursor(false);
  const notes = [`Predicted device bytes of each action at its peak, by category. ${P.first ? `Each column stands for up to ${P.first[1]} actions, by the highest of them. ` : ""}`];
  notes.push(base ? `The grey floor (${bytes(base)}) is held before the first tensor: interpreter, libraries, tensors of others. ` : "");
  if (limit !== null && isHigh) notes.push(`The limit, ${bytes(limit)}, lies above the picture. `);
  if (limit === null) notes.push("There is no limit. ");
  if (M) notes.push("The line is what the last measured step held at its highest in each action.");
  $("memory-note").textContent = notes.join("");
}
function label(x, y, text, anchor, fill = "ink") {
  const made = s("text", { x, y, "text-anchor": anchor, style: `fill:${color(fill)};paint-order:stroke;stroke:${color("back")};stroke-width:3px` }, text);
  return made;
}
// The strip of actions below the picture, with their texts where there is room.
function drawAlong(svg, columns, w, top, v, x) {
  let run = 0;
  for (let c = 1; c <= w; c++) {
    const kind = columns[run] < 0 ? null : kindOf(P.actions[columns[run]]);
    if (c < w && (columns[c] < 0 ? null : kindOf(P.actions[columns[c]])) === kind) continue;
    if (kind) svg.append(s("rect", { x: MARGIN.left + run, width: c - run, y: top, height: 10, style: `fill:${color(kind)}` }));
    run = c;
  }
  let free = -1;
  for (let i = 0; i < P.n; i++) {
    const [a, b] = span(P, i, memory.axis);
    if (b < v.from || a > v.to) continue;
    const left = Math.max(x(a), MARGIN.left), right = Math.min(x(b), MARGIN.left + w), text = P.actions[i];
    if (right - left < text.length * 6.2 || left < free) continue;
    free = right;
    svg.append(s("text", { x: (left + right) / 2, y: top + 22, "text-anchor": "middle", class: "soft" }, text));
  }
}
function drawScale(svg, v, x, w, height, axis) {
  const step = axis === "actions" ? Math.max(1, tickStep(v.to - v.from, 9, false)) : tickStep(v.to - v.from, 9, false);
  const bottom = height - 6;
  for (let p = Math.ceil(v.from / step) * step; p <= v.to + 1e-12; p += step) {
    svg.append(s("line", { class: "axis", x1: x(p), x2: x(p), y1: height - 20, y2: height - 17 }));
    if (x(p) < MARGIN.left + w - 60) svg.append(s("text", { class: "soft", x: x(p), y: bottom, "text-anchor": "middle" }, axis === "actions" ? Math.round(p * (P.first ? P.first[1] : 1)) : tick(Math.round(p / step) * step)));
  }
  svg.append(s("text", { class: "soft", x: MARGIN.left + w, y: bottom, "text-anchor": "end" }, axis));
}
// The largest tensor that the calls of an action save, with the line of the program that makes it.
function largestOf(action) {
  const found = /\bC(\d+)(?:-(\d+))?/.exec(action);
  if (!found) return [];
  const calls = D.memory.of_calls.slice(+found[1], +(found[2] || found[1]) + 1).filter(Boolean);
  const most = calls.reduce((a, b) => (a && a[1] >= b[1] ? a : b), null);
  return most ? [`its largest saved tensor: ${bytes(most[1])}, ${most[0]}${most[2] ? `, ${most[2]}` : ""}`] : [];
}
function drawCursor(withTip = true) {
  const i = memory.cursor, chart = $("memory-chart");
  chart.setAttribute("aria-valuemax", String(Math.max(0, P.n - 1)));
  if (i < 0) return;
  const [a, b] = span(P, i, memory.axis), at = memory.x((a + b) / 2);
  memory.cursorLine.setAttribute("x1", at);
  memory.cursorLine.setAttribute("x2", at);
  memory.cursorLine.setAttribute("visibility", at >= MARGIN.left - 1 && at <= MARGIN.left + memory.width + 1 ? "visible" : "hidden");
  const rows = categories.filter((c) => P.by[c][i]).map((c) => [categoryColor(c), CATEGORIES[c] || c, bytes(P.by[c][i])]);
  rows.push([null, "sum at the peak", bytes(P.peak[i])], [null, "afterwards", bytes(P.after[i])]);
  for (const [tier, column] of Object.entries(P.away)) rows.push([null, `on ${tier}`, bytes(column[i])]);
  const same = M && i < M.n && M.actions[i] === P.actions[i];
  if (same) rows.push([color("measured"), "measured", bytes(M.peak[i])]);
  const number = P.first ? P.first[i] : i;
  const lines = [`${P.actions[i]}, action ${number} of ${D.predicted.first ? "about " : ""}${P.n * (P.first ? P.first[1] : 1)}${i === P.peak_index ? ": the predicted peak" : ""}`];
  if (hasSeconds) lines.push(`${seconds(P.start[i])} to ${seconds(P.end[i])}: ${seconds(P.end[i] - P.start[i])}`);
  if (same && M.total) lines.push(`measured ${seconds(M.end[i] - M.start[i])}`);
  lines.push(...largestOf(P.actions[i]));
  chart.setAttribute("aria-valuenow", String(i));
  chart.setAttribute("aria-valuetext", `${inWords(P.actions[i])}: ${bytes(P.peak[i])} at its peak, of it ${rows.slice(0, -2).map((r) => `${r[1]} ${r[2]}`).join(", ")}${hasSeconds ? `; ${seconds(P.end[i] - P.start[i])}` : ""}`);
  if (withTip) showTip(chart, at, 20, inWords(P.actions[i]), lines, rows);
}

function zoom(v, limits, from, to) {
  const least = (limits.to - limits.from) / Math.max(50, 4 * P.n);
  const size = clamp(to - from, least, limits.to - limits.from);
  const middle = (from + to) / 2;
  v.from = clamp(middle - size / 2, limits.from, limits.to - size);
  v.to = v.from + size;
  redraw();
}
function zoomBy(factor) {
  const v = view(), i = memory.cursor;
  const [a, b] = i < 0 ? [v.from, v.to] : span(P, i, memory.axis);
  const middle = (a + b) / 2 >= v.from && (a + b) / 2 <= v.to ? (a + b) / 2 : (v.from + v.to) / 2;
  const size = (v.to - v.from) * factor, share = (middle - v.from) / (v.to - v.from);
  zoom(v, whole[memory.axis], middle - size * share, middle + size * (1 - share));
}
function zoomAll() { Object.assign(view(), whole[memory.axis]); redraw(); }
function toPeak() {
  if (P.peak_index < 0) return;
  memory.cursor = P.peak_index;
  const [a, b] = span(P, memory.cursor, memory.axis), around = (whole[memory.axis].to - whole[memory.axis].from) / 12;
  zoom(view(), whole[memory.axis], (a + b - around) / 2, (a + b + around) / 2);
}
function moveTo(i) {
  memory.cursor = clamp(i, 0, P.n - 1);
  const v = view(), [a, b] = span(P, memory.cursor, memory.axis);
  if (a < v.from || b > v.to) zoom(v, whole[memory.axis], (a + b - v.to + v.from) / 2, (a + b + v.to - v.from) / 2);
  drawCursor();
}
function setUpMemory() {
  const chart = $("memory-chart");
  let drag = null;
  const position = (event) => {
    const v = view();
    return v.from + clamp((event.clientX - chart.getBoundingClientRect().left - MARGIN.left) / memory.width, 0, 1) * (v.to - v.from);
  };
  chart.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, at: position(event) }; });
  chart.addEventListener("pointermove", (event) => {
    const column = clamp(Math.floor(event.clientX - chart.getBoundingClientRect().left - MARGIN.left), 0, memory.width - 1);
    if (memory.columns[column] >= 0) { memory.cursor = memory.columns[column]; drawCursor(); }
    if (drag && Math.abs(event.clientX - drag.x) > 5) {
      const at = memory.x(drag.at), to = memory.x(position(event));
      memory.band.setAttribute("x", Math.min(at, to));
      memory.band.setAttribute("width", Math.abs(at - to));
      memory.band.setAttribute("visibility", "visible");
    }
  });
  window.addEventListener("pointerup", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 5) {
      const to = position(event), from = drag.at;
      zoom(view(), whole[memory.axis], Math.min(from, to), Math.max(from, to));
    }
    drag = null;
    memory.band.setAttribute("visibility", "hidden");
  });
  chart.addEventListener("dblclick", zoomAll);
  chart.addEventListener("pointerleave", hideTip);
  chart.addEventListener("blur", hideTip);
  chart.addEventListener("keydown", (event) => {
    const many = Math.max(10, Math.round(P.n / 20)), at = memory.cursor;
    const moves = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: Math.max(0, at - 1), ArrowDown: Math.max(0, at - 1), PageUp: at + many, PageDown: Math.max(0, at - many), Home: 0, End: P.n - 1 };
    if (event.key in moves) moveTo(moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoomBy(.5);
    else if (event.key === "-") zoomBy(2);
    else if (event.key === "0") zoomAll();
    else if (event.key === "p" || event.key === "P") { toPeak(); drawCursor(); }
    else if (event.key === "Escape") hideTip();
    else return;
    event.preventDefault();
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => ({ in: () => zoomBy(.5), out: () => zoomBy(2), all: zoomAll, peak: toPeak })[button.dataset.zoom]());
  }
  for (const radio of document.querySelectorAll("[name=axis]")) {
    radio.checked = radio.value === memory.axis;
    radio.disabled = radio.value === "seconds" && !hasSeconds;
    radio.addEventListener("change", () => { memory.axis = radio.value; redraw(); });
  }
  const legend = $("memory-legend");
  for (const c of [...(base ? ["base"] : []), ...categories]) {
    const button = h("button", { type: "button", "aria-pressed": "true" }, swatch(categoryColor(c)), CATEGORIES[c] || c);
    button.addEventListener("click", () => {
      memory.hidden.has(c) ? memory.hidden.delete(c) : memory.hidden.add(c);
      button.setAttribute("aria-pressed", String(!memory.hidden.has(c)));
      drawMemory();
    });
    legend.append(button);
  }
  if (M) legend.append(h("span", {}, swatch(color("measured")), "measured"));
  for (const [kind, name] of [["forward", "forward"], ["backward", "backward"], ["update", "updates and gradients"], ["other", "transfers"]]) {
    if (P.actions.some((a) => kindOf(a) === kind)) legend.append(h("span", {}, swatch(color(kind)), `strip: ${name}`));
  }
}

// ---- lanes ----

const lanes = { lane: 0, at: -1 };
// The zoom of the memory's picture where that shows seconds; else all that is predicted.
const lanesView = () => (memory.axis === "seconds" ? seconds_view : { from: 0, to: P.total });
const kindParts = (kind) => kind.split(" ");
function laneFill(kind) {
  const [what, name] = kindParts(kind);
  if (what === "stall") return stallFill(name);
  return what === "work" ? color("work") : categoryColor(name);
}
const laneWords = (kind) => {
  const [what, name] = kindParts(kind);
  return what === "work" ? "computes" : what === "stall" ? `waits for ${name}` : `moves ${CATEGORIES[name] || name}`;
};
function drawLanes() {
  const chart = $("lanes-chart");
  if (!P.lanes.length) return;
  const left = Math.max(108, 16 + 6.4 * Math.max(...P.lanes.map((lane) => lane.name.length)));  // its names end there
  const width = Math.max(320, chart.clientWidth), row = 30, w = width - left - 18, v = lanesView();
  const height = P.lanes.length * row + 34;
  const x = (t) => left + (t - v.from) / (v.to - v.from) * w;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  P.lanes.forEach((lane, l) => {
    const y = l * row + 4;
    svg.append(s("text", { x: left - 8, y: y + 16, "text-anchor": "end" }, lane.name), s("rect", { x: left, y, width: w, height: row - 8, style: `fill:${color("panel")}` }));
    const paths = lane.kinds.map(() => "");
    const ends = lane.kinds.map(() => -1);
    for (let i = 0; i < lane.start.length; i++) {
      if (lane.end[i] < v.from || lane.start[i] > v.to) continue;
      const k = lane.kind[i], a = Math.max(left, x(lane.start[i]), ends[k]), b = Math.min(left + w, Math.max(x(lane.end[i]), x(lane.start[i]) + .4));
      if (b <= a) continue;
      paths[k] += `M${a.toFixed(1)} ${y}H${b.toFixed(1)}V${y + row - 8}H${a.toFixed(1)}Z`;
      ends[k] = b;
    }
    paths.forEach((d, k) => d && svg.append(s("path", { d, style: `fill:${laneFill(lane.kinds[k])}` })));
  });
  const step = tickStep(v.to - v.from, 9, false);
  for (let p = Math.ceil(v.from / step) * step; p <= v.to; p += step) {
    svg.append(s("line", { class: "axis", x1: x(p), x2: x(p), y1: 0, y2: height - 26 }), s("text", { class: "soft", x: x(p), y: height - 10, "text-anchor": "middle" }, tick(Math.round(p / step) * step)));
  }
  const mark = s("rect", { fill: "none", "stroke-width": 2, style: `stroke:${color("ink")}`, visibility: "hidden", height: row - 6 });
  svg.append(mark);
  Object.assign(lanes, { x, left, w, row, mark });
  chart.replaceChildren(svg);
}
function showInterval(withTip = true) {
  const lane = P.lanes[lanes.lane], i = lanes.at, chart = $("lanes-chart");
  if (!lane || i < 0) return;
  const a = clamp(lanes.x(lane.start[i]), lanes.left, lanes.left + lanes.w), b = clamp(lanes.x(lane.end[i]), lanes.left, lanes.left + lanes.w);
  for (const [key, value] of Object.entries({ x: a, width: Math.max(1, b - a), y: lanes.lane * lanes.row + 3, visibility: "visible" })) lanes.mark.setAttribute(key, value);
  const words = `${lane.name} ${laneWords(lane.kinds[lane.kind[i]])}`, action = P.actions[lane.moment[i]];
  const moved = lane.bytes && lane.bytes[i];
  const lines = [inWords(action), `${seconds(lane.start[i])} to ${seconds(lane.end[i])}: ${seconds(lane.end[i] - lane.start[i])}`];
  if (moved) lines.push(`${bytes(moved)}, ${bytes(moved / (lane.end[i] - lane.start[i]))} a second`);
  chart.setAttribute("aria-valuemax", String(lane.start.length - 1));
  chart.setAttribute("aria-valuenow", String(i));
  chart.setAttribute("aria-valuetext", `${words}; ${lines.join("; ")}`);
  if (withTip) showTip(chart, (a + b) / 2, lanes.lane * lanes.row + lanes.row, words, lines, []);
}
function intervalAt(lane, t, slack) {
  let low = 0, high = lane.start.length - 1, found = -1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle] <= t + slack) { found = middle; low = middle + 1; } else high = middle - 1;
  }
  return found >= 0 && lane.end[found] >= t - slack ? found : -1;
}
function setUpLanes() {
  const chart = $("lanes-chart");
  if (!P.lanes.length) {
    $("lanes-note").textContent = "Seconds were not predicted: without a machine's speeds there are no lanes.";
    chart.remove();
    $("lanes-keys").remove();
    return;
  }
  const stalled = Object.values(P.stalls_s).reduce((a, b) => a + b, 0);
  $("lanes-note").textContent = `Predicted for ${D.device}: a step of ${seconds(P.seconds)}, of which compute waits ${seconds(stalled)} (hatched). Read: to the device; write: from it.${P.commit_s ? ` A commit of ${seconds(P.commit_s)} follows the step.` : ""}`;
  const kinds = [...new Set(P.lanes.flatMap((lane) => lane.kinds))].sort().reverse();
  for (const kind of kinds) $("lanes-legend").append(h("span", {}, swatch(laneFill(kind)), laneWords(kind)));
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), l = clamp(Math.floor((event.clientY - box.top) / lanes.row), 0, P.lanes.length - 1);
    const v = lanesView(), per = (v.to - v.from) / lanes.w;
    const at = intervalAt(P.lanes[l], v.from + (event.clientX - box.left - lanes.left) * per, 1.5 * per);
    if (at < 0) { hideTip(); lanes.mark.setAttribute("visibility", "hidden"); return; }
    Object.assign(lanes, { lane: l, at });
    showInterval();
  });
  chart.addEventListener("pointerleave", hideTip);
  chart.addEventListener("blur", hideTip);
  chart.addEventListener("keydown", (event) => {
    const lane = P.lanes[lanes.lane];
    const before = lanes.at < 0 ? 0 : lane.start[lanes.at];
    const change = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (change) {
      lanes.lane = clamp(lanes.lane + change, 0, P.lanes.length - 1);
      lanes.at = Math.max(0, P.lanes[lanes.lane].start.findIndex((t) => t >= before));
    } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      lanes.at = clamp(lanes.at + (event.key === "ArrowRight" ? 1 : -1), 0, lane.start.length - 1);
    } else if (event.key === "Home" || event.key === "End") {
      lanes.at = event.key === "Home" ? 0 : lane.start.length - 1;
    } else if (event.key === "Escape") { hideTip(); return; } else return;
    event.preventDefault();
    showInterval();
  });
  const places = $("lanes-tables");
  const busy = P.lanes.map((lane) => {
    const sum = lane.start.reduce((a, t, i) => a + (lane.kinds[lane.kind[i]].startsWith("stall") ? 0 : lane.end[i] - t), 0);
    return [lane.name, seconds(sum), `${(100 * sum / P.total).toFixed(0)} %`, { meter: sum, of: P.total, color: color("work") }];
  });
  places.append(table("Busy", [["lane", "text"], ["seconds", ""], ["of the step", ""], ["", "text"]], busy));
  const stalls = Object.entries(P.stalls_s).filter(([, t]) => t > 0).sort((a, b) => b[1] - a[1]);
  if (stalls.length) places.append(table("Compute waits", [["for", "text"], ["predicted", ""], ...(M ? [["measured", ""]] : [])], stalls.map(([cause, t]) => [cause, seconds(t), ...(M ? [cause in M.stalls_s ? seconds(M.stalls_s[cause]) : "not seen"] : [])])));
  const moved = [...new Set([...Object.keys(P.read), ...Object.keys(P.written)])].sort();
  if (moved.length) places.append(table("Moved in a step", [["what", "text"], ["read", ""], ["written", ""]], moved.map((name) => [name, bytes(P.read[name] || 0), bytes(P.written[name] || 0)])));
}

// ---- where the memory goes ----

function setUpWhere() {
  const T = D.memory, place = $("where-tables"), p = P.peak_index;
  $("where-note").textContent = `The first table is this plan's step at its predicted peak; the others say what plain training of ${T.plain_rows} rows holds. Figures of blocks are of one block of the row, saved bytes those of a microbatch of ${T.rows} rows.`;
  if (p >= 0) {
    const rows = categories.filter((c) => P.by[c][p]).map((c) => [CATEGORIES[c] || c, bytes(P.by[c][p]), { meter: P.by[c][p], of: P.peak[p], color: categoryColor(c) }]);
    const pair = h("div", { class: "pair" });
    pair.append(table(`At the peak, ${P.actions[p]}`, [["category", "text"], ["bytes", ""], ["", "text"]], [...rows, ["all tensors", bytes(P.peak[p]), ""]], true));
    const most = T.plain[T.plain.length - 1][1];
    pair.append(table("Plain training, everything on the device", [["what", "text"], ["bytes", ""], ["", "text"]], T.plain.map(([name, n]) => [name, bytes(n), { meter: n, of: most }]), true));
    place.append(pair);
  }
  if (T.holders.length) {
    // Holders that differ in numbers alone stand in one row.
    const rows = new Map();
    for (const [category, name, n] of T.holders) {
      const key = JSON.stringify([category, name.replace(/\d+/g, "0"), n]), row = rows.get(key) || { category, name, n, k: 0 };
      rows.set(key, { ...row, k: row.k + 1 });
    }
    const shown = [...rows.values()].sort((a, b) => b.n * b.k - a.n * a.k).slice(0, 16);
    place.append(table("Largest holders at the peak", [["name", "text"], ["category", "text"], ["bytes", ""], ["", "text"]], shown.map(({ category, name, n, k }) => [`${name || "(model)"}${k > 1 ? ` and ${k - 1} alike` : ""}`, CATEGORIES[category] || category, bytes(n * k), { meter: n * k, of: shown[0].n * shown[0].k, color: categoryColor(category) }])));
  }
  const most = Math.max(...T.blocks.map((b) => b.count * (b.weight_bytes + b.gradient_bytes + b.state_bytes + b.saved_bytes)));
  place.append(table("By block, in the order of their first call", [["block", "text"], ["blocks", ""], ["parameters", ""], ["weights", ""], ["gradients", ""], ["states", ""], ["saved inside", ""], ["operations", ""], ["all of the row", ""], ["", "text"], ["policy", "text"], ["weights, gradients, states rest on", "text"]],
    T.blocks.map((b) => { const all = b.count * (b.weight_bytes + b.gradient_bytes + b.state_bytes + b.saved_bytes); return [b.name, b.count, count(b.parameters), bytes(b.weight_bytes), bytes(b.gradient_bytes), bytes(b.state_bytes), bytes(b.saved_bytes), operations(b.flops), bytes(all), { meter: all, of: most }, b.policy, b.homes]; })));
  if (T.largest_saved.length) place.append(table("The largest tensors saved for backward, by operation and shape", [["operation", "text"], ["line", "text"], ["tensors", ""], ["bytes of one", ""], ["", "text"]], T.largest_saved.map(([what, n, k, line]) => [what, line, k, bytes(n), { meter: n, of: T.largest_saved[0][1], color: color("activation") }])));
  if (T.untiled) place.append(h("p", {}, `Attention bypasses tiled kernels in ${T.untiled.modules}: it saves ${bytes(T.untiled.saved_bytes)} of probabilities, in whose place scaled_dot_product_attention saves ${bytes(T.untiled.tiled_bytes)} where it is tiled.`));
}

// ---- lifetimes ----

function drawLifetimes() {
  const L = D.lifetimes, frame = $("lifetimes-chart");
  if (!L.calls.length) return;
  const width = Math.max(320, frame.clientWidth - 14), row = L.calls.length > 60 ? 9 : L.calls.length > 30 ? 13 : 18, left = Math.min(210, width * .3), w = width - left - 12;
  const total = hasSeconds ? P.total : P.n, height = L.calls.length * row + 30;
  const x = (t) => left + t / total * w;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Forward, idle time and backward of each call of microbatch 0; the table below has the figures" });
  const most = Math.max(1, ...L.calls.map((c) => c.saved_bytes + c.boundary_bytes));
  L.calls.forEach((c, r) => {
    const [f0, f1] = hasSeconds ? c.forward_s : [c.forward, c.forward + 1], [b0, b1] = hasSeconds ? c.backward_s : [c.backward, c.backward + 1];
    const y = r * row, thick = Math.max(1.5, (row - 2) * (c.policy === "keep" ? c.saved_bytes + c.boundary_bytes : c.boundary_bytes) / most);
    const group = s("g");
    group.append(s("title", {}, `${c.site || "(model)"}: ${c.policy}; saves ${bytes(c.saved_bytes)} beyond arguments of ${bytes(c.boundary_bytes)}; idle ${hasSeconds ? seconds(Math.max(0, b0 - f1)) : `${c.backward - c.forward - 1} actions`}`));
    if (c.policy !== "offload") group.append(s("rect", { x: x(f1), y: y + (row - thick) / 2, width: Math.max(0, x(b0) - x(f1)), height: thick, style: `fill:${c.policy === "keep" ? color("activation") : color("base")}` }));
    if (c.policy === "offload") group.append(s("rect", { x: x(f1), y: y + 2, width: Math.max(0, x(b0) - x(f1)), height: row - 4, fill: stallFill("offload") }));
    group.append(s("rect", { x: x(f0), y: y + 1, width: Math.max(1, x(f1) - x(f0)), height: row - 2, style: `fill:${color("forward")}` }), s("rect", { x: x(b0), y: y + 1, width: Math.max(1, x(b1) - x(b0)), height: row - 2, style: `fill:${color("backward")}` }));
    if (row > 10 || r % 4 === 0) group.append(s("text", { x: left - 6, y: y + row / 2 + 4, "text-anchor": "end", style: row < 12 ? "font-size:10px" : "" }, (c.site || "(model)").slice(-30)));
    svg.append(group);
  });
  const step = tickStep(total, 8, false);
  for (let p = 0; p <= total; p += step) svg.append(s("line", { class: "grid", x1: x(p), x2: x(p), y1: 0, y2: height - 24 }), s("text", { class: "soft", x: x(p), y: height - 8, "text-anchor": "middle" }, hasSeconds ? tick(p) : p));
  frame.replaceChildren(svg);
}
function setUpLifetimes() {
  const L = D.lifetimes, many = D.microbatches > 1 ? `microbatch 0 of ${D.microbatches}` : "the batch";
  $("lifetimes-note").textContent = `What each call saves of ${many}: made in its forward, idle until its backward. The thickness of the bar between is what is held meanwhile, beside the call that holds most. Times are those of the plan's predicted step.`;
  for (const [fill, name] of [[color("forward"), "forward"], [color("backward"), "backward"], [color("activation"), "idle, kept"], [color("base"), "idle, arguments only (recomputed)"], [stallFill("offload"), "away"]]) {
    $("lifetimes-legend").append(h("span", {}, swatch(fill), name));
  }
  if (!L.calls.length) { $("lifetimes-chart").remove(); return; }
  const most = Math.max(...L.storages.map((r) => r.idle_byte_s));
  const rows = L.storages.filter((r) => r.idle_byte_s >= most / 2000).map((r) => [r.made_by || "(model)", r.saved_by || "(model)", r.policy, r.count, bytes(r.nbytes), `${r.uses.forward} + ${r.uses.recompute} + ${r.uses.backward}`, ...(hasSeconds ? [seconds(r.used_s - r.made_s), seconds(Math.max(0, r.again_s - r.used_s)), `${(r.idle_byte_s / 2 ** 30).toPrecision(3)} GiB s`, r.recompute_s === null ? "" : seconds(r.recompute_s), Object.entries(r.reload_s).map(([tier, t]) => `${tier} ${seconds(t)}`).join(", "), r.break_even_bytes_per_s === null ? "" : `${bytes(r.break_even_bytes_per_s)}/s`] : [])]);
  if (rows.length) $("lifetimes-table").append(table("Saved storages with the most idle byte-seconds, where their calls keep them", [["made in", "text"], ["saved by", "text"], ["policy", "text"], ["storages", ""], ["bytes of one", ""], ["reads in forward + made again + backward", ""], ...(hasSeconds ? [["in use, first one", ""], ["idle, first one", ""], ["idle byte-seconds, all", ""], ["made again in", ""], ["moved in", ""], ["a link as fast", ""]] : [])], rows));
}

// ---- from plain training to the plan ----

function setUpPlain() {
  const place = $("plain-tables"), F = D.from_plain;
  $("plain-note").textContent = "Each row adds one kind of the plan's decisions to the rows above it; predicted, tensors only. In another order the same decisions would show other shares.";
  if (F.length) {
    const most = Math.max(...F.map((p) => p.peak_bytes)), slowest = Math.max(...F.map((p) => p.seconds));
    place.append(table("Decision by decision", [["decision", "text"], ["peak", ""], ["saves", ""], ["", "text"], ["step", ""], ["costs", ""], ["", "text"]], F.map((p, i) => {
      const saved = i ? F[i - 1].peak_bytes - p.peak_bytes : 0, change = i ? p.seconds - F[i - 1].seconds : 0, cost = Math.abs(change) < 1e-6 * p.seconds ? 0 : change;
      return [p.name, bytes(p.peak_bytes), i ? bytes(saved) : "", { meter: p.peak_bytes, of: most }, seconds(p.seconds), i ? `${cost > 0 ? "+" : ""}${seconds(cost)}` : "", { meter: p.seconds, of: slowest, color: color("backward") }];
    })));
  }
  if (D.front.length) {
    const most = Math.max(...D.front.map((p) => p.peak_bytes)), slowest = Math.max(...D.front.map((p) => p.seconds));
    $("front-table").append(table("Plans beside this one, from the fastest to the leanest", [["plan", "text"], ["", "text"], ["peak", ""], ["", "text"], ["step", ""], ["", "text"]], D.front.map((p) => [p.name, p.note, bytes(p.peak_bytes), { meter: p.peak_bytes, of: most }, seconds(p.seconds), { meter: p.seconds, of: slowest, color: color("backward") }])));
  }
  if (!D.front.length) $("front").remove();
  if (!F.length && !D.front.length) $("plain").remove();
}
// Bytes against seconds of the plans beside this one.
function drawFront() {
  const place = $("front-chart");
  if (!place) return;
  const points = [...D.front].sort((a, b) => a.peak_bytes - b.peak_bytes);
  const width = clamp(place.clientWidth, 320, 760), height = 260, left = 74, right = 24, top = 16, bottom = 44;
  const most = points[points.length - 1].peak_bytes * 1.05, slowest = Math.max(...points.map((p) => p.seconds)), fastest = Math.min(...points.map((p) => p.seconds));
  const low = fastest - Math.max(slowest - fastest, slowest * .02) * .15, high = slowest + Math.max(slowest - fastest, slowest * .02) * .15;
  const x = (n) => left + n / most * (width - left - right), y = (t) => top + (high - t) / (high - low) * (height - top - bottom);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Seconds of a step against peak bytes of tensors, a point for each plan of the table below" });
  for (let n = 0, unit = tickStep(most, 7, true); n <= most; n += unit) svg.append(s("line", { class: "grid", x1: x(n), x2: x(n), y1: top, y2: height - bottom }), s("text", { class: "soft", x: x(n), y: height - bottom + 16, "text-anchor": "middle" }, bytes(n).replace(/\.0+ /, " ")));
  const step = tickStep(high - low, 5, false);
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }), s("text", { class: "soft", x: left - 8, y: y(t) + 4, "text-anchor": "end" }, tick(t)));
  const room = D.limit_bytes === null ? most : D.limit_bytes - base - D.reserve_bytes;
  if (room < most) svg.append(s("line", { x1: x(room), x2: x(room), y1: top, y2: height - bottom, "stroke-width": 2, style: `stroke:${color("limit")}` }), label(x(room) + 5, top + 10, `${bytes(room)} for tensors`, "start", "limit"));
  svg.append(s("path", { d: points.map((p, i) => `${i ? "L" : "M"}${x(p.peak_bytes).toFixed(1)} ${y(p.seconds).toFixed(1)}`).join(""), fill: "none", style: `stroke:${color("soft")}` }));
  for (const p of points) {
    const isChosen = p.note === "chosen", dot = s("circle", { cx: x(p.peak_bytes), cy: y(p.seconds), r: isChosen ? 6 : 4, "stroke-width": 2, style: `fill:${isChosen ? color("focus") : p.note === "fits" ? color("soft") : color("back")};stroke:${isChosen ? color("focus") : color("soft")}` });
    dot.append(s("title", {}, `${p.name}: ${bytes(p.peak_bytes)}, ${seconds(p.seconds)}${p.note ? `, ${p.note}` : ""}`));
    svg.append(dot);
  }
  svg.append(s("text", { class: "soft", x: width - right, y: height - 8, "text-anchor": "end" }, "peak of tensors; hollow points do not fit"));
  place.replaceChildren(svg);
}

// ---- proof by phase ----

function setUpProof() {
  if (!D.phases.length) {
    $("proof").remove();
    document.querySelector('a[href="#proof"]').remove();
    return;
  }
  const told = (n) => (n === null ? "-" : bytes(n));
  $("proof-note").textContent = "Peaks of the run so far. What is predicted is an upper bound of loading and resuming. Memory that a step has freed may stay ready for the next one, so that phases behind it may hold as much as a step; their tensors tell them apart.";
  $("proof-table").append(table("Predicted and measured peaks by phase", [["phase", "text"], ["times", ""], ["predicted", ""], ["measured", ""], ["limit", ""], ["", "text"], ["tensors, predicted", ""], ["tensors, measured", ""]], D.phases.map((p) => [p.name, String(p.times), told(p.predicted_bytes), `${bytes(p.measured_bytes)}${p.holds ? "" : " (above the limit)"}`, told(p.limit_bytes), { meter: p.measured_bytes, of: p.limit_bytes || Math.max(...D.phases.map((q) => q.measured_bytes)) }, told(p.predicted_tensor_bytes), bytes(p.measured_tensor_bytes)])));
}

// ---- what if ----

const OPTIMIZERS = [["given", "as profiled", null], ["sgd", "SGD without momentum", 0], ["momentum", "SGD with momentum, or Lion", 1], ["adam", "Adam, AdamW", 2], ["adam8", "Adam with 8-bit states", .5], ["amsgrad", "Adam with amsgrad", 3]];
const PRECISIONS = [["given", "as profiled"], ["fp32", "fp32"], ["bf16-masters", "bf16 with fp32 masters"], ["bf16", "bf16 alone"]];
function setUpWhatIf() {
  const F = D.what_if, form = $("whatif-form"), repeated = F.calls.filter((call) => call.is_repeated).length;
  const given = F.weight_bytes / Math.max(1, F.elements);
  const errors = F.traced_peaks.map(([rows, traced], i) => `${rows} rows: traced ${bytes(traced)}, closed forms ${bytes(F.given_peaks[i][1])}`);
  $("whatif-note").textContent = `Closed forms that this page carries, not the planner: one microbatch, everything on the device. Bytes of activations are straight lines in rows, through ${F.traced_rows.length > 1 ? `the traced sizes ${F.traced_rows.join(" and ")}` : `zero and the traced size ${F.traced_rows[0]}`}. Approximate: a sequence scales bytes and operations in proportion (probabilities that attention saves: with the square; operations of attention too little), a narrower dtype all activations alike, seconds are operations by one rate. Activations and gradients at their peak, for ${errors.join("; ")}.`;
  const steps = 40, most = Math.max(64, F.rows * 8);
  const rowsAt = (k) => Math.max(1, Math.round(most ** (k / steps)));
  const limit0 = D.limit_bytes || D.capacities.device || 2 ** 34;
  const fields = {};
  const add = (name, title, control) => {
    const value = h("b", { id: `whatif-${name}-value` });
    control.setAttribute("id", `whatif-${name}`);
    form.append(h("label", { for: `whatif-${name}` }, `${title}: `, value, control));
    fields[name] = { control, value };
    control.addEventListener("input", update);
  };
  const range = (min, max, step, value) => h("input", { type: "range", min, max, step, value });
  const select = (options) => h("select", {}, ...options.map(([value, name]) => h("option", { value }, name)));
  add("rows", "Batch", range(0, steps, 1, Math.round(steps * Math.log(F.rows) / Math.log(most))));
  add("sequence", "Sequence", range(-3, 5, .5, 0));
  add("recomputed", "Recompute", range(0, repeated, 1, 0));
  add("limit", "Limit", range(-4, 6, .125, 0));
  add("optimizer", "Optimizer", select(OPTIMIZERS));
  add("precision", "Precision", select(PRECISIONS));
  add("update", "Updates", select([["after", "after backward"], ["in", "in backward, block by block"]]));
  form.addEventListener("submit", (event) => event.preventDefault());
  function update() {
    const position = +fields.rows.control.value, start = Math.round(steps * Math.log(F.rows) / Math.log(most));
    const rows = position === start ? F.rows : rowsAt(position);
    const sequence = 2 ** +fields.sequence.control.value, recomputed = +fields.recomputed.control.value, limit = limit0 * 2 ** +fields.limit.control.value;
    const precision = fields.precision.control.value, optimizer = OPTIMIZERS.find(([name]) => name === fields.optimizer.control.value);
    const width = { given, fp32: 4, "bf16-masters": 2, bf16: 2 }[precision];
    const masters = precision === "bf16-masters" ? 4 * F.trainable : 0;
    const states = optimizer[2] === null ? F.state_bytes : optimizer[2] * F.trainable * (precision === "bf16" ? 2 : 4);
    const options = { recomputed, sequence, activations: precision === "given" ? 1 : width / given, gradients: fields.update.control.value === "in" ? 0 : width / given };
    const found = closedPeak(F, rows, options), weights = width * F.elements;
    const held = weights + states + masters + F.buffer_bytes, peak = held + found.peak + base + D.reserve_bytes;
    fields.rows.value.textContent = `${rows} rows`;
    fields.sequence.value.textContent = sequence === 1 ? "as profiled" : `${sequence < 1 ? `1/${(1 / sequence).toPrecision(3)}` : `${sequence.toPrecision(3)} times`} of the profiled`;
    fields.recomputed.value.textContent = `${recomputed} of ${repeated} repeated calls`;
    fields.limit.value.textContent = bytes(limit);
    for (const name of ["rows", "sequence", "recomputed", "limit"]) fields[name].control.setAttribute("aria-valuetext", fields[name].value.textContent);
    const time = closedSeconds(F, rows, options);
    let verdict = peak <= limit ? `Fits: ${bytes(limit - peak)} are left of ${bytes(limit)}.` : `Does not fit: ${bytes(peak - limit)} more than ${bytes(limit)}.`;
    if (peak > limit) {
      let enough = -1;
      for (let k = recomputed + 1; k <= repeated && enough < 0; k++) if (held + base + D.reserve_bytes + closedPeak(F, rows, { ...options, recomputed: k }).peak <= limit) enough = k;
      verdict += enough > 0 ? ` It would with ${enough} calls recomputed.` : " Recomputation alone does not help: microbatches or homes on another tier would, which memfit plan chooses.";
    }
    const parts = [["held before tensors", base, "base"], ["weights and buffers", weights + F.buffer_bytes, "weight"], ["optimizer states and masters", states + masters, "state"], ["gradients at the peak", found.gradients, "gradient"], ["saved activations at the peak", found.held, "activation"], ["inside of a call at the peak", found.inside, "transient"], ["reserve", D.reserve_bytes, "staging"]].filter(([, n]) => n > 0);
    $("whatif-out").replaceChildren(h("p", { class: "verdict" }, verdict), table("Closed forms", [["category", "text"], ["bytes", ""], ["", "text"]], [...parts.map(([name, n, c]) => [name, bytes(n), { meter: n, of: peak, color: color(c) }]), ["peak", bytes(peak), ""]], true));
    if (time) $("whatif-out").append(h("p", {}, `A step of about ${seconds(time)} by operations alone, ${count(Math.round(rows / time * 10) / 10)} rows a second.`));
  }
  update();
}

function redraw() { drawMemory(); drawLanes(); }
function setUpHead() {
  // The first two sentences; the rest where it is asked for.
  const said = D.reason.match(/^(?:.*?[.;:] ){2}(?=[A-Z])/s), brief = D.reason.length > 320 && said ? said[0] : D.reason;
  $("reason").textContent = brief;
  if (brief.length < D.reason.length) $("reason").after(h("details", {}, h("summary", {}, "More on the plan"), h("p", {}, D.reason.slice(brief.length))));
  for (const [name, value] of D.facts) $("facts").append(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  $("footer").textContent = `memfit ${D.version}. Everything here is predicted unless it says measured. The page carries its data and asks nothing of the network.`;
  const names = ["as the system", "light", "dark"], dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = 0;
  const apply = () => {
    document.documentElement.dataset.theme = chosen ? names[chosen] : dark.matches ? "dark" : "light";
    $("theme").textContent = `Theme: ${names[chosen]}`;
  };
  $("theme").addEventListener("click", () => { chosen = (chosen + 1) % 3; apply(); });
  dark.addEventListener("change", apply);
  apply();
}

setUpHead();
setUpMemory();
setUpLanes();
setUpWhere();
setUpLifetimes();
setUpPlain();
setUpProof();
setUpWhatIf();
redraw();
drawLifetimes();
drawFront();
let waiting = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { redraw(); drawLifetimes(); drawFront(); }); });
