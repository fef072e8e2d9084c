// ---- frontier: energy against time, with a straggler's time to move along it

// Shapes for planners, so that nobody needs the colours.
const SHAPES = {
  max_frequency: ["cross", "var(--baseline)"], zeus_global: ["down", "#56b4e9"],
  zeus_per_stage: ["up", "#009e73"], envpipe: ["square", "#cc79a7"],
  frontier: ["diamond", "var(--ink)"], this_plan: ["diamond", "var(--now)"],
};
const MARK_SIZES = { cross: 10, square: 10 };
const USUAL_MARK_SIZE = 7;
const SLIDER_STEPS = 1000;

const isThisPlan = (point) => point.planner === "this_plan";
const shapeOf = (planner) => SHAPES[planner] || ["square", "var(--muted)"];

/**
 * @param {Element} host
 * @param {FrontierChart} data
 */
function frontierChart(host, data) {
  const canvas = html(host, "div");
  legendOfFrontier(html(host, "div", "legend"), data);
  const controls = html(host, "div", "controls");
  const label = html(controls, "label", "", "Straggler's iteration time ");
  const slider = rangeInput(controls, SLIDER_STEPS, "Straggler's iteration time");
  label.appendChild(document.createTextNode(" "));
  const answer = html(host, "p", "answer");
  answer.setAttribute("aria-live", "polite");

  const fastest = data.baseline.time;
  const near = Math.max(data.t_star * 1.12, data.baseline.time * 1.05);
  const given = Math.max(fastest, data.straggler || 0);
  const slowest = Math.max(near, given, data.slower.length ? data.t_max : 0);
  // A page about a plan opens on it, whatever others there are.
  const own = data.straggler ? null : data.points.find(isThisPlan);
  const state = { straggler: own ? Math.max(fastest, own.time) : given, own };

  const moveSlider = () => {
    const share = (state.straggler - fastest) / (slowest - fastest);
    slider.value = Math.round(share * SLIDER_STEPS);
  };
  const draw = () => {
    // As far as T_max only for a straggler that is there: the frontier itself ends at T_star.
    const end = state.straggler > near ? slowest : near;
    drawFrontier(canvas, data, state, end, (time) => {
      state.own = null;
      state.straggler = Math.min(end, Math.max(fastest, time));
      moveSlider();
      draw();
    });
    sayStraggler(answer, data, state);
  };
  moveSlider();
  slider.addEventListener("input", () => {
    state.own = null;
    state.straggler = fastest + (slider.value / SLIDER_STEPS) * (slowest - fastest);
    draw();
  });
  redraws.push(draw);
}

// The plan of least energy until a straggler's time, waiting included, and that energy.
function lookUp(data, time) {
  const until = (plan) => plan.energy + data.waiting_w * Math.max(0, time - plan.time);
  let chosen = data.plans[0], least = Infinity;
  for (const plan of [...data.plans, ...data.slower, ...data.points.filter(isThisPlan)]) {
    if (plan.time > time + 1e-12) continue;
    const energy = until(plan);
    if (energy < least) {
      least = energy;
      chosen = plan;
    }
  }
  return { plan: chosen, energy: until(chosen) };
}

// Say what the page's plan saves, or which plan to follow for a straggler.
function sayStraggler(answer, data, { straggler: time, own }) {
  const modelled = data.modelled ? " (modelled)" : "";
  if (own) {
    const used = `${joules(own.energy)} instead of ${joules(data.baseline.energy)}`;
    answer.textContent = `This plan takes ${shown(own.time, 4)} s; ${used} at maximum frequency, `;
    html(answer, "strong", "", `${own.saved.toFixed(1)}% saved`);
    answer.append(`${modelled}. Move the line to a straggler's time to see which plan to follow then.`);
    return;
  }
  const { plan, energy } = lookUp(data, time);
  const baseline = data.baseline.energy + data.waiting_w * Math.max(0, time - data.baseline.time);
  const saved = 100 * (1 - energy / baseline);
  const isStraggler = time > data.baseline.time * (1 + 1e-9);
  answer.textContent = isStraggler ? `A straggler takes ${shown(time, 4)} s: ` : "No straggler: ";
  const used = `${joules(energy)} with waiting instead of ${joules(baseline)}`;
  answer.append(`follow the plan of ${shown(plan.time, 4)} s; ${used} at maximum frequency, `);
  html(answer, "strong", "", `${saved.toFixed(1)}% saved`);
  answer.append(`${modelled}.`);
}

