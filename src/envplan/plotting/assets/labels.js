// ---- labels: text that never covers a line, a mark or other text

const LABEL_HEIGHT = 15;

// What labels keep clear of, in pixels, within an area: curves, straight rules, and boxes.
function labelGround(area) {
  return { area, lines: [], rules: [], boxes: [] };
}

// Places beside a point: on its right and left, above and below.
function placesAround(x, y, gap = 9) {
  return [
    [x + gap, y + 4, "start"], [x, y - gap, "end"], [x, y - gap, "start"],
    [x, y + gap + 10, "end"], [x, y + gap + 10, "start"], [x - gap, y + 4, "end"],
  ];
}

// Places along a polyline, from its end: above and below it.
function placesAlong(line) {
  const places = placesAround(...line[line.length - 1]);
  for (const share of [0.85, 0.7, 0.55, 0.4]) {
    const [x, y] = line[Math.floor(share * (line.length - 1))];
    for (const far of [9, 20, 34]) places.push([x, y - far, "start"], [x, y + far + 10, "end"]);
  }
  return places;
}

/**
 * Write a text at the first of several places where it covers nothing; null where there is none.
 * @param {Element} svg
 * @param {{area: object, lines: number[][][], rules: number[][][], boxes: number[][]}} ground
 * @param {string} text
 * @param {[number, number, string][]} places - x, y of the text's foot, and its anchor
 * @param {object} look - further attributes
 * @param {?number[][]} own - the curve that it names: no other may be nearer to it
 */
function placeLabel(svg, ground, text, places, look, own = null) {
  const label = make(svg, "text", { x: 0, y: 0, ...look }, text);
  const width = label.getComputedTextLength();
  for (const [x, y, anchor] of places) {
    const left = anchor === "end" ? x - width : x;
    const box = [left - 2, y - LABEL_HEIGHT + 3, left + width + 2, y + 4];
    if (!isFree(box, ground) || (own && !isNearest(box, own, ground.lines))) continue;
    for (const [name, value] of Object.entries({ x, y, "text-anchor": anchor })) label.setAttribute(name, value);
    ground.boxes.push(box);
    return label;
  }
  label.remove();
  return null;
}

function isFree([left, top, right, bottom], { area, lines, rules, boxes }) {
  if (left < area.left + 2 || right > area.right + 14 || top < area.top || bottom > area.bottom) return false;
  if (boxes.some(([l, t, r, b]) => l < right && left < r && t < bottom && top < b)) return false;
  return ![...lines, ...rules].some((line) => line.some((point, k) =>
    k > 0 && segmentMeets(line[k - 1], point, [left, top, right, bottom])));
}

// Whether no other curve is nearer to a box than its own.
function isNearest(box, own, lines) {
  const distance = distanceTo(box, own);
  return lines.every((line) => line === own || distanceTo(box, line) > distance);
}
// The distance from a box to the nearest corner of a curve.
function distanceTo([left, top, right, bottom], line) {
  const far = (value, low, high) => Math.max(low - value, 0, value - high);
  return Math.min(...line.map(([x, y]) => Math.hypot(far(x, left, right), far(y, top, bottom))));
}

// Whether a segment has a point in a box (Liang and Barsky).
function segmentMeets([x1, y1], [x2, y2], [left, top, right, bottom]) {
  let enter = 0, leave = 1;
  for (const [step, room] of [[x1 - x2, x1 - left], [x2 - x1, right - x1], [y1 - y2, y1 - top], [y2 - y1, bottom - y1]]) {
    if (step === 0 && room < 0) return false;
    if (step < 0) enter = Math.max(enter, room / step);
    if (step > 0) leave = Math.min(leave, room / step);
  }
  return enter <= leave;
}
