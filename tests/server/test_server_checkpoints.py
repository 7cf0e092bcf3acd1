# SPDX-License-Identifier: MIT
"""Context checkpoints of models with states and windows: within --memory, and of use to conversations."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import pytest
import servers

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not models.stock_dir().exists(), reason="needs make stock"),
]

_MIB = 1 << 20
_N_TURNS = 6
_LIMIT = 200 * _MIB
# States and windows of real size in small models: a snapshot of each takes some MiB.
_MAKE = """
import dataclasses, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
lib_dir = Path(sys.argv[1])
os.environ["LLAMA_CPP_LIB_PATH"] = str(lib_dir)
import llama_cpp.llama_cpp as llama
from architecture_models import write_model
from architectures import ARCHITECTURES
keys = {
    "qwen3next": {"ssm.inner_size": 4096, "ssm.time_step_rank": 32, "ssm.group_count": 16},
    "gpt-oss": {"attention.sliding_window": 512, "attention.head_count": 16, "attention.head_count_kv": 4,
                "attention.key_length": 128, "attention.value_length": 128},
}
for name, changed in keys.items():
    architecture = ARCHITECTURES[name]
    changed["context_length"] = 2048
    architecture = dataclasses.replace(architecture, keys=architecture.keys | changed)
    write_model(llama, lib_dir, name, architecture, Path(sys.argv[2]) / f"{name}.gguf")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    paths = (models.ROOT / "tests", models.ROOT / "tests/engine")
    command = [sys.executable, "-c", _MAKE, models.stock_dir(), path, *paths]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return path


def _talk(server: servers.Server, number: int) -> int:
    """Sends a growing prompt without the answers; returns the prompt tokens that were computed."""
    rng, tokens, computed = random.Random(number), list[int](), 0
    for _ in range(_N_TURNS):
        tokens += [rng.randrange(3, 300) for _ in range(60)]
        body = {"prompt": tokens, "n_predict": 4, "temperature": 0, "ignore_eos": True}
        answer = server.request("/completion", body)
        assert answer.status == 200, answer.text
        computed += answer.json["timings"]["prompt_n"]
    return computed


def _serve(model: Path, *options: object) -> tuple[int, int, int]:
    """Peak memory, prompt tokens computed by four conversations, and bytes that checkpoints may take."""
    limit = ("--memory", _LIMIT, "--ctx-size", 2048, "--parallel", 4, "--batch", 128)
    with servers.serving(model, model.with_suffix(".log"), *limit, *options) as server:
        with ThreadPoolExecutor(4) as pool:
            computed = sum(pool.map(lambda number: _talk(server, number), range(4)))
        return server.peak(), computed, server.cache()["snapshot_bytes"]


@pytest.mark.parametrize("name", ["qwen3next", "gpt-oss"])
def test_checkpoints_stay_within_the_memory(folder: Path, name: str) -> None:
    peak, computed, n_bytes = _serve(folder / f"{name}.gguf")
    n_prompt = 4 * sum(60 * n for n in range(1, _N_TURNS + 1))
    print(f"\n{name}: peak {peak / _MIB:.0f} MiB, checkpoints {n_bytes / _MIB:.0f} MiB, "
          f"{computed} of {n_prompt} prompt tokens computed")  # fmt: skip
    assert peak <= _LIMIT + 8 * _MIB
    assert n_bytes > 0
    assert computed < 0.6 * n_prompt


def test_without_checkpoints_a_conversation_is_computed_again(folder: Path) -> None:
    peak, computed, n_bytes = _serve(folder / "qwen3next.gguf", "--ctx-checkpoints", 0)
    assert peak <= _LIMIT + 8 * _MIB
    assert (computed, n_bytes) == (4 * sum(60 * n for n in range(1, _N_TURNS + 1)), 0)


def test_a_number_of_checkpoints_that_does_not_fit_is_refused(folder: Path) -> None:
    command = [sys.executable, "-m", "pyhobbit", "serve", folder / "qwen3next.gguf", "--ctx-size", 2048]
    options = ("--memory", 2 * _LIMIT, "--batch", 128, "--parallel", 4, "--ctx-checkpoints", 30, "--port", 1)
    done = subprocess.run(list(map(str, [*command, *options])), capture_output=True, text=True)
    assert done.returncode == 1
    assert "120 context checkpoints of 4.3 MiB take 510.4 MiB, and " in done.stderr
    assert "give a smaller --ctx-checkpoints" in done.stderr


def test_a_saved_slot_of_a_recurrent_model(folder: Path, tmp_path: Path) -> None:
    options = ("--pools", "20M", "--parallel", 1, "--slot-save-path", f"{tmp_path}/")
    with servers.serving(folder / "qwen3next.gguf", tmp_path / "log", *options) as server:
        prompt = [3 + i * 7919 % 250 for i in range(60)]
        body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "return_tokens": True}

        def answer() -> list[int]:
            return server.request("/completion", body).json["tokens"]

        first = answer()
        assert server.request("/slots/0?action=save", {"filename": "slot"}).status == 200
        other = server.complete(n=8)
        assert server.request("/slots/0?action=restore", {"filename": "slot"}).status == 200
        assert answer() == first
        assert server.request("/slots/0?action=restore", {"filename": "slot"}).status == 200
        longer = server.request("/completion", {**body, "prompt": [*prompt, *first, 5, 6, 7]})
        assert longer.json["timings"]["prompt_n"] < 60  # the state that was saved goes on
        assert server.complete(n=8) == other
