# SPDX-License-Identifier: MIT
"""Checks the order of the folders that docs/design.md lists: part of `make lint`.

A file includes or imports only from its own folder and from those above it in the list, and files form no
circle. Imports inside functions and under TYPE_CHECKING count like all others. No two headers define a class
of one name, and no source file declares a function that a header of ours does. All folders of llama_ext are
include paths, so there a name alone is a file.
"""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DESIGN = ROOT / "docs" / "design.md"
TREES = {
    "ggml_ext/src": {"": "*.*"},
    "llama_ext": {"": "*.*", "ggml_ext/": "*.*"},
    "pyhobbit": {"": "*.py", "convert/": "*.py"},
}


def order(tree: str) -> list[str]:
    """The names below the tree's in the list, from the ground up."""
    (lines,) = re.findall(rf"^    {tree}/\n((?:        \w.*\n)+)", DESIGN.read_text("utf-8"), re.MULTILINE)
    return re.findall(r"^ +(\w+)", lines, re.MULTILINE)


def used(text: str, is_python: bool) -> Iterator[tuple[str, ...]]:
    """Paths in the tree at which the file of each include or import may lie."""
    if not is_python:
        yield from ((name,) for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE))
        return
    for node in ast.walk(ast.parse(text)):
        imported = isinstance(node, ast.Import | ast.ImportFrom)
        module = f"{node.module}/" if isinstance(node, ast.ImportFrom) else ""
        for name in (f"{module}{alias.name}".replace(".", "/") for alias in (node.names if imported else ())):
            package, _, inside = name.partition("/")
            outer = inside.rpartition("/")[0]
            if package == "pyhobbit":
                ends = [".py", "/__init__.py"]
                yield tuple(f"{path}{end}".lstrip("/") for path in (inside, outer) for end in ends)


def problems(tree: str) -> Iterator[str]:
    """Arrows against the order, folders that it lacks, and a circle."""
    paths = {}
    for folder, pattern in TREES[tree].items():  # convert/ is installed as pyhobbit/convert/
        root = ROOT / (folder or tree)
        paths |= {folder + path.relative_to(root).as_posix(): path for path in root.rglob(pattern)}
    by_name = {path.name: file for file, path in paths.items()} if tree == "llama_ext" else {}
    levels = {name: level for level, name in enumerate(order(tree))}
    top = len(levels)
    graph = {}
    for file, path in paths.items():
        found = used(path.read_text("utf-8"), path.suffix == ".py")
        names = [[by_name.get(name, name) for name in some] for some in found]
        graph[file] = {next((each for each in some if each in paths), file) for some in names} - {file}
        folder = file.split("/")[0].removesuffix(".py")
        level = levels.get(folder, top)
        if "/" in file and level == top:
            yield f"{tree}/{file}: its folder is not in the list of docs/design.md"
        for target in sorted(graph[file]):
            other = target.split("/")[0].removesuffix(".py")
            if levels.get(other, top) > level:
                yield f"{tree}/{file} uses {target}, which comes later in the list of docs/design.md"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        yield f"{tree}: a circle: {' -> '.join(e.args[1])}"


def doubles() -> Iterator[str]:
    """Classes that two headers define: the linker takes one's functions for both, without a word."""
    first = dict[str, str]()
    for path in sorted((ROOT / "ggml_ext" / "src").rglob("*.h")):
        for name in re.findall(r"^(?:class|struct) (\w+)[^;]*\{", path.read_text("utf-8"), re.MULTILINE):
            if (other := first.setdefault(name, path.name)) != path.name:
                yield f"{path.name} and {other} both define {name}"


def declared_by_hand() -> Iterator[str]:
    """Functions of our headers that a source file declares itself: an arrow that no include shows."""
    texts = {path: path.read_text("utf-8") for path in ROOT.glob("*_ext/**/*.[ch]*")}
    found = [
        (path, re.findall(r"^\w[^=(\n]*\b(\w+)\([^;{}=]*\);", text, re.M)) for path, text in texts.items()
    ]
    ours = {name for path, names in found if path.suffix == ".h" for name in names}
    for path, names in found:
        yield from (f"{path.name} declares {n} by hand" for n in names if n in ours and path.suffix == ".cpp")


if __name__ == "__main__":
    found = [problem for tree in TREES for problem in problems(tree)]
    sys.exit("\n".join([*found, *doubles(), *declared_by_hand()]) or 0)
