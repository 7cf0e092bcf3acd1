# SPDX-License-Identifier: MIT
"""Writes a model of tests/engine/architectures.py with other keys, in a process with stock llama.cpp.

python tests/architecture_file.py --lib-dir build/stock/bin qwen35moe OUT '{"block_count": 5}'
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))

import architecture_models
import models
from architectures import ARCHITECTURES

# Heads for keys by block; MLA has one, and a recurrent block none.
_HEADS_KV = {"bailingmoe3": 1, "nemotron_h_moe": 2}


def write(name: str, path: Path, without: str = architecture_models.NOTHING, **keys: object) -> Path:
    """without: a pattern of tensors that are left out."""
    command = [sys.executable, __file__, "--lib-dir", models.stock_dir(), "--without", without, name, path]
    subprocess.run([*map(str, command), json.dumps(keys)], check=True, capture_output=True)
    return path


def with_head(name: str, path: Path, without: str = architecture_models.NOTHING) -> Path:
    """A model of four layers and a draft block (MTP)."""
    keys: dict[str, object] = {"block_count": 5, "nextn_predict_layers": 1}
    for key, value in ARCHITECTURES[name].keys.items():
        if isinstance(value, list) and not key.endswith(("dimension_sections", "indexer.types")):
            last = _HEADS_KV.get(name, value[1]) if key.endswith("head_count_kv") else value[-1]
            keys[key] = [*value, last]
    return write(name, path, without, **keys)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small model of an architecture.")
    parser.add_argument("--lib-dir", type=Path, required=True)
    parser.add_argument("--without", default=architecture_models.NOTHING)
    parser.add_argument("name", choices=ARCHITECTURES, metavar="NAME")
    parser.add_argument("path", type=Path)
    parser.add_argument("keys", type=json.loads)
    args = parser.parse_args()
    os.environ["LLAMA_CPP_LIB_PATH"] = str(args.lib_dir)
    import llama_cpp.llama_cpp as llama

    base = ARCHITECTURES[args.name]
    expected = architecture_models.expected_tensors
    architecture_models.expected_tensors = lambda *given: [
        each for each in expected(*given) if not re.search(args.without, each.name)
    ]
    own = replace(base, keys={**base.keys, **args.keys})
    architecture_models.write_model(llama, args.lib_dir, args.name, own, args.path)


if __name__ == "__main__":
    main()
