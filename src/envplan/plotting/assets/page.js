"use strict";
// Draws the charts of a page from the data embedded in it. No network, no libraries.
// Every element with a `data-chart` attribute names its kind and the key of its data.

/**
 * The data of the charts, times in s, energies in J, powers in W. Classes of the same names in
 * plotting/page_data.py write them, and a test keeps both alike.
 *
 * @typedef {object} FrontierChart
 * @property {[number, number][]} curve - the exact relaxed frontier: pairs of s and J
 * @property {Object<string, [number, number][]>} curves - further curves, by planner
 * @property {PlanPoint[]} plans - along the frontier, by ascending time
 * @property {PlanPoint[]} slower - beyond T_star, for stragglers
 * @property {PlanPoint[]} points - single plans with marks of their own
 * @property {PlanPoint} baseline - maximum frequency everywhere
 * @property {number} t_min
 * @property {number} t_star
 * @property {string[]} ends - names of T_min and T_star
 * @property {number} t_max - the slowest plan's time
 * @property {number} waiting_w - what all GPUs draw while they wait
 * @property {?number} straggler - a straggler's time when the page opens
 * @property {boolean} modelled
 *
 * @typedef {object} PlanPoint
 * @property {string} planner - "this_plan" for the plan that the page is about
 * @property {string} label
 * @property {number} time
 * @property {number} energy
 * @property {number} saved - percent, against maximum frequency
 * @property {number} slower - percent, against maximum frequency
 * @property {?number} gap - certified, a fraction
 * @property {number} power - average of all GPUs
 *
 * @typedef {object} TimelineChart
 * @property {TimelineData[]} timelines - from the top
 * @property {number} span - the length of their time axis
 *
 * @typedef {object} AnimationChart
 * @property {TimelineData[]} frames - of the frontier's plans
 * @property {number} span
 * @property {FrontierChart} frontier
 *
 * @typedef {object} TimelineData
 * @property {string} name
 * @property {string} title
 * @property {number} chunks
 * @property {number} stages
 * @property {string[]} kinds - the instructions that occur
 * @property {OperationColumns} ops
 * @property {Object<number, PartSpan[]>} parts - by operation, where parts have clocks of their own
 * @property {TimelineBubble[]} bubbles
 * @property {{times: number[], watts: number[]}} power - of all GPUs; one time more than watts
 * @property {number} average_w
 *
 * @typedef {object} OperationColumns - an entry for each operation
 * @property {number[]} microbatch
 * @property {number[]} chunk
 * @property {number[]} start
 * @property {number[]} mhz - 0 where it controls no clock
 * @property {number[]} slack - how much longer it could take
 * @property {number[]} stage
 * @property {number[]} kind - index into kinds
 * @property {number[]} time
 * @property {number[]} watts - average of one GPU
 * @property {number[]} critical - 1 on the critical path, else 0
 *
 * @typedef {[number, number, number, number, string]} PartSpan - begin, end, MHz, W, name
 * @typedef {[number, number, number, number]} TimelineBubble - stage, begin, end, usable time
 */

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
// The cividis colour map (Nunez et al. 2018): even in lightness, the same to the colour-blind.
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
// Shapes for planners, so that nobody needs the colours.
const SHAPES = {
  max_frequency: ["cross", "var(--baseline)"], zeus_global: ["down", "#56b4e9"],
  zeus_per_stage: ["up", "#009e73"], envpipe: ["square", "#cc79a7"],
  frontier: ["diamond", "var(--ink)"], this_plan: ["diamond", "var(--now)"],
};
const redraws = [];
const tip = document.getElementById("tip");

function cividis(share) {
  const x = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const k = Math.min(CIVIDIS.length - 2, Math.floor(x));
  return CIVIDIS[k].map((v, c) => Math.round(v + (x - k) * (CIVIDIS[k + 1][c] - v)));
}
const rgb = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function shown(value, digits) {
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) >= 100) return String(value);
  const size = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  const decimals = Math.max(0, Math.min(9, digits - 1 - size));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