function legendOfFrontier(legend, data) {
  const entry = (text, draw) => {
    const item = html(legend, "span");
    draw(make(item, "svg", { viewBox: "0 0 18 16" }));
    item.append(text);
  };
  const line = (look) => (svg) => make(svg, "line", { x1: 0, x2: 18, y1: 8, y2: 8, ...look });
  const dot = (look) => (svg) => make(svg, "circle", { cx: 9, cy: 8, r: 4.5, ...look });
  entry("exact relaxed frontier (lower bound)", line({ stroke: "var(--curve)", "stroke-width": 3 }));
  entry("plans, one frequency per operation", dot({ fill: "var(--plan)" }));
  if (data.slower.length) {
    const ring = { fill: "none", stroke: "var(--plan)", "stroke-width": 1.5 };
    entry("slower plans, to wait for stragglers with", dot(ring));
  }
  for (const point of data.points) {
    const [shape, colour] = shapeOf(point.planner);
    entry(point.label, (svg) => symbol(svg, shape, 9, 8, 5, colour));
  }
  // A line in the colour of a planner's mark is all of its plans.
  if (data.curves.envpipe) {
    const dashed = { stroke: SHAPES.envpipe[1], "stroke-width": 2, "stroke-dasharray": "5 3" };
    entry("lower bound of EnvPipe's schedule", line(dashed));
  }
}

/**
 * @param {Element} host
 * @param {FrontierChart} data
 * @param {{straggler: ?number, own: ?PlanPoint}} state
 * @param {number} end - how far the time axis reaches at least
 * @param {?function(number)} moveTo - called with the time to which the straggler's line is moved
 */
function drawFrontier(host, data, state, end, moveTo) {
  host.textContent = "";
  const width = Math.max(320, host.clientWidth), height = Math.min(460, Math.max(320, width * 0.5));
  const label = "Energy per iteration against iteration time";
  const svg = make(host, "svg", { width, height, role: "img", "aria-label": label });
  const area = plotArea(width, height, 74, 42);
  const [factor, unit] = unitOf(data.baseline.energy, "J");
  const slower = data.slower.filter((plan) => plan.time <= end);
  const { x, y } = scalesOfFrontier(data, slower, state, end, area, factor);
  const offZero = width < 560 ? "not from 0" : "axis does not start at 0";
  axes(svg, area, x, y, "Iteration time (s), axis does not start at 0", `Energy (${unit}), ${offZero}`);
  nameEnds(svg, data, area, x);
  drawCurves(svg, data, x, y, factor);
  const spots = drawPlans(svg, data, slower, x, y, factor);
  noteSavings(svg, data, area, x, y, factor);
  if (state.straggler !== undefined) drawStraggler(svg, data, state, area, x, y, factor);
  listenToFrontier(svg, data, area, x, spots, moveTo);
}

// Scales on which all curves, plans and the straggler have room.
function scalesOfFrontier(data, slower, state, end, area, factor) {
  const padded = (values, share) => {
    const low = Math.min(...values), high = Math.max(...values);
    const room = (high - low || low * 0.1 || 1) * share;
    return [low - room, high + room];
  };
  const times = [
    ...data.curve.map(([time]) => time), ...data.points.map((point) => point.time), state.straggler, end,
  ];
  const others = Object.values(data.curves).flat().filter(([time]) => time <= end);
  const energies = [
    ...data.curve.map(([, energy]) => energy), ...others.map(([, energy]) => energy),
    ...data.points.map((point) => point.energy), ...slower.map((plan) => plan.energy),
  ];
  const [left, right] = padded(times, 0.03);
  const [low, high] = padded(energies.map((energy) => energy / factor), 0.12);
  return { x: scale(left, right, area.left, area.right), y: scale(low, high, area.bottom, area.top) };
}

