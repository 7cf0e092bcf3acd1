# SPDX-License-Identifier: MIT
"""First token of a long conversation after a restart of `pyhobbit serve`, with and without --keep-slots.

python tests/server/restart.py MODEL [--tokens 3000] [--rounds 3] [--memory 8G]
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers import END_TIMEOUT_S, PROMPT, Server, serving, streaming


def first_token_s(server: Server, prompt: list[int]) -> tuple[float, float]:
    """Seconds and processor seconds until the first token of an answer."""
    start, used = time.perf_counter(), server.cpu_s()
    with streaming(server, prompt=prompt, n_predict=8):
        return time.perf_counter() - start, server.cpu_s() - used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="8G")
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    for n in range(2 * args.rounds):
        is_kept = n % 2 == 0
        options = ["--memory", args.memory, "--ctx", args.tokens + 1000, "--parallel", 1]
        options += ["--keep-slots", "8G"] if is_kept else []
        name = f"{'with' if is_kept else 'without'} --keep-slots"
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "m.gguf"
            model.symlink_to(args.model.absolute())
            with serving(model, model.with_suffix(".log"), *options) as server:
                text = {"content": PROMPT * args.tokens}
                talk = server.request("/tokenize", text).json["tokens"][: args.tokens]
                first_token_s(server, talk)
                start = time.perf_counter()
                server.process.terminate()
                server.process.wait(END_TIMEOUT_S)
                times.setdefault(f"{name}: end, s", []).append(time.perf_counter() - start)
            n_bytes = sum(each.stat().st_size for each in model.parent.glob("*.slots-*"))
            times.setdefault(f"{name}: kept, MiB", []).append(n_bytes / (1 << 20))
            with serving(model, model.with_suffix(".log"), *options) as server:
                seconds, used = first_token_s(server, [*talk, *talk[:20]])
                times.setdefault(f"{name}: first token, s", []).append(seconds)
                times.setdefault(f"{name}: first token, processor s", []).append(used)
    for row, values in times.items():
        print(f"{row}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
