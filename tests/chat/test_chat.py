# SPDX-License-Identifier: MIT
import json
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit
from random_moe import Shape, declare, write_model

from pyhobbit import CacheConfig, Engine, EngineConfig, HobbitError, SamplingConfig
from pyhobbit.engine.stats import CacheStats, ModelInfo, Stats
from pyhobbit.native.devices import has_gpu
from pyhobbit.native.paths import LIB_DIR

PROMPT = "def read_file(path):\n"
GREEDY = ("--temp", "0")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def dense_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    models.write_dense_llama(path)
    return path


@pytest.fixture(scope="module")
def chat_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    models.write_dense_llama(path, TEMPLATE)
    return path


# one shot


def test_one_shot_prints_the_text_and_nothing_else(run_pyhobbit: RunPyhobbit, tiny_gguf: Path) -> None:
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20))) as engine:
        text = "".join(piece.text for piece in engine.generate(PROMPT, 20, SamplingConfig(temp=0)))
    done = run_pyhobbit("chat", tiny_gguf, "-p", PROMPT, "-n", 20, "--pools", "8M", *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text.removesuffix("\n") + "\n"
    assert "20 generated tokens" in done.stderr
    assert done.stderr.startswith("pyhobbit: GPU: ") == has_gpu()
    assert re.search(r"B read \(\S+ [KMG]iB per token\), ", done.stderr)
    assert "low precision" not in done.stderr
    done = run_pyhobbit(
        "chat", tiny_gguf, "-p", PROMPT, "-n", 20, "--pools", "8M", "--set", "t1=0.5", *GREEDY
    )
    assert re.search(r"; [1-9]\d*% of the uses in low precision, 0% skipped; ", done.stderr)
    assert "hits" in done.stderr


def test_a_prompt_may_follow_the_model_and_a_text_ends_the_answer(
    run_pyhobbit: RunPyhobbit, tiny_gguf: Path
) -> None:
    common = ("run", tiny_gguf, "-q", "-n", 20, "--pools", "8M", *GREEDY)
    whole = run_pyhobbit(*common, PROMPT).stdout
    assert whole == run_pyhobbit(*common, "-p", PROMPT).stdout
    end = whole[8:13]
    done = run_pyhobbit(*common, PROMPT, "--stop", "never in it", "--stop", end)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == whole.partition(end)[0].removesuffix("\n") + "\n"


def test_an_answer_follows_a_schema(run_pyhobbit: RunPyhobbit, tiny_gguf: Path, chat_gguf: Path) -> None:
    of = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}
    schema = json.dumps({"type": "object", "properties": of, "required": ["a", "b"]})
    texts = [
        run_pyhobbit("chat", model, PROMPT, "-n", 99, *GREEDY, "--format", schema, "--drafts", n).stdout
        for model, n in ((tiny_gguf, 0), (tiny_gguf, 2), (chat_gguf, 0))
    ]
    assert texts[0] == texts[1]
    assert all(set(json.loads(text)) == {"a", "b"} for text in texts)


