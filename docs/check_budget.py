# SPDX-License-Identifier: MIT
"""Checks that code and pages have no more lines than docs/budget.toml allows. --print shows the lines."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "docs" / "budget.toml"
CODE = re.compile(r"\.(cpp|h|c|cu|py|patch|cmake|html|sh|in)$|\b((Make|Docker)file|CMakeLists\.txt)$|^\.ci/")
PAGES = ("docs/*.md", "docs/results/*.md")
DEPTHS = {"ggml_ext": 3, "llama_ext": 2, "pyhobbit": 2, "tests": 2}  # other folders are counted whole


def lines_by_folder() -> Counter[str]:
    """Lines of code per folder, "." for the root's. The modelled device counts, other tests do not."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
    lines: Counter[str] = Counter()
    for path in map(Path, names.stdout.split("\0")[:-1]):
        key = f"{path.parent.as_posix()}/*{path.suffix}"
        if CODE.search(path.as_posix()):
            key = "/".join(path.parent.parts[: DEPTHS.get(path.parts[0], 1)]) or "."
        is_counted = key in (*PAGES, "tests/modelled_device") or not re.match(r"tests|.*\*", key)
        if is_counted and (ROOT / path).is_file():
            lines[key] += (ROOT / path).read_bytes().count(b"\n")
    return lines


def main() -> int:
    """Prints what exceeds the budget; returns 1 if anything does."""
    lines = lines_by_folder()
    lines["all"] = sum(number for key, number in lines.items() if key not in PAGES)
    if "--print" in sys.argv:
        print("\n".join(f'"{key}" = {number}' for key, number in sorted(lines.items())))
        return 0
    most = {key: int(n) for key, n in re.findall(r'(?m)^"(.+)" *= *(\d+)', BUDGET.read_text("utf-8"))}
    problems = [
        f"{key} has {number} lines, docs/budget.toml allows {most.get(key, 0)}: remove some"
        for key, number in sorted(lines.items())
        if number > most.get(key, 0)
    ]
    problems += [f"docs/budget.toml has a line for {key}, which is empty" for key in {*most} - {*lines}]
    folders = sum(number for key, number in most.items() if key not in (*PAGES, "all"))
    if folders > most.get("all", 0):
        problems.append(f"docs/budget.toml allows its folders {folders} lines, more than all: lower one")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
