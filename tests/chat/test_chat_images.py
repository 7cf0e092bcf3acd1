# SPDX-License-Identifier: MIT
"""Images in a conversation."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import random_moe
from chat_models import write_with_template
from conftest import RunPyhobbit
from models import stock_dir
from projector import N_TOKENS, picture, write_projector
from servers import running

from pyhobbit import CacheConfig, Engine, EngineConfig, HobbitError, SamplingConfig
from pyhobbit.chat.commands import Commands
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.saved import read_chat
from pyhobbit.engine.plan import beside_projector, fit
from pyhobbit.engine.projector import projector_bytes
from pyhobbit.settings.config import ChatConfig, format_size

POOLS = 2 << 20
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its projector and two pictures."""
    folder = tmp_path_factory.mktemp("images")
    random_moe.write_model(random_moe.declare("qwen3moe"), folder / "plain.gguf", stock_dir())
    write_with_template(folder / "plain.gguf", folder / "m.gguf")
    write_projector(folder / "mmproj.gguf", random_moe.Shape().n_embd)
    for name, red in (("a.png", 0), ("b.png", 255)):
        (folder / name).write_bytes(picture(red))
    return folder


def _config(folder: Path, n_ctx: int = 512) -> ChatConfig:
    engine = EngineConfig(CacheConfig(pools=POOLS), n_ctx=n_ctx, projector=folder / "mmproj.gguf")
    return ChatConfig(engine=engine, sampling=SamplingConfig(temp=0), max_tokens=16)


def _ask(conversation: Conversation, text: str, replaces_last: bool = False) -> str:
    return "".join(piece.text for piece in conversation.ask(text, replaces_last=replaces_last))


def test_a_conversation_sees_what_stock_sees(folder: Path, tmp_path: Path) -> None:
    config = _config(folder)
    texts = []
    with Engine(folder / "m.gguf", config.engine) as engine:
        for name in ("a.png", "b.png"):
            conversation = Conversation(engine, config)
            conversation.attach(folder / name)
            texts.append(_ask(conversation, QUESTION))
        before = engine.stats()
        texts.append(_ask(conversation, "And now?"))
        again = engine.stats().since(before)
        assert 0 < again.prompt_tokens_evaluated < again.prompt_tokens - N_TOKENS  # the picture is kept
        turns = conversation.turns
    urls = [
        {"url": f"data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}"}
        for name in ("a.png", "b.png")
    ]
    first, second = (
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}],
        }
        for url in urls
    )
    answer = {"role": "assistant", "content": turns[1]["content"]}
    conversations = ([first], [second], [second, answer, {"role": "user", "content": "And now?"}])
    stock = [stock_dir() / "llama-server", "-m", folder / "m.gguf", "--mmproj", folder / "mmproj.gguf"]
    with running([*stock, "-c", 512], tmp_path / "stock") as server:
        for messages, text in zip(conversations, texts, strict=True):
            body = {"messages": messages, "max_tokens": 16, "temperature": 0, "cache_prompt": False}
            assert (
                server.request("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == text
            )
    assert texts[0] != texts[1]


def test_a_question_that_is_asked_again_keeps_its_image(folder: Path, tmp_path: Path) -> None:
    config = _config(folder)
    with Engine(folder / "m.gguf", config.engine) as engine:
        conversation = Conversation(engine, config)
        commands = Commands(conversation)
        commands.run(f"/image {folder / 'a.png'}")
        text = _ask(conversation, QUESTION)
        assert _ask(conversation, QUESTION, replaces_last=True) == text
        commands.run(f"/save {tmp_path / 'chat.json'}")
        conversation.reset()
        blind = _ask(conversation, QUESTION)
        conversation.restore(read_chat(tmp_path / "chat.json"))
        assert conversation.turns[0]["images"] == [str(folder / "a.png")]
        assert _ask(conversation, QUESTION, replaces_last=True) == text != blind
        with pytest.raises(HobbitError, match=r"is not an image that llama.cpp can read"):
            commands.run(f"/image {tmp_path / 'chat.json'}")
        with pytest.raises(HobbitError, match="cannot be read: No such file"):
            commands.run(f"/image {tmp_path / 'none.png'}")


def test_the_oldest_images_leave_a_full_context(folder: Path) -> None:
    config = _config(folder, n_ctx=128)
    with Engine(folder / "m.gguf", config.engine) as engine:
        conversation = Conversation(engine, config)
        for name in ("a.png", "b.png", "a.png"):
            conversation.attach(folder / name)
            _ask(conversation, QUESTION)
        assert conversation.n_dropped > 0


def test_one_question_with_an_image(folder: Path, run_pyhobbit: RunPyhobbit) -> None:
    ask = ("chat", folder / "m.gguf", "-p", QUESTION, "-n", 8, "--temp", 0, "--pools", "2M", "-q")
    projector = ("--mmproj", folder / "mmproj.gguf")
    one, other = (run_pyhobbit(*ask, *projector, "--image", folder / f"{name}.png") for name in "ab")
    assert one.returncode == 0 == other.returncode, one.stderr + other.stderr
    assert one.stdout != other.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--image", "a.png"), "--image needs the projector that comes with the model"),
        (("--mmproj", "none.gguf", "--image", "a.png"), "none.gguf; --mmproj takes the model's projector"),
        (("--mmproj", "m.gguf", "--image", "a.png"), "m.gguf cannot be loaded"),
        (("--mmproj", "mmproj.gguf", "--image", "m.gguf"), "is not an image that llama.cpp can read"),
    ],
)
def test_what_cannot_be_seen_is_one_sentence(
    folder: Path, run_pyhobbit: RunPyhobbit, arguments: tuple[str, ...], problem: str
) -> None:
    given = [each if each.startswith("-") else folder / each for each in arguments]
    done = run_pyhobbit("chat", folder / "m.gguf", "-p", QUESTION, "--pools", "2M", "-q", *given)
    assert done.returncode != 0
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_images_need_a_projector_and_a_template(folder: Path) -> None:
    blind = EngineConfig(CacheConfig(pools=POOLS), n_ctx=512)
    with (
        Engine(folder / "m.gguf", blind) as engine,
        pytest.raises(HobbitError, match="open the model with --mmproj FILE"),
    ):
        Conversation(engine, ChatConfig(engine=blind)).attach(folder / "a.png")
    config = _config(folder)
    with (
        Engine(folder / "plain.gguf", config.engine) as engine,
        pytest.raises(HobbitError, match="the model has no chat template, which images need"),
    ):
        Conversation(engine, config).attach(folder / "a.png")


