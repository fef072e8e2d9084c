// ---- timeline: one row a stage, to scale; zoom, pan, select, search

const KEYS = "Wheel or W and S: zoom. Drag or A and D: move. Click or arrows: select. 0: all of it.";
// The most that one can zoom in: a window of so small a part of all.
const MAX_ZOOM = 20000;
const COLOUR_QUANTITIES = [["mhz", "SM clock (MHz)"], ["watts", "power of one GPU (W)"]];

/**
 * @param {Element} host
 * @param {TimelineChart} data - which may also have a `height` that its rows share, and timelines
 *   `behind`, of which only the power is shown
 */
function timelineChart(host, data) {
  const parts = timelineElements(host, data);
  const { charts, select } = parts;
  // What is shown: a window of time, and the selected operation of a chart.
  const view = { from: 0, to: data.span, chart: null, index: -1 };
  let fixedRanges = null, pending = 0;

  const draw = () => {
    const timelines = charts.map((chart) => chart.timeline);
    const quantity = select.value;
    const range = fixedRanges ? fixedRanges[quantity] : colourRange(timelines, quantity);
    legendOfTimeline(parts.legend, timelines, range, select.options[select.selectedIndex].text);
    for (const chart of charts) drawTimeline(chart, view, range, quantity);
    const drawn = [...(data.behind || []), ...timelines];
    legendOfPower(parts.powerLegend, drawn);
    drawPower(parts.power, drawn, view, data.height);
    parts.chosen.textContent = view.chart
      ? `Selected: ${describeOperation(view.chart.timeline, view.index).join("; ")}` : "";
  };
  const drawSoon = () => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(draw);
  };
  const show = (from, to) => {
    const width = Math.min(data.span, Math.max(data.span / MAX_ZOOM, to - from));
    view.from = Math.min(Math.max(0, from), data.span - width);
    view.to = view.from + width;
    drawSoon();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) =>
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pick = (chart, index) => {
    view.chart = index < 0 ? null : chart;
    view.index = index;
    if (index < 0 || !showOperation(chart.timeline.ops, index, view, show)) drawSoon();
  };
  const viewer = { data, view, show, zoom, pick };

  for (const [text, name, act] of [
    ["+", "Zoom in", () => zoom(0.5)],
    ["−", "Zoom out", () => zoom(2)],
    ["All", "Show all of it", () => show(0, data.span)],
  ]) addButton(parts.buttons, text, name, act);
  select.addEventListener("change", draw);
  listenToSearch(parts.search, parts.found, charts, pick, drawSoon);
  for (const chart of charts) {
    listenToWheel(chart, viewer);
    listenToPointer(chart, viewer);
    listenToKeys(chart, viewer);
  }
  redraws.push(draw);
  const setSpan = (span) => {
    if (span === data.span) return;
    Object.assign(data, { span });
    Object.assign(view, { from: 0, to: span });
  };
  return { chart: charts[0], draw, setSpan, setRange: (ranges) => { fixedRanges = ranges; } };
}

// The elements of a timeline chart, from the top.
function timelineElements(host, data) {
  const controls = html(host, "div", "controls");
  html(controls, "span", "", "Colour:");
  const select = html(controls, "select");
  select.setAttribute("aria-label", "What colours stand for");
  for (const [value, text] of COLOUR_QUANTITIES) html(select, "option", "", text).value = value;
  const search = html(controls, "input", "search");
  search.type = "search";
  search.placeholder = "Find: backward 3";
  search.setAttribute("aria-label", "Find operations by kind, microbatch and stage");
  const found = html(controls, "span", "found");
  found.setAttribute("aria-live", "polite");
  const buttons = html(controls, "span");
  const legend = html(host, "div", "legend");
  const box = html(host, "div", "timelines");
  const charts = data.timelines.map((timeline) => {
    const title = html(box, "h3", "", timeline.title);
    const canvas = html(box, "canvas");
    canvas.tabIndex = 0;
    return { timeline, title, canvas, box, height: data.height, hits: new Set() };
  });
  html(box, "p", "keys", KEYS);
  const chosen = html(box, "p", "chosen");
  chosen.setAttribute("aria-live", "polite");
  const powerLegend = html(box, "div", "legend");
  const power = html(box, "div");
  return { select, search, found, buttons, legend, charts, chosen, powerLegend, power };
}

