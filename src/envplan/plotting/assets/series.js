// ---- series: lines over time in panels one above the other, read off together

// Black lines would not show on a dark page.
const lineColour = (colour) => (colour === "#000000" ? "var(--ink)" : colour);
const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

/**
 * @param {Element} host
 * @param {SeriesChart} data
 */
function seriesChart(host, data) {
  legendOfSeries(html(host, "div", "legend"), data);
  const canvas = html(host, "div");
  redraws.push(() => {
    canvas.textContent = "";
    const width = Math.max(280, canvas.clientWidth);
    const cursors = [];
    data.panels.forEach((panel, k) => cursors.push(drawPanel(canvas, data, panel, k, width, cursors)));
  });
}

function legendOfSeries(legend, data) {
  data.names.forEach((name, k) => {
    const svg = make(html(legend, "span"), "svg", { viewBox: "0 0 18 16" });
    make(svg, "line", {
      x1: 0, x2: 18, y1: 8, y2: 8, stroke: lineColour(data.colours[k]), "stroke-width": 2.5,
      "stroke-dasharray": data.dashes[k],
    });
    svg.parentNode.append(name);
  });
}

// Draw a panel; returns its cursor, a line that moves with those of all panels.
function drawPanel(canvas, data, panel, k, width, cursors) {
  const isLast = k === data.panels.length - 1;
  const isHigh = panel.lines.length > 1 && k === 1;
  const height = (isHigh ? 250 : 130) + (isLast ? 44 : 0);
  html(canvas, "h3", "", panel.label);
  const svg = make(canvas, "svg", { width, height, role: "img", "aria-label": `${panel.label} over time` });
  const area = { left: 52, right: width - 12, top: 8, bottom: height - (isLast ? 48 : 8) };
  area.width = area.right - area.left;
  area.height = area.bottom - area.top;
  const { x, y } = scalesOfPanel(data.times, panel, area);
  axes(svg, area, x, y, isLast ? data.label : "", "", isLast);
  panel.lines.forEach((line, n) => drawLine(svg, data, panel, line, n, area, x, y));
  const cursor = make(svg, "line", { y1: area.top, y2: area.bottom, stroke: "var(--now)", visibility: "hidden" });
  listenToPanel(svg, data, panel, area, x, cursors);
  return cursor;
}

function scalesOfPanel(times, panel, area) {
  const values = panel.lines.flat().filter((value) => value !== null);
  const high = panel.highest ?? largest(values), low = panel.from_zero ? 0 : smallest(values);
  const room = (high - low || 1) * 0.06;
  const top = panel.highest ?? high + room;
  return {
    x: scale(0, times[times.length - 1] || 1, area.left, area.right),
    y: scale(panel.from_zero ? 0 : low - room, top, area.bottom, area.top),
  };
}

// Draw a line; one that all policies share, such as the load, is an area.
function drawLine(svg, data, panel, line, n, area, x, y) {
  const corners = line.flatMap((value, i) =>
    value === null ? [] : [`${x.at(data.times[i]).toFixed(1)} ${y.at(value).toFixed(1)}`]);
  const d = `M${corners.join("L")}`;
  if (panel.lines.length === 1 && data.names.length > 1) {
    const ground = `L${x.at(x.high)} ${area.bottom}L${x.at(data.times[0])} ${area.bottom}Z`;
    make(svg, "path", { d: d + ground, fill: "var(--muted)", "fill-opacity": 0.4 });
  } else {
    make(svg, "path", {
      d, fill: "none", stroke: lineColour(data.colours[n]), "stroke-width": 1.6, "stroke-dasharray": data.dashes[n],
      class: "series",
    });
  }
}

// Move all cursors to the time at the pointer, and tell the values of this panel there.
function listenToPanel(svg, data, panel, area, x, cursors) {
  const { left, top, width, height } = area;
  const pane = make(svg, "rect", { x: left, y: top, width, height, fill: "transparent" });
  pane.addEventListener("pointermove", (event) => {
    const time = x.value(event.clientX - svg.getBoundingClientRect().left);
    const far = (i) => Math.abs(data.times[i] - time);
    const i = data.times.reduce((nearest, _, n) => (far(n) < far(nearest) ? n : nearest), 0);
    const at = x.at(data.times[i]);
    for (const cursor of cursors) {
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
    }
    const nameOf = (n) => (panel.lines.length > 1 ? `${data.names[n]}: ` : "");
    const values = panel.lines.map((line, n) => `${nameOf(n)}${shown(line[i], 4)}`);
    showTip(event, [`${data.label} ${shown(data.times[i], 4)}`, panel.label, ...values].join("\n"));
  });
  pane.addEventListener("pointerleave", (event) => {
    showTip(event, "");
    for (const cursor of cursors) cursor.setAttribute("visibility", "hidden");
  });
}
