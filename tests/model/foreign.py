# SPDX-License-Identifier: MIT
"""A table of other programs' files by verb: what each verb of pyhobbit says to each.

    python tests/model/foreign.py [FORM ...]

Prints each form, the verbs, and what they say. Exits with 1 where a verb ends otherwise than by the form's
sentence and status 1, calls what is whole damaged, or downloads a file whose header tells what it is.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import struct
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
import numpy as np
from fake_hub import Hub, serving
from safetensors import numpy

CHECKPOINT = models.TINY / "model"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 40960\n"
PAGE = "<!DOCTYPE html><html><body>Sign in to Hugging Face</body></html>"

Tensors = Iterable[tuple[str, np.ndarray]]
Make = Callable[[Path], object]
"""Writes a file under this path, or a folder."""


def changed(change: Callable[[bytearray], None]) -> Make:
    def make(path: Path) -> None:
        data = bytearray(models.tiny().read_bytes())
        change(data)
        path.write_bytes(data)

    return make


def _type_139(data: bytearray) -> None:
    name = b"blk.0.ffn_gate_exps.weight"
    at = data.index(name) + len(name)
    struct.pack_into("<I", data, at + 4 + 8 * struct.unpack_from("<I", data, at)[0], 139)


def _version(data: bytearray, version: int) -> None:
    struct.pack_into("<I", data, 4, version)


def _new_architecture(data: bytearray) -> None:
    data[:] = data.replace(b"llama", b"llamq")


def keys(**named: object) -> Make:
    given = {key.replace("__", "."): value for key, value in named.items()}
    return lambda path: models.copy_gguf(models.tiny(), path, keys=given)


def tensors(edit: Callable[[str, np.ndarray], Tensors]) -> Make:
    return lambda path: models.copy_gguf(models.tiny(), path, edit=edit)


def beside(name: str) -> Make:
    return tensors(lambda own, data: [(own, data), *([(name, data)] if own == "output_norm.weight" else [])])


def separate(name: str, data: np.ndarray) -> Tensors:
    part = re.fullmatch(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight", name)
    return [(f"{part[1]}.{i}.weight", each) for i, each in enumerate(data)] if part else [(name, data)]


def holding(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"weight": [1.0]}))
        file.writestr("archive/data/0", bytes(4096))


def _split(path: Path, keep: Iterable[int]) -> None:
    first = models.split(models.tiny)
    parts = sorted(first.parent.glob(first.name.replace("-00001-", "-*-")))
    for i in keep:
        shutil.copy(parts[i], path.with_name(parts[i].name.replace(first.name.partition("-0000")[0], "m")))


def _second_part(path: Path) -> None:
    _split(path, [0, 1])
    next(path.parent.glob("m-00002-of-*")).rename(path)


def _without_last_part(path: Path) -> None:
    _split(path, [0, 1, 2])
    first = next(path.parent.glob("m-00001-of-*"))
    path.symlink_to(first)


def checkpoint(change: Callable[[Path], object]) -> Make:
    def make(path: Path) -> None:
        shutil.copytree(CHECKPOINT, path)
        change(path)

    return make


def quantised(**config: object) -> Make:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))

    return checkpoint(change)


def _mlx(folder: Path) -> None:
    """Weights of 4 bits, packed into numbers of 32."""
    path, config = folder / "model.safetensors", folder / "config.json"
    weights = numpy.load_file(path)
    weights["lm_head.weight"] = weights["lm_head.weight"].view(np.uint32)
    numpy.save_file(weights, path, {"format": "mlx"})
    own = {"quantization": {"group_size": 64, "bits": 4}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **own}))


def _mistral(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")


def _diffusers(folder: Path) -> None:
    (folder / "config.json").rename(folder / "model_index.json")


# by form: how it is made, and what all verbs say
FORMS: Mapping[str, tuple[Make, str]] = {
    "GGUF of ik_llama.cpp": (changed(_type_139), "has the type 139, perhaps one of ik_llama.cpp's own"),
    "GGUF, big-endian": (
        changed(lambda data: data.__setitem__(slice(4, 8), data[4:8][::-1])),
        "is for big-endian",
    ),
    "GGUF, version 1": (changed(lambda data: _version(data, 1)), "version 1"),
    "GGUF, version 9": (changed(lambda data: _version(data, 9)), "version 9"),
    "GGUF, newer architecture": (
        changed(_new_architecture),
        "the architecture 'llamq'; a newer pyhobbit may",
    ),
    "GGUF, newer tokenizer": (keys(tokenizer__ggml__model="zoo"), "does not know the tokenizer 'zoo'"),
    "GGUF, further tensor": (beside("extra.weight"), "wrong number of tensors; expected 64, got 63"),
    "GGUF of Ollama": (beside("v.blk.0.weight"), "is in Ollama's own form"),
    "GGUF, tensor per expert": (tensors(separate), "has one tensor per expert, as llama.cpp once wrote them"),
    "projector": (
        keys(general__architecture="clip", general__type="mmproj"),
        "is no model but comes with one",
    ),
    "LoRA adapter": (keys(general__type="adapter", adapter__type="lora"), "is no model but comes with one"),
    "importance matrix": (keys(general__type="imatrix"), "is no model but comes with one"),
    "control vector": (keys(general__architecture="controlvector"), "is no model but comes with one"),
    "image model": (keys(general__architecture="flux"), "the architecture 'flux'"),
    "second part": (_second_part, "is part 2 of a split model: give its first part"),
    "last part is missing": (_without_last_part, "m-00004-of-00007.gguf"),
    "GGML of before 2023": (holding(b"tjgg" + struct.pack("<I", 3) + bytes(4096)), "is not a GGUF file"),
    "safetensors": (lambda path: shutil.copy(CHECKPOINT / "model.safetensors", path), "is not a GGUF file"),
    "pytorch": (_zip, "is not a GGUF file"),
    "pickle": (holding(pickle.dumps({"weight": [1.0]})), "is not a GGUF file"),
    "gzip": (
        lambda path: path.write_bytes(gzip.compress(models.tiny().read_bytes()[:4096])),
        "is not a GGUF file",
    ),
    "web page": (holding(PAGE.encode()), "is not a GGUF file"),
    "Git LFS pointer": (holding(POINTER.encode()), "is not a GGUF file"),
    "empty": (holding(b""), "is empty"),
}
FOLDERS: Mapping[str, tuple[Make, str]] = {
    "checkpoint, AWQ": (
        quantised(quantization_config={"quant_method": "awq", "bits": 4}),
        "quantised already (awq)",
    ),
    "checkpoint, EXL2": (quantised(quantization_config={"quant_method": "exl2"}), "quantised already (exl2)"),
    "checkpoint, bitsandbytes": (
        quantised(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "quantised already (bitsandbytes)",
    ),
    "checkpoint, MLX": (checkpoint(_mlx), "quantised already (MLX)"),
    "checkpoint of Mistral": (checkpoint(_mistral), "is in Mistral's own form"),
    "checkpoint of diffusers": (checkpoint(_diffusers), "is no Hugging Face checkpoint"),
}


# Headers that only loading tells from others, or that lack what would tell it.
UNSEEN = {"GGUF, further tensor", "second part", "last part is missing", "empty"}


def verbs(path: Path, name: str) -> dict[str, list[object]]:
    """Command lines by verb. name: of the model's repository."""
    pools = ["--pools", "5M"]
    convert = ["convert", "--low", "q4_0", "-o", path.with_name("out.gguf")]
    if path.is_dir():
        return {"convert": [*convert, path], "convert --dry-run": [*convert, "--dry-run", path]}
    return {
        "chat": ["chat", path, "-p", "x", "-n", 1],
        "chat --pools": ["chat", path, *pools, "-p", "x", "-n", 1],
        "serve": ["serve", path, *pools, "--port", 1],
        "inspect": ["inspect", path, "--no-speed"],
        "config": ["config", path],
        "bench": ["bench", path, *pools],
        "calibrate": ["calibrate", path, "--text", path.with_name("text")],
        "convert": [*convert, path],
        "convert --dry-run --sidecar": ["convert", "--dry-run", "--sidecar", path],
        "pull": ["pull", name],
        "inspect USER/NAME": ["inspect", name],
    }


