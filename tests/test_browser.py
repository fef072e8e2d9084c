"""The pages in a real browser: Debian's Chromium, driven by Selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_helpers import envplan

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

_DRIVER = shutil.which("chromedriver")
_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(
    not (_DRIVER and _BROWSER),
    reason="needs Chromium and its driver: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    job = ("a40-gpt3-1.3b-4stage", "-m", "8")
    for arguments in (
        ("solve", *job, "--slowdown", "1"),
        ("report",),
        ("timeline", "-o", "timeline.html"),
        ("solve", *job, "--straggler-time", "4.6", "-o", "waits.json"),
        ("report", "waits.json", "--no-compare", "-o", "waits.html"),
        ("frontier", *job, "--plot", "frontier.html", "--plans", "9"),
        ("frontier", *job, "--animate", "animation.html", "--plans", "9"),
        ("serving", "compare", "--plot", "serving.html"),
    ):
        assert envplan(*arguments, cwd=folder).code == 0
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=Service(_DRIVER), options=options)
    yield driver
    driver.quit()


def visit(browser: webdriver.Chrome, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def text_of_tip(browser: webdriver.Chrome) -> str:
    tip = browser.find_element(By.ID, "tip")
    return tip.text if tip.value_of_css_property("visibility") == "visible" else ""


@pytest.mark.parametrize("name", ["report", "timeline", "frontier", "animation", "serving"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_load_without_errors_and_fit(
    browser: webdriver.Chrome, pages: Path, name: str, width: int, dark: bool
) -> None:
    visit(browser, pages / f"{name}.html", width=width, dark=dark)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    theme = browser.execute_script("return document.documentElement.dataset.theme")
    assert theme == ("dark" if dark else "light")


def test_the_straggler_slider_moves_the_line_and_the_plan(
    browser: webdriver.Chrome, pages: Path
) -> None:
    visit(browser, pages / "report.html")
    answer = browser.find_element(By.CSS_SELECTOR, ".answer")
    before = answer.text
    plan = browser.execute_script("return DATA.frontier.points.at(-1)")
    assert before.startswith(f"This plan takes {plan['time']:.3f} s;")
    assert f"{plan['saved']:.1f}% saved" in before
    line = browser.find_element(By.CSS_SELECTOR, "line.straggler").get_attribute("x1")
    followed = browser.find_element(By.CSS_SELECTOR, "circle.followed").get_attribute("cx")
    browser.execute_script(
        "const s = document.querySelector('input[type=range]'); s.value = 500;"
        "s.dispatchEvent(new Event('input'))"
    )
    assert answer.text.startswith("A straggler takes")
    assert "saved (modelled)" in answer.text
    assert browser.find_element(By.CSS_SELECTOR, "line.straggler").get_attribute("x1") > line
    moved = browser.find_element(By.CSS_SELECTOR, "circle.followed").get_attribute("cx")
    assert float(moved) > float(followed)


def test_a_plan_for_a_straggler_opens_at_it_and_saves_what_its_card_says(
    browser: webdriver.Chrome, pages: Path
) -> None:
    visit(browser, pages / "waits.html")
    answer = browser.find_element(By.CSS_SELECTOR, ".answer").text
    assert answer.startswith("A straggler takes 4.600 s")
    cards = browser.find_elements(By.CSS_SELECTOR, ".card")
    saved = next(card for card in cards if "until the straggler" in card.text)
    assert f"{saved.find_element(By.TAG_NAME, 'b').text} saved" in answer


@pytest.mark.parametrize("width", [390, 1280])
def test_the_ends_of_the_frontier_are_named_above_it_and_apart(
    browser: webdriver.Chrome, pages: Path, width: int
) -> None:
    visit(browser, pages / "frontier.html", width=width)
    low, high = (label.rect for label in browser.find_elements(By.CSS_SELECTOR, "text.end"))
    assert 0 <= low["x"] < low["x"] + low["width"] < high["x"]
    assert high["x"] + high["width"] <= width
    points = browser.find_elements(By.CSS_SELECTOR, "circle[r='4']")
    assert max(low["y"], high["y"]) + 10 < min(point.rect["y"] for point in points)


def view(browser: webdriver.Chrome) -> tuple[float, float]:
    """Which times the first canvas shows, s."""
    return tuple(
        browser.execute_script("const x = document.timelines[0].x; return [x.low, x.high]")
    )


def press(browser: webdriver.Chrome, *keys: str) -> None:
    for key in keys:
        ActionChains(browser).send_keys(key).perform()
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")


def test_a_timeline_zooms_and_moves_by_keys_wheel_and_drag(
    browser: webdriver.Chrome, pages: Path
) -> None:
    visit(browser, pages / "timeline.html")
    canvas = browser.find_element(By.TAG_NAME, "canvas")
    canvas.click()
    whole = view(browser)
    press(browser, "w", "w")
    near = view(browser)
    assert whole[0] < near[0] < near[1] < whole[1]
    press(browser, "d")
    moved = view(browser)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    press(browser, "a", "s", "s")
    ActionChains(browser).drag_and_drop_by_offset(canvas, -200, 0).perform()
    press(browser, "0")
    assert view(browser) == pytest.approx(whole)
    origin = ScrollOrigin.from_element(canvas)
    ActionChains(browser).scroll_from_origin(origin, 0, -300).perform()
    press(browser)
    wheeled = view(browser)
    assert wheeled[1] - wheeled[0] < whole[1] - whole[0]
    ActionChains(browser).drag_and_drop_by_offset(canvas, 200, 0).perform()
    press(browser)
    assert view(browser)[0] < wheeled[0]
    # Before and after stay on one time axis.
    both = browser.execute_script("return document.timelines.map((g) => g.x.low)")
    assert both[0] == both[1]


def test_operations_are_found_and_selected(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "timeline.html")
    search = browser.find_element(By.CSS_SELECTOR, "input[type=search]")
    search.send_keys("backward 3 stage 2")
    assert browser.find_element(By.CSS_SELECTOR, ".found").text.startswith("2 found")
    search.send_keys(Keys.ENTER)
    press(browser)
    chosen = browser.find_element(By.CSS_SELECTOR, ".chosen")
    assert "backward of microbatch 3, stage 2" in chosen.text
    browser.find_element(By.TAG_NAME, "canvas").send_keys(Keys.ARROW_RIGHT)
    press(browser)
    assert "stage 2" in chosen.text
    assert "backward of microbatch 3" not in chosen.text


def test_series_are_read_off_together(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "serving.html")
    charts = browser.find_elements(By.CSS_SELECTOR, "[data-chart=series] svg[role=img]")
    assert len(charts) == 4
    ActionChains(browser).move_to_element(charts[1]).perform()
    text = text_of_tip(browser)
    assert "Power of all GPUs (kW)" in text
    assert "envplan: " in text


def test_a_command_can_be_copied(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "report.html")
    button = browser.find_element(By.CSS_SELECTOR, "button.copy")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    # The clipboard answers later.
    WebDriverWait(browser, 10, poll_frequency=0.05).until(lambda _: button.text == "Copied")


def test_a_straggler_beyond_t_star_is_waited_for_with_a_slower_plan(
    browser: webdriver.Chrome, pages: Path
) -> None:
    visit(browser, pages / "frontier.html")
    data = browser.execute_script("return DATA.frontier")
    slower = [plan["time"] for plan in data["slower"]]
    assert data["t_star"] < min(slower)
    assert max(slower) <= data["t_max"]
    # The chart ends soon after the frontier, until a straggler needs more room.
    assert len(browser.find_elements(By.CSS_SELECTOR, "circle.slower")) < len(slower)
    browser.execute_script(
        "const s = document.querySelector('input[type=range]'); s.value = s.max;"
        "s.dispatchEvent(new Event('input'))"
    )
    assert len(browser.find_elements(By.CSS_SELECTOR, "circle.slower")) == len(slower)
    found, energy = browser.execute_script(
        "const d = DATA.frontier, found = lookUp(d, d.t_max);return [found.plan.time, found.energy]"
    )
    assert found == max(slower)
    at_star = data["plans"][-1]
    assert energy < at_star["energy"] + data["waiting_w"] * (data["t_max"] - at_star["time"])
    assert (
        f"follow the plan of {found:.5g}"[:-1]
        in browser.find_element(By.CSS_SELECTOR, ".answer").text
    )
    assert browser.get_log("browser") == []


def test_pointing_at_a_plan_tells_its_figures(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "frontier.html")
    point = browser.find_elements(By.CSS_SELECTOR, "circle[r='4']")[3]
    ActionChains(browser).move_to_element(point).perform()
    text = text_of_tip(browser)
    assert "% saved" in text
    assert "certified gap" in text
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert text_of_tip(browser) == ""


def test_pointing_at_an_operation_tells_its_clock(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "timeline.html")
    canvas = browser.find_elements(By.TAG_NAME, "canvas")[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width = canvas.size["width"]
    ActionChains(browser).move_to_element_with_offset(
        canvas, int(66 + 8 - width / 2), -50
    ).perform()
    text = text_of_tip(browser)
    assert "forward of microbatch 0, stage 0" in text
    assert "MHz" in text


def test_colour_by_power_redraws(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "timeline.html")
    before = browser.execute_script("return document.querySelector('canvas').toDataURL()")
    browser.execute_script(
        "const s = document.querySelector('select'); s.value = 'watts';"
        "s.dispatchEvent(new Event('change'))"
    )
    after = browser.execute_script("return document.querySelector('canvas').toDataURL()")
    assert after != before
    assert "W" in browser.find_element(By.CSS_SELECTOR, ".ramp").text


def test_the_theme_button_switches(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "report.html")
    ground = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    browser.find_element(By.ID, "theme").click()
    other = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert ground != other


def test_the_animation_walks(browser: webdriver.Chrome, pages: Path) -> None:
    visit(browser, pages / "animation.html")
    title = browser.find_element(By.TAG_NAME, "h3").text
    browser.execute_script(
        "const s = document.querySelector('input[type=range]'); s.value = s.max;"
        "s.dispatchEvent(new Event('input'))"
    )
    assert browser.find_element(By.TAG_NAME, "h3").text != title
    button = browser.find_element(By.XPATH, "//button[text()='Play']")
    button.click()
    assert button.text == "Pause"
    button.click()
    assert button.text == "Play"
    assert browser.get_log("browser") == []
