# SPDX-License-Identifier: MIT
"""Small changes of C++ and Python code: operators, constants, limits, statements that are left out."""

from __future__ import annotations

import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "//": "*", "+=": "-=", "-=": "+=", "++": "--",
    "&&": "||", "||": "&&", "and": "or", "or": "and", "is": "is not", "not": "", "!": "",
    "true": "false", "false": "true", "True": "False", "False": "True", "0": "1", "1": "2",
    "std::min": "std::max", "std::max": "std::min", "min": "max", "max": "min",
    "any": "all", "all": "any", "any_of": "all_of", "all_of": "any_of",
}  # fmt: skip
# Binary operators stand between spaces, by clang-format.
CPP = re.compile(
    r"(?<= )(?:<=|>=|==|!=|&&|\|\||\+=|-=|[<>+*/%-])(?= )|\+\+"
    r"|\b(?:true|false|std::min|std::max|any_of|all_of)\b|(?<![\w.])[01](?![\w.])|!(?=[\w(])"
)
CPP_STATEMENT = re.compile(
    r"^ {4,}(?!return|break|continue|using|case|delete|throw)[\w.\->\[\]]+(?:\(| [-+*|]?= |\+\+).*;$", re.M
)
CPP_HIDDEN = re.compile(
    r"//[^\n]*|^#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|GGML_(?:LOG|ASSERT)[^;]*;", re.M
)


@dataclass(frozen=True)
class Change:
    """old becomes new at offset."""

    offset: int
    old: str
    new: str


def changes(name: str, text: str) -> list[Change]:
    """All of them, in the order of the text."""
    found = _python(text) if name.endswith(".py") else _cpp(text)
    return sorted(found, key=lambda change: change.offset)


def sample(name: str, text: str, seed: int) -> Iterator[Change]:
    """All of them in an order that the name and the seed decide."""
    everything = changes(name, text)
    random.Random(f"{name} {seed}").shuffle(everything)
    yield from everything


def _cpp(text: str) -> Iterator[Change]:
    shown = CPP_HIDDEN.sub(lambda m: " " * len(m[0]), text)
    for match in CPP.finditer(shown):
        yield Change(match.start(), match[0], SWAPS[match[0]])
    for match in CPP_STATEMENT.finditer(text):
        statement = match[0].strip()
        if (
            statement not in ("};", "});")
            and shown[match.start() : match.end()].strip()
            and "{" not in statement
        ):
            yield Change(match.end() - len(statement), statement, ";")


def _python(text: str) -> Iterator[Change]:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER) and token.string in SWAPS:
            line = lines[token.start[0] - 1]
            if line.lstrip().startswith(("import ", "from ", "def ", "class ", "@")) or "->" in line:
                continue
            yield Change(starts[token.start[0] - 1] + token.start[1], token.string, SWAPS[token.string])
