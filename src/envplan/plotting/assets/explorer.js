// ---- explorer: the frontier, a time that one accepts, and what its plan does then

const FRAME_MS = 350;
const SLIDER_STEPS = 1000;
// A timeline of many stages has low rows, so that it fits a screen together with the frontier.
const EXPLORER_TIMELINE_HEIGHT = 168;

/**
 * @param {Element} host
 * @param {ExplorerChart} data
 */
function explorerChart(host, data) {
  fillSharedColumns(data.frames);
  const parts = explorerElements(host, data);
  const { slider, play, waits } = parts;
  const { frontier } = data;
  const range = rangeOfExplorer(frontier);
  const state = startOfExplorer(frontier);
  const timeline = data.frames.length ? explorerTimeline(parts.timeline, data) : null;

  const end = () => (state.waits || state.accepted > range.near ? range.slowest : range.near);
  const draw = () => {
    const chosen = choice(frontier, state);
    slider.value = Math.round(((state.accepted - range.fastest) / (end() - range.fastest)) * SLIDER_STEPS);
    waits.checked = state.waits;
    sayChoice(parts.answer, frontier, state, chosen);
    const frame = frameOf(frontier, chosen.plan);
    if (timeline && frame >= 0) {
      showStages(parts.stages, data.stages[frame]);
      timeline.show(data.frames[frame], frame < frontier.plans.length);
    }
    const height = timeline ? Math.min(340, Math.max(285, parts.side.clientHeight)) : null;
    drawFrontier(parts.canvas, frontier, { ...state, chosen: chosen.plan }, end(), height, accept);
  };
  const accept = (time) => {
    state.own = null;
    state.accepted = Math.min(end(), Math.max(range.fastest, time));
    draw();
  };
  slider.addEventListener("input", () =>
    accept(range.fastest + (slider.value / SLIDER_STEPS) * (end() - range.fastest)));
  waits.addEventListener("change", () => {
    state.waits = waits.checked;
    accept(state.accepted);
  });
  listenToPlay(play, () => accept(nextTime(frontier, state)));
  redraws.push(draw);
}

// Frames after the first leave out the columns that say which operation it is.
function fillSharedColumns(frames) {
  for (const frame of frames.slice(1)) {
    const { microbatch, chunk, stage, kind } = frames[0].ops;
    Object.assign(frame.ops, { microbatch, chunk, stage, kind });
  }
}

// The elements of an explorer, from the top.
function explorerElements(host, data) {
  const box = html(host, "section", data.frames.length ? "explorer with-frames" : "explorer");
  const controls = html(box, "div", "controls accept");
  const play = html(controls, "button", "play", "Play");
  play.type = "button";
  const label = html(controls, "label", "slide", "Iteration time that you accept ");
  const slider = rangeInput(label, SLIDER_STEPS, "Iteration time that you accept");
  const waiting = html(controls, "label", "waits");
  const waits = html(waiting, "input");
  waits.type = "checkbox";
  waiting.append(" a straggler takes that long: count the waiting");
  const answer = html(box, "p", "answer");
  answer.setAttribute("aria-live", "polite");
  const panes = html(box, "div", "panes");
  const canvas = html(panes, "div");
  const side = html(panes, "div", "side");
  const stages = data.frames.length ? html(html(side, "div", "scroll"), "table", "stages") : null;
  legendOfFrontier(html(side, "div", "legend"), data.frontier);
  const timeline = html(box, "div", "compact");
  return { play, slider, waits, answer, canvas, side, stages, timeline };
}

// How far the slider reaches: soon after T_star, and as far as T_max only for a straggler.
function rangeOfExplorer(frontier) {
  const { baseline, t_star: tStar, t_max: tMax, straggler, slower } = frontier;
  const fastest = Math.min(baseline.time, frontier.t_min);
  const near = Math.max(tStar + (tStar - fastest) / 2, baseline.time * 1.05);
  const slowest = Math.max(near, straggler || 0, slower.length ? tMax : 0);
  return { fastest, near, slowest };
}

// A page about a plan opens on it; one about a straggler opens at its time.
function startOfExplorer(frontier) {
  const { straggler, baseline } = frontier;
  const own = straggler ? null : frontier.points.find(isThisPlan) || null;
  return { accepted: straggler || (own ? own.time : baseline.time), waits: Boolean(straggler), own };
}

