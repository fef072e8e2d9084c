// ---- the page: charts, commands that one can copy, light and dark

const CHARTS = { explorer: explorerChart, timeline: timelineChart, series: seriesChart };
// Every element with a `data-chart` attribute names its kind and the key of its data.
for (const host of document.querySelectorAll("[data-chart]"))
  CHARTS[host.dataset.chart](host, DATA[host.dataset.key]);

for (const button of document.querySelectorAll("button.copy"))
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // A page opened from a file may not write to the clipboard itself.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });

function redraw() {
  for (const draw of redraws) draw();
}
function theme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  redraw();
}
const isDark = () => document.documentElement.dataset.theme === "dark";
document.getElementById("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
let pendingRedraw = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(pendingRedraw);
  pendingRedraw = requestAnimationFrame(redraw);
});
theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
