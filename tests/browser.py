"""A headless Chromium for tests of pages: `with chromium() as browser`, or a skip that says what is missing.

A page is opened from disk. What it logs and what it asks of the network are noted, so that a test can say "nothing".
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


class Browser:
    """A browser with one page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, view: str = "") -> None:
        """Open a page from disk and wait until it has drawn itself."""
        self.driver.get("about:blank")
        self.said()
        self.requests()
        self.driver.get(f"{path.resolve().as_uri()}#{view}")
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *args: Any) -> Any:
        """The result of a script in the page."""
        return self.driver.execute_script(script, *args)

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """What a script returns, as soon as that is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda driver: self.run(script))

    def click(self, selector: str) -> None:
        """Click an element as a person would."""
        self.driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self.driver.find_element("css selector", selector).send_keys(text)

    def text(self, selector: str) -> str:
        """The text of an element, as it is shown."""
        found: str = self.driver.find_element("css selector", selector).text
        return found

    def said(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call, beside files and data in the page."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith(("file:", "data:", "about:", "blob:"))]

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        self.driver.save_screenshot(str(path))


def missing() -> str:
    """What there is not, or nothing."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    programs = [("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)]
    lacking = [names[0] for names in programs if not any(map(shutil.which, names))]
    return f"{' and '.join(lacking)} not found; .ci/run installs them with apt-get" if lacking else ""


@contextmanager
def chromium(*switches: str) -> Iterator[Browser]:
    """A browser, which ends with the block."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for switch in (*SWITCHES, *switches):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", ",".join(filter(None, (os.environ.get("NO_PROXY"), "localhost,127.0.0.1"))))
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
