# SPDX-License-Identifier: MIT
"""A request's own confidence."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servers import PROMPT, serving


def test_a_request_brings_its_own_confidence(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "6M", "--set", "rule=rank", "--prefetch", 0, "--parallel", 2, "--ctx-size", 1024)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:

        def repeated(**options: object) -> tuple[str, int]:
            before = server.cache()["tokens_repeated"]
            text = server.complete(ignore_eos=True, **options)
            return text, server.cache()["tokens_repeated"] - before

        assert server.cache()["confidence"] == 0
        refused = server.request(
            "/completion", {"prompt": "a", "n_predict": 1, "hobbit": {"confidence": 1.5}}
        )
        assert refused.status == 400
        assert "hobbit.confidence is 1.5: it must lie between 0 and 1" in refused.error
        high, _ = repeated(hobbit={"t1": 1})
        assert repeated(hobbit={"confidence": 1}) == (high, 31)  # the first token is the prompt's
        draft, n = repeated()
        assert n == 0
        assert draft != high
        assert 0 < repeated(hobbit={"confidence": 0.5})[1] < 31

        # beside a request without a confidence; what is computed with its prompt is high at once
        before = server.cache()["tokens_repeated"]
        with ThreadPoolExecutor(2) as pool:
            doubted = pool.submit(server.complete, PROMPT, 64, hobbit={"confidence": 1}, ignore_eos=True)
            server.complete("class Node:\n", 64, ignore_eos=True)
        assert doubted.result()
        assert 60 <= server.cache()["tokens_repeated"] - before <= 63