function addButton(parent, text, name, act) {
  const button = html(parent, "button", "", text);
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", act);
}

// Show a window that has an operation in it, wide enough to be seen; false where it is seen already.
function showOperation(ops, index, view, show) {
  const begin = ops.start[index], time = ops.time[index], end = begin + time;
  const middle = (begin + end) / 2, width = view.to - view.from;
  if ((end - begin) / width < 0.01) show(middle - 15 * (end - begin), middle + 15 * (end - begin));
  else if (begin < view.from || end > view.to) show((begin + end - width) / 2, (begin + end + width) / 2);
  else return false;
  return true;
}

// Mark the operations that a text names; Enter goes from one to the next.
function listenToSearch(search, found, charts, pick, drawSoon) {
  let last = -1;
  const matches = () => charts.flatMap((chart) => [...chart.hits].map((index) => [chart, index]));
  search.addEventListener("input", () => {
    for (const chart of charts) chart.hits = new Set(findOperations(chart.timeline, search.value));
    last = -1;
    found.textContent = search.value.trim() ? `${matches().length} found, Enter goes to the next` : "";
    drawSoon();
  });
  search.addEventListener("keydown", (event) => {
    const all = matches();
    if (event.key !== "Enter" || !all.length) return;
    last = (last + (event.shiftKey ? all.length - 1 : 1)) % all.length;
    found.textContent = `${last + 1} of ${all.length}`;
    pick(...all[last]);
  });
}

// The wheel zooms; sideways or with Shift it moves.
function listenToWheel(chart, { data, view, show, zoom }) {
  const { canvas } = chart;
  canvas.addEventListener("wheel", (event) => {
    const isOut = event.deltaY > 0;
    // All is shown: the page may scroll.
    if (!event.deltaX && isOut && view.to - view.from >= data.span) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = ((event.deltaX || event.deltaY) / canvas.clientWidth) * (view.to - view.from);
      show(view.from + by, view.to + by);
    } else {
      const x = event.clientX - canvas.getBoundingClientRect().left;
      zoom(isOut ? 1.25 : 0.8, chart.geometry.x.value(x));
    }
  }, { passive: false });
}

// Dragging moves what is shown, a click selects, and an operation under the pointer tells of itself.
function listenToPointer(chart, { view, show, pick }) {
  const { canvas } = chart;
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      showTip(event, describePlace(chart, event));
      return;
    }
    const by = ((drag.x - event.clientX) / canvas.clientWidth) * (view.to - view.from);
    if (Math.abs(drag.x - event.clientX) > 3) {
      drag.moved = true;
      showTip(event, "");
    }
    if (drag.moved) show(drag.from + by, drag.from + by + view.to - view.from);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) pick(chart, indexAt(chart, event));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
}

function listenToKeys(chart, { data, view, show, zoom, pick }) {
  const acts = {
    w: () => zoom(0.67),
    s: () => zoom(1.5),
    a: (by) => show(view.from - by, view.to - by),
    d: (by) => show(view.from + by, view.to + by),
    0: () => show(0, data.span),
    Escape: () => pick(chart, -1),
    ArrowRight: () => pickBeside(chart, view, pick, 1),
    ArrowLeft: () => pickBeside(chart, view, pick, -1),
    ArrowDown: () => pickOnStage(chart, view, pick, 1),
    ArrowUp: () => pickOnStage(chart, view, pick, -1),
  };
  chart.canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act((view.to - view.from) / 5);
  });
}

// Select the operation before or after the selected one on its stage.
function pickBeside(chart, view, pick, ahead) {
  const { ops } = chart.timeline;
  const next = view.index + ahead;
  if (view.chart !== chart) pick(chart, 0);
  else if (ops.stage[next] === ops.stage[view.index]) pick(chart, next);
}

// Select the operation of a neighbouring stage that is nearest in time to the selected one.
function pickOnStage(chart, view, pick, down) {
  if (view.chart !== chart) {
    pick(chart, 0);
    return;
  }
  const { ops } = chart.timeline;
  const middle = (i) => ops.start[i] + ops.time[i] / 2;
  const stage = ops.stage[view.index] + down;
  let nearest = -1, least = Infinity;
  ops.stage.forEach((other, i) => {
    const far = Math.abs(middle(i) - middle(view.index));
    if (other === stage && far < least) {
      least = far;
      nearest = i;
    }
  });
  if (nearest >= 0) pick(chart, nearest);
}

