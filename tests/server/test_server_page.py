# SPDX-License-Identifier: MIT
"""The server's web page in a headless Chromium: needs `pip install playwright` and Debian's chromium."""

import re
import shutil
import threading
from pathlib import Path

import pytest
from servers import PROMPT, serving

browser = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_answers_a_prompt(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M", "--n-predict", 32) as server:
        if "WEB_PAGE=ON" in server.request("/").text:
            pytest.skip("llama-server was built without its page")
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


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_panel_shows_two_clients_beside_the_conversation(tiny_gguf: Path, tmp_path: Path) -> None:
    lossy = ("--pools", "6M", "--set", "t1=0.6", "--set", "t2=0.9", "--api-key", "k")
    with (
        serving(tiny_gguf, tmp_path / "log", *lossy, "--ctx-size", 4096, key="k") as server,
        browser.sync_playwright() as playwright,
    ):
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1100, "height": 700})
        page.on("dialog", lambda dialog: dialog.accept("k"))
        failures: list[str] = []
        page.on("pageerror", lambda error: failures.append(str(error)))
        hosts: set[str] = set()
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(f"{server.url}/panel")
        busy = [
            threading.Thread(target=server.complete, kwargs={"n": 1500, "ignore_eos": True, "prompt": prompt})
            for prompt in (PROMPT, "class A:\n")
        ]
        for each in busy:
            each.start()
        figures = page.locator("#figures")
        figures.get_by_text(re.compile(r"^\d+\.\d %, \d+\.\d %, \d+\.\d %$")).wait_for(timeout=60_000)
        page.wait_for_timeout(2000)
        page.screenshot(path=tmp_path / "panel.png")
        text = figures.inner_text()
        if page.locator("iframe").count():
            frame = page.frame_locator("iframe")
            frame.locator("textarea").first.fill("def f(x):")
            frame.locator("textarea").first.press("Enter")
        for each in busy:
            each.join()
        chromium.close()
    assert not failures
    assert hosts == {server.url.removeprefix("http://")}  # works without network
    found = dict(line.split("\t") for line in text.splitlines() if line.count("\t") == 1)
    assert float(found["tokens/s, with prompts"]) > 0
    assert 0 < float(found["experts found in memory"].split()[0]) <= 100
    assert float(found["MiB per token"]) > 0
