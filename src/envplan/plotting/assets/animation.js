// ---- animation: the pipeline while T walks along the frontier

const FRAME_MS = 220;

/**
 * @param {Element} host
 * @param {AnimationChart} data
 */
function animationChart(host, data) {
  const controls = html(host, "div", "controls");
  const play = html(controls, "button", "", "Play");
  const slider = rangeInput(controls, data.frames.length - 1, "Iteration time");
  const says = html(controls, "span");
  const timelineHost = html(host, "div");
  const frontierHost = html(host, "div");
  legendOfFrontier(html(host, "div", "legend"), data.frontier);
  const timeline = timelineChart(timelineHost, { timelines: [data.frames[0]], span: data.span });
  // One range of colours for all frames.
  timeline.setRange({ mhz: colourRange(data.frames, "mhz"), watts: colourRange(data.frames, "watts") });

  const show = () => {
    const frame = data.frames[slider.value], plan = data.frontier.plans[slider.value];
    timeline.chart.timeline = frame;
    timeline.chart.title.textContent = frame.title;
    const modelled = data.frontier.modelled ? " (modelled)" : "";
    says.textContent = `${shown(plan.time, 4)} s, ${joules(plan.energy)}, ${savedWords(plan)}${modelled}`;
    timeline.draw();
    drawFrontier(frontierHost, data.frontier, { straggler: plan.time, own: plan }, data.frontier.t_star);
  };
  const next = () => {
    slider.value = (Number(slider.value) + 1) % data.frames.length;
    show();
  };
  let timer = null;
  slider.addEventListener("input", show);
  play.addEventListener("click", () => {
    play.textContent = timer ? "Play" : "Pause";
    if (timer) {
      clearInterval(timer);
      timer = null;
    } else timer = setInterval(next, FRAME_MS);
  });
  redraws.push(show);
}
