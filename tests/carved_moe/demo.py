# SPDX-License-Identifier: MIT
"""`make demo`: real weights answer a question with half of their experts in memory, and say what that took.

python demo.py FOLDER TINY    # without the network the tiny model, a GGUF, continues a line instead
"""

import subprocess
import sys
import time
from pathlib import Path

import carved_gguf

QUESTION = "What is the opposite of hot?"
HALF = "31M"  # half of the routed experts in high precision


def main(folder: Path, tiny: Path) -> int:
    began = time.monotonic()
    try:
        dense = carved_gguf.dense(folder)
    except carved_gguf.UnavailableError as error:
        print(f"== {error}: the tiny model, which knows Python's library alone, answers instead", flush=True)
        return _chat(tiny, "def read_file(path):", "6M")
    downloaded = time.monotonic()
    model = folder / "carved.gguf"
    if not model.exists():
        plain = folder / "carved-f16.gguf"
        carved_gguf.write(dense, plain)
        subprocess.run(["pyhobbit", "convert", "--low", "q4_0", plain, "-o", model], check=True)
        plain.unlink()
    made = time.monotonic()
    print(f"== {carved_gguf.ABOUT}")
    print(f"== pyhobbit chat, half of the experts in memory: {QUESTION}", flush=True)
    status = _chat(model, QUESTION, HALF)
    answered = time.monotonic()
    seconds = (downloaded - began, made - downloaded, answered - made)
    print("== download {:.1f} s, making the model {:.1f} s, chat {:.1f} s".format(*seconds))
    return status


def _chat(model: Path, prompt: str, pools: str) -> int:
    options = ["-n", "64", "--temp", "0", "--pools", pools]
    return subprocess.run(["pyhobbit", "chat", model, "-p", prompt, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
