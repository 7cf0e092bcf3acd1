# SPDX-License-Identifier: MIT
"""Refuses sentences that begin like a part of one and are no question, and long ones: part of `make lint`.

Reads comments, docstrings, help texts and documents of the files that git tracks. A tenth of the
sentences of README.md, of docs and of C++ headers may have more than MOST_WORDS words. Code does not count.
Usage: python docs/openings.py [FOLDER or FILE...]
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 25
MEASURED = ("README.md", "docs/**/*.md", "ggml_ext/**/*.h")
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z0-9`\[\"*(])")
WORD = re.compile(r"[^\W_][\w'%./-]*")
CELL_WORDS = 8  # a table cell with more is prose
LINKS = "after|as|at|before|behind|beside|by|for|from|in|on|per|to|under|while|with|within|without"
OPENING = re.compile(
    r"\W*((of|what|who|whether|none|which|whose|likewise)\b(?![=.(:'\"|\]])"
    rf"|(those|that) (of|that|with|in|to|under|an?|the)\b|({LINKS}) (what|which|whose|another one)\b"
    r"|the same( (as|of|for|in|with|without)\b|[.,;:]|$)|least (?!recently|frequently)|one of so many"
    r"|the right to)|.*(without whose|, by an? (half|quarter) of)\b",
    re.IGNORECASE,
)
# the first sentence of a comment or docstring that begins without a verb, as "By name."
FRAGMENT = re.compile(
    rf"\W*(?=(?-i:[A-Z]))(where [^,.:;]+[.:;]|({LINKS})\b(?! (most|least|short)\b|[^.:;]*, (?!of|not|or))"
    r"(?![^.:;]*\b(is|are|was|were|has|have|had|does|do|can|may|must|will)\b)[^.:;]{0,45}[.:;])",
    re.IGNORECASE,
)
LITERAL = r'"((?:[^"\\\n]|\\.)*)"'
WITH_HASHES = re.compile(
    r"(Makefile|CMakeLists\.txt|Dockerfile|(^|/)\.ci/\w+|\.(cmake|lock|service|sh|toml|txt|ya?ml))$"
)

Block = tuple[int, str]  # the number of its line, or of its first one; a text of one or more sentences
Comment = tuple[int, str, bool]  # True: code precedes it in its line


def joined(comments: list[Comment]) -> Iterator[Block]:
    """Joins comments of consecutive lines. One behind code, or after an empty one, starts a new block."""
    first, text, last = 0, "", -1
    for number, comment, follows_code in comments:
        if comment.startswith("SPDX"):
            continue
        if follows_code or number != last + 1 or not comment:
            yield first, text
            first, text = number, ""
        text, last = f"{text} {comment}", number
    yield first, text


def cpp(text: str) -> Iterator[Block]:
    """Yields comments of C and C++, and string literals that start like a sentence: help texts."""
    text = re.sub(r"/\*(.*?)\*/", lambda match: "//" + match[1].replace("\n", "\n//"), text, flags=re.DOTALL)
    comments = []
    for number, line in enumerate(text.splitlines(), 1):
        code, slashes, comment = re.sub(LITERAL, '""', line).partition("//")
        if slashes:
            comments.append((number, comment.strip("/!*< "), bool(code.strip())))
    yield from joined(comments)
    for match in re.finditer(rf"{LITERAL}(?:\s*{LITERAL})*", text):
        yield from help_text(text.count("\n", 0, match.start()) + 1, "".join(re.findall(LITERAL, match[0])))


def help_text(number: int, text: str) -> Iterator[Block]:
    """Yields a string if it starts with a capital and has several words."""
    if re.match(r"[A-Z][a-z]* ", text):
        yield number, text


def with_hashes(text: str) -> Iterator[Block]:
    """Yields comments after #."""
    matches = [
        (number, re.match(r"(|.*?\s)#+\s(.*)", line)) for number, line in enumerate(text.splitlines(), 1)
    ]
    yield from joined([(number, match[2], bool(match[1].strip())) for number, match in matches if match])


def python(text: str) -> Iterator[Block]:
    """Yields comments, docstrings by paragraph, help= of argparse, and strings that start like a sentence."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    yield from joined(
        [(t.start[0], t.string.lstrip("#: "), bool(t.line[: t.start[1]].strip())) for t in comments]
    )
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstrings.add(node.body[0].value)
                for part in re.split(r"\n\s*\n", ast.get_docstring(node)):
                    yield node.body[0].lineno, part
        elif isinstance(node, ast.keyword | ast.Assign) and isinstance(node.value, ast.Constant):
            if getattr(node, "arg", "") == "help" or ast.unparse(node).startswith("what = '"):
                yield node.value.lineno, str(node.value.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from help_text(node.lineno, node.value)


def document(text: str) -> Iterator[Block]:
    """Yields paragraphs, list items and long cells of tables."""
    plain = re.sub(r"^```.*?^```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    plain = re.sub(r"^( {4}|#).*$", "\n", plain, flags=re.MULTILINE)
    plain = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", plain))
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\|)", plain):
        cells = [cell for cell in part.split("|") if len(WORD.findall(cell)) > CELL_WORDS]
        item = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", part)
        for block in cells if part.lstrip().startswith("|") else [item]:
            yield text.count("\n", 0, max(text.find(block.strip()[:16]), 0)) + 1, block


def patch(text: str) -> Iterator[Block]:
    """Yields comments of the lines that a patch adds."""
    return cpp(re.sub(r"^(\+(?!\+\+)|.*)", "", text, flags=re.MULTILINE))


READERS = {".py": python, ".md": document, ".patch": patch} | dict.fromkeys((".c", ".cpp", ".h"), cpp)


def problems(path: Path) -> Iterator[str]:
    """Yields each refused sentence of a file, with its line."""
    reader = READERS.get(path.suffix) or (with_hashes if WITH_HASHES.search(path.as_posix()) else None)
    for number, block in dict.fromkeys(reader(path.read_text("utf-8")) if reader else ()):
        for i, sentence in enumerate(SENTENCE_END.split(" ".join(block.split()))):
            is_part = i == 0 and path.suffix != ".md" and FRAGMENT.match(sentence)
            if (is_part or OPENING.match(sentence)) and not sentence.rstrip("\"')*`").endswith("?"):
                yield f"{path.relative_to(ROOT)}:{number}: {sentence[:90]}"


def long_sentences() -> Iterator[str]:
    """Yields the groups of files with too many long sentences."""
    for files in MEASURED:
        blocks = (each for path in ROOT.glob(files) for each in READERS[path.suffix](path.read_text("utf-8")))
        parts = (WORD.findall(part) for _, block in blocks for part in SENTENCE_END.split(block))
        lengths = sorted(len(words) for words in parts if words)
        if lengths and lengths[int(0.9 * len(lengths))] > MOST_WORDS:
            yield f"{files}: more than a tenth of the sentences has over {MOST_WORDS} words"


def main() -> str:
    """Returns the refused sentences."""
    command = ["git", "-C", ROOT, "ls-files", "-z", *sys.argv[1:]]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    found = [problem for name in names if (ROOT / name).is_file() for problem in problems(ROOT / name)]
    if found:
        found.append("Begin with the noun that the sentence is about.")
    return "\n".join([*found, *long_sentences()])


if __name__ == "__main__":
    sys.exit(main() or 0)