function unitOf(value, unit) {
  for (const [factor, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (value >= 10 * factor) return [factor, sign + unit];
  return [1, unit];
}
function joules(value) {
  const [factor, unit] = unitOf(value, "J");
  return `${shown(value / factor, 4)} ${unit}`;
}

function make(parent, kind, attributes, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}
function html(parent, kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function rangeInput(parent, most, label) {
  const slider = html(parent, "input");
  slider.type = "range"; slider.min = 0; slider.max = most; slider.value = 0;
  slider.setAttribute("aria-label", label);
  return slider;
}
// An entry of a legend: a swatch of a class and a background, and what it stands for.
function swatch(legend, className, background, text) {
  const item = html(legend, "span");
  html(item, "i", className).style.background = background;
  item.append(text);
}

function showTip(event, text) {
  if (!text) { tip.style.visibility = "hidden"; return; }
  tip.textContent = text;
  tip.style.visibility = "visible";
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const above = event.clientY - box.height - 12;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 16}px`;
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (step / power === 2.5 ? 1 : 0));
  const list = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step)
    list.push([v, v.toFixed(Math.min(9, decimals))]);
  return list;
}

function axes(svg, area, x, y, xLabel, yLabel, named = true) {
  for (const [value, text] of ticks(x.low, x.high, area.width / 64)) {
    make(svg, "line", { x1: x.at(value), x2: x.at(value), y1: area.top, y2: area.bottom, stroke: "var(--grid)" });
    if (named) make(svg, "text", { x: x.at(value), y: area.bottom + 18, "text-anchor": "middle" }, text);
  }
  for (const [value, text] of ticks(y.low, y.high, area.height / 45)) {
    make(svg, "line", { x1: area.left, x2: area.right, y1: y.at(value), y2: y.at(value), stroke: "var(--grid)" });
    make(svg, "text", { x: area.left - 8, y: y.at(value) + 4, "text-anchor": "end" }, text);
  }
  make(svg, "line", { x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom, stroke: "var(--muted)" });
  make(svg, "line", { x1: area.left, x2: area.left, y1: area.top, y2: area.bottom, stroke: "var(--muted)" });
  make(svg, "text", { x: (area.left + area.right) / 2, y: area.bottom + 40, "text-anchor": "middle" }, xLabel);
  const middle = (area.top + area.bottom) / 2;
  make(svg, "text", { x: 16, y: middle, "text-anchor": "middle", transform: `rotate(-90 16 ${middle})` }, yLabel);
}
function plotArea(width, height, left, top = 14) {
  const area = { left, right: width - 16, top, bottom: height - 50 };
  return { ...area, width: area.right - area.left, height: area.bottom - area.top };
}
function scale(low, high, from, to) {
  return { low, high, at: (v) => from + ((v - low) / (high - low)) * (to - from),
           value: (p) => low + ((p - from) / (to - from)) * (high - low) };
}
function symbol(svg, shape, x, y, size, colour) {
  const paths = {
    cross: `M${x - size} ${y - size}L${x + size} ${y + size}M${x - size} ${y + size}L${x + size} ${y - size}`,
    down: `M${x - size} ${y - size}H${x + size}L${x} ${y + size}Z`,
    up: `M${x - size} ${y + size}H${x + size}L${x} ${y - size}Z`,
    square: `M${x - size} ${y - size}H${x + size}V${y + size}H${x - size}Z`,
    diamond: `M${x - size * 1.2} ${y}L${x} ${y - size * 1.2}L${x + size * 1.2} ${y}L${x} ${y + size * 1.2}Z`,
  };
  const line = shape === "cross";
  return make(svg, "path", {
    d: paths[shape], fill: line ? "none" : colour, stroke: line ? colour : "var(--card)",
    "stroke-width": line ? 3.5 : 1, "stroke-linecap": "round",
  });
}

// ---- frontier: energy against time, with a straggler's time to move along it

function frontierChart(host, data) {
  const canvas = html(host, "div");
  legendOfFrontier(html(host, "div", "legend"), data);
  const controls = html(host, "div", "controls");
  const label = html(controls, "label", "", "Straggler's iteration time ");
  const slider = rangeInput(controls, 1000, "Straggler's iteration time");
  label.appendChild(document.createTextNode(" "));
  const answer = html(host, "p", "answer");
  answer.setAttribute("aria-live", "polite");
  const first = data.baseline.time, near = Math.max(data.t_star * 1.12, data.baseline.time * 1.05);
  const given = Math.max(first, data.straggler || 0);
  const last = Math.max(near, given, data.slower.length ? data.t_max : 0);
  // A page about a plan opens on it, whatever others there are.
  const own = data.straggler ? null : data.points.find((p) => p.planner === "this_plan");
  const state = { straggler: own ? Math.max(first, own.time) : given, own };
  const follow = () => { slider.value = Math.round(((state.straggler - first) / (last - first)) * 1000); };
  follow();
  slider.addEventListener("input", () => {
    state.own = null;
    state.straggler = first + (slider.value / 1000) * (last - first);
    draw();
  });
  const draw = () => {
    // As far as T_max only for a straggler that is there: the frontier itself ends at T_star.
    const end = state.straggler > near ? last : near;
    drawFrontier(canvas, data, state, end, (time) => {
      state.own = null;
      state.straggler = Math.min(end, Math.max(first, time));
      follow();
      draw();
    });
    sayStraggler(answer, data, state);
  };
  redraws.push(draw);
}

function lookUp(data, time) {
  let chosen = data.plans[0], least = Infinity;
  for (const plan of [...data.plans, ...data.slower, ...data.points.filter((p) => p.planner === "this_plan")]) {
    if (plan.time > time + 1e-12) continue;
    const energy = plan.energy + data.waiting_w * (time - plan.time);
    if (energy < least) { least = energy; chosen = plan; }
  }
  return { plan: chosen, energy: chosen.energy + data.waiting_w * Math.max(0, time - chosen.time) };
}

function sayStraggler(answer, data, { straggler: time, own }) {
  if (own) {
    answer.textContent = `This plan takes ${shown(own.time, 4)} s; ${joules(own.energy)} instead of ${joules(data.baseline.energy)} at maximum frequency, `;
    html(answer, "strong", "", `${own.saved.toFixed(1)}% saved`);
    answer.append(`${data.modelled ? " (modelled)" : ""}. Move the line to a straggler's time to see which plan to follow then.`);
    return;
  }
  const { plan, energy } = lookUp(data, time);
  const before = data.baseline.energy + data.waiting_w * Math.max(0, time - data.baseline.time);
  const saved = 100 * (1 - energy / before);
  answer.textContent = time <= data.baseline.time * (1 + 1e-9)
    ? "No straggler: " : `A straggler takes ${shown(time, 4)} s: `;
  answer.append(`follow the plan of ${shown(plan.time, 4)} s; ${joules(energy)} with waiting instead of ${joules(before)} at maximum frequency, `);
  html(answer, "strong", "", `${saved.toFixed(1)}% saved`);
  answer.append(data.modelled ? " (modelled)." : ".");
}

function legendOfFrontier(legend, data) {
  const entry = (draw, text) => {
    const item = html(legend, "span");
    const svg = make(item, "svg", { viewBox: "0 0 18 16" });
    draw(svg);
    item.append(text);
  };
  entry((s) => make(s, "line", { x1: 0, x2: 18, y1: 8, y2: 8, stroke: "var(--curve)", "stroke-width": 3 }), "exact relaxed frontier (lower bound)");
  entry((s) => make(s, "circle", { cx: 9, cy: 8, r: 4.5, fill: "var(--plan)" }), "plans, one frequency per operation");
  if (data.slower.length)
    entry((s) => make(s, "circle", { cx: 9, cy: 8, r: 4.5, fill: "none", stroke: "var(--plan)", "stroke-width": 1.5 }), "slower plans, to wait for stragglers with");
  for (const point of data.points) {
    const [shape, colour] = SHAPES[point.planner] || SHAPES.frontier;
    entry((s) => symbol(s, shape, 9, 8, 5, colour), point.label);
  }
  // A line in the colour of a planner's mark is all of its plans.
  if (data.curves.envpipe)
    entry((s) => make(s, "line", { x1: 0, x2: 18, y1: 8, y2: 8, stroke: SHAPES.envpipe[1], "stroke-width": 2, "stroke-dasharray": "5 3" }), "lower bound of EnvPipe's schedule");
}

function drawFrontier(host, data, state, last, moveTo) {
  host.textContent = "";
  const width = Math.max(320, host.clientWidth), height = Math.min(460, Math.max(320, width * 0.5));
  const svg = make(host, "svg", { width, height, role: "img", "aria-label": "Energy per iteration against iteration time" });
  const [factor, unit] = unitOf(data.baseline.energy, "J");
  const slower = data.slower.filter((p) => p.time <= last);
  const times = [...data.curve.map((p) => p[0]), ...data.points.map((p) => p.time), state.straggler];
  const shapes = Object.values(data.curves).flat().filter((p) => p[0] <= last);
  const energies = [...[...data.curve, ...shapes].map((p) => p[1]), ...[...data.points, ...slower].map((p) => p.energy)].map((e) => e / factor);
  const pad = (list, share) => {
    const low = Math.min(...list), high = Math.max(...list), room = (high - low || low * 0.1 || 1) * share;
    return [low - room, high + room];
  };
  const area = plotArea(width, height, 74, 42);
  const [x0, x1] = pad([...times, last], 0.03), [y0, y1] = pad(energies, 0.12);
  const x = scale(x0, x1, area.left, area.right), y = scale(y0, y1, area.bottom, area.top);
  axes(svg, area, x, y, "Iteration time (s), axis does not start at 0", `Energy (${unit}), ${width < 560 ? "not from 0" : "axis does not start at 0"}`);

  nameEnds(svg, data, area, x);
  const curve = (points, look) => make(svg, "path", {
    d: "M" + points.map((p) => `${x.at(p[0]).toFixed(1)} ${y.at(p[1] / factor).toFixed(1)}`).join("L"), fill: "none", ...look,
  });
  // The planners' own curves may run out on the right.
  for (const [planner, points] of Object.entries(data.curves)) {
    const dashed = planner === "envpipe" ? { "stroke-dasharray": "6 4" } : {};
    curve(points.filter((p) => p[0] <= x1), { stroke: SHAPES[planner][1], "stroke-width": 1.5, class: "other", ...dashed });
  }
  curve(data.curve, { stroke: "var(--curve)", "stroke-width": 2.5 });
  const spots = [];
  const spot = (plan, name, draw) => {
    const cx = x.at(plan.time), cy = y.at(plan.energy / factor);
    draw(cx, cy);
    spots.push([cx, cy, describePlan(plan, name)]);
  };
  for (const plan of data.plans)
    spot(plan, "plan", (cx, cy) => make(svg, "circle", { cx, cy, r: 4, fill: "var(--plan)", stroke: "var(--card)" }));
  for (const plan of slower)
    spot(plan, "plan, to wait for a straggler with", (cx, cy) => make(svg, "circle", { cx, cy, r: 4, fill: "none", stroke: "var(--plan)", "stroke-width": 1.5, class: "slower" }));
  for (const point of data.points) {
    const [shape, colour] = SHAPES[point.planner] || SHAPES.frontier;
    spot(point, point.label, (cx, cy) => symbol(svg, shape, cx, cy, { cross: 10, square: 10 }[shape] || 7, colour));
  }
  noteSavings(svg, data, area, x, y, factor);
  if (state.straggler !== undefined) {
    const at = x.at(state.straggler), found = state.own || lookUp(data, state.straggler).plan;
    make(svg, "line", { x1: at, x2: at, y1: area.top, y2: area.bottom, stroke: "var(--now)", "stroke-width": 2, class: "straggler" });
    make(svg, "circle", { cx: x.at(found.time), cy: y.at(found.energy / factor), r: 8, fill: "none", stroke: "var(--now)", "stroke-width": 2.5, class: "followed" });
  }
  const pane = make(svg, "rect", { x: area.left, y: area.top, width: area.width, height: area.height, fill: "transparent", style: "cursor:crosshair; touch-action:pan-y" });
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  pane.addEventListener("pointermove", (event) => {
    const [px, py] = place(event);
    if (moveTo && event.buttons === 1) { moveTo(x.value(px)); return; }
    const near = spots.map((s) => [Math.hypot(s[0] - px, s[1] - py), s]).sort((a, b) => a[0] - b[0])[0];
    showTip(event, near[0] < 18 ? near[1][2] : onCurve(data, x.value(px)));
  });
  pane.addEventListener("pointerdown", (event) => moveTo && moveTo(x.value(place(event)[0])));
  pane.addEventListener("pointerleave", (event) => showTip(event, ""));
}

// T_min and T_star: lines, named above the plot, where nothing is in their way.
function nameEnds(svg, data, area, x) {
  const narrow = area.width < 460, names = data.ends.map((name) => (narrow ? name.split(",")[0] : name));
  const ends = [[data.t_min, names[0], "end"], [data.t_star, names[1], "start"]];
  if (data.t_min === data.t_star) ends.splice(0, 2, [data.t_min, "T_min = T_star", "start"]);
  for (const [time, name, anchor] of ends) {
    make(svg, "line", { x1: x.at(time), x2: x.at(time), y1: area.top - 8, y2: area.bottom, stroke: "var(--muted)", "stroke-dasharray": "2 4" });
    const label = make(svg, "text", { x: x.at(time), y: area.top - 12, "text-anchor": anchor, class: "muted end" }, `${name}: ${shown(time, 4)} s`);
    const wide = label.getComputedTextLength();
    if (anchor === "end") label.setAttribute("x", Math.max(x.at(time), wide + 2));
    else label.setAttribute("x", Math.min(x.at(time), area.right + 14 - wide));
  }
  // Names that would run into each other stand in two rows.
  const labels = svg.querySelectorAll("text.end");
  if (labels.length === 2 && labels[0].getBBox().x + labels[0].getBBox().width + 8 > labels[1].getBBox().x)
    labels[0].setAttribute("y", area.top - 28);
}

// What the best plan without slowdown and the cheapest of all save, beside them.
function noteSavings(svg, data, area, x, y, factor) {
  const free = data.plans.filter((p) => p.time <= data.baseline.time * (1 + 1e-12));
  const cheaper = (a, b) => (b.energy < a.energy ? b : a), cheapest = data.plans.reduce(cheaper);
  const best = free.length ? free.reduce(cheaper) : null;
  const note = (plan, at, height, anchor) => {
    if (plan.saved < 0.05) return;
    const text = make(svg, "text", { x: at, y: height, "text-anchor": anchor, class: "saved" }, savedWords(plan));
    if (anchor === "end") text.setAttribute("x", Math.max(at, area.left + 4 + text.getComputedTextLength()));
  };
  if (best) {
    const from = y.at(data.baseline.energy / factor), to = y.at(best.energy / factor), at = x.at(data.baseline.time);
    make(svg, "line", { x1: at, x2: at, y1: from + 12, y2: to - 8, stroke: "var(--good)", "stroke-width": 2 });
    note(best, at + 8, (from + to) / 2, "start");
  }
  const low = y.at(cheapest.energy / factor);
  if (cheapest !== best && area.width > 460) note(cheapest, Math.min(x.at(cheapest.time), area.right), low + 24 < area.bottom ? low + 20 : low - 12, "end");
}

const savedWords = (plan) => `${plan.saved.toFixed(1)}% saved, ${plan.slower < 0.05 ? "no slowdown" : `${plan.slower.toFixed(1)}% slower`}`;

function describePlan(plan, name) {
  const lines = [name, `${shown(plan.time, 4)} s, ${joules(plan.energy)}`,
    `${plan.saved.toFixed(2)}% saved, ${plan.slower.toFixed(2)}% slower`];
  if (plan.gap !== null && plan.gap !== undefined) lines.push(`certified gap ${(100 * plan.gap).toFixed(3)}%`);
  if (plan.power) lines.push(`average ${shown(plan.power, 4)} W`);
  return lines.join("\n");
}
function onCurve(data, time) {
  const points = data.curve;
  if (time < points[0][0]) return "faster than T_min: no plan is";
  if (time > points[points.length - 1][0]) return data.slower.length
    ? "beyond T_star: slower costs energy as well as time,\nunless everyone waits for a straggler anyway"
    : "beyond T_star: slower costs energy as well as time";
  const k = Math.max(1, points.findIndex((p) => p[0] >= time));
  const [a, b] = [points[k - 1], points[k]];
  const share = b[0] > a[0] ? (time - a[0]) / (b[0] - a[0]) : 0;
  return `by ${shown(time, 4)} s no plan uses less than\n${joules(a[1] + share * (b[1] - a[1]))}`;
}

// ---- timeline: one row a stage, to scale; zoom, pan, select, search

const KEYS = "Wheel or W and S: zoom. Drag or A and D: move. Click or arrows: select. 0: all of it.";

function timelineChart(host, data) {
  const controls = html(host, "div", "controls");
  const buttons = document.createElement("span");
  const button = (text, name, act) => {
    const made = html(buttons, "button", "", text);
    made.type = "button"; made.setAttribute("aria-label", name);
    made.addEventListener("click", act);
  };
  html(controls, "span", "", "Colour:");
  const select = html(controls, "select");
  select.setAttribute("aria-label", "What colours stand for");
  for (const [value, text] of [["mhz", "SM clock (MHz)"], ["watts", "power of one GPU (W)"]])
    html(select, "option", "", text).value = value;
  const search = html(controls, "input", "search");
  search.type = "search"; search.placeholder = "Find: backward 3 stage 2";
  search.setAttribute("aria-label", "Find operations by kind, microbatch and stage");
  const found = html(controls, "span", "found");
  found.setAttribute("aria-live", "polite");
  controls.appendChild(buttons);
  button("+", "Zoom in", () => zoom(0.5));
  button("−", "Zoom out", () => zoom(2));
  button("All", "Show all of it", () => show(0, data.span));
  const legend = html(host, "div", "legend");
  const box = html(host, "div", "timelines");
  const charts = data.timelines.map((timeline) => {
    const title = html(box, "h3", "", timeline.title);
    const canvas = html(box, "canvas");
    canvas.tabIndex = 0;
    return { timeline, title, canvas, box, hits: new Set() };
  });
  html(box, "p", "keys", KEYS);
  const chosen = html(box, "p", "chosen");
  chosen.setAttribute("aria-live", "polite");
  const said = html(box, "div", "legend");
  const power = html(box, "div");
  const view = { from: 0, to: data.span, chart: null, index: -1 };
  let range = null, pending = 0;
  const showPower = (timelines) => { legendOfPower(said, timelines); drawPower(power, { timelines, view }); };
  const draw = () => {
    const shownNow = charts.map((chart) => chart.timeline);
    const colours = range ? range[select.value] : colourRange(shownNow, select.value);
    legendOfTimeline(legend, { timelines: shownNow }, colours, select.options[select.selectedIndex].text);
    for (const chart of charts) drawTimeline(chart, view, colours, select.value);
    showPower(shownNow);
    chosen.textContent = view.chart ? `Selected: ${describeOperation(view.chart.timeline, view.index).join("; ")}` : "";
  };
  const soon = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(draw); };
  const show = (from, to) => {
    const wide = Math.min(data.span, Math.max(data.span / 20000, to - from));
    view.from = Math.min(Math.max(0, from), data.span - wide);
    view.to = view.from + wide;
    soon();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) => show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pick = (chart, index) => {
    view.chart = index < 0 ? null : chart; view.index = index;
    if (index >= 0) {
      const ops = chart.timeline.ops, begin = ops.start[index], end = begin + ops.time[index], wide = view.to - view.from;
      // Wide enough to be seen, and within what is shown.
      if ((end - begin) / wide < 0.01) { show((begin + end) / 2 - 15 * (end - begin), (begin + end) / 2 + 15 * (end - begin)); return; }
      if (begin < view.from || end > view.to) { show((begin + end - wide) / 2, (begin + end + wide) / 2); return; }
    }
    soon();
  };
  const step = (chart, ahead, down) => {
    const ops = chart.timeline.ops;
    if (view.chart !== chart) { pick(chart, 0); return; }
    if (ahead) {
      const next = view.index + ahead;
      if (ops.stage[next] === ops.stage[view.index]) pick(chart, next);
      return;
    }
    const middle = ops.start[view.index] + ops.time[view.index] / 2, stage = ops.stage[view.index] + down;
    let best = -1, least = Infinity;
    ops.stage.forEach((of, i) => {
      const far = Math.abs(ops.start[i] + ops.time[i] / 2 - middle);
      if (of === stage && far < least) { least = far; best = i; }
    });
    if (best >= 0) pick(chart, best);
  };
  select.addEventListener("change", draw);
  let last = -1;
  const matches = () => charts.flatMap((chart) => [...chart.hits].map((index) => [chart, index]));
  search.addEventListener("input", () => {
    for (const chart of charts) chart.hits = new Set(findOperations(chart.timeline, search.value));
    last = -1;
    found.textContent = search.value.trim() ? `${matches().length} found, Enter goes to the next` : "";
    soon();
  });
  search.addEventListener("keydown", (event) => {
    const all = matches();
    if (event.key !== "Enter" || !all.length) return;
    last = (last + (event.shiftKey ? all.length - 1 : 1)) % all.length;
    found.textContent = `${last + 1} of ${all.length}`;
    pick(...all[last]);
  });
  for (const chart of charts) {
    const canvas = chart.canvas;
    const timeAt = (event) => chart.geometry.x.value(event.clientX - canvas.getBoundingClientRect().left);
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      const out = event.deltaY > 0;
      // All is shown: the page may scroll.
      if (!event.deltaX && out && view.to - view.from >= data.span) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = ((event.deltaX || event.deltaY) / canvas.clientWidth) * (view.to - view.from);
        show(view.from + by, view.to + by);
      } else zoom(out ? 1.25 : 0.8, timeAt(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: view.from, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) { showTip(event, operationAt(chart, event)); return; }
      const by = ((drag.x - event.clientX) / canvas.clientWidth) * (view.to - view.from);
      if (Math.abs(drag.x - event.clientX) > 3) { drag.moved = true; showTip(event, ""); }
      if (drag.moved) show(drag.from + by, drag.from + by + view.to - view.from);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) pick(chart, indexAt(chart, event));
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const by = (view.to - view.from) / 5;
      const acts = {
        w: () => zoom(0.67), s: () => zoom(1.5), a: () => show(view.from - by, view.to - by), d: () => show(view.from + by, view.to + by),
        0: () => show(0, data.span), Escape: () => pick(chart, -1),
        ArrowRight: () => step(chart, 1, 0), ArrowLeft: () => step(chart, -1, 0), ArrowDown: () => step(chart, 0, 1), ArrowUp: () => step(chart, 0, -1),
      };
      const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }
  redraws.push(draw);
  return { chart: charts[0], draw, setRange: (all) => { range = all; } };
}

