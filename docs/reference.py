# SPDX-License-Identifier: MIT
"""Builds the reference of the Python package, and of settings and counters: python docs/reference.py FOLDER.

Needs pdoc: pip install pdoc.
"""

import sys
from pathlib import Path

import pdoc

import pyhobbit
from pyhobbit._tables import COUNTERS, SETTINGS


def tables() -> str:
    """Settings and counters, as Markdown."""
    lines = [
        "# Settings",
        "",
        "`--override-kv KEY=TYPE:VALUE` takes the keys. Options and keywords have their last part.",
        "",
        "| key | values | default | may stand in a GGUF file | meaning |",
        "|---|---|---|---|---|",
    ]
    for each in SETTINGS:
        values = ", ".join(each.choices) or each.kind
        if each.kind in ("number", "count"):
            values = f"{each.min:g} to {each.max:g} {each.unit or ''}".strip()
        default = "" if each.default is None else each.default
        stored = "yes" if each.is_stored else ""
        lines.append(f"| `{each.key}` | {values} | {each.note or default} | {stored} | {each.help} |")
    lines += ["", "# Counters", "", "| name | Prometheus | meaning |", "|---|---|---|"]
    for each in COUNTERS:
        label = f"{{{each.label}}}" if each.label else ""
        lines.append(f"| `{each.name}` | `hobbit_{each.metric}{label}` | {each.help} |")
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.md").write_text(tables(), encoding="utf-8")
    # pdoc looks for names in the module's dictionary, where the package puts none before they are used
    for name in pyhobbit.__all__:
        setattr(pyhobbit, name, getattr(pyhobbit, name))
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc("pyhobbit", "llama_cpp.llama", output_directory=folder)  # the latter for what Hobbit inherits
    print(f"{folder / 'pyhobbit.html'}\n{folder / 'settings.md'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/reference.py FOLDER")
    main(Path(sys.argv[1]))
