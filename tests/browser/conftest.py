"""Pages in a real browser: `make test-browser`. Each test that opens a page also asserts an empty error console."""

import base64
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
)
WIDE, PHONE = (1280, 900), (390, 844)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and leaves them out unless `-m` asks for them."""
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    for item in own:
        item.add_marker("browser")
    if own and "browser" not in config.option.markexpr:
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]


class Browser:
    """A chromium without a window that opens files, in light or dark, as wide as asked."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder, self.size = driver, folder, WIDE

    def open(self, page: str | Path, scheme: str = "light", size: tuple[int, int] = WIDE) -> "Browser":
        """Opens a file, or HTML text, which is written to a file first. `scheme` is "light" or "dark"."""
        if isinstance(page, str):
            page, text = self.folder / "page.html", page
            page.write_text(text, encoding="utf-8")
        self.resize(size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(page.resolve().as_uri())
        return self

    def js(self, code: str, *arguments: Any) -> Any:
        """The value that a piece of JavaScript returns."""
        return self.driver.execute_script(code, *arguments)

    def find(self, css: str) -> Any:
        """The first element that matches."""
        return self.driver.find_element("css selector", css)

    def all(self, css: str) -> Sequence[Any]:
        """All elements that match."""
        return self.driver.find_elements("css selector", css)

    def text(self, css: str) -> str:
        """The text of the first element that matches, as it is shown."""
        return self.find(css).text

    def wait(self, css: str, seconds: float = 15.0) -> Any:
        """The first element that matches, as soon as it is there. Fails if it does not come."""
        from selenium.webdriver.support.wait import WebDriverWait

        found = WebDriverWait(self.driver, seconds, 0.05).until(lambda _: self.all(css), f"nothing matches {css}")
        return found[0]

    def until(self, holds: Callable[[], bool], seconds: float = 10.0) -> None:
        """Waits until a condition holds. Fails if it does not."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, seconds, 0.05).until(lambda _: holds())

    def hover(self, element: Any, x: float = 0.5, y: float = 0.5) -> None:
        """Points at a place in an element (or the first that matches a selector), in shares of its width and height."""
        from selenium.webdriver import ActionChains

        element = self.find(element) if isinstance(element, str) else element
        self.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        width, height = element.size["width"], element.size["height"]
        right, down = round((x - 0.5) * width), round((y - 0.5) * height)
        ActionChains(self.driver, duration=0).move_to_element_with_offset(element, right, down).perform()

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, such as "TAB", "ARROW_RIGHT" or "a"."""
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.driver).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()

    def sideways(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.js("return document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def screenshot(self, name: str, whole: bool = False) -> Path:
        """Saves what is shown, or the whole page, to build/screenshots/NAME.png."""
        if whole:
            self.resize((self.size[0], self.js("return document.documentElement.scrollHeight")))
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {})
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def resize(self, size: tuple[int, int]) -> None:
        """Gives the window a width and a height."""
        self.size, scale = size, 2 if size[0] < 600 else 1
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def complaints(self) -> list[str]:
        """The errors in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The driver of one chromium for all tests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.exit(f"{' and '.join(missing)} not found: apt-get install -y chromium chromium-driver", returncode=2)
    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(programs["chromedriver"]))
    driver.set_page_load_timeout(20)
    driver.set_script_timeout(20)
    driver.command_executor.client_config.timeout = 30
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any, tmp_path: Path) -> Iterator[Browser]:
    """A browser; after the test its console must have no error."""
    opened = Browser(chromium, tmp_path)
    opened.complaints()
    yield opened
    chromium.get("about:blank")
    assert opened.complaints() == []
