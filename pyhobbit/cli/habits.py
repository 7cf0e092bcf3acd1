# SPDX-License-Identifier: MIT
"""Options that users of llama.cpp and ollama type by habit, and our names for them."""

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