def said(arguments: list[object]) -> tuple[int, str]:
    """Exit status and the last line on standard error; status 99: an exception that is none of ours."""
    from pyhobbit.cli.main import main

    with redirect_stderr(StringIO()) as err, redirect_stdout(StringIO()):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as e:
            status = int(e.code or 0)
        except Exception as e:  # a table has a line for each
            return 99, repr(e)
    return status, (err.getvalue().strip().splitlines() or [""])[-1].removeprefix("pyhobbit: error: ")


def main() -> int:
    forms = sys.argv[1:] or [*FORMS, *FOLDERS]
    repos: dict[str, dict[str, bytes]] = {}
    n_wrong = 0
    with tempfile.TemporaryDirectory() as temporary, serving(Hub(repos)) as hub:
        os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": temporary}  # before they are read
        for i, form in enumerate(forms):
            folder = Path(temporary, str(i))
            folder.mkdir()
            (folder / "text").write_text("def f(x):\n" * 400)
            path = folder / ("m" if form in FOLDERS else "m-Q8_0.gguf")
            make, sentence = {**FORMS, **FOLDERS}[form]
            make(path)
            name = f"u/m{i}"
            repos[name] = {path.name: path.read_bytes()} if path.is_file() else {}
            found = defaultdict(list)
            for verb, arguments in verbs(path, name).items():
                status, text = said(arguments)
                is_right = status == 1 and sentence in text and "damaged" not in text
                is_right &= not any(file.endswith(("gguf", "safetensors")) for file, _ in hub.served)
                hub.served.clear()
                if form in UNSEEN and verb in ("pull", "inspect USER/NAME"):
                    continue
                n_wrong += not is_right
                shown = text.replace(f"{folder}/", "").replace(f"{temporary}/", "")
                found[shown + ("" if is_right else f" (WRONG, {status})")].append(verb)
            for text, names in found.items():
                print(f"| {form} | {', '.join(names) if len(found) > 1 else 'all'} | {text} |", flush=True)
    print(f"{n_wrong} answers are wrong")
    return min(1, n_wrong)


if __name__ == "__main__":
    sys.exit(main())
