"""Drives pages in a headless Chromium as a reader would; the fixture `browser` in conftest.py starts it."""

import json
import time


def opened(browser, url: str, width: int = 1280, scheme: str = "light") -> None:
    """Opens a page at a window width, in light or dark mode, and discards the logs of earlier pages."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # left by an earlier page
    browser.get(url)


def wait(browser, condition: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not browser.execute_script(condition):
        assert time.monotonic() < deadline, (condition, browser.get_log("browser"))
        time.sleep(0.02)


def text(browser, selector: str) -> str:
    return browser.execute_script(f"return document.querySelector({selector!r}).textContent")


def press(browser, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def focus(browser, selector: str) -> None:
    browser.execute_script(f"document.querySelector({selector!r}).focus()")


def asked(browser) -> list[str]:
    """The URLs that the page requested. Fails if the page logged anything to the console."""
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
