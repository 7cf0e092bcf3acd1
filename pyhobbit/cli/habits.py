# SPDX-License-Identifier: MIT
"""Options that users of llama.cpp and ollama type by habit: taken under our names, or ignored with a line."""

import sys
from collections.abc import Mapping

TAKEN: Mapping[str, str] = {
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "--batch"),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx"), "--ctx"),
    **dict.fromkeys(("-cmoe", "--cpu-moe"), "--device=CPU"),
    **dict.fromkeys(("--predict", "--n-predict", "--max-tokens"), "-n"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("--json-schema", "-j", "--json-schema-file", "-jf"), "--format"),
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-f": "--file",
    "-t": "--threads",
    "-s": "--seed",
    "--temperature": "--temp",
    "--hf-repo": "-hf",
    "--output": "-o",
    "--quiet": "-q",
    "--tokens": "-n",
}

_LAYERS = "a GPU build puts all layers on the GPU, and --device-memory SIZE limits the experts there"
_AS_MANY = "--placement tries it with the smallest N that fits, or that --device-memory SIZE allows"
_CHATS = "without -p or --file this is a conversation"
_ATTENTION = "llama.cpp itself takes the faster attention"
_MAPS = "experts are read into a cache and never mapped"
_IGNORED: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), (1, _LAYERS)),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe"), (1, _AS_MANY)),
    **dict.fromkeys(("-fa", "--flash-attn"), (0, _ATTENTION)),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), (0, _CHATS)),
    **dict.fromkeys(("-st", "--single-turn"), (0, "-p or --file gets one answer")),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap"), (0, _MAPS)),
    **dict.fromkeys(("-co", "--color"), (0, "colours follow the terminal")),
    "--jinja": (0, "templates are always Jinja"),
}
_MAY_FOLLOW = ("on", "off", "auto", "0", "1")


def ignore(name: str, has_value: bool, rest: list[str]) -> bool:
    """True for an option that is ignored with a line; its value leaves rest. has_value: it was attached."""
    if name not in _IGNORED:
        return False
    n_values, why = _IGNORED[name]
    if not has_value and rest and (n_values or rest[0] in _MAY_FOLLOW):
        rest.pop(0)
    print(f"pyhobbit: {name} is ignored: {why}", file=sys.stderr)
    return True