def test_a_projector_is_a_part_of_the_forecast(folder: Path, run_pyhobbit: RunPyhobbit) -> None:
    model, projector = folder / "m.gguf", ("--mmproj", folder / "mmproj.gguf")
    taken = projector_bytes(model, projector[1])
    asked = (model, "--memory", "300M", *projector, "--json")
    found = run_pyhobbit("inspect", *asked, "--no-speed")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)["memory"]
    assert (plan["projector"], plan["info"]["memory"]) == (taken, 300 << 20)
    rows = json.loads(run_pyhobbit("config", *asked).stdout)["settings"]
    row = next(each for each in rows if each["name"] == "mmproj")
    assert (row["value"], row["note"]) == (str(projector[1]), f"{format_size(taken)} of the memory")
    shown = run_pyhobbit("inspect", model, *projector, "--no-speed")
    assert f"images        {format_size(taken)} for the projector" in shown.stdout
    wrong = run_pyhobbit("inspect", model, "--mmproj", model, "--no-speed")
    assert (wrong.returncode, "it holds no projector" in wrong.stderr) == (1, True)
    refused = run_pyhobbit("inspect", model, "--memory", "5M", *projector, "--no-speed")
    assert f"takes {format_size(taken)} of memory, and 5.0 MiB are allowed" in refused.stderr


def test_a_projector_is_a_part_of_the_memory(folder: Path) -> None:
    cache = CacheConfig(memory=2 << 30)  # the tests before may have left much in this process
    taken = projector_bytes(folder / "m.gguf", folder / "mmproj.gguf")
    config = EngineConfig(cache, n_ctx=512, projector=folder / "mmproj.gguf")
    bound = fit(folder / "m.gguf", config).settings["hobbit.memory"]
    assert bound == pytest.approx((2 << 30) - taken, abs=16 << 20)  # and what laying out has left behind


def test_a_projector_takes_its_memory_from_the_cache(folder: Path) -> None:
    path, taken = folder / "m.gguf", projector_bytes(folder / "m.gguf", folder / "mmproj.gguf")

    def beside(cache: CacheConfig, most: int | None = 10 + taken) -> CacheConfig:
        plan = None if most is None else SimpleNamespace(most=most, info=SimpleNamespace(cached=True))
        config = EngineConfig(cache, projector=folder / "mmproj.gguf")
        config, bytes_taken = beside_projector(path, config, lambda _: plan)  # type: ignore[arg-type, return-value]
        assert bytes_taken == taken
        return config.cache

    assert beside(CacheConfig(pools=POOLS)) == CacheConfig(pools=POOLS)
    assert beside(CacheConfig()) == CacheConfig(memory=10)
    assert beside(CacheConfig(), None) == CacheConfig()
    with pytest.raises(HobbitError, match="raise --memory"):
        beside(CacheConfig(memory=taken))
    without = EngineConfig(CacheConfig(memory=4))
    assert beside_projector(path, without, lambda _: None) == (without, 0)
