# SPDX-License-Identifier: MIT
"""Tries a pyhobbit that a wheel was installed from: python try_wheel.py FOLDER_OF_THE_ENVIRONMENT

The environment has nothing beside the wheel and what it depends on. `make package` runs this.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

TINY = Path(__file__).resolve().parents[1] / "tiny_moe"
PROMPT = "def read_file(path):"
PORT = 18437
TIMEOUT_S = 60


def main(environment: Path) -> None:
    programs = environment.resolve() / "bin"
    with tempfile.TemporaryDirectory() as folder:  # outside the checkout
        done = [check.__name__ for check in CHECKS if check(programs, Path(folder)) is None]
    print(f"{', '.join(done)}\n{len(done)} passed, 0 failed")


def _run(folder: Path, *command: object) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or "ggml_" in done.stderr:  # a log that nobody asked for
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def only_what_is_needed(programs: Path, folder: Path) -> None:
    names = ("torch", "matplotlib", "pytest", "bench")
    code = f"from importlib.util import find_spec; print([*filter(find_spec, {names})])"
    assert _run(folder, programs / "python", "-c", code) == "[]\n"


def convert(programs: Path, folder: Path) -> None:
    _run(folder, programs / "python", TINY / "to_gguf.py", "plain.gguf")
    _run(folder, programs / "pyhobbit", "convert", "--low", "q4_0", "plain.gguf", "-o", "tiny.gguf")


def chat(programs: Path, folder: Path) -> None:
    options = ("-p", PROMPT, "-n", 16, "--temp", 0)
    plain = _run(folder, programs / "pyhobbit", "chat", "plain.gguf", *options)
    tiers = _run(folder, programs / "pyhobbit", "chat", "tiny.gguf", *options, "--pools", "6M")
    assert plain == tiers
    assert len(plain) > len("\n" * 8)


def inspect(programs: Path, folder: Path) -> None:
    document = json.loads(_run(folder, programs / "pyhobbit", "inspect", "tiny.gguf", "--json"))
    assert document["model"]["tiers"]


def bench(programs: Path, folder: Path) -> None:
    options = ("--prompts", 8, "-n", 8, "--set", "warm_up=2", "--pools", "6M", "--json")
    document = json.loads(_run(folder, programs / "pyhobbit", "bench", "tiny.gguf", *options))
    assert document["decoding"]["n_tokens"] == 8


def either_import_order(programs: Path, folder: Path) -> None:
    code = "from llama_cpp import LlamaGrammar; from pyhobbit import Hobbit; print(Hobbit.__name__)"
    assert _run(folder, programs / "python", "-c", code) == "Hobbit\n"


def other_programs(programs: Path, folder: Path) -> None:
    assert "perplexity" in _run(folder, programs / "pyhobbit", "llama")


def serve(programs: Path, folder: Path) -> None:
    command = [programs / "pyhobbit", "serve", "tiny.gguf", "--pools", "6M", "--port", str(PORT)]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _wait(f"http://127.0.0.1:{PORT}/health", server, folder / "log")
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=TIMEOUT_S) as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny"
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


def _wait(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while server.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(address, timeout=TIMEOUT_S):
            return
        time.sleep(0.5)
    sys.exit(f"the server does not answer:\n{log.read_text()}")


CHECKS = (only_what_is_needed, convert, chat, inspect, bench, either_import_order, other_programs, serve)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
