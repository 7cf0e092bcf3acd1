# SPDX-License-Identifier: MIT
"""The cells of the matrix: each verb on a model of the test bed, "ok" or one sentence why not.

A text is right where it is that of the unpatched llama-server, on the first and on later turns.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
from beds import EXPERTS_SUFFIX, bed
from servers import Server, running, serving

from pyhobbit.model.file_names import calibration_path, sidecar_path
from pyhobbit.model.gguf_file import read_gguf

os.environ["OMP_WAIT_POLICY"] = "passive"  # idle threads sleep, as tests/conftest.py has it

OK = "ok"
QUESTIONS = ("where does the river end", "and how long is it then", "tell me more of the sea")
CLIENTS = ("the first client asks", "a second one wonders", "number three writes on", "the last is quiet")
N_TOKENS = 8
CTX = 2048
SERVER = ("--ctx-size", CTX, "--parallel", 4, "--threads", 2)
OVER_BUDGET = 8 << 20  # bytes by which a process may exceed --memory
TIMEOUT_S = 900
MAX_KL = 0.05
ROUNDING = 0.05  # for log probabilities, where other parts of a prompt were computed anew


class WrongError(Exception):
    """The message is the cell."""


@dataclass(frozen=True)
class Bench:
    """A model of the bed with a folder for its files."""

    name: str
    folder: Path

    @functools.cached_property
    def wide(self) -> Path:
        return self._written(self.name)

    @functools.cached_property
    def many(self) -> Path:
        return self._written(self.name + EXPERTS_SUFFIX)

    def _written(self, name: str) -> Path:
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            command = (sys.executable, Path(__file__).with_name("make.py"), name, path)
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
        return path

    @functools.cached_property
    def memory(self) -> int:
        """Bytes of a process that hold about half of the experts of `wide`, and what else it needs."""
        return self.wide.stat().st_size - models.routed_expert_bytes(self.wide) // 2 + (160 << 20)

    @functools.cached_property
    def stock(self) -> tuple[list[str], list[Any]]:
        """The unpatched server's answers of a conversation and of four that grow in turns."""
        saved = ("--slot-save-path", self.folder)
        command = (models.stock_dir() / "llama-server", "-m", self.wide, *SERVER, "--cache-ram", 0, *saved)
        with running(command, self.folder / "stock.log") as server:
            return _conversation(server), _growing(server)


def _conversation(server: Server) -> list[str]:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0}
        answer = server.request("/v1/chat/completions", body)
        assert answer.status == 200, answer.text
        messages.append(answer.json["choices"][0]["message"])
    return [message["content"] for message in messages[1::2]]


def _growing(server: Server) -> list[Any]:
    """Three turns of four clients, with a slot restored: each answer's text, log probabilities, and tokens of
    the prompt that were computed."""
    texts, found = list(CLIENTS), []
    for slot in range(len(texts)):
        _slot_action(server, slot, "erase")  # a conversation before this one leaves a common first token
    for turn in range(3):
        if turn == 2:
            for action in ("save", "erase", "restore"):
                _slot_action(server, 0, action)
        for slot in range(len(texts)):
            body = {"prompt": texts[slot], "id_slot": slot, "n_predict": N_TOKENS, "temperature": 0}
            answer = server.request("/completion", body | {"n_probs": 3, "cache_prompt": True})
            assert answer.status == 200, answer.text
            places = answer.json["completion_probabilities"]
            values = [top["logprob"] for place in places for top in place["top_logprobs"]]
            found.append((answer.json["content"], values, answer.json["timings"]["prompt_n"]))
            texts[slot] += answer.json["content"] + " " + QUESTIONS[turn]
    return found


def _slot_action(server: Server, slot: int, action: str) -> None:
    done = server.request(f"/slots/{slot}?action={action}", {"filename": "slot.bin"})
    assert done.status == 200, f"slot {action}: {done.text}"


def _run(*arguments: object) -> str:
    """Standard output of pyhobbit; WrongError with its own sentence where it fails."""
    return _run_module(Path("/"), "pyhobbit", *arguments)


def _run_module(folder: Path, *arguments: object) -> str:
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
    if done.returncode:
        raise WrongError(_sentence(done.stderr))
    return done.stdout


def _sentence(text: str) -> str:
    """The last error in it up to its first colon, without folders."""
    lines = [line for line in text.strip().splitlines() if "rror" in line] or text.strip().splitlines()[-1:]
    line = re.sub(r"^.*?([Ee]rror|pyhobbit): (error: )?", "", lines[-1] if lines else "no message")
    return re.split("; |: ", re.sub(r"'?/\S*/([\w.-]+)'?", r"\1", line))[0].replace("|", "/")


