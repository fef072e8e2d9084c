"""The pages in a real browser: Debian's Chromium, driven by Selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_helpers import envplan, says

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

_DRIVER = shutil.which("chromedriver")
_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

#: Without a window, and without anything of Chromium's that would use the network.
_ARGUMENTS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)

pytestmark = pytest.mark.skipif(
    not (_DRIVER and _BROWSER),
    reason="needs Chromium and its driver: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, job = tmp_path_factory.mktemp("pages"), "a40-gpt3-1.3b-4stage -m 8"
    for line in f"""
        solve {job} --slowdown 1
        report
        timeline -o timeline.html
        solve {job} --straggler-time 4.6 -o waits.json
        report waits.json --no-compare -o waits.html
        solve {job} -o still.json
        report still.json --no-compare -o still.html
        frontier {job} --plot frontier.html --plans 9
        compare {job} --plot compare.html
        compare h100-gpt3-175b-8stage -m 8 --plot eight.html
        serving compare --plot serving.html
    """.strip().splitlines():
        assert envplan(*line.split(), cwd=folder).code == 0
    return folder


class Browser(webdriver.Chrome):
    """Chromium without a window."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = _BROWSER or ""
        for argument in _ARGUMENTS:
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        super().__init__(service=Service(_DRIVER), options=options)

    def visit(self, page: Path, *, width: int = 1280, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.get(page.as_uri())

    def one(self, selector: str) -> WebElement:
        return self.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.find_elements(By.CSS_SELECTOR, selector)

    def put(self, selector: str, value: str) -> None:
        """Set a slider or a choice to a JavaScript value, in which it is `s`."""
        kind = "input" if "input" in selector else "change"
        self.execute_script(
            f"const s = document.querySelector('{selector}'); s.value = {value};"
            f"s.dispatchEvent(new Event('{kind}'))"
        )

    @property
    def tip(self) -> str:
        tip = self.one("#tip")
        return tip.text if tip.value_of_css_property("visibility") == "visible" else ""

    @property
    def times(self) -> tuple[float, float]:
        """Which times the first canvas shows, s."""
        return tuple(
            self.execute_script("const x = document.timelines[0].x; return [x.low, x.high]")
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self).send_keys(key).perform()
        self.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as driver:
        yield driver


@pytest.mark.parametrize("name", ["report", "timeline", "frontier", "compare", "serving"])
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_pages_load_without_errors_and_fit(
    browser: Browser, pages: Path, name: str, width: int, dark: bool
) -> None:
    browser.visit(pages / f"{name}.html", width=width, dark=dark)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    theme = browser.execute_script("return document.documentElement.dataset.theme")
    assert theme == ("dark" if dark else "light")


def test_the_slider_of_a_report_starts_at_its_plan_and_its_straggler(
    browser: Browser, pages: Path
) -> None:
    browser.visit(pages / "report.html")
    answer = browser.one(".answer")
    plan = browser.execute_script("return DATA.explorer.frontier.points.at(-1)")
    says(
        answer.text,
        f"This plan takes {plan['time']:.3f} s;",
        f"{plan['saved']:.1f}% saved | {plan['energy']:,.0f} J",
    )
    line = browser.one("line.accepted").get_attribute("x1")
    followed = browser.one("circle.followed").get_attribute("cx")
    browser.put("input[type=range]", "500")
    says(answer.text, "Accepting", "% slower: the plan takes", "saved (modelled)")
    assert browser.one("line.accepted").get_attribute("x1") > line
    assert float(browser.one("circle.followed").get_attribute("cx")) > float(followed)
    # A plan for a straggler opens at it and saves what its card says.
    browser.visit(pages / "waits.html")
    saved = next(one for one in browser.all(".card") if "until the straggler" in one.text)
    said = saved.find_element(By.TAG_NAME, "b").text
    says(browser.one(".answer").text, "A straggler takes 4.600 s", f"{said} saved")
    assert browser.one("input[type=checkbox]").is_selected()


def test_a_report_states_one_saving_of_its_plan(browser: Browser, pages: Path) -> None:
    browser.visit(pages / "still.html", width=1400)
    plan = browser.execute_script("return DATA.explorer.frontier.points.at(-1)")
    stated = f"{plan['saved']:.1f}% saved"
    says(browser.one(".answer").text, stated)
    assert f"{stated}, no slowdown" in [one.text for one in browser.all("svg .saved")]


@pytest.mark.parametrize("name", ["frontier", "eight"])
def test_frontier_timeline_power_and_stages_are_above_the_fold(
    browser: Browser, pages: Path, name: str
) -> None:
    browser.visit(pages / f"{name}.html", width=1400)
    assert browser.execute_script("return document.documentElement.scrollHeight") <= 900
    for selector in ("circle.followed", ".stages tbody tr:last-child", "canvas", "button.play"):
        assert browser.one(selector).is_displayed()
    boxes = [one.rect for one in browser.all(".explorer svg[role=img], canvas, .side")]
    assert max(box["y"] + box["height"] for box in boxes) <= 900


def test_the_slider_redraws_timeline_power_and_stages_of_its_plan(
    browser: Browser, pages: Path
) -> None:
    browser.visit(pages / "frontier.html", width=1400)

    def shown() -> tuple[str, str, str, str]:
        canvas = browser.execute_script("return document.querySelector('canvas').toDataURL()")
        power = browser.all(".compact svg path")[-1].get_attribute("d")
        return browser.one(".answer").text, canvas, power, browser.one(".stages").text

    before = shown()
    browser.put("input[type=range]", "400")
    after = shown()
    assert all(new != old for new, old in zip(after, before, strict=True))
    explorer = browser.execute_script("return DATA.explorer")
    number = browser.execute_script(
        "return DATA.explorer.frontier.plans.findLastIndex("
        "(plan) => arguments[0].includes(`the plan takes ${shown(plan.time, 4)} s`))",
        after[0],
    )
    plan, stages = explorer["frontier"]["plans"][number], explorer["stages"][number]
    # What the table and the answer say is what the plan says.
    assert f"{plan['saved']:.1f}% saved" in after[0]
    for stage, (_, saved, waits, *_) in enumerate(stages):
        row = browser.all(".stages tbody tr")[stage].text
        says(row, f"stage {stage}", f"{saved:.1f}%", f"{waits:.1f}%")
    assert browser.get_log("browser") == []


def test_play_walks_along_the_frontier_and_pauses(browser: Browser, pages: Path) -> None:
    browser.visit(pages / "frontier.html", width=1400)
    first, button = browser.one(".answer").text, browser.one("button.play")
    button.click()
    assert button.text == "Pause"
    WebDriverWait(browser, 10, poll_frequency=0.05).until(
        lambda _: browser.one(".answer").text != first
    )
    button.click()
    assert button.text == "Play"
    assert browser.get_log("browser") == []


#: For each label, how many points along curves, rules and marks lie in its box.
_COVERED = """
const svg = document.querySelector(".explorer svg[role=img]"), covered = {};
const lines = [...svg.querySelectorAll("line")];
const rules = lines.filter((line) => line.getAttribute("stroke") !== "var(--grid)");
const shapes = [...svg.querySelectorAll("path, circle"), ...rules];
for (const label of svg.querySelectorAll("text.saved, text.curve")) {
  const { x, y, width, height } = label.getBBox();
  let points = 0;
  for (const shape of shapes) {
    const length = shape.getTotalLength();
    for (let at = 0; at <= length; at += 0.5) {
      const p = shape.getPointAtLength(at);
      if (p.x > x && p.x < x + width && p.y > y + 2 && p.y < y + height - 2) points += 1;
    }
  }
  covered[label.textContent] = points;
}
return covered;
"""


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", ["frontier", "compare", "eight", "report"])
def test_labels_cover_no_line_and_no_mark_wherever_the_slider_is(
    browser: Browser, pages: Path, name: str, width: int
) -> None:
    browser.visit(pages / f"{name}.html", width=width)
    for place in ("0", "300", "700"):
        browser.put("input[type=range]", place)
        covered = browser.execute_script(_COVERED)
        # On a phone, the legend alone may have to do.
        assert covered or width < 600
        assert set(covered.values()) <= {0}, covered


def test_legends_have_a_line_for_every_curve(browser: Browser, pages: Path) -> None:
    browser.visit(pages / "compare.html")
    entries = {entry.text: entry for entry in browser.all(".explorer .side .legend span")}
    for name in (
        "Zeus, one clock for all",
        "Zeus, one clock a stage",
        "lower bound, EnvPipe's order",
    ):
        assert entries[name].find_elements(By.TAG_NAME, "line")


def test_cards_fill_their_rows(browser: Browser, pages: Path) -> None:
    for width in (390, 1280):
        browser.visit(pages / "report.html", width=width)
        whole = browser.one(".cards").rect
        cards = [card.rect for card in browser.all(".card")]
        for row in {card["y"] for card in cards}:
            ends = [card["x"] + card["width"] for card in cards if card["y"] == row]
            assert max(ends) == pytest.approx(whole["x"] + whole["width"], abs=2)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_ends_of_the_frontier_are_named_above_it_and_apart(
    browser: Browser, pages: Path, width: int
) -> None:
    browser.visit(pages / "frontier.html", width=width)
    low, high = (label.rect for label in browser.all("text.end"))
    assert 0 <= low["x"] < low["x"] + low["width"] < high["x"]
    assert high["x"] + high["width"] <= width
    points = browser.all("circle[r='4']")
    assert max(low["y"], high["y"]) + 10 < min(point.rect["y"] for point in points)


def test_a_straggler_beyond_t_star_has_a_slower_plan_and_plans_tell_their_figures(
    browser: Browser, pages: Path
) -> None:
    browser.visit(pages / "frontier.html")
    ActionChains(browser).move_to_element(browser.all("circle[r='4']")[3]).perform()
    says(browser.tip, "% saved", "certified gap")
    ActionChains(browser).move_to_element(browser.one("h1")).perform()
    assert browser.tip == ""
    data = browser.execute_script("return DATA.explorer.frontier")
    slower = [plan["time"] for plan in data["slower"]]
    assert data["t_star"] < min(slower) <= max(slower) <= data["t_max"]
    # The chart ends soon after the frontier, until a straggler needs more room.
    assert len(browser.all("circle.slower")) < len(slower)
    browser.one("input[type=checkbox]").click()
    browser.put("input[type=range]", "s.max")
    assert len(browser.all("circle.slower")) == len(slower)
    found, energy = browser.execute_script(
        "const d = DATA.explorer.frontier, found = lookUp(d, d.t_max);"
        "return [found.plan.time, found.energy]"
    )
    assert found == max(slower)
    at_star = data["plans"][-1]
    assert energy < at_star["energy"] + data["waiting_w"] * (data["t_max"] - at_star["time"])
    assert f"follow the plan of {found:.5g}"[:-1] in browser.one(".answer").text
    assert browser.get_log("browser") == []


def test_a_timeline_zooms_and_moves_by_keys_wheel_and_drag(browser: Browser, pages: Path) -> None:
    browser.visit(pages / "timeline.html")
    canvas = browser.one("canvas")
    canvas.click()
    whole = browser.times
    browser.press("w", "w")
    near = browser.times
    assert whole[0] < near[0] < near[1] < whole[1]
    browser.press("d")
    moved = browser.times
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    browser.press("a", "s", "s")
    ActionChains(browser).drag_and_drop_by_offset(canvas, -200, 0).perform()
    browser.press("0")
    assert browser.times == pytest.approx(whole)
    origin = ScrollOrigin.from_element(canvas)
    ActionChains(browser).scroll_from_origin(origin, 0, -300).perform()
    browser.press()
    wheeled = browser.times
    assert wheeled[1] - wheeled[0] < whole[1] - whole[0]
    ActionChains(browser).drag_and_drop_by_offset(canvas, 200, 0).perform()
    browser.press()
    assert browser.times[0] < wheeled[0]
    # Before and after stay on one time axis.
    both = browser.execute_script("return document.timelines.map((g) => g.x.low)")
    assert both[0] == both[1]


def test_operations_are_found_selected_pointed_at_and_coloured_anew(
    browser: Browser, pages: Path
) -> None:
    browser.visit(pages / "timeline.html")
    search = browser.one("input[type=search]")
    search.send_keys("backward 3 stage 2")
    assert browser.one(".found").text.startswith("2 found")
    search.send_keys(Keys.ENTER)
    browser.press()
    chosen = browser.one(".chosen")
    assert "backward of microbatch 3, stage 2" in chosen.text
    browser.one("canvas").send_keys(Keys.ARROW_RIGHT)
    browser.press()
    assert "stage 2" in chosen.text
    assert "backward of microbatch 3" not in chosen.text
    canvas = browser.all("canvas")[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    left = int(66 + 8 - canvas.size["width"] / 2)
    ActionChains(browser).move_to_element_with_offset(canvas, left, -50).perform()
    says(browser.tip, "forward of microbatch 0, stage 0", "MHz")
    before = browser.execute_script("return document.querySelector('canvas').toDataURL()")
    browser.put("select", "'watts'")
    after = browser.execute_script("return document.querySelector('canvas').toDataURL()")
    assert after != before
    assert "W" in browser.one(".ramp").text


def test_series_are_read_off_together(browser: Browser, pages: Path) -> None:
    browser.visit(pages / "serving.html")
    charts = browser.all("[data-chart=series] svg[role=img]")
    assert len(charts) == 4
    ActionChains(browser).move_to_element(charts[1]).perform()
    says(browser.tip, "Power of all GPUs (kW)", "envplan: ")


def test_a_command_can_be_copied_and_the_theme_be_switched(browser: Browser, pages: Path) -> None:
    browser.visit(pages / "report.html")
    button = browser.one("button.copy")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    WebDriverWait(browser, 10, poll_frequency=0.05).until(lambda _: button.text == "Copied")
    ground = browser.one("body").value_of_css_property("background-color")
    browser.one("#theme").click()
    assert browser.one("body").value_of_css_property("background-color") != ground
