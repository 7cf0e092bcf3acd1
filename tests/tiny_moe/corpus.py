# SPDX-License-Identifier: MIT
"""Text and tokenizer of the tiny MoE model: Python's standard library, split by whole modules.

A stronger model also reads packages that requirements/test.txt pins.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import string
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import sentencepiece as spm

VOCAB_SIZE = 2048
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2

SKIPPED_DIRS = {
    "site-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib-dynload",
    "_bundled",
    "pydoc_data",
}
# Tables of data rather than code; _sysconfigdata holds paths of the machine that built Python.
SKIPPED_FILES = re.compile(r"^(_sysconfigdata.*|html/entities|encodings/(?!__init__|idna|punycode).*)\.py$")
HELD_OUT = (
    "csv.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/__init__.py",
    "json/decoder.py",
    "json/encoder.py",
    "json/scanner.py",
    "json/tool.py",
    "sched.py",
    "shlex.py",
    "string.py",
    "textwrap.py",
)
# Distributions with their licences, as their metadata name them.
PACKAGES = {
    "anyio": "MIT", "attrs": "MIT", "click": "BSD-3-Clause", "fonttools": "MIT", "fsspec": "BSD-3-Clause",
    "httpx": "BSD-3-Clause", "huggingface-hub": "Apache-2.0", "jinja2": "BSD", "lark": "MIT",
    "matplotlib": "Python Software Foundation License", "networkx": "BSD",
    "numpy": "BSD", "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pillow": "MIT-CMU", "prompt-toolkit": "BSD", "pydantic": "MIT", "pyparsing": "MIT", "pytest": "MIT",
    "rich": "MIT", "setuptools": "MIT", "tomlkit": "MIT", "urllib3": "MIT",
}  # fmt: skip
HELD_OUT_PACKAGES = {"requests": "Apache-2.0"}


def _decode(path: Path) -> str | None:
    """Text of a source file, or None where it is not UTF-8 (lib2to3 carries such a file on purpose)."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def read_modules() -> tuple[dict[str, str], dict[str, str]]:
    """Training and held-out modules of the running Python, each as {relative path: text} in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in relative:
        if SKIPPED_DIRS.intersection(name.split("/")[:-1]) or SKIPPED_FILES.match(name):
            continue
        text = _decode(root / name)
        if text:
            (held_out if name in HELD_OUT else train)[name] = text
    missing = set(HELD_OUT) - set(held_out)
    if missing:
        raise FileNotFoundError(f"held-out modules missing in {root}: {', '.join(sorted(missing))}")
    return train, held_out


def read_packages() -> tuple[dict[str, str], dict[str, str]]:
    """Texts of PACKAGES and of HELD_OUT_PACKAGES, each as {distribution/path: text}, in order."""
    train, held_out = (
        {f"{name}/{path}": text for name in names for path, text in _texts(name).items()}
        for names in (PACKAGES, HELD_OUT_PACKAGES)
    )
    return train, held_out


def _texts(name: str) -> dict[str, str]:
    """Code and documentation of an installed distribution, without tests, copies of others and tables."""
    texts = {}
    for path in sorted(distribution(name).files or ()):
        is_text = path.suffix in (".py", ".rst", ".md") or path.name == "METADATA"
        if is_text and not {*SKIPPED_DIRS, "_vendor"}.intersection(path.parts[:-1]):
            text = _decode(Path(path.locate()))
            if text and not _is_table(text):
                texts[path.as_posix()] = text
    return texts


def _is_table(text: str) -> bool:
    """Tells if more than a tenth are digits, or a twentieth further bytes of letters of other scripts."""
    n_digits = sum(map(text.count, string.digits))
    return 10 * n_digits > len(text) or 20 * (len(text.encode()) - len(text)) > len(text)


def digest(modules: dict[str, str]) -> str:
    """SHA-256 over names and texts, to tell whether two machines have the same corpus."""
    state = hashlib.sha256()
    for name, text in modules.items():
        state.update(f"{name}\0{text}\0".encode())
    return state.hexdigest()


def train_tokenizer(modules: dict[str, str], model_file: Path) -> None:
    """Train a SentencePiece BPE whose pieces never depend on a prefix space, so all runtimes agree on it."""
    # The trainer drops trailing newlines of a sentence: cut before a blank line, not after it.
    paragraphs = (part for text in modules.values() for part in re.split(r"(?<!\n)(?=\n\n)", text))
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=paragraphs,
        model_writer=model,
        vocab_size=VOCAB_SIZE,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        split_digits=True,
        max_sentence_length=1 << 20,
        max_sentencepiece_length=16,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=-1,
        num_threads=1,
        minloglevel=1,
    )
    model_file.write_bytes(model.getvalue())


def write_tokenizer_configs(folder: Path, context: int) -> None:
    """The Hugging Face side of the tokenizer: no prefix space, BOS added, EOS not."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def write_fast_tokenizer(folder: Path) -> None:
    """tokenizer.json from tokenizer.model: with it, loading needs neither sentencepiece nor protobuf."""
    from transformers import LlamaTokenizer  # seconds to import, and only the export needs it

    target = folder / "tokenizer.json"
    target.unlink(missing_ok=True)  # else it would be read instead of tokenizer.model
    LlamaTokenizer.from_pretrained(folder).backend_tokenizer.save(str(target))


def encode_modules(modules: dict[str, str], tokenizer: spm.SentencePieceProcessor) -> np.ndarray:
    """All modules as one int64 stream, each ended by EOS."""
    ids: list[int] = []
    for text in modules.values():
        ids.extend(tokenizer.encode(text))
        ids.append(EOS_ID)
    return np.array(ids, dtype=np.int64)
