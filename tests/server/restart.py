# SPDX-License-Identifier: MIT
"""First token of a long conversation after a restart of `pyhobbit serve`, with and without --keep-slots.

python tests/server/restart.py MODEL [--tokens 3000] [--rounds 3] [--memory 8G]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers import END_TIMEOUT_S, PROMPT, Server, serving, streaming


def first_token_s(server: Server, prompt: list[int]) -> tuple[float, str]:
    """Seconds until the first token of an answer, and its text."""
    start = time.perf_counter()
    with streaming(server, prompt=prompt, n_predict=8, temperature=0, n_probs=5) as answer:
        first = time.perf_counter() - start
        return first, str([json.loads(line[6:]) for line in answer if line.startswith(b"data: {")][:-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="8G")
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    answers = set()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for _ in range(args.rounds):
            for kept in (True, False):
                options = ("--memory", args.memory, "--ctx", args.tokens + 1000, "--parallel", 1)
                options += ("--keep-slots", "8G") if kept else ()
                name = f"{'with' if kept else 'without'} --keep-slots, s: "
                with serving(args.model, log, *options) as server:
                    text = {"content": PROMPT * args.tokens}
                    talk = server.request("/tokenize", text).json["tokens"][: args.tokens]
                    times.setdefault(name + "first token before", []).append(first_token_s(server, talk)[0])
                    start = time.perf_counter()
                    server.process.terminate()
                    server.process.wait(END_TIMEOUT_S)
                    times.setdefault(name + "end", []).append(time.perf_counter() - start)
                n_bytes = sum(each.stat().st_size for each in args.model.parent.glob("*.slots-*"))
                start = time.perf_counter()
                with serving(args.model, log, *options) as server:
                    times.setdefault(name + "start", []).append(time.perf_counter() - start)
                    first, answer = first_token_s(server, [*talk, *talk[:20]])
                    times.setdefault(name + "first token after", []).append(first)
                    answers.add(answer)
                if kept:
                    print(f"{n_bytes} bytes kept")
        for each in args.model.parent.glob("*.slots-*"):
            each.unlink()
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    print(f"{len(answers)} different answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