// Indices of operations that a text such as "backward 3 stage 2" or "f3" names; none for no text.
function findOperations(timeline, text) {
  const wanted = parseSearch(text);
  if (!Object.keys(wanted).length) return [];
  const { ops, kinds } = timeline;
  const fits = (i) => Object.entries(wanted).every(([key, value]) =>
    key === "kind" ? kinds[ops.kind[i]].startsWith(value) : ops[key][i] === value);
  return [...ops.stage.keys()].filter(fits);
}
// What a text asks for, by the names of columns.
function parseSearch(text) {
  const words = text.toLowerCase().match(/[a-z_]+|[0-9]+/g) || [];
  const isNumber = (word) => /^[0-9]+$/.test(word || "");
  const wanted = {};
  for (let k = 0; k < words.length; k++) {
    if (/^(s|stage|rank)$/.test(words[k]) && isNumber(words[k + 1])) wanted.stage = Number(words[++k]);
    else if (/^(c|chunk)$/.test(words[k]) && isNumber(words[k + 1])) wanted.chunk = Number(words[++k]);
    else if (/^(m|mb|microbatch|of)$/.test(words[k])) continue;
    else if (isNumber(words[k])) wanted.microbatch = Number(words[k]);
    else if (words[k] === "critical") wanted.critical = 1;
    else wanted.kind = words[k];
  }
  return wanted;
}

// ---- what is under the pointer

function placeOf(chart, event) {
  const box = chart.canvas.getBoundingClientRect(), { x, row } = chart.geometry;
  return { time: x.value(event.clientX - box.left), stage: Math.floor((event.clientY - box.top) / row) };
}
// The index of the operation at the pointer; -1 for none.
function indexAt(chart, event) {
  const { stage, time } = placeOf(chart, event), { ops } = chart.timeline;
  for (let i = 0; i < ops.stage.length; i++)
    if (ops.stage[i] === stage && time >= ops.start[i] && time <= ops.start[i] + ops.time[i]) return i;
  return -1;
}
// What there is to say of the operation or the bubble at the pointer.
function describePlace(chart, event) {
  const i = indexAt(chart, event);
  const { stage, time } = placeOf(chart, event);
  if (i >= 0) return describeOperation(chart.timeline, i, time).join("\n");
  for (const [other, begin, end, usable] of chart.timeline.bubbles)
    if (other === stage && begin <= time && time <= end) {
      const use = usable
        ? `slower clocks before it could fill ${shown(usable, 3)} s of it`
        : "slower clocks before it save nothing more";
      return `waits for ${shown(end - begin, 4)} s\n${use}`;
    }
  return "";
}
// Lines about an operation, and about its part at a time where parts have clocks of their own.
function describeOperation({ ops, kinds, parts }, i, time) {
  const begin = ops.start[i], end = begin + ops.time[i];
  const chunk = ops.chunk[i] ? `, chunk ${ops.chunk[i]}` : "";
  const clock = ops.mhz[i] ? `${ops.mhz[i]} MHz` : "no clock of its own";
  const lines = [`${kinds[ops.kind[i]]} of microbatch ${ops.microbatch[i]}${chunk}, stage ${ops.stage[i]}`];
  const part = (parts[i] || []).find(([partBegin, partEnd]) => partBegin <= time && time <= partEnd);
  if (part) {
    const [partBegin, partEnd, mhz, watts, name] = part;
    lines.push(`part ${name}: ${mhz} MHz, ${shown(watts, 4)} W a GPU, ${shown(partEnd - partBegin, 4)} s`);
  }
  return [
    ...lines,
    `${clock}, ${shown(ops.watts[i], 4)} W a GPU`,
    `${shown(begin, 6)} s to ${shown(end, 6)} s (${shown(ops.time[i], 4)} s)`,
    `${shown(ops.watts[i] * ops.time[i], 4)} J a GPU`,
    ops.critical[i] ? "on the critical path" : `could take ${shown(ops.slack[i], 3)} s longer`,
  ];
}
