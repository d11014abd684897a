"""A real Chromium without a window, driven by selenium; tests are skipped without it."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
LIMIT = 60
"""Seconds to wait for something on a page."""


@contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """Start a browser with an empty profile in `folder`. Every wait in it ends."""
    program, driver = (
        next((path for name in names if (path := shutil.which(name))), None)
        for names in (BROWSERS, DRIVERS)
    )
    if importlib.util.find_spec("selenium") is None or not (program and driver):
        pytest.skip("needs selenium, Chromium and its driver (Debian: chromium, chromium-driver)")

    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    chromium = webdriver.Chrome(options=options, service=service)
    try:
        chromium.set_page_load_timeout(LIMIT)
        chromium.set_script_timeout(LIMIT)
        yield chromium
    finally:
        chromium.quit()


class Page:
    """What a reader does with a page: look, type, press keys, click."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get("about:blank")  # another hash alone would keep the page
        self.driver.get(url)

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def wait(self, condition: str, *arguments: Any) -> Any:
        """Wait until an expression in JavaScript holds, and return it."""
        from selenium.webdriver.support.wait import WebDriverWait

        def found(driver: Any) -> Any:
            return driver.execute_script(f"return ({condition})", *arguments)

        return WebDriverWait(self.driver, LIMIT, 0.05).until(found, condition)

    def run(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def find(self, selector: str) -> Any:
        """Wait for an element and return it."""
        self.wait("document.querySelector(arguments[0])", selector)
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def texts(self, selector: str) -> list[str]:
        code = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"
        found: list[str] = self.run(code, selector)
        return found

    def errors(self) -> list[str]:
        """Return what the console has logged since the last call, without its notes."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]