function drawCurves(svg, data, x, y, factor) {
  const drawCurve = (points, look) => {
    const corners = points.map(([time, energy]) => `${x.at(time).toFixed(1)} ${y.at(energy / factor).toFixed(1)}`);
    make(svg, "path", { d: `M${corners.join("L")}`, fill: "none", ...look });
  };
  // The planners' own curves may run out on the right.
  for (const [planner, points] of Object.entries(data.curves)) {
    const look = { stroke: shapeOf(planner)[1], "stroke-width": 1.5, class: "other" };
    if (planner === "envpipe") look["stroke-dasharray"] = "6 4";
    drawCurve(points.filter(([time]) => time <= x.high), look);
  }
  drawCurve(data.curve, { stroke: "var(--curve)", "stroke-width": 2.5 });
}

// Draw all plans; returns where they are and what there is to say of each.
function drawPlans(svg, data, slower, x, y, factor) {
  const spots = [];
  const drawAll = (plans, nameOf, draw) => {
    for (const plan of plans) {
      const cx = x.at(plan.time), cy = y.at(plan.energy / factor);
      draw(plan, cx, cy);
      spots.push({ x: cx, y: cy, text: describePlan(plan, nameOf(plan)) });
    }
  };
  const dot = { r: 4, fill: "var(--plan)", stroke: "var(--card)" };
  const ring = { r: 4, fill: "none", stroke: "var(--plan)", "stroke-width": 1.5, class: "slower" };
  drawAll(data.plans, () => "plan", (_, cx, cy) => make(svg, "circle", { cx, cy, ...dot }));
  drawAll(slower, () => "plan, to wait for a straggler with", (_, cx, cy) => make(svg, "circle", { cx, cy, ...ring }));
  drawAll(data.points, (point) => point.label, (point, cx, cy) => {
    const [shape, colour] = shapeOf(point.planner);
    symbol(svg, shape, cx, cy, MARK_SIZES[shape] || USUAL_MARK_SIZE, colour);
  });
  return spots;
}

// A line at the straggler's time, and a ring around the plan to follow.
function drawStraggler(svg, data, state, area, x, y, factor) {
  const at = x.at(state.straggler);
  const followed = state.own || lookUp(data, state.straggler).plan;
  make(svg, "line", {
    x1: at, x2: at, y1: area.top, y2: area.bottom, stroke: "var(--now)", "stroke-width": 2, class: "straggler",
  });
  make(svg, "circle", {
    cx: x.at(followed.time), cy: y.at(followed.energy / factor), r: 8, fill: "none", stroke: "var(--now)",
    "stroke-width": 2.5, class: "followed",
  });
}

