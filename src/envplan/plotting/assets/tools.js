// ---- tools: colours, numbers, elements, scales

const SVG = "http://www.w3.org/2000/svg";
// The cividis colour map (Nunez et al. 2018): even in lightness, the same to the colour-blind.
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
// Functions that draw charts anew, where the page has another width or theme.
const redraws = [];
const tip = document.getElementById("tip");

// The colour [red, green, blue] of a share from 0 to 1.
function cividis(share) {
  const position = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const k = Math.min(CIVIDIS.length - 2, Math.floor(position));
  const next = CIVIDIS[k + 1];
  return CIVIDIS[k].map((level, channel) => Math.round(level + (position - k) * (next[channel] - level)));
}
const rgb = ([red, green, blue]) => `rgb(${red},${green},${blue})`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A number with so many significant digits; a dash for none.
function shown(value, digits) {
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) >= 100) return String(value);
  const size = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  const decimals = Math.max(0, Math.min(9, digits - 1 - size));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
// [the number to divide a value by, its unit then], such as [1000, "kJ"].
function unitOf(value, unit) {
  for (const [factor, prefix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (value >= 10 * factor) return [factor, prefix + unit];
  return [1, unit];
}
function joules(value) {
  const [factor, unit] = unitOf(value, "J");
  return `${shown(value / factor, 4)} ${unit}`;
}

// Append an SVG element.
function make(parent, kind, attributes, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}
// Append an HTML element.
function html(parent, kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}
function rangeInput(parent, most, label) {
  const slider = html(parent, "input");
  slider.type = "range";
  slider.min = 0;
  slider.max = most;
  slider.value = 0;
  slider.setAttribute("aria-label", label);
  return slider;
}
// An entry of a legend: a swatch of a class and a background, and what it stands for.
function swatch(legend, className, background, text) {
  const item = html(legend, "span");
  html(item, "i", className).style.background = background;
  item.append(text);
}

// Show a text beside the pointer; hide the tip where the text is empty.
function showTip(event, text) {
  if (!text) {
    tip.style.visibility = "hidden";
    return;
  }
  tip.textContent = text;
  tip.style.visibility = "visible";
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const above = event.clientY - box.height - 12;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 16}px`;
}

// About so many round numbers between two: pairs of a number and its text.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((multiple) => multiple * power).find((size) => size >= raw * 0.999);
  const halves = step / power === 2.5 ? 1 : 0;
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + halves);
  const list = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    list.push([value, value.toFixed(Math.min(9, decimals))]);
  return list;
}

// A linear scale from values to pixels: `at` a value, and the `value` at a pixel.
function scale(low, high, from, to) {
  return {
    low,
    high,
    at: (value) => from + ((value - low) / (high - low)) * (to - from),
    value: (pixel) => low + ((pixel - from) / (to - from)) * (high - low),
  };
}
function plotArea(width, height, left, top = 14) {
  const area = { left, right: width - 16, top, bottom: height - 50 };
  return { ...area, width: area.right - area.left, height: area.bottom - area.top };
}

// Draw the grid, the axes and their labels; the numbers below only where they are named.
function axes(svg, area, x, y, xLabel, yLabel, named = true) {
  const { left, right, top, bottom } = area;
  for (const [value, text] of ticks(x.low, x.high, area.width / 64)) {
    const at = x.at(value);
    make(svg, "line", { x1: at, x2: at, y1: top, y2: bottom, stroke: "var(--grid)" });
    if (named) make(svg, "text", { x: at, y: bottom + 18, "text-anchor": "middle" }, text);
  }
  for (const [value, text] of ticks(y.low, y.high, area.height / 45)) {
    const at = y.at(value);
    make(svg, "line", { x1: left, x2: right, y1: at, y2: at, stroke: "var(--grid)" });
    make(svg, "text", { x: left - 8, y: at + 4, "text-anchor": "end" }, text);
  }
  make(svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--muted)" });
  make(svg, "line", { x1: left, x2: left, y1: top, y2: bottom, stroke: "var(--muted)" });
  make(svg, "text", { x: (left + right) / 2, y: bottom + 40, "text-anchor": "middle" }, xLabel);
  const middle = (top + bottom) / 2;
  make(svg, "text", { x: 16, y: middle, "text-anchor": "middle", transform: `rotate(-90 16 ${middle})` }, yLabel);
}

// Draw a mark of a shape: cross, down, up, square or diamond.
function symbol(svg, shape, x, y, size, colour) {
  const [left, right, top, bottom] = [x - size, x + size, y - size, y + size];
  const paths = {
    cross: `M${left} ${top}L${right} ${bottom}M${left} ${bottom}L${right} ${top}`,
    down: `M${left} ${top}H${right}L${x} ${bottom}Z`,
    up: `M${left} ${bottom}H${right}L${x} ${top}Z`,
    square: `M${left} ${top}H${right}V${bottom}H${left}Z`,
    diamond: `M${x - size * 1.2} ${y}L${x} ${y - size * 1.2}L${x + size * 1.2} ${y}L${x} ${y + size * 1.2}Z`,
  };
  const isLine = shape === "cross";
  return make(svg, "path", {
    d: paths[shape],
    fill: isLine ? "none" : colour,
    stroke: isLine ? colour : "var(--card)",
    "stroke-width": isLine ? 3.5 : 1,
    "stroke-linecap": "round",
  });
}