def test_drafts_print_the_same_text_and_how_many_were_right(
    run_pyhobbit: RunPyhobbit, tiny_gguf: Path
) -> None:
    arguments = (
        "chat",
        tiny_gguf,
        "-p",
        "for i in range(10):\n    print(i)\n" * 4,
        "-n",
        48,
        "--pools",
        "8M",
    )
    none = run_pyhobbit(*arguments, *GREEDY)
    drafted = run_pyhobbit(*arguments, *GREEDY, "--drafts", 7)
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == none.stdout
    assert re.search(r"[1-9]\d* of \d+ drafts right", drafted.stderr)
    assert "drafts" not in none.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafts", 16), "n_drafts is 16; it must lie between 0 and 15"),
        (("--drafts", 3, "--trace", "t.csv"), "--trace records each token once"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    options: tuple[object, ...], message: str, run_pyhobbit: RunPyhobbit, tiny_gguf: Path
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", PROMPT, *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr


def test_a_prompt_from_standard_input_gives_the_same(run_pyhobbit: RunPyhobbit, tiny_gguf: Path) -> None:
    arguments = ("chat", tiny_gguf, "-n", 8, "--pools", "8M", *GREEDY)
    piped = run_pyhobbit(*arguments, stdin=PROMPT + "\n")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == run_pyhobbit(*arguments, "-p", PROMPT).stdout


def test_statistics_hold_what_was_promised(
    run_pyhobbit: RunPyhobbit, tiny_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "stats.json"
    path.write_text("old")
    done = run_pyhobbit(
        "chat",
        tiny_gguf,
        "-p",
        PROMPT,
        "-n",
        16,
        "--pools",
        "8M",
        "--set",
        "t1=0",
        "--stats-json",
        path,
        *GREEDY,
    )
    assert done.returncode == 0, done.stderr
    stats = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]
    assert stats["prompt_tokens"] > 3
    assert stats["generated_tokens"] == 16
    assert stats["time_to_first_token_s"] > 0
    assert stats["decode_tokens_per_second"] > 0
    assert 0 < stats["pool_bytes_high"] + stats["pool_bytes_low"] <= 8 << 20
    # The last layer computes only the last token of a prompt.
    n_routed = stats["n_layers"] * (stats["prompt_tokens"] + 15) - (stats["prompt_tokens"] - 1)
    assert stats["selections_high"] + stats["selections_low"] == n_routed * stats["n_experts_used"]
    # With t1 0 the top expert is high and every other low, unless its high version is in the cache already.
    assert stats["selections_high"] >= n_routed
    assert stats["selections_low"] > 0
    assert stats["selections_skipped"] == 0
    for tier in ("high", "low"):
        rate = stats[f"hits_{tier}"] / (stats[f"hits_{tier}"] + stats[f"misses_{tier}"])
        assert stats[f"hit_rate_{tier}"] == pytest.approx(rate)
        assert stats[f"misses_{tier}"] > 0
    assert stats["bytes_read"] > 0
    assert 0 < stats["stall_s"] < stats["compute_s"]  # some reads had to be waited for
    assert stats["peak_rss_bytes"] > 10 << 20
    assert stats["cached"]


def test_a_file_is_the_prompt_or_follows_it(
    run_pyhobbit: RunPyhobbit, tiny_gguf: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def read_file(path):\n\n")
    arguments = ("chat", tiny_gguf, "-n", 8, "--pools", "8M", *GREEDY)
    whole = run_pyhobbit(*arguments, "-p", "import os\ndef read_file(path):\n")
    assert whole.returncode == 0, whole.stderr
    for options, stdin in ((("--file", file), ""), (("--file", "/dev/stdin"), file.read_text())):
        done = run_pyhobbit(*arguments, "-p", "import os", *options, stdin=stdin)
        assert done.stdout == whole.stdout, done.stderr
    alone = run_pyhobbit(*arguments, "--file", file)
    assert alone.stdout == run_pyhobbit(*arguments, "-p", "def read_file(path):\n").stdout
    missing = run_pyhobbit(*arguments, "--file", tmp_path / "none.txt")
    assert missing.returncode == 1
    assert "none.txt cannot be read: No such file or directory" in missing.stderr


def test_a_model_without_a_template_says_so_and_ends(run_pyhobbit: RunPyhobbit, tiny_gguf: Path) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", PROMPT, "--ctx", 32, *GREEDY)
    assert done.returncode == 0
    assert "no chat template: it continues the text" in done.stderr
    assert "the context is full; use a larger --ctx" in done.stderr


def test_a_low_tier_that_lies_idle_is_mentioned(run_pyhobbit: RunPyhobbit, tiny_gguf: Path) -> None:
    idle = "the low tier is not used: start with --quality small-loss"
    for pools, thresholds, is_said in (("8M", (), 1), ("8M", ("--set", "t1=0.6"), 0), ("60M", (), 0)):
        options = ("-p", PROMPT, "-n", 1, "--pools", pools, *thresholds, *GREEDY)
        done = run_pyhobbit("chat", tiny_gguf, *options)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(idle) == is_said


def test_ctrl_c_keeps_the_text_and_exits_with_130(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"  # an answer that goes on until the signal comes
    write_model(declare("llama", Shape(n_ctx=40_000)), path, LIB_DIR)
    options = ["-p", PROMPT, "-n", "-1", "--ctx", "40000", "--pools", "3M", *GREEDY]
    command = [sys.executable, "-m", "pyhobbit", "chat", str(path), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (first + rest).endswith("\n")
    assert "Traceback" not in errors
    assert "generated token" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "be kind"], "no chat template"),
        (["--ctx", "1000000"], "use --ctx"),
        (["--pools", "1K"], "pools"),
        (["--sidecar", "nowhere.gguf"], "sidecar"),
    ],
)
def test_what_the_model_cannot_do_is_one_sentence(
    options: list[str], message: str, run_pyhobbit: RunPyhobbit, tiny_gguf: Path
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 2, *options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("pyhobbit: error: ")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sidecar", "nowhere.gguf"], "nowhere.gguf"),
        (["--set", "t1=0.5"], "low-precision"),
        (["--memory", "1M"], "smallest"),
    ],
)
def test_what_a_plain_gguf_cannot_do_is_one_sentence(
    options: list[str], message: str, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    path = tmp_path / "plain.gguf"
    write_model(declare("llama"), path, LIB_DIR)
    done = run_pyhobbit("chat", path, "-p", "x", "-n", 2, *options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr


def test_a_plain_gguf_gives_the_same_text_with_and_without_the_cache(
    run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    path = tmp_path / "plain.gguf"
    write_model(declare("llama"), path, LIB_DIR)
    arguments = ("chat", path, "-p", "a plain model", "-n", 12, *GREEDY)
    stock = run_pyhobbit(*arguments)
    cached = run_pyhobbit(*arguments, "--pools", "3M")
    assert stock.returncode == cached.returncode == 0, stock.stderr + cached.stderr
    assert "fits in memory" in stock.stderr
    assert "experts in memory: " in cached.stderr
    assert cached.stdout == stock.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.gguf", None, "does not exist"),
        ("text.gguf", b"hello", "is not a GGUF file"),
        ("empty.gguf", b"", "is empty"),
        ("short.gguf", 1 << 20, "short.gguf"),
        ("header.gguf", 3000, "header.gguf"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_sentence(
    name: str,
    content: bytes | int | None,
    message: str,
    run_pyhobbit: RunPyhobbit,
    tiny_gguf: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    if isinstance(content, int):
        with tiny_gguf.open("rb") as file:
            content = file.read(content)
    if content is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    done = run_pyhobbit("chat", path, "-p", "x", "-n", 2)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_dense_model_runs_as_stock_and_says_so_once(
    run_pyhobbit: RunPyhobbit, dense_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "stats.json"
    done = run_pyhobbit("chat", dense_gguf, "-p", "ab", "-n", 4, "--stats-json", path, *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("without experts to cache") == 1
    assert "does not apply" not in done.stderr
    stats = json.loads(path.read_text())
    assert not stats["cached"]
    assert stats["selections_high"] == stats["bytes_read"] == 0
    assert stats["generated_tokens"] == 4


@pytest.mark.parametrize("bound", ["--memory", "--pools", "--trace"])
def test_a_dense_model_says_that_a_bound_does_not_apply(
    bound: str, run_pyhobbit: RunPyhobbit, dense_gguf: Path
) -> None:
    done = run_pyhobbit("chat", dense_gguf, "-p", "ab", "-n", 1, bound, "1G", *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("without experts to cache") == 1
    assert f"{bound} does not apply to it" in done.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_under_a_stream_is_an_error(stream: str, dense_gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyhobbit", "chat", str(dense_gguf), "-p", "ab", "-n", "4"]
    with Path("/dev/full").open("w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run(command, text=True, cwd=tmp_path, timeout=60, **streams)
    assert done.returncode == 1
    if stream == "stdout":
        assert done.stderr.splitlines()[-1].endswith("cannot be used: No space left on device")
        assert "Traceback" not in done.stderr


# conversations


def test_a_template_shapes_the_prompt_and_the_first_token_comes_once(chat_gguf: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with Engine(chat_gguf) as engine:
        assert engine.chat_template == TEMPLATE
        list(engine.generate(messages, 1))
        model, context = engine._opened().model, engine._opened().context
        plain = model.tokenize("<system>be brief\n<user>hi\n<assistant>")
        assert context.tokens == plain
        with pytest.raises(HobbitError, match="refuses this conversation: no tools"):
            list(engine.generate([{"role": "tool", "content": ""}], 1))


# statistics


def _stats(**cache: int) -> Stats:
    info = ModelInfo(
        model="m.gguf", description="llama", n_ctx=512, n_threads=2, cached=True, has_experts=True,
        pool_bytes_high=1, tier_bytes_high=4,
    )  # fmt: skip
    return Stats(info, CacheStats(**cache), 0.1, 1 << 20, prompt_tokens=4, prompt_tokens_evaluated=4)


def test_statistics_without_measurements_have_none_instead_of_a_number() -> None:
    values = _stats().as_dict()
    assert values["hit_rate_high"] is None
    assert values["decode_tokens_per_second"] is None
    assert "4 prompt + 0 generated tokens" in _stats().summary()
    assert "4 prompt + 1 generated token, " in replace(_stats(), generated_tokens=1).summary()


def test_statistics_of_a_part_are_differences_and_keep_what_is_no_counter() -> None:
    before = _stats(hits_high=3, misses_high=1, bytes_read=80, prefetch_active=0)
    later = replace(
        _stats(hits_high=4, misses_high=4, bytes_read=100, prefetch_active=1),
        answers=2,
        prompt_tokens_evaluated=6,
        generated_tokens=8,
        decoded_tokens=6,
        first_tokens_s=0.5,
        decode_s=2.0,
        peak_rss_bytes=2 << 20,
    )
    part = later.since(before)
    assert part.hit_rate_high == 0.25
    assert part.bytes_read_per_token == 2
    assert part.time_to_first_token_s == 0.25
    assert part.decode_tokens_per_second == 3
    assert part.cache.prefetch_active == 1
    assert (part.peak_rss_bytes, part.load_s) == (2 << 20, 0.1)
    assert later.since(later).decode_tokens_per_second is None
    counted = {field.name for field in fields(Stats)} - {"info", "cache", "load_s", "peak_rss_bytes"}
    nothing = later.since(later)
    assert all(getattr(nothing, name) == 0 for name in counted)


def test_derived_statistics_follow_from_the_counters() -> None:
    stats = _stats(hits_high=3, misses_high=1, bytes_read=80)
    assert stats.hit_rate_high == 0.75
    assert stats.bytes_read_per_token == 20
    assert "75% hits" in stats.summary()
    assert "host memory" not in stats.summary()


def test_a_devices_misses_are_hits_of_host_memory_or_reads() -> None:
    hits = {"hits_high": 6, "host_hits_high": 3, "host_hits_low": 1}
    summary = _stats(**hits, misses_high=4, misses_low=4, bytes_transferred=99).summary()
    assert "60% hits; host memory 0 B, 50% of the misses hit, 99 B uploaded; 0 B read" in summary


def test_the_cpus_share_beside_a_device_is_in_the_summary() -> None:
    summary = _stats(selections_high=8, selections_cpu=2).summary()
    assert "25% of the experts computed by the CPU; " in summary


def test_statistics_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "stats.json").mkdir()
    with pytest.raises(HobbitError, match="cannot be written"):
        _stats().write_json(tmp_path / "stats.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]


def test_statistics_can_go_to_a_device_or_through_a_link(tmp_path: Path) -> None:
    _stats().write_json(Path("/dev/null"))
    assert not Path("/dev/null").is_file()
    link = tmp_path / "link.json"
    link.symlink_to("target.json")
    _stats().write_json(link)
    assert link.is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["model"] == "m.gguf"
