# SPDX-License-Identifier: MIT
"""The server's web page in a headless Chromium: needs `pip install playwright` and Debian's chromium."""

import re
import shutil
from pathlib import Path

import pytest
from servers import PROMPT, serving

browser = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_answers_a_prompt(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M", "--n-predict", 32) as server:
        if server.request("/").status == 404:
            assert "built without the web page" in server.log.read_text(errors="replace")
            pytest.skip("llama-server was built where npm is missing")
        before = server.cache()["selections_high"]
        with browser.sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1000, "height": 700})
            page.goto(server.url)
            page.locator("textarea").first.fill(PROMPT.strip())
            page.locator("textarea").first.press("Enter")
            speed = page.get_by_text(re.compile(r"\d t/s"))
            speed.first.wait_for(timeout=60_000)
            page.screenshot(path=tmp_path / "page.png")
            text = page.locator("body").inner_text()
            chromium.close()
        assert PROMPT.strip() in text
        assert re.search(r"\b32 tokens", text)
        assert server.cache()["selections_high"] > before
        assert (tmp_path / "page.png").stat().st_size > 10_000