// Indices of operations that a text such as "backward 3 stage 2" or "f3" names; none for no text.
function findOperations(timeline, text) {
  const words = text.toLowerCase().match(/[a-z_]+|[0-9]+/g) || [], want = {};
  for (let k = 0; k < words.length; k++) {
    const next = /^[0-9]+$/.test(words[k + 1] || "");
    if (/^(s|stage|rank)$/.test(words[k]) && next) want.stage = Number(words[++k]);
    else if (/^(c|chunk)$/.test(words[k]) && next) want.chunk = Number(words[++k]);
    else if (/^(m|mb|microbatch|of)$/.test(words[k])) continue;
    else if (/^[0-9]+$/.test(words[k])) want.microbatch = Number(words[k]);
    else if (words[k] === "critical") want.critical = 1;
    else want.kind = words[k];
  }
  if (!Object.keys(want).length) return [];
  const { ops, kinds } = timeline, found = [];
  for (let i = 0; i < ops.stage.length; i++)
    if (Object.entries(want).every(([key, value]) => (key === "kind" ? kinds[ops.kind[i]].startsWith(value) : ops[key][i] === value))) found.push(i);
  return found;
}

function colourRange(timelines, key) {
  let low = Infinity, high = -Infinity;
  for (const timeline of timelines)
    timeline.ops[key].forEach((value, i) => {
      if (!timeline.ops.mhz[i]) return;
      low = Math.min(low, value); high = Math.max(high, value);
    });
  return low <= high ? [low, high] : [0, 0];
}
// A single value is a highest one.
const shareOf = (value, [low, high]) => (high > low ? (value - low) / (high - low) : 1);
const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";
const lowered = (number) => [...String(number)].map((digit) => SUBSCRIPTS[digit]).join("");

