"""A link to the page, on a page of another site."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.chromium import headless, needs_chromium, until
from tests.support.run_folders import write_run
from tests.support.served_page import served, text

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = list(needs_chromium)


def test_a_link_with_the_token_opens_the_page(tmp_path: Path):
    write_run(tmp_path / "runs" / "a", [1.0])
    (tmp_path / "other").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "other"))
    with (
        served(tmp_path / "runs", "--token", "a-long-token") as address,
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as other,
        headless() as browser,
    ):
        assert "token=a-long-token" in address
        (tmp_path / "other" / "index.html").write_text(f'<a href="{address}">the runs</a>')
        threading.Thread(target=other.serve_forever, daemon=True).start()
        browser.get(f"http://localhost:{other.server_port}/")  # another site than 127.0.0.1
        browser.find_element("css selector", "a").click()
        until(browser, lambda: text(browser, "#runs li") or "needs the token" in text(browser, "body"))
        assert "a\ncompleted" in text(browser, "#runs li")
        other.shutdown()
