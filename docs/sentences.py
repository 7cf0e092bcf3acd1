# SPDX-License-Identifier: MIT
"""Counts the words of each sentence: python docs/sentences.py [--max N] [--files].

Prints the median and the 90th percentile for README.md, docs and the comments of C++ headers. With --max it
fails if the 90th percentile of a group is larger. Code, headings and short table cells do not count.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_GROUPS = {"readme": "README.md", "docs": "docs/**/*.md", "headers": "ggml_ext/**/*.h"}
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z0-9`\[\"*(])")
_WORD = re.compile(r"[^\W_][\w'%./-]*")
_CELL_WORDS = 8  # a table cell with more is prose


def markdown(text: str) -> Iterator[str]:
    """The paragraphs, list items and long table cells."""
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( {4}|#).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\|)", text):
        if block.lstrip().startswith("|"):
            yield from (cell for cell in block.split("|") if len(_WORD.findall(cell)) > _CELL_WORDS)
        else:
            yield re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block)


def _comments(text: str) -> Iterator[str]:
    """Each run of // lines; an empty one separates, and a comment behind code begins anew."""
    block: list[str] = []
    for line in text.splitlines():
        code, slashes, comment = line.partition("//")
        if code.strip() or not comment.strip():
            yield " ".join(block)
            block = []
        if slashes and "SPDX" not in comment:
            block.append(comment.strip())
    yield " ".join(block)


def sentence_lengths(path: Path) -> list[int]:
    """Words of each sentence of one file."""
    text = path.read_text(encoding="utf-8")
    blocks = markdown(text) if path.suffix == ".md" else _comments(text)
    lengths = (len(_WORD.findall(part)) for block in blocks for part in SENTENCE_END.split(block))
    return [length for length in lengths if length]


def _percentile(lengths: list[int], share: float) -> int:
    return sorted(lengths)[int(share * len(lengths))] if lengths else 0


def main() -> int:
    """Prints a line for each group; returns 1 if --max is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max", type=int, metavar="N", help="largest 90th percentile of a group")
    parser.add_argument("--files", action="store_true", help="print each file as well")
    args = parser.parse_args()
    exceeded = False
    for group, files in _GROUPS.items():
        by_file = {str(path): sentence_lengths(path) for path in sorted(_ROOT.glob(files))}
        everything = [length for lengths in by_file.values() for length in lengths]
        for name, lengths in {group: everything, **(by_file if args.files else {})}.items():
            middle, high = _percentile(lengths, 0.5), _percentile(lengths, 0.9)
            print(f"{name}: {len(lengths)} sentences, median {middle} words, 90th percentile {high}")
        exceeded |= args.max is not None and _percentile(everything, 0.9) > args.max
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
