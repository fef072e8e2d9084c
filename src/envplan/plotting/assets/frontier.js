// ---- frontier: energy against time, with a time to move along it

// Shapes for planners, so that nobody needs the colours.
const SHAPES = {
  max_frequency: ["cross", "var(--baseline)"], zeus_global: ["down", "#56b4e9"],
  zeus_per_stage: ["up", "#009e73"], envpipe: ["square", "#cc79a7"],
  frontier: ["diamond", "var(--ink)"], this_plan: ["diamond", "var(--now)"],
};
const MARK_SIZES = { cross: 10, square: 10 };
const USUAL_MARK_SIZE = 7;

const isThisPlan = (point) => point.planner === "this_plan";
const shapeOf = (planner) => SHAPES[planner] || ["square", "var(--muted)"];

function legendOfFrontier(legend, data) {
  const entry = (text, draw) => {
    const item = html(legend, "span");
    draw(make(item, "svg", { viewBox: "0 0 18 16" }));
    item.append(text);
  };
  const line = (look) => (svg) => make(svg, "line", { x1: 0, x2: 18, y1: 8, y2: 8, ...look });
  const throughPlans = new Set(data.curves.filter((curve) => !curve.bound).map((curve) => curve.planner));
  const dot = (look) => (svg) => make(svg, "circle", { cx: 9, cy: 8, r: 4.5, ...look });
  entry("lower bound (exact, relaxed)", line({ stroke: "var(--curve)", "stroke-width": 3 }));
  entry("plans", dot({ fill: "var(--plan)" }));
  if (data.slower.length) {
    const ring = { fill: "none", stroke: "var(--plan)", "stroke-width": 1.5 };
    entry("slower plans, for stragglers", dot(ring));
  }
  for (const point of data.points) {
    const [shape, colour] = shapeOf(point.planner);
    entry(point.label, (svg) => {
      // A line in the colour of a planner's mark is all of its plans.
      if (throughPlans.has(point.planner)) line({ stroke: colour, "stroke-width": 2 })(svg);
      symbol(svg, shape, 9, 8, 5, colour);
    });
  }
  for (const curve of data.curves.filter(({ bound }) => bound))
    entry(curve.label, line({ ...lookOfCurve(curve), "stroke-width": 2, "stroke-dasharray": "5 3" }));
}

// Lower bounds are dashed, lines through plans are not.
function lookOfCurve({ planner, bound }) {
  const look = { stroke: shapeOf(planner)[1], "stroke-width": 1.5, fill: "none" };
  return bound ? { ...look, "stroke-dasharray": "6 4" } : look;
}

/**
 * @param {Element} host
 * @param {FrontierChart} data
 * @param {{accepted: number, chosen: PlanPoint}} state
 * @param {number} end - how far the time axis reaches at least
 * @param {?number} height - null: as suits the width
 * @param {function(number)} moveTo - called with the time to which the line is moved
 */
function drawFrontier(host, data, state, end, height, moveTo) {
  host.textContent = "";
  const width = Math.max(320, host.clientWidth);
  height ??= Math.min(460, Math.max(320, width * 0.5));
  const label = "Energy per iteration against iteration time";
  const svg = make(host, "svg", { width, height, role: "img", "aria-label": label });
  const area = plotArea(width, height, 74, 42);
  const [factor, unit] = unitOf(data.baseline.energy, "J");
  const slower = data.slower.filter((plan) => plan.time <= end);
  const { x, y } = scalesOfFrontier(data, slower, state, end, area, factor);
  const offZero = width < 560 ? "not from 0" : "axis does not start at 0";
  axes(svg, area, x, y, `Iteration time (s), ${offZero}`, `Energy (${unit}), not from 0`);
  const ground = labelGround(area);
  nameEnds(svg, data, area, x, ground);
  const curves = drawCurves(svg, data, x, y, factor, ground);
  const spots = drawPlans(svg, data, slower, x, y, factor);
  for (const spot of spots) ground.boxes.push([spot.x - 9, spot.y - 9, spot.x + 9, spot.y + 9]);
  drawAccepted(svg, state, area, x, y, factor, ground);
  noteSavings(svg, data, x, y, factor, ground);
  for (const { line, text, colour } of curves)
    placeLabel(svg, ground, text, placesAlong(line), { style: `fill: ${colour}`, class: "curve" }, line);
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
    ...data.curve.map(([time]) => time), ...data.points.map((point) => point.time), state.accepted, end,
  ];
  const others = data.curves.flatMap((curve) => curve.points).filter(([time]) => time <= end);
  const energies = [
    ...data.curve.map(([, energy]) => energy), ...others.map(([, energy]) => energy),
    ...data.points.map((point) => point.energy), ...slower.map((plan) => plan.energy),
  ];
  const [left, right] = padded(times, 0.03);
  const [low, high] = padded(energies.map((energy) => energy / factor), 0.12);
  return { x: scale(left, right, area.left, area.right), y: scale(low, high, area.bottom, area.top) };
}