def _inside(bench: Bench, how: str, **environment: object) -> list[str]:
    """The answers of inside.py."""
    script = Path(__file__).with_name("inside.py")
    pools = models.routed_expert_bytes(bench.wide) * 7 // 10
    command = [sys.executable, script, how, bench.wide, pools, *QUESTIONS]
    values = os.environ | {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/", env=values
    )
    if done.returncode:
        raise WrongError(_sentence(done.stderr))
    return json.loads(done.stdout)


def _same(found: list[str], expected: list[str]) -> str:
    for turn, (answer, right) in enumerate(zip(found, expected, strict=True), 1):
        if answer != right:
            raise WrongError(f"turn {turn} is not stock's text")
    return OK


def chat(bench: Bench) -> str:
    return _same(_inside(bench, "chat"), bench.stock[0])


def hobbit(bench: Bench) -> str:
    """Compared with llama-cpp-python on the unpatched library."""
    stock = functools.partial(_inside, bench, LLAMA_CPP_LIB_PATH=models.stock_dir())
    found, expected = _inside(bench, "hobbit"), stock("llama")
    if found != expected and found[0] == expected[0] and _inside(bench, "hobbit-anew") == stock("llama-anew"):
        raise WrongError("later turns differ by rounding: the prompt is computed in other passes")
    return _same(found, expected)


@functools.lru_cache(1)
def _served(bench: Bench) -> tuple[list[Any], int]:
    """Answers of our server within --memory, and by how many bytes its peak was above that."""
    limit = bench.memory
    saved = ("--slot-save-path", bench.folder)
    command = (sys.executable, "-m", "pyhobbit", "serve", bench.wide, *SERVER, *saved, "--memory", "1M")
    refused = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S
    ).stderr
    if smallest := re.search(r"smallest that works is (\d+) MiB", refused):
        limit = max(limit, int(smallest[1]) + 16 << 20)
    with _ours(bench, *SERVER, *saved, "--memory", limit) as server:
        return _growing(server), server.peak() - limit


def _ours(bench: Bench, *options: object) -> AbstractContextManager[Server]:
    return serving(bench.wide, bench.folder / "ours.log", *options)


def serve(bench: Bench) -> str:
    try:
        found, _ = _served(bench)
    except AssertionError as error:
        raise WrongError(_sentence(str(error))) from error
    for n, (ours, stock) in enumerate(zip(found, bench.stock[1], strict=True)):
        most = ROUNDING if ours[2] != stock[2] else 0
        if ours[0] != stock[0] or any(abs(a - b) > most for a, b in zip(ours[1], stock[1], strict=True)):
            raise WrongError(f"turn {n // 4 + 1} of client {n % 4 + 1} is not stock's")
    return OK


def memory(bench: Bench) -> str:
    try:
        _, above = _served(bench)
    except AssertionError as error:
        raise WrongError(_sentence(str(error))) from error
    if above > OVER_BUDGET:
        raise WrongError(f"the peak was {above >> 20} MiB above --memory")
    return OK


def sidecar(bench: Bench) -> str:
    """A low tier for rows of the real lengths, from which each expert with a small weight is taken."""
    _run("convert", "--sidecar", bench.wide)
    path = sidecar_path(bench.wide)
    low, high = path.stat().st_size, models.routed_expert_bytes(bench.wide)
    try:
        if low > 0.8 * high:
            raise WrongError(f"the low tier has {low / high:.0%} of the high tier's bytes")
        # room for a token's experts in each tier, where a wide model has hardly more
        if not _stats(bench, bench.wide, 1.5, "--set", "t1=0.6", "--set", "t2=0.9", "--set", "strict=true")[
            "selections_low"
        ]:
            raise WrongError("no expert is used in low precision")
    finally:
        path.unlink()
    return OK


def _stats(bench: Bench, model: Path, share: float, *options: object) -> dict[str, float]:
    """Statistics of an answer. share: of the experts' bytes, for the pools."""
    pools = int(share * models.routed_expert_bytes(model))
    path = bench.folder / "stats.json"
    prompt = " ".join(QUESTIONS)
    _run(
        "chat",
        model,
        "-p",
        prompt,
        "-n",
        12,
        "--temp",
        0,
        "--ctx",
        512,
        "--pools",
        pools,
        "--stats-json",
        path,
        *options,
    )
    return json.loads(path.read_text())