// Tell of what the pointer is at, and move the straggler's line where it is pressed.
function listenToFrontier(svg, data, area, x, spots, moveTo) {
  const { left, top, width, height } = area;
  const style = "cursor:crosshair; touch-action:pan-y";
  const pane = make(svg, "rect", { x: left, y: top, width, height, fill: "transparent", style });
  const pointAt = (event) => {
    const box = svg.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  pane.addEventListener("pointermove", (event) => {
    const point = pointAt(event);
    if (moveTo && event.buttons === 1) {
      moveTo(x.value(point.x));
      return;
    }
    const far = (spot) => Math.hypot(spot.x - point.x, spot.y - point.y);
    const nearest = spots.reduce((best, spot) => (far(spot) < far(best) ? spot : best));
    showTip(event, far(nearest) < 18 ? nearest.text : describeCurve(data, x.value(point.x)));
  });
  pane.addEventListener("pointerdown", (event) => moveTo && moveTo(x.value(pointAt(event).x)));
  pane.addEventListener("pointerleave", (event) => showTip(event, ""));
}

// T_min and T_star: lines, named above the plot, where nothing is in their way.
function nameEnds(svg, data, area, x) {
  const isNarrow = area.width < 460;
  const [tMin, tStar] = data.ends.map((name) => (isNarrow ? name.split(",")[0] : name));
  const ends = data.t_min === data.t_star
    ? [[data.t_min, "T_min = T_star", "start"]]
    : [[data.t_min, tMin, "end"], [data.t_star, tStar, "start"]];
  for (const [time, name, anchor] of ends) {
    const at = x.at(time);
    make(svg, "line", {
      x1: at, x2: at, y1: area.top - 8, y2: area.bottom, stroke: "var(--muted)", "stroke-dasharray": "2 4",
    });
    const place = { x: at, y: area.top - 12, "text-anchor": anchor, class: "muted end" };
    const label = make(svg, "text", place, `${name}: ${shown(time, 4)} s`);
    const width = label.getComputedTextLength();
    if (anchor === "end") label.setAttribute("x", Math.max(at, width + 2));
    else label.setAttribute("x", Math.min(at, area.right + 14 - width));
  }
  // Names that would run into each other stand in two rows.
  const labels = svg.querySelectorAll("text.end");
  if (labels.length < 2) return;
  const [box, nextBox] = [labels[0].getBBox(), labels[1].getBBox()];
  if (box.x + box.width + 8 > nextBox.x) labels[0].setAttribute("y", area.top - 28);
}

// What the best plan without slowdown and the cheapest of all save, beside them.
function noteSavings(svg, data, area, x, y, factor) {
  const cheaper = (one, two) => (two.energy < one.energy ? two : one);
  const cheapest = data.plans.reduce(cheaper);
  const notSlower = data.plans.filter((plan) => plan.time <= data.baseline.time * (1 + 1e-12));
  const best = notSlower.length ? notSlower.reduce(cheaper) : null;
  const note = (plan, at, height, anchor) => {
    if (plan.saved < 0.05) return;
    const text = make(svg, "text", { x: at, y: height, "text-anchor": anchor, class: "saved" }, savedWords(plan));
    if (anchor === "end") text.setAttribute("x", Math.max(at, area.left + 4 + text.getComputedTextLength()));
  };
  if (best) {
    const from = y.at(data.baseline.energy / factor), to = y.at(best.energy / factor);
    const at = x.at(data.baseline.time);
    make(svg, "line", { x1: at, x2: at, y1: from + 12, y2: to - 8, stroke: "var(--good)", "stroke-width": 2 });
    note(best, at + 8, (from + to) / 2, "start");
  }
  if (cheapest !== best && area.width > 460) {
    const low = y.at(cheapest.energy / factor);
    const height = low + 24 < area.bottom ? low + 20 : low - 12;
    note(cheapest, Math.min(x.at(cheapest.time), area.right), height, "end");
  }
}

function savedWords(plan) {
  const slowdown = plan.slower < 0.05 ? "no slowdown" : `${plan.slower.toFixed(1)}% slower`;
  return `${plan.saved.toFixed(1)}% saved, ${slowdown}`;
}

function describePlan(plan, name) {
  const lines = [
    name,
    `${shown(plan.time, 4)} s, ${joules(plan.energy)}`,
    `${plan.saved.toFixed(2)}% saved, ${plan.slower.toFixed(2)}% slower`,
  ];
  if (plan.gap !== null && plan.gap !== undefined) lines.push(`certified gap ${(100 * plan.gap).toFixed(3)}%`);
  if (plan.power) lines.push(`average ${shown(plan.power, 4)} W`);
  return lines.join("\n");
}
// What the curve says of a time.
function describeCurve(data, time) {
  const points = data.curve;
  if (time < points[0][0]) return "faster than T_min: no plan is";
  if (time > points[points.length - 1][0]) {
    const beyond = "beyond T_star: slower costs energy as well as time";
    return data.slower.length ? `${beyond},\nunless everyone waits for a straggler anyway` : beyond;
  }
  const k = Math.max(1, points.findIndex(([later]) => later >= time));
  const [[beginTime, beginEnergy], [endTime, endEnergy]] = [points[k - 1], points[k]];
  const share = endTime > beginTime ? (time - beginTime) / (endTime - beginTime) : 0;
  const energy = beginEnergy + share * (endEnergy - beginEnergy);
  return `by ${shown(time, 4)} s no plan uses less than\n${joules(energy)}`;
}
