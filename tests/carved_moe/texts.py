# SPDX-License-Identifier: MIT
"""English text that Debian packages ship: what healing reads, and two kinds that it does not see.

python texts.py FOLDER    # writes twelve pieces of each unseen text, in unseen.txt both in turn, and in
                          # others.txt as many from between them
"""

import gzip
import html
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# a Debian package and the files of it that are English prose
TRAINED = {
    "perl-doc": "usr/share/perl/*/pod/perl[!u]*.pod",
    "python3.11-doc": "usr/share/doc/python3.11/html/_sources/**/*.rst.txt",
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US/*.html",
    "debian-reference-en": "usr/share/debian-reference/ch*.en.html",
    "developers-reference": "usr/share/developers-reference/_sources/*.rst.txt",
    "anarchism": "usr/share/doc/anarchism/html/*.html",
    "dict-gcide": "usr/share/dictd/gcide.dict.dz",
    "fortunes": "usr/share/games/fortunes/*[!tu8]",
}
UNSEEN = {
    "bash-doc": "usr/share/doc/bash/bashref.html",
    "jargon-text": "usr/share/doc/jargon-text/jargon.txt.gz",
}
_ENTRY = re.compile(r"^(\w[\w -]+) \\[^\n]*\n((?:[ \t]+[^\n]*\n|\n)+)", re.MULTILINE)
_ASKED = (
    "What is {}?",
    "What does the word {} mean?",
    "Define {}.",
    "Explain {} to me.",
    "Tell me about {}.",
)


def read(package: str, pattern: str) -> str:
    """The text of a package's files in the order of their names; needs Debian's apt-get and dpkg-deb."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["apt-get", "download", "--quiet", "--quiet", package], cwd=folder, check=True)
        subprocess.run(["dpkg-deb", "--extract", next(folder.glob("*.deb")), folder], check=True)
        return "\n\n".join(_plain(path) for path in sorted(folder.glob(pattern)))


def conversations(dictionary: str) -> Iterator[list[dict[str, str]]]:
    """Questions for words and the dictionary's answers, as messages of a chat."""
    for number, (word, meaning) in enumerate(_ENTRY.findall(dictionary)):
        answer = " ".join(meaning.split())
        if 80 < len(answer) < 900:
            asked = _ASKED[number % len(_ASKED)].format(word.lower())
            yield [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _plain(path: Path) -> str:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix in (".dz", ".gz") else data).decode("utf-8", "replace")
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</(p|div|li|h\d|dt|dd|tr)>", "\n", text)))
    return re.sub(r"[ \t]+\n", "\n", re.sub(r"\n\s*\n+", "\n\n", text))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    both: dict[str, list[list[str]]] = {"unseen": [], "others": []}
    for name, files in UNSEEN.items():
        text = read(name, files)
        step = len(text) // 12
        for kept, start in (("unseen", 0), ("others", step // 2)):
            both[kept].append([text[at : at + 3000] for at in range(start, len(text), step)][:12])
        (folder / f"{name}.txt").write_text("\n".join(both["unseen"][-1]), encoding="utf-8")
    for kept, found in both.items():
        pieces = (piece for pair in zip(*found, strict=True) for piece in pair)
        (folder / f"{kept}.txt").write_text("\n".join(pieces), encoding="utf-8")