function legendOfTimeline(legend, data, range, text) {
  legend.textContent = "";
  const single = range[0] === range[1];
  const ramp = html(legend, "span", "ramp", single ? "" : shown(range[0], 4));
  const stops = CIVIDIS.map((c) => rgb(c)).join(",");
  html(ramp, "i", single ? "single" : "").style.background = single ? rgb(cividis(1)) : `linear-gradient(90deg,${stops})`;
  ramp.append(`${shown(range[1], 4)}  ${text}`);
  const kinds = new Set(data.timelines.flatMap((timeline) => timeline.kinds));
  if (kinds.has("forward")) swatch(legend, "low", "var(--muted)", "forward (low)");
  if (kinds.has("backward") || kinds.has("backward_input")) swatch(legend, "", "var(--muted)", "backward (high)");
  if (kinds.has("backward_weight")) swatch(legend, "weight", "", "weight gradient");
  swatch(legend, "", "repeating-linear-gradient(45deg,var(--usable-mark) 0 1px,var(--usable) 1px 6px)", "waiting that slower clocks could fill");
  swatch(legend, "", "var(--unusable)", "other waiting");
  swatch(legend, "outline", "transparent", "critical path");
  if (data.timelines.some((timeline) => timeline.chunks > 1)) html(legend, "span", "", `3${lowered(1)}: microbatch 3, chunk 1`);
}

