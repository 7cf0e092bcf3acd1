# SPDX-License-Identifier: MIT
"""How much an answer depends on what the server computes beside it: KL against the same request alone.

    python tests/server/sharing.py [MODEL] [OPTION ...]

Sends one greedy request alone, with three others, after a kept prefix, and to a server with other passes,
with the thresholds of the server and with a t1 of 1. Other options are those of `pyhobbit serve`. Without a
model it takes the tiny one with two precisions. KL is in nats, over the likeliest 200 tokens and the rest,
at places up to the first token that differs.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
from servers import PROMPT, Server, serving

N_TOKENS, N_PROBS, N_REPEATS = 32, 200, 3
PROMPTS = [
    PROMPT * 6,
    "class Node:\n    def __init__(self):\n" * 3,
    "import os\n" * 12,
    "# a list\nx = [1, 2]\n" * 4,
]
OPTIONS = ("--pools", "4M", "--set", "t1=0.6", "--set", "t2=0.95")
EXACT = {"hobbit": {"t1": 1}}

Answer = list[tuple[int, dict[int, float]]]  # tokens, and log probabilities there


def ask(server: Server, prompt: str, **options: object) -> Answer:
    body = {"prompt": prompt, "n_predict": N_TOKENS, "n_probs": N_PROBS, "temperature": 0, "ignore_eos": True}
    answer = server.request("/completion", {"cache_prompt": False, **body, **options})
    assert answer.status == 200, answer.text
    places = answer.json["completion_probabilities"]
    return [(each["id"], {top["id"]: top["logprob"] for top in each["top_logprobs"]}) for each in places]


def with_others(server: Server, **options: object) -> Answer:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return next(iter(pool.map(lambda prompt: ask(server, prompt, **options), PROMPTS)))


def after_prefix(server: Server, **options: object) -> Answer:
    ask(server, PROMPT * 3, cache_prompt=True, **options)
    return ask(server, PROMPTS[0], cache_prompt=True, **options)


def divergences(expected: Answer, answer: Answer) -> Iterator[float]:
    for (token, p), (other, q) in zip(expected, answer, strict=True):
        shared = p.keys() & q.keys()
        rest = [max(1e-9, 1 - sum(math.exp(each[i]) for i in shared)) for each in (p, q)]
        kl = sum(math.exp(p[i]) * (p[i] - q[i]) for i in shared)
        yield max(0.0, kl + rest[0] * math.log(rest[0] / rest[1]))
        if token != other:
            return


def report(name: str, expected: Answer, answers: list[Answer]) -> None:
    found = [kl for answer in answers for kl in divergences(expected, answer)]
    same = sum([token for token, _ in answer] == [token for token, _ in expected] for answer in answers)
    mean = sum(found) / len(found)
    print(f"{name:28} mean KL {mean:.1e}, most {max(found):.1e}, same text {same} of {len(answers)}")


def main() -> int:
    arguments = sys.argv[1:]
    is_model = bool(arguments) and not arguments[0].startswith("-")
    model = Path(arguments.pop(0)) if is_model else models.tiny_tiers("q8_0", "q4_0")
    options = arguments or OPTIONS
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        expected: dict[str, Answer] = {}
        with serving(model, log, *options, "--ctx-size", 2048) as server:
            for name, own in (("", {}), (", t1 = 1", EXACT)):
                expected[name] = ask(server, PROMPTS[0], **own)
                for kind, call in (
                    ("alone again", lambda own: ask(server, PROMPTS[0], **own)),
                    ("with three others", lambda own: with_others(server, **own)),
                    ("after a kept prefix", lambda own: after_prefix(server, **own)),
                ):
                    report(f"{kind}{name}", expected[name], [call(own) for _ in range(N_REPEATS)])
        for n_batch in (16, 64):
            with serving(model, log, *options, "--ctx-size", 2048, "--batch", n_batch) as server:
                for name, own in (("", {}), (", t1 = 1", EXACT)):
                    answers = [ask(server, PROMPTS[0], **own) for _ in range(N_REPEATS)]
                    report(f"passes of {n_batch}{name}", expected[name], answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
