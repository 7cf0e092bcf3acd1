# SPDX-License-Identifier: MIT
"""A model that sees or hears: its projector's memory, images and sounds behind the server and in Hobbit."""

import argparse
import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import random_moe
from conftest import RunPyhobbit
from llama_cpp.llama_chat_format import Llava15ChatHandler
from models import stock_dir
from projector import N_TOKENS, picture, sound, write_ear, write_projector
from servers import Answer, Server, running, serving

from pyhobbit import HobbitError
from pyhobbit.cli import serve
from pyhobbit.engine.plan import beside_projector, projector_bytes
from pyhobbit.hobbit.hobbit import Hobbit
from pyhobbit.native.machine import resident_memory
from pyhobbit.settings.config import CacheConfig

POOLS = 2 << 20
N_FF = 100_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its projector, which is large beside a context."""
    folder = tmp_path_factory.mktemp("images")
    random_moe.write_model(random_moe.declare("qwen3moe"), folder / "m.gguf", stock_dir())
    write_projector(folder / "mmproj.gguf", random_moe.Shape().n_embd, N_FF)
    return folder / "m.gguf", folder / "mmproj.gguf"


def _messages(red: int, n_behind: int = 0, **size: int) -> list[Any]:
    """n_behind: bytes behind the picture's end, which nobody reads."""
    url = "data:image/png;base64," + base64.b64encode(picture(red, **size) + bytes(n_behind)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": content}]


def _answers(server: Server) -> list[tuple[str, int]]:
    """Texts for two pictures, and the tokens of their prompts."""
    answers = []
    for red in (0, 255):
        body = {"messages": _messages(red), "max_tokens": 16, "temperature": 0, "seed": 1}
        answer = server.request("/v1/chat/completions", body)
        assert answer.status == 200, answer.text
        answers.append(
            (answer.json["choices"][0]["message"]["content"], answer.json["usage"]["prompt_tokens"])
        )
    return answers


def test_a_model_without_a_projector_says_so(files: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(files[0], tmp_path / "log", "--pools", POOLS) as server:
        answer = server.request("/v1/chat/completions", {"messages": _messages(0), "max_tokens": 4})
    assert answer.status == 400, answer.text
    assert "image input is not supported" in answer.json["error"]["message"]


def test_a_model_sees_what_it_sees_with_stock(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, projector = files
    log = tmp_path / "log"
    template = ("--chat-template", "chatml")
    with serving(model, log, "--pools", POOLS, "--mmproj", projector, *template) as server:
        found = _answers(server)
        assert server.request("/hobbit").json["cached"]
    assert "images    mmproj.gguf, " in log.read_text(errors="replace")
    stock = [stock_dir() / "llama-server", "-m", model, "--mmproj", projector, "-c", 512, *template]
    with running(stock, tmp_path / "stock") as server:
        assert _answers(server) == found
    assert found[0][0] != found[1][0]
    assert min(n for _, n in found) > N_TOKENS


def test_the_terminal_sees_what_the_server_sees(
    files: tuple[Path, Path], tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    model, projector = files
    with serving(model, tmp_path / "log", "--pools", POOLS, "--mmproj", projector) as server:
        expected = _answers(server)
    seen = ("--pools", POOLS, "--mmproj", projector, "-n", 16, "--temp", 0, "--seed", 1)
    for red, (text, _) in zip((0, 255), expected, strict=True):
        (tmp_path / "a, b.png").write_bytes(picture(red))
        done = run_pyhobbit("chat", model, *seen, "-p", "What is it?", "--image", tmp_path / "a, b.png")
        assert done.returncode == 0, done.stderr
        assert (
            f"> What is it?\n{text.rstrip(chr(0xFFFD))}" in done.stdout
        )  # a stream holds half a character back
        assert "images    mmproj.gguf, " in done.stderr
        assert "address" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--image", "a.png"), "--image needs --mmproj FILE, the projector of the model, and a prompt by -p"),
        (("--mmproj", "none.gguf"), "there is no file none.gguf; --mmproj takes the model's projector"),
        (("--mmproj", "none.gguf", "--image", "none.png"), "none.png cannot be used: No such file"),
        (("--mmproj", "none.gguf", "-q"), "--quiet is not possible beside --mmproj; leave it out"),
        (("--mmproj", "none.gguf", "--stop", "a"), "--stop is not possible beside --mmproj; leave it out"),
    ],
)
def test_what_a_terminal_that_sees_cannot_do_is_said(
    files: tuple[Path, Path], run_pyhobbit: RunPyhobbit, options: tuple[str, ...], said: str
) -> None:
    done = run_pyhobbit("chat", files[0], "-p", "What is it?", *options)
    assert done.returncode != 0
    assert said in done.stderr


def test_what_a_projector_takes_is_left_free(files: tuple[Path, Path]) -> None:
    model, projector = files
    before = resident_memory()
    taken = projector_bytes(model, projector)
    assert resident_memory() - before < projector.stat().st_size // 4  # nothing is loaded
    assert projector.stat().st_size <= taken < 2 * projector.stat().st_size
    args = argparse.Namespace(batch=None, passed_on=["--mmproj", str(projector)])
    rows, cache = serve._beside_images(model, CacheConfig(memory=1 << 30), args)
    assert rows["images"].startswith("mmproj.gguf, ")
    assert cache.memory == (1 << 30) - taken
    assert serve._beside_images(model, CacheConfig(pools=POOLS), args)[1] == CacheConfig(pools=POOLS)
    with pytest.raises(HobbitError, match=r"of memory, and 40\.0 MiB are allowed; raise --memory"):
        serve._beside_images(model, CacheConfig(memory=40 << 20), args)
    plan: Any = SimpleNamespace(most=10 + taken, info=SimpleNamespace(cached=True))
    assert beside_projector(model, projector, CacheConfig(), lambda _: plan) == (
        CacheConfig(memory=10),
        taken,
    )
    assert beside_projector(model, projector, CacheConfig(), lambda _: None) == (CacheConfig(), taken)


def test_large_images_at_once_stay_within_the_memory(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, projector = files
    limit = 600 << 20
    with serving(model, tmp_path / "log", "--memory", limit, "--mmproj", projector) as server:

        def ask(messages: list[Any]) -> Answer:
            body = {"messages": messages, "max_tokens": 4, "temperature": 0}
            return server.request("/v1/chat/completions", body)

        assert ask(_messages(0)).status == 200
        for messages, status in (
            (_messages(0, 1_500_000), 200),
            (_messages(0, 9_000_000), 413),
            (_messages(0, width=1400), 200),  # a small file of many pixels
            (_messages(0, width=1500), 413),
        ):
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(ask, [messages] * 6))
            assert {answer.status for answer in answers} == {status}, answers[0].text[:300]
        said = "the request's images and audio would take 17.2 MiB of memory to read, and 16.6 MiB"
        assert said in answers[0].error
        assert server.peak() <= limit + (8 << 20)


def test_long_sounds_at_once_stay_within_the_memory(files: tuple[Path, Path], tmp_path: Path) -> None:
    write_ear(tmp_path / "ear.gguf", random_moe.Shape().n_embd)
    limit = 600 << 20
    size = ("--ctx-size", 8192, "--override-kv", "qwen3moe.context_length=int:8192", "--memory", limit)
    with serving(files[0], tmp_path / "log", *size, "--mmproj", tmp_path / "ear.gguf") as server:

        def ask(wave: bytes) -> Answer:
            data = {"data": base64.b64encode(wave).decode(), "format": "wav"}
            messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": data}]}]
            return server.request("/v1/chat/completions", {"messages": messages, "max_tokens": 4})

        for wave, status in (
            (sound(16_000), 200),
            (sound(700_000), 200),
            (sound(2_000_000), 413),
            (sound(1000, rate=8), 413),  # a small file of two minutes
            (b"RIFF\0\0\0\0WAVE, and no more", 400),
        ):
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(ask, [wave] * 6))
            assert {answer.status for answer in answers} == {status}, answers[0].text[:300]
            assert "images and audio would take 35." in answers[0].text or status != 413
            assert status != 200 or answers[0].json["usage"]["prompt_tokens"] > 750
        assert server.peak() <= limit + (8 << 20)


def test_what_is_no_projector_is_said_before_the_server_starts(files: tuple[Path, Path]) -> None:
    model, projector = files
    with pytest.raises(
        HobbitError, match=r"m\.gguf cannot be loaded: it holds no projector; give the projector that comes"
    ):
        projector_bytes(model, model)
    with pytest.raises(HobbitError, match="there is no file"):
        projector_bytes(model, projector.with_name("none.gguf"))


def test_a_projector_of_another_model_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    write_projector(tmp_path / "other.gguf", 2 * random_moe.Shape().n_embd)
    n_embd = 2 * random_moe.Shape().n_embd
    with pytest.raises(HobbitError, match=f"other.gguf cannot be loaded: it makes {n_embd} numbers"):
        projector_bytes(files[0], tmp_path / "other.gguf")


def test_handlers_of_llama_cpp_python_see(files: tuple[Path, Path]) -> None:
    model, projector = files
    texts = {}
    for settings in ({}, {"pools": POOLS}):
        handler = Llava15ChatHandler(clip_model_path=str(projector), verbose=False)
        with Hobbit(model, n_ctx=512, chat_handler=handler, verbose=False, **settings) as llm:
            llm.input_ids.fill(-1)  # numpy leaves it as it is, and the handler writes no ids for an image
            texts[len(settings)] = [
                llm.create_chat_completion(_messages(red), max_tokens=16, temperature=0)["choices"][0][
                    "message"
                ]
                for red in (0, 255)
            ]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