// Draw all curves; returns where they are and what their ends are called.
function drawCurves(svg, data, x, y, factor, ground) {
  const drawn = [];
  const drawCurve = (points, look, text, colour) => {
    const line = points.map(([time, energy]) => [x.at(time), y.at(energy / factor)]);
    const corners = line.map(([across, down]) => `${across.toFixed(1)} ${down.toFixed(1)}`);
    make(svg, "path", { d: `M${corners.join("L")}`, fill: "none", ...look });
    ground.lines.push(line);
    drawn.push({ line, text, colour });
  };
  // The planners' own curves may run out on the right.
  for (const curve of data.curves) {
    const points = curve.points.filter(([time]) => time <= x.high);
    if (points.length) drawCurve(points, { ...lookOfCurve(curve), class: "other" }, curve.label, "var(--muted)");
  }
  drawCurve(data.curve, { stroke: "var(--curve)", "stroke-width": 2.5 }, "envplan", "var(--curve)");
  return drawn;
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

// A line at the time that is accepted, and a ring around the plan to follow.
function drawAccepted(svg, { accepted, chosen }, area, x, y, factor, ground) {
  const at = x.at(accepted), cx = x.at(chosen.time), cy = y.at(chosen.energy / factor);
  make(svg, "line", {
    x1: at, x2: at, y1: area.top, y2: area.bottom, stroke: "var(--now)", "stroke-width": 2, class: "accepted",
  });
  make(svg, "circle", { cx, cy, r: 8, fill: "none", stroke: "var(--now)", "stroke-width": 2.5, class: "followed" });
  ground.rules.push([[at, area.top], [at, area.bottom]]);
}

// Tell of what the pointer is at, and move the line where it is pressed.
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
    if (event.buttons === 1) {
      moveTo(x.value(point.x));
      return;
    }
    const far = (spot) => Math.hypot(spot.x - point.x, spot.y - point.y);
    const nearest = spots.reduce((best, spot) => (far(spot) < far(best) ? spot : best));
    showTip(event, far(nearest) < 18 ? nearest.text : describeCurve(data, x.value(point.x)));
  });
  pane.addEventListener("pointerdown", (event) => moveTo(x.value(pointAt(event).x)));
  pane.addEventListener("pointerleave", (event) => showTip(event, ""));
}

// T_min and T_star: lines, named above the plot, where nothing is in their way.
function nameEnds(svg, data, area, x, ground) {
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
    ground.rules.push([[at, area.top], [at, area.bottom]]);
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

// What the best plan without slowdown, or the page's own, and the cheapest of all save, beside them.
function noteSavings(svg, data, x, y, factor, ground) {
  const cheaper = (one, two) => (two.energy < one.energy ? two : one);
  const cheapest = data.plans.reduce(cheaper);
  const notSlower = data.plans.filter((plan) => plan.time <= data.baseline.time * (1 + 1e-12));
  // A page about a plan without slowdown states what that one saves.
  const own = data.points.find((point) => isThisPlan(point) && point.slower < 0.05);
  const best = own || (notSlower.length ? notSlower.reduce(cheaper) : null);
  const note = (plan, places) => {
    if (plan.saved >= 0.05) placeLabel(svg, ground, savedWords(plan), places, { class: "saved" });
  };
  if (best) {
    const from = y.at(data.baseline.energy / factor), to = y.at(best.energy / factor);
    const at = x.at(data.baseline.time);
    const arrow = [[at, from + 12], [at, to - 8]];
    make(svg, "line", { x1: at, x2: at, y1: from + 12, y2: to - 8, stroke: "var(--good)", "stroke-width": 2 });
    ground.rules.push(arrow);
    note(best, placesDown(at, from, to));
  }
  if (cheapest !== best) {
    const at = x.at(cheapest.time), height = y.at(cheapest.energy / factor);
    const places = [-34, -50, -66, 24, 40, 56, -84].flatMap((by) => [[at, height + by, "end"], [at + 6, height + by, "start"]]);
    note(cheapest, [...placesAround(at, height, 12), ...places]);
  }
}

// Places on both sides of an upright line, from its middle to its ends.
function placesDown(x, top, bottom) {
  const shares = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.9];
  const heights = shares.map((share) => top + share * (bottom - top));
  return [...heights.map((y) => [x + 8, y, "start"]), ...heights.map((y) => [x - 8, y, "end"])];
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
