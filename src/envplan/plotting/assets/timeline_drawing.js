// ---- drawing of timelines

const BAR = 0.84; // height of a bar, as a share of its row
const HEIGHT = { forward: 0.62, backward_weight: 0.8 }; // of an operation, as a share of its bar
const HATCHED = "backward_weight"; // too busy for a number
const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";
const BRIGHT = 115; // black is legible on brighter colours, white on others
const MAX_OUTLINED = 1500; // operations; thick outlines of more would hide what is in them

const lowered = (number) => [...String(number)].map((digit) => SUBSCRIPTS[digit]).join("");
// A single value is a highest one.
const shareOf = (value, [low, high]) => (high > low ? (value - low) / (high - low) : 1);

// The least and the greatest value of a quantity, over operations that control a clock.
function colourRange(timelines, quantity) {
  let low = Infinity, high = -Infinity;
  for (const { ops } of timelines)
    ops[quantity].forEach((value, i) => {
      if (!ops.mhz[i]) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  return low <= high ? [low, high] : [0, 0];
}

function legendOfTimeline(legend, timelines, [low, high], text) {
  legend.textContent = "";
  const isSingle = low === high;
  const ramp = html(legend, "span", "ramp", isSingle ? "" : shown(low, 4));
  const colours = isSingle ? rgb(cividis(1)) : `linear-gradient(90deg,${CIVIDIS.map(rgb).join(",")})`;
  html(ramp, "i", isSingle ? "single" : "").style.background = colours;
  ramp.append(`${shown(high, 4)}  ${text}`);
  const kinds = new Set(timelines.flatMap((timeline) => timeline.kinds));
  if (kinds.has("forward")) swatch(legend, "low", "var(--muted)", "forward (low)");
  if (kinds.has("backward") || kinds.has("backward_input")) swatch(legend, "", "var(--muted)", "backward (high)");
  if (kinds.has(HATCHED)) swatch(legend, "weight", "", "weight gradient");
  const hatched = "repeating-linear-gradient(45deg,var(--usable-mark) 0 1px,var(--usable) 1px 6px)";
  swatch(legend, "", hatched, "waiting that slower clocks could fill");
  swatch(legend, "", "var(--unusable)", "other waiting");
  swatch(legend, "outline", "transparent", "critical path");
  if (timelines.some((timeline) => timeline.chunks > 1))
    html(legend, "span", "", `3${lowered(1)}: microbatch 3, chunk 1`);
}

// Draw what a view shows of a timeline, in colours that stand for a quantity.
function drawTimeline(chart, view, range, quantity) {
  const { timeline, canvas, box } = chart;
  const isNarrow = box.clientWidth < 560;
  const row = rowHeight(timeline.stages, chart.height), left = isNarrow ? 30 : 66;
  const width = Math.max(280, box.clientWidth), height = timeline.stages * row + 24;
  const context = sizedContext(canvas, width, height, timeline);
  const x = scale(view.from, view.to, left, width - 10);
  chart.geometry = { x, row };
  // Where times are on each canvas, for tests.
  const others = (document.timelines || []).filter((other) => other.canvas !== canvas);
  document.timelines = [...others, { canvas, x }];

  nameStages(context, timeline.stages, row, left, isNarrow);
  context.save();
  context.beginPath();
  context.rect(left, 0, width - 10 - left, height);
  context.clip();
  drawBubbles(context, timeline.bubbles, view, x, row);
  const boxes = visibleBoxes(timeline, view, x, row);
  drawOperations(context, chart, boxes, x, range, quantity);
  outline(context, boxes.filter(({ i }) => timeline.ops.critical[i]), "--critical", boxes.length > MAX_OUTLINED ? 0.7 : 1.6);
  outline(context, boxes.filter(({ i }) => view.chart === chart && view.index === i), "--now", 3);
  context.restore();
  timeAxis(context, x, view, timeline.stages * row, width);
}

// The height of a stage's row; rows that share a height are no higher than others and no lower than text.
function rowHeight(stages, height) {
  const usual = stages > 8 ? 24 : 34;
  return height === undefined ? usual : Math.max(13, Math.min(usual, Math.floor(height / stages)));
}

// The context of a canvas of so many CSS pixels, sharp on any screen.
function sizedContext(canvas, width, height, timeline) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Timeline of ${timeline.stages} stages: ${timeline.title}. ${KEYS}`);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function nameStages(context, count, row, left, isNarrow) {
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = css("--ink");
  context.textAlign = "right";
  for (let stage = 0; stage < count; stage++)
    context.fillText(isNarrow ? `s${stage}` : `stage ${stage}`, left - 8, stage * row + row / 2);
}

// Grey what no operation fills; hatch of that what the operation before it could fill.
function drawBubbles(context, bubbles, view, x, row) {
  const unusableFill = css("--unusable"), usableFill = hatch(context, "--usable", "--usable-mark");
  for (const [stage, begin, end, usable] of bubbles) {
    if (end < view.from || begin > view.to) continue;
    for (const [fill, until] of [[unusableFill, end], [usableFill, begin + usable]]) {
      if (until <= begin) continue;
      context.fillStyle = fill;
      context.fillRect(x.at(begin), stage * row + row * (1 - BAR) / 2, x.at(until) - x.at(begin), row * BAR);
    }
  }
}

// The rectangles of the operations that are in view, with their indices.
function visibleBoxes({ ops, kinds }, view, x, row) {
  const boxes = [];
  for (let i = 0; i < ops.stage.length; i++) {
    const begin = ops.start[i], end = begin + ops.time[i];
    if (begin > view.to || end < view.from) continue;
    const tall = row * BAR * (HEIGHT[kinds[ops.kind[i]]] || 1);
    const from = x.at(begin), wide = x.at(end) - from;
    boxes.push({ i, from, top: ops.stage[i] * row + row * (1 + BAR) / 2 - tall, wide, tall });
  }
  return boxes;
}

function drawOperations(context, chart, boxes, x, range, quantity) {
  const { ops } = chart.timeline;
  context.textAlign = "center";
  context.font = "10px system-ui, sans-serif";
  context.strokeStyle = css("--edge");
  context.lineWidth = 0.7;
  for (const box of boxes) {
    const { i, from, top, wide, tall } = box;
    const colour = cividis(shareOf(ops[quantity][i], range));
    context.globalAlpha = chart.hits.size && !chart.hits.has(i) ? 0.3 : 1;
    context.fillStyle = ops.mhz[i] ? rgb(colour) : css("--constant");
    context.fillRect(from, top, Math.max(wide - (wide > 3 ? 0.8 : 0), 0.4), tall);
    if (wide > 3) context.strokeRect(from + 0.5, top + 0.5, wide - 1.8, tall - 1);
    if (wide > 12) drawParts(context, chart.timeline.parts[i] || [], box, x, range, quantity);
    markOperation(context, chart.timeline, box, colour);
  }
  context.globalAlpha = 1;
}

// Draw the parts of an operation that have clocks of their own.
function drawParts(context, parts, { top, tall }, x, range, quantity) {
  for (const [begin, end, mhz, watts] of parts) {
    const value = quantity === "mhz" ? mhz : watts;
    context.fillStyle = mhz ? rgb(cividis(shareOf(value, range))) : css("--constant");
    context.fillRect(x.at(begin), top, x.at(end) - x.at(begin), tall);
  }
}

// Number an operation by its microbatch and chunk where there is room; hatch weight gradients.
function markOperation(context, { ops, kinds, chunks }, { i, from, top, wide, tall }, [red, green, blue]) {
  const isBright = 0.299 * red + 0.587 * green + 0.114 * blue > BRIGHT;
  if (kinds[ops.kind[i]] === HATCHED) {
    if (wide > 4) stripe(context, from, top, wide, tall, isBright);
    return;
  }
  const text = ops.microbatch[i] + (chunks > 1 ? lowered(ops.chunk[i]) : "");
  if (wide > 9 && wide > context.measureText(text).width + 3) {
    context.fillStyle = isBright ? "#000" : "#fff";
    context.fillText(text, from + wide / 2, top + tall / 2 + 0.5);
  }
}

function outline(context, boxes, colour, lineWidth) {
  context.strokeStyle = css(colour);
  context.lineWidth = lineWidth;
  for (const { from, top, wide, tall } of boxes)
    context.strokeRect(from + 0.5, top + 0.5, Math.max(wide - 1, 0.5), tall - 1);
}

function timeAxis(context, x, view, at, width) {
  context.strokeStyle = css("--muted");
  context.fillStyle = css("--ink");
  context.lineWidth = 1;
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.beginPath();
  context.moveTo(x.at(view.from), at + 1);
  context.lineTo(x.at(view.to), at + 1);
  context.stroke();
  for (const [value, text] of ticks(view.from, view.to, width / 120))
    context.fillText(`${text} s`, Math.min(x.at(value), width - 18), at + 14);
}

// A pattern of diagonal lines.
function hatch(context, ground, mark) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const tileContext = tile.getContext("2d");
  tileContext.fillStyle = css(ground);
  tileContext.fillRect(0, 0, 8, 8);
  tileContext.strokeStyle = css(mark);
  tileContext.beginPath();
  tileContext.moveTo(0, 8);
  tileContext.lineTo(8, 0);
  tileContext.stroke();
  return context.createPattern(tile, "repeat");
}

// Diagonal lines over a rectangle.
function stripe(context, from, top, wide, tall, isBright) {
  context.save();
  context.beginPath();
  context.rect(from, top, wide, tall);
  context.clip();
  context.strokeStyle = isBright ? "rgba(0,0,0,.35)" : "rgba(255,255,255,.4)";
  context.lineWidth = 1;
  for (let left = from - tall; left < from + wide; left += 6) {
    context.beginPath();
    context.moveTo(left, top + tall);
    context.lineTo(left + tall, top);
    context.stroke();
  }
  context.restore();
}

// ---- power of all GPUs below the timelines; the last of them is the plan's

const isPlan = (k, timelines) => k === timelines.length - 1;

// [the greatest power, the number to divide powers by, their unit then]
function powerUnit(timelines) {
  const peak = timelines.reduce((most, { power }) => power.watts.reduce((a, b) => Math.max(a, b), most), 0);
  return [peak, ...unitOf(peak, "W")];
}

function legendOfPower(legend, timelines) {
  legend.textContent = "";
  const [, factor, unit] = powerUnit(timelines);
  timelines.forEach((timeline, k) => {
    const [className, background] = isPlan(k, timelines) ? ["", "var(--power)"] : ["line", "var(--muted)"];
    swatch(legend, className, background, `${timeline.name}, average ${shown(timeline.average_w / factor, 4)} ${unit}`);
  });
}

function drawPower(host, timelines, view, isLow) {
  host.textContent = "";
  const width = Math.max(280, host.clientWidth), height = isLow ? 118 : 170;
  const svg = make(host, "svg", { width, height, role: "img", "aria-label": "Power of all GPUs over time" });
  const area = { ...plotArea(width, isLow ? height + 38 : height, 66), right: width - 10 };
  area.width = area.right - area.left;
  const [peak, factor, unit] = powerUnit(timelines);
  const x = scale(view.from, view.to, area.left, area.right);
  const y = scale(0, (1.1 * peak) / factor || 1, area.bottom, area.top);
  // Times of a low chart are named at the timeline above it.
  axes(svg, area, x, y, isLow ? "" : "Time (s)", `All GPUs (${unit})`, !isLow);
  timelines.forEach((timeline, k) => {
    const fills = isPlan(k, timelines);
    const d = powerPath(timeline.power, view, x, y, factor, fills ? area.bottom : null);
    const look = fills ? { fill: "var(--power)", "fill-opacity": 0.6 } : { fill: "none", stroke: "var(--muted)" };
    make(svg, "path", { d, ...look });
  });
}

// The steps of power in view as an SVG path; down to a ground it is closed, without one (null) open.
function powerPath({ times, watts }, view, x, y, factor, ground) {
  const clamped = (time) => x.at(Math.min(view.to, Math.max(view.from, time))).toFixed(1);
  let d = "";
  watts.forEach((power, i) => {
    if (times[i + 1] < view.from || times[i] > view.to) return;
    const left = clamped(times[i]), right = clamped(times[i + 1]), high = y.at(power / factor).toFixed(1);
    if (d) d += "L";
    else d += ground === null ? "M" : `M${left} ${ground}L`;
    d += `${left} ${high}L${right} ${high}`;
  });
  if (ground !== null && d) d += `L${clamped(times[times.length - 1])} ${ground}Z`;
  return d;
}
