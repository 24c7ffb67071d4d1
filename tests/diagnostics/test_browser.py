"""The page in a real browser: three widths, light and dark, contrast, keyboard, print, and no network."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="the extra [report] brings jinja2 and matplotlib")
pytest.importorskip("matplotlib", reason="the extra [report] brings jinja2 and matplotlib")
pytest.importorskip("selenium", reason="selenium drives the browser")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from .example import example, slower

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]

WIDTHS = [390, 820, 1400]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage"),
)

#: Every visible text whose contrast with what lies behind it is below WCAG's level AA.
FAINT = """
const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0.99) return c;
  }
  return [255, 255, 255];
};
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let seen = 0;
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement, style = getComputedStyle(e);
  if (!walk.currentNode.data.trim() || !e.getClientRects().length || ["SCRIPT", "STYLE"].includes(e.tagName)) continue;
  const [a, b] = [light(parse(e.closest("svg") ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize), least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
  seen += 1;
  if ((a + 0.05) / (b + 0.05) < least) found.push(`${walk.currentNode.data.trim()}: ${(a + 0.05) / (b + 0.05)}`);
}
return [seen, found];
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    example().against(slower(example())).save(path)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER))) as driver:
        yield driver


def shown(browser: webdriver.Chrome, page: Path, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_text_can_be_read_and_nothing_is_cut_off(browser: Any, page: Path, width: int, scheme: str) -> None:
    shown(browser, page, width, scheme)
    assert browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
    browser.execute_script("document.querySelector('tr[data-row]').focus()")  # a row that is lit, and the tip
    seen, faint = browser.execute_script(FAINT)
    assert seen > 100
    assert faint == []
    wide = "return [...document.querySelectorAll('main *')].filter(e => e.getClientRects().length"
    wide += " && !e.closest('thead') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
    assert browser.execute_script(wide) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    small = "return [...document.querySelectorAll('svg text')].filter(e => e.getClientRects().length)"
    small += ".map(e => e.getBoundingClientRect().height).filter(h => h < 9)"
    assert browser.execute_script(small) == []


def test_it_needs_no_network_and_says_nothing_on_the_console(browser: Any, page: Path) -> None:
    shown(browser, page, 1400)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []


def lit(browser: Any) -> set[str]:
    """The rows whose point that is shown is lit."""
    points = browser.find_elements(By.CSS_SELECTOR, ".point.on")
    return {p.get_attribute("data-row") for p in points if p.size["width"]}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_keyboard_goes_from_row_to_row_and_lights_their_points(browser: Any, page: Path, width: int) -> None:
    shown(browser, page, width)
    for _ in range(12):  # whatever comes before it
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.switch_to.active_element.get_attribute("data-row") == "0":
            break
    for key, row in ((None, "0"), (Keys.ARROW_DOWN, "1"), (Keys.END, "19"), (Keys.ARROW_DOWN, "19"), (Keys.HOME, "0")):
        if key:
            browser.switch_to.active_element.send_keys(key)
        assert browser.switch_to.active_element.get_attribute("data-row") == row
        assert lit(browser) == {row}
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Show all 28"  # one row is a stop, not each
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("data-row") == "20"
    browser.switch_to.active_element.send_keys(Keys.END)
    assert lit(browser) == {"27"}
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert lit(browser) == set()


def test_the_pointer_lights_a_row_and_its_point_and_the_tip_names_it(browser: Any, page: Path) -> None:
    shown(browser, page, 1400)
    point = next(p for p in browser.find_elements(By.CSS_SELECTOR, '.point[data-row="5"]') if p.size["width"])
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    webdriver.ActionChains(browser).move_to_element(point).perform()
    row = browser.find_element(By.CSS_SELECTOR, "tr.on")
    tip = browser.find_element(By.ID, "tip")
    (number,) = lit(browser)  # a point may lie on top of another
    assert row.get_attribute("data-row") == number
    assert row.find_element(By.TAG_NAME, "th").text.split(" ")[0].rstrip("…") in tip.text
    assert tip.is_displayed()
    point.click()
    assert browser.switch_to.active_element.get_attribute("data-row") == number


def rows(browser: Any) -> list[str]:
    return [
        row.get_attribute("data-row")
        for row in browser.find_elements(By.CSS_SELECTOR, "tr[data-row]")
        if row.is_displayed()
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_one_line_and_are_sorted_filtered_and_opened(browser: Any, page: Path, width: int) -> None:
    shown(browser, page, width)
    assert rows(browser) == [str(i) for i in range(20)]
    heights = "return [...document.querySelectorAll('tr[data-row]:not([hidden])')].map(e => e.offsetHeight)"
    assert max(browser.execute_script(heights)) < (66 if width < 500 else 40)
    box = browser.find_element(By.ID, "filter")
    box.send_keys("depthwise 7x7")
    found = rows(browser)
    assert 0 < len(found) < 14
    assert browser.find_element(By.ID, "found").text.startswith(f"{len(found)} of 28 rows, ")
    browser.find_element(By.CSS_SELECTOR, f'tr[data-row="{found[0]}"]').click()
    detail = browser.find_element(By.ID, "tip").text
    assert "by rule: <slow> & wide" in detail
    assert "g32mb4" in detail
    box.clear()
    box.send_keys(" ")
    assert rows(browser) == [str(i) for i in range(20)]
    if width < 500:
        return
    for head, first in (("limit", "descending"), ("layer", "ascending")):
        column = browser.find_element(By.CSS_SELECTOR, f"thead .{head}")
        button = column.find_element(By.TAG_NAME, "button")
        button.click()
        assert column.get_attribute("aria-sort") == first
        some = rows(browser)
        button.click()
        assert rows(browser) != some
    assert rows(browser)[0] == browser.execute_script(
        "const rows = JSON.parse(document.getElementById('data').textContent).rows;"
        "const names = rows.map(r => r.layers[0]);"
        "return String(names.indexOf([...names].sort((a, b) => b.localeCompare(a, 'en', {numeric: true}))[0]))"
    )


def told(browser: Any) -> dict[str, list[str]] | None:
    """The names of what assistive technology sees, by role; None as long as a busy browser has not told all."""
    roles: dict[str, list[str]] = {}
    for node in browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    return roles if len(roles.get("heading", ())) >= 7 else None


def test_what_assistive_technology_is_told(browser: Any, page: Path) -> None:
    for width in (390, 1400):  # on a phone the table is no table to the eye
        shown(browser, page, width)
        roles = WebDriverWait(browser, 10).until(told)
        assert all(roles["heading"])
        assert any("Roofline of 28 rows" in name for name in roles.get("image", roles.get("img", [])))
        assert len(roles["rowheader"]) >= 20
        assert len(roles["row"]) >= 21
        assert "Show all 28" in roles["button"]


def test_it_prints_every_row(browser: Any, page: Path) -> None:
    shown(browser, page, 1400, "dark")
    assert base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]).startswith(b"%PDF")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.find_element(By.CSS_SELECTOR, 'tr[data-row="27"]').is_displayed()
    assert not browser.find_element(By.ID, "all").is_displayed()
    _, faint = browser.execute_script(FAINT)
    assert faint == []