// The plan of least energy by a time, and that energy; what is used while waiting counts if asked.
function lookUp(frontier, time, waits = true) {
  const waiting = (plan) => (waits ? frontier.waiting_w * Math.max(0, time - plan.time) : 0);
  const candidates = [...frontier.plans, ...frontier.points.filter(isThisPlan), ...(waits ? frontier.slower : [])];
  const inTime = candidates.filter((plan) => plan.time <= time + 1e-12);
  const until = (plan) => plan.energy + waiting(plan);
  const plan = inTime.length ? inTime.reduce((best, other) => (until(other) < until(best) ? other : best)) : candidates[0];
  return { plan, energy: until(plan) };
}

function choice(frontier, { accepted, waits, own }) {
  return own ? { plan: own, energy: own.energy } : lookUp(frontier, accepted, waits);
}

// The number of the frame that shows a plan; -1 for none.
function frameOf({ plans, slower }, plan) {
  return [...plans, ...slower].indexOf(plan);
}

// The time of the plan after the one that is shown; after the last the first.
function nextTime({ plans, slower, t_star: tStar }, { accepted, waits }) {
  const ladder = waits && accepted > tStar ? [...plans, ...slower] : plans;
  const next = ladder.find((plan) => plan.time > accepted + 1e-9);
  return (next || ladder[0]).time;
}

function listenToPlay(play, step) {
  let timer = null;
  play.addEventListener("click", () => {
    play.textContent = timer ? "Play" : "Pause";
    if (timer) {
      clearInterval(timer);
      timer = null;
    } else timer = setInterval(step, FRAME_MS);
  });
}

// Say what a page's plan saves, or which plan to follow for a time.
function sayChoice(answer, frontier, { accepted, waits, own }, { plan, energy }) {
  const { baseline } = frontier;
  const late = Math.max(0, accepted - baseline.time);
  const before = baseline.energy + (waits ? frontier.waiting_w * late : 0);
  const saved = 100 * (1 - energy / before);
  const slowdown = (100 * late) / baseline.time;
  const slower = slowdown < 0.05 ? "no slowdown" : `${slowdown.toFixed(1)}% slower`;
  const instead = `instead of ${joules(before)} at maximum frequency, `;
  if (own) answer.textContent = `This plan takes ${shown(own.time, 4)} s; ${joules(energy)} ${instead}`;
  else if (waits) {
    answer.textContent = `A straggler takes ${shown(accepted, 4)} s, ${slower}: follow the plan of ${shown(plan.time, 4)} s; `;
    answer.append(`${joules(energy)} with waiting ${instead}`);
  } else {
    answer.textContent = `Accepting ${shown(accepted, 4)} s, ${slower}: the plan takes ${shown(plan.time, 4)} s `;
    answer.append(`and ${joules(energy)} ${instead}`);
  }
  html(answer, "strong", "", `${saved.toFixed(1)}% saved`);
  if (frontier.modelled) answer.append(" (modelled)");
  answer.append(".");
  if (!waits && !own && accepted > frontier.t_star * (1 + 1e-9))
    answer.append(" Slower than T_star saves nothing more.");
}

// A timeline whose frame can be changed; one range of colours is for all frames. Its axis reaches as
// far as the plans along the frontier, and as far as all of them for slower ones.
function explorerTimeline(host, data) {
  const before = { name: "maximum frequency", power: data.power_before, average_w: data.average_before_w };
  const ends = data.frames.map(({ power }) => power.times[power.times.length - 1]);
  const spans = { along: Math.max(...ends.slice(0, data.frontier.plans.length)), all: Math.max(...ends) };
  const chart = timelineChart(host, {
    timelines: [data.frames[0]], span: spans.along, behind: [before], height: EXPLORER_TIMELINE_HEIGHT,
  });
  chart.setRange({ mhz: colourRange(data.frames, "mhz"), watts: colourRange(data.frames, "watts") });
  return {
    show: (frame, isAlong) => {
      chart.chart.timeline = frame;
      chart.chart.title.textContent = frame.title;
      chart.setSpan(isAlong ? spans.along : spans.all);
      chart.draw();
    },
  };
}

const STAGE_HEADERS = ["", "energy", "saved", "waits", "mean clock", "changes"];
const percent = (value) => (value === null ? "–" : `${value.toFixed(1)}%`);

function showStages(table, rows) {
  table.textContent = "";
  const head = html(html(table, "thead"), "tr");
  for (const header of STAGE_HEADERS) html(head, "th", "", header);
  const body = html(table, "tbody");
  rows.forEach(([energy, saved, waits, clock, changes], stage) => {
    const cells = [
      `stage ${stage}`, joules(energy), percent(saved), percent(waits),
      clock === null ? "–" : `${clock.toFixed(0)} MHz`, String(changes),
    ];
    const row = html(body, "tr");
    for (const cell of cells) html(row, "td", "", cell);
  });
}
