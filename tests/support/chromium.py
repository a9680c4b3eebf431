"""Headless Chromium for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["headless", "needs_chromium", "until"]

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = (
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="chromium or chromedriver is not installed"),
)


@contextmanager
def headless() -> Iterator[Any]:
    """A browser, whose console messages can be read."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1100"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(browser: Any, true: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until it is true; returns what it has returned. An element that is replaced meanwhile is looked up again."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    waiting = WebDriverWait(browser, seconds, 0.05, ignored_exceptions=[StaleElementReferenceException])
    return waiting.until(lambda _: true())