def prefetch(bench: Bench) -> str:
    stats = _stats(bench, bench.many, 0.5, "--prefetch", 1)
    if not stats["predicted"]:
        raise WrongError("nothing is predicted")
    right, chance = (
        stats["predicted_right"] / stats["predicted"],
        stats["n_experts_used"] / stats["n_experts"],
    )
    if right < 4 * chance:
        raise WrongError(f"{right:.0%} of the predicted experts are used")
    return OK


def trace(bench: Bench) -> str:
    path, text = bench.folder / "trace.csv", bench.folder / "text.txt"
    text.write_text(". ".join(QUESTIONS) * 10)
    _stats(bench, bench.many, 0.5, "--trace", path)
    if "lru" not in _run("simulate", "--trace", path, "--capacity", 0.5, "--policy", "lru"):
        raise WrongError("simulate prints no row")
    out = bench.folder / "report"
    given = ("--text", text, "--chunks", 1, "--parts", "routing", "--output", out)
    _run_module(models.ROOT, "bench.report", bench.many, *given)
    if '"figures"' not in (out / "lines.jsonl").read_text("utf-8"):
        raise WrongError("the report is empty")
    return OK


def calibrate(bench: Bench) -> str:
    text, out = bench.folder / "text.txt", bench.many.with_suffix(".hobbit.gguf")
    out.unlink(missing_ok=True)
    text.write_text((models.TINY / "heldout.txt").read_text("utf-8")[:2200], "utf-8")
    _run("convert", "--sidecar", bench.many)
    pools = models.routed_expert_bytes(bench.many) // 2
    limits = ("--chunks", 4, "--set", "cost_chunks=1", "--ctx", 128, "--max-kl", MAX_KL, "--set", "rule=gate")
    _run("calibrate", bench.many, "--text", text, "--pools", pools, *limits)
    kept = read_gguf(calibration_path(bench.many)).metadata
    divergence = float(kept["hobbit.gate.fit.mean_kl"].value())
    if not 0 <= divergence <= MAX_KL:
        raise WrongError(f"the KL divergence is {divergence:.2g} for a limit of {MAX_KL:g}")
    return OK


def drafts(bench: Bench) -> str:
    """Tokens are drafted by the draft block where there is one, else from the text; the answer is stock's."""
    head = ("--spec-type", "draft-mtp", "--spec-draft-n-max", 2)
    text = ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 3, "--spec-ngram-mod-n-min", 1)
    options = head if bed(bench.name).mtp else text
    pools = models.routed_expert_bytes(bench.wide) * 7 // 10
    alike = ("--parallel", 1, "--ctx-size", 1024, "--threads", 2, *options)
    stock = (models.stock_dir() / "llama-server", "-m", bench.wide, *alike)
    try:
        with running(stock, bench.folder / "stock.log") as server:
            expected = _drafted(server)
        with _ours(bench, "--pools", pools, *alike) as server:
            found = _drafted(server)
    except AssertionError as error:
        raise WrongError(_sentence(str(error))) from error
    if bed(bench.name).mtp and not found["timings"].get("draft_n"):
        raise WrongError("the draft block drafted nothing")
    return _same([found["content"]], [expected["content"]])


def _drafted(server: Server) -> Any:
    body = {"prompt": (QUESTIONS[0] + ". ") * 6, "n_predict": 24, "temperature": 0}
    answer = server.request("/completion", body)
    assert answer.status == 200, answer.text
    return answer.json


def checkpoint(bench: Bench) -> str:
    from checkpoints import CHECKPOINTS, write_checkpoint

    if bench.name not in CHECKPOINTS:
        raise WrongError("not tried: no class of transformers writes a text model in the published form")
    folder, out = bench.folder / "checkpoint", bench.folder / "checkpoint.gguf"
    write_checkpoint(bench.name, folder)
    script = Path(__file__).with_name("convert_known.py")
    done = subprocess.run(
        [sys.executable, script, folder, out], capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/"
    )
    if done.returncode:
        raise WrongError(_sentence(done.stderr))
    _run("chat", out, "-p", "hello", "-n", 2, "--ctx", 128)
    return OK


VERBS: dict[str, Callable[[Bench], str]] = {
    "chat": chat,
    "serve": serve,
    "Hobbit": hobbit,
    "memory": memory,
    "sidecar": sidecar,
    "prefetch": prefetch,
    "trace": trace,
    "calibrate": calibrate,
    "drafts": drafts,
    "checkpoint": checkpoint,
}


def cell(bench: Bench, verb: str) -> str:
    """ "ok", or the sentence why not."""
    try:
        return VERBS[verb](bench)
    except WrongError as wrong:
        return str(wrong)
    except subprocess.TimeoutExpired:
        return "takes too long"
