# SPDX-License-Identifier: MIT
"""Checks that no folder has more lines than docs/budget.toml allows: part of `make lint`.

Counts the lines of all files that git tracks. --print writes a table of the present numbers.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "docs" / "budget.toml"
CODE = ("bench", "convert", "ggml_ext", "llama_ext", "patches", "pyhobbit")


def lines_by_folder() -> Counter[str]:
    """Lines per folder: of bench, convert and patches as a whole, else of each folder with code."""
    command = ["git", "-C", ROOT, "ls-files", "-z", *CODE]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    lines: Counter[str] = Counter()
    for path in map(Path, names):
        if (ROOT / path).is_file():
            depth = {"ggml_ext": 3, "llama_ext": 2, "pyhobbit": 2}.get(path.parts[0], 1)
            lines["/".join(path.parent.parts[:depth])] += (ROOT / path).read_bytes().count(b"\n")
    return lines


def budget() -> dict[str, int]:
    """The numbers of docs/budget.toml by folder; `all` is their sum's."""
    rows = re.findall(r'(?m)^"?([\w/]+)"? *= *(\d+)', BUDGET.read_text("utf-8"))
    return {folder: int(number) for folder, number in rows}


def main() -> int:
    """Prints the folders that exceed their budget; returns 1 if there are any."""
    lines, most = lines_by_folder(), budget()
    lines["all"] = sum(lines.values())
    if "--print" in sys.argv:
        print("\n".join(f'"{folder}" = {number}' for folder, number in sorted(lines.items())))
        return 0
    problems = [
        f"{folder} has {number} lines, docs/budget.toml allows {most.get(folder, 0)}: remove or raise it"
        for folder, number in sorted(lines.items())
        if number > most.get(folder, 0)
    ]
    problems += [
        f"docs/budget.toml has a line for {folder}, which is empty" for folder in most.keys() - lines.keys()
    ]
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