const BAR = 0.84;
const HEIGHT = { forward: 0.62, backward_weight: 0.8 };

function drawTimeline(chart, view, range, key) {
  const { timeline, canvas, box } = chart, ops = timeline.ops;
  const narrow = box.clientWidth < 560;
  const row = timeline.stages > 8 ? 24 : 34, left = narrow ? 30 : 66;
  const width = Math.max(280, box.clientWidth), height = timeline.stages * row + 24;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Timeline of ${timeline.stages} stages: ${timeline.title}. ${KEYS}`);
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  const x = scale(view.from, view.to, left, width - 10);
  chart.geometry = { x, row };
  document.timelines = (document.timelines || []).filter((g) => g.canvas !== canvas).concat({ canvas, x });
  c.font = "12px system-ui, sans-serif";
  c.textBaseline = "middle";
  c.fillStyle = css("--ink");
  c.textAlign = "right";
  for (let stage = 0; stage < timeline.stages; stage++) c.fillText(narrow ? `s${stage}` : `stage ${stage}`, left - 8, stage * row + row / 2);
  c.save();
  c.beginPath(); c.rect(left, 0, width - 10 - left, height); c.clip();
  const fills = [css("--unusable"), hatch(c, "--usable", "--usable-mark")];
  for (const [stage, begin, end, usable] of timeline.bubbles) {
    if (end < view.from || begin > view.to) continue;
    // Only the part that the operation before it could fill is coloured.
    for (const [k, until] of [[0, end], [1, begin + usable]]) {
      if (until <= begin) continue;
      c.fillStyle = fills[k];
      c.fillRect(x.at(begin), stage * row + row * (1 - BAR) / 2, x.at(until) - x.at(begin), row * BAR);
    }
  }
  const outlines = [], marked = [];
  c.textAlign = "center";
  c.font = "10px system-ui, sans-serif";
  c.strokeStyle = css("--edge"); c.lineWidth = 0.7;
  let drawn = 0;
  for (let i = 0; i < ops.stage.length; i++) {
    if (ops.start[i] > view.to || ops.start[i] + ops.time[i] < view.from) continue;
    drawn++;
    const kind = timeline.kinds[ops.kind[i]], tall = row * BAR * (HEIGHT[kind] || 1);
    const from = x.at(ops.start[i]), wide = x.at(ops.start[i] + ops.time[i]) - from;
    const top = ops.stage[i] * row + row * (1 + BAR) / 2 - tall;
    const colour = cividis(shareOf(ops[key][i], range));
    c.globalAlpha = chart.hits.size && !chart.hits.has(i) ? 0.3 : 1;
    c.fillStyle = ops.mhz[i] ? rgb(colour) : css("--constant");
    c.fillRect(from, top, Math.max(wide - (wide > 3 ? 0.8 : 0), 0.4), tall);
    if (wide > 3) c.strokeRect(from + 0.5, top + 0.5, wide - 1.8, tall - 1);
    for (const [begin, end, mhz, watts] of wide > 12 ? timeline.parts[i] || [] : []) {
      c.fillStyle = mhz ? rgb(cividis(shareOf(key === "mhz" ? mhz : watts, range))) : css("--constant");
      c.fillRect(x.at(begin), top, x.at(end) - x.at(begin), tall);
    }
    const bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 115;
    if (kind === "backward_weight" && wide > 4) stripe(c, from, top, wide, tall, bright);
    const text = ops.microbatch[i] + (timeline.chunks > 1 ? lowered(ops.chunk[i]) : "");
    if (kind !== "backward_weight" && wide > 9 && wide > c.measureText(text).width + 3) {
      c.fillStyle = bright ? "#000" : "#fff";
      c.fillText(text, from + wide / 2, top + tall / 2 + 0.5);
    }
    if (ops.critical[i]) outlines.push([from, top, wide, tall]);
    if (view.chart === chart && view.index === i) marked.push([from, top, wide, tall]);
  }
  c.globalAlpha = 1;
  for (const [shapes, colour, line] of [[outlines, "--critical", drawn > 1500 ? 0.7 : 1.6], [marked, "--now", 3]]) {
    c.strokeStyle = css(colour); c.lineWidth = line;
    for (const [from, top, wide, tall] of shapes) c.strokeRect(from + 0.5, top + 0.5, Math.max(wide - 1, 0.5), tall - 1);
  }
  c.restore();
  timeAxis(c, x, view, timeline.stages * row, width);
}

function timeAxis(c, x, view, at, width) {
  c.strokeStyle = css("--muted"); c.fillStyle = css("--ink");
  c.lineWidth = 1; c.font = "12px system-ui, sans-serif"; c.textAlign = "center";
  c.beginPath(); c.moveTo(x.at(view.from), at + 1); c.lineTo(x.at(view.to), at + 1); c.stroke();
  for (const [value, text] of ticks(view.from, view.to, width / 120)) c.fillText(`${text} s`, Math.min(x.at(value), width - 18), at + 14);
}

function hatch(c, ground, mark) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const t = tile.getContext("2d");
  t.fillStyle = css(ground); t.fillRect(0, 0, 8, 8);
  t.strokeStyle = css(mark);
  t.beginPath(); t.moveTo(0, 8); t.lineTo(8, 0); t.stroke();
  return c.createPattern(tile, "repeat");
}

function stripe(c, from, top, wide, tall, bright) {
  c.save();
  c.beginPath(); c.rect(from, top, wide, tall); c.clip();
  c.strokeStyle = bright ? "rgba(0,0,0,.35)" : "rgba(255,255,255,.4)";
  c.lineWidth = 1;
  for (let k = from - tall; k < from + wide; k += 6) { c.beginPath(); c.moveTo(k, top + tall); c.lineTo(k + tall, top); c.stroke(); }
  c.restore();
}

function indexAt(chart, event) {
  const { stage, time } = placeOf(chart, event), { ops } = chart.timeline;
  for (let i = 0; i < ops.stage.length; i++)
    if (ops.stage[i] === stage && time >= ops.start[i] && time <= ops.start[i] + ops.time[i]) return i;
  return -1;
}
function placeOf(chart, event) {
  const box = chart.canvas.getBoundingClientRect(), { x, row } = chart.geometry;
  return { time: x.value(event.clientX - box.left), stage: Math.floor((event.clientY - box.top) / row) };
}
function describeOperation({ ops, kinds, parts }, i, time) {
  const chunk = ops.chunk[i] ? `, chunk ${ops.chunk[i]}` : "";
  const part = (parts[i] || []).find(([begin, end]) => begin <= time && time <= end);
  return [`${kinds[ops.kind[i]]} of microbatch ${ops.microbatch[i]}${chunk}, stage ${ops.stage[i]}`,
    ...(part ? [`part ${part[4]}: ${part[2]} MHz, ${shown(part[3], 4)} W a GPU, ${shown(part[1] - part[0], 4)} s`] : []),
    ops.mhz[i] ? `${ops.mhz[i]} MHz, ${shown(ops.watts[i], 4)} W a GPU` : `no clock of its own, ${shown(ops.watts[i], 4)} W a GPU`,
    `${shown(ops.start[i], 6)} s to ${shown(ops.start[i] + ops.time[i], 6)} s (${shown(ops.time[i], 4)} s)`,
    `${shown(ops.watts[i] * ops.time[i], 4)} J a GPU`,
    ops.critical[i] ? "on the critical path" : `could take ${shown(ops.slack[i], 3)} s longer`];
}
function operationAt(chart, event) {
  const i = indexAt(chart, event);
  const { stage, time } = placeOf(chart, event);
  if (i >= 0) return describeOperation(chart.timeline, i, time).join("\n");
  for (const [of, begin, end, usable] of chart.timeline.bubbles)
    if (of === stage && begin <= time && time <= end)
      return `waits for ${shown(end - begin, 4)} s\n${usable ? `slower clocks before it could fill ${shown(usable, 3)} s of it` : "slower clocks before it save nothing more"}`;
  return "";
}

function powerUnit(timelines) {
  const peak = timelines.reduce((most, t) => t.power.watts.reduce((a, b) => Math.max(a, b), most), 0);
  return [peak, ...unitOf(peak, "W")];
}
const isPlan = (k, timelines) => k === timelines.length - 1;

function legendOfPower(legend, timelines) {
  legend.textContent = "";
  const [, factor, unit] = powerUnit(timelines);
  timelines.forEach((timeline, k) => {
    const look = isPlan(k, timelines) ? ["", "var(--power)"] : ["line", "var(--muted)"];
    swatch(legend, ...look, `${timeline.name}, average ${shown(timeline.average_w / factor, 4)} ${unit}`);
  });
}

function drawPower(host, { timelines, view }) {
  host.textContent = "";
  const width = Math.max(280, host.clientWidth), height = 170;
  const svg = make(host, "svg", { width, height, role: "img", "aria-label": "Power of all GPUs over time" });
  const area = { ...plotArea(width, height, 66), right: width - 10 };
  area.width = area.right - area.left;
  const [peak, factor, unit] = powerUnit(timelines);
  const x = scale(view.from, view.to, area.left, area.right), y = scale(0, (1.1 * peak) / factor || 1, area.bottom, area.top);
  axes(svg, area, x, y, "Time (s)", `All GPUs (${unit})`);
  timelines.forEach((timeline, k) => {
    const plan = isPlan(k, timelines), { times, watts } = timeline.power;
    const at = (time) => x.at(Math.min(view.to, Math.max(view.from, time))).toFixed(1);
    let d = "";
    watts.forEach((w, i) => {
      if (times[i + 1] < view.from || times[i] > view.to) return;
      const high = y.at(w / factor).toFixed(1);
      d += `${d ? "L" : plan ? `M${at(times[i])} ${area.bottom}L` : "M"}${at(times[i])} ${high}L${at(times[i + 1])} ${high}`;
    });
    if (plan && d) d += `L${at(times[times.length - 1])} ${area.bottom}Z`;
    make(svg, "path", plan ? { d, fill: "var(--power)", "fill-opacity": 0.6 } : { d, fill: "none", stroke: "var(--muted)" });
  });
}

// ---- series: lines over time in panels one above the other, read off together

function seriesChart(host, data) {
  const legend = html(host, "div", "legend");
  data.names.forEach((name, k) => {
    const svg = make(html(legend, "span"), "svg", { viewBox: "0 0 18 16" });
    make(svg, "line", { x1: 0, x2: 18, y1: 8, y2: 8, stroke: lineColour(data.colours[k]), "stroke-width": 2.5, "stroke-dasharray": data.dashes[k] });
    svg.parentNode.append(name);
  });
  const canvas = html(host, "div");
  redraws.push(() => {
    canvas.textContent = "";
    const width = Math.max(280, canvas.clientWidth), times = data.times, end = times[times.length - 1] || 1;
    const marks = [];
    data.panels.forEach((panel, k) => {
      const last = k === data.panels.length - 1, height = (panel.lines.length > 1 && k === 1 ? 250 : 130) + (last ? 44 : 0);
      html(canvas, "h3", "", panel.label);
      const svg = make(canvas, "svg", { width, height, role: "img", "aria-label": `${panel.label} over time` });
      const area = { left: 52, right: width - 12, top: 8, bottom: height - (last ? 48 : 8) };
      area.width = area.right - area.left; area.height = area.bottom - area.top;
      const all = panel.lines.flat().filter((value) => value !== null), high = all.reduce((a, b) => Math.max(a, b), 0), low = panel.from_zero ? 0 : all.reduce((a, b) => Math.min(a, b), Infinity);
      const room = (high - low || 1) * 0.06;
      const x = scale(0, end, area.left, area.right), y = scale(panel.from_zero ? 0 : low - room, high + room, area.bottom, area.top);
      axes(svg, area, x, y, last ? data.label : "", "", last);
      panel.lines.forEach((line, n) => {
        const d = "M" + line.flatMap((value, i) => (value === null ? [] : [`${x.at(times[i]).toFixed(1)} ${y.at(value).toFixed(1)}`])).join("L");
        const alone = panel.lines.length === 1 && data.names.length > 1;
        if (alone) make(svg, "path", { d: `${d}L${x.at(end)} ${area.bottom}L${x.at(times[0])} ${area.bottom}Z`, fill: "var(--muted)", "fill-opacity": 0.4 });
        else make(svg, "path", { d, fill: "none", stroke: lineColour(data.colours[n]), "stroke-width": 1.6, "stroke-dasharray": data.dashes[n], class: "series" });
      });
      marks.push(make(svg, "line", { y1: area.top, y2: area.bottom, stroke: "var(--now)", visibility: "hidden" }));
      const pane = make(svg, "rect", { x: area.left, y: area.top, width: area.width, height: area.height, fill: "transparent" });
      pane.addEventListener("pointermove", (event) => {
        const time = x.value(event.clientX - svg.getBoundingClientRect().left);
        const i = times.reduce((best, t, n) => (Math.abs(t - time) < Math.abs(times[best] - time) ? n : best), 0);
        for (const mark of marks) { mark.setAttribute("x1", x.at(times[i])); mark.setAttribute("x2", x.at(times[i])); mark.setAttribute("visibility", "visible"); }
        const rows = panel.lines.map((line, n) => `${panel.lines.length > 1 ? `${data.names[n]}: ` : ""}${shown(line[i], 4)}`);
        showTip(event, [`${data.label} ${shown(times[i], 4)}`, panel.label, ...rows].join("\n"));
      });
      pane.addEventListener("pointerleave", (event) => { showTip(event, ""); for (const mark of marks) mark.setAttribute("visibility", "hidden"); });
    });
  });
}
// Black lines would not show on a dark page.
const lineColour = (colour) => (colour === "#000000" ? "var(--ink)" : colour);

// ---- animation: the pipeline while T walks along the frontier

function animationChart(host, data) {
  const controls = html(host, "div", "controls");
  const play = html(controls, "button", "", "Play");
  const slider = rangeInput(controls, data.frames.length - 1, "Iteration time");
  const says = html(controls, "span");
  const chart = html(host, "div");
  const curve = html(host, "div");
  legendOfFrontier(html(host, "div", "legend"), data.frontier);
  const timeline = timelineChart(chart, { timelines: [data.frames[0]], span: data.span });
  timeline.setRange({ mhz: colourRange(data.frames, "mhz"), watts: colourRange(data.frames, "watts") });
  let timer = null;
  const show = () => {
    const frame = data.frames[slider.value], plan = data.frontier.plans[slider.value];
    timeline.chart.timeline = frame;
    timeline.chart.title.textContent = frame.title;
    says.textContent = `${shown(plan.time, 4)} s, ${joules(plan.energy)}, ${savedWords(plan)}${data.frontier.modelled ? " (modelled)" : ""}`;
    timeline.draw();
    drawFrontier(curve, data.frontier, { straggler: plan.time, own: plan }, data.frontier.t_star);
  };
  slider.addEventListener("input", show);
  play.addEventListener("click", () => {
    play.textContent = timer ? "Play" : "Pause";
    if (timer) { clearInterval(timer); timer = null; return; }
    timer = setInterval(() => { slider.value = (Number(slider.value) + 1) % data.frames.length; show(); }, 220);
  });
  redraws.push(show);
}

// ---- commands that one can copy

for (const button of document.querySelectorAll("button.copy"))
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try { await navigator.clipboard.writeText(code.textContent); }
    catch { // A page opened from a file may not write to the clipboard itself.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });

const CHARTS = { frontier: frontierChart, timeline: timelineChart, series: seriesChart, animation: animationChart };
for (const host of document.querySelectorAll("[data-chart]")) CHARTS[host.dataset.chart](host, DATA[host.dataset.key]);

function redraw() { for (const draw of redraws) draw(); }
function theme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  redraw();
}
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
let pending = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(redraw); });
theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
