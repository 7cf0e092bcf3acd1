# SPDX-License-Identifier: MIT
"""The MoE models in the folders of ollama and LM Studio, by the names of these programs. Nothing is copied.

ollama keeps models as blobs without names: a link in our own folder gives one a name, and its sidecar and
calibration a place.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.file_names import is_gguf

_LAYER = "application/vnd.ollama.image.model"
_HOST, _USER, _TAG = "registry.ollama.ai", "library", "latest"


def _ollama_folders() -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    of_service = Path("/usr/share/ollama/.ollama/models")
    return [Path(own)] if own else [Path.home() / ".ollama/models", of_service]


def lm_studio_folders() -> list[Path]:
    """Folders in which LM Studio keeps models, PUBLISHER/NAME/FILE.gguf."""
    return [Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"]


def find(name: str) -> Path | None:
    """The file of a model that ollama or LM Studio calls so; None where none of them has it."""
    tagged = name if "/" in name or ":" in name else f"{name}:{_TAG}"  # USER/NAME alone is on Hugging Face
    with suppress(OSError, ValueError):  # a name of zeros, or of a folder that is not ours
        for folder in lm_studio_folders() if is_gguf(name) and not Path(name).is_absolute() else ():
            if (folder / name).is_file():
                return folder / name
        found = (blob for each, blob in ollama_models() if each == tagged)
        return _named(blob, name) if (blob := next(found, None)) else None
    return None


def ollama_models() -> Iterator[tuple[str, Path]]:
    """Name and file of each of ollama's models."""
    for folder in _ollama_folders():
        for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
            if blob := _blob(folder, manifest):
                host, user, model, tag = manifest.relative_to(folder / "manifests").parts
                above = f"{host}/{user}/" if host != _HOST else f"{user}/" if user != _USER else ""
                yield f"{above}{model}:{tag}", blob


def moe_form(path: Path) -> str | None:
    """Nothing for a GGUF file with routed experts, or words about its form; None for other files."""
    from pyhobbit.model.gguf_file import read_gguf  # takes a while to import
    from pyhobbit.model.model_file import check_form

    try:
        file = read_gguf(path)
    except HobbitError:
        return None
    keys = file.metadata
    if not any(key.endswith(".expert_count") and keys[key].value() for key in keys):
        return None
    try:
        check_form([file])
    except LoadError:
        return ", in a form that cannot be loaded"
    return ""


def _blob(folder: Path, manifest: Path) -> Path | None:
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [each["digest"] for each in layers if each["mediaType"] == _LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not a manifest
    path = folder / "blobs" / digests[0].replace(":", "-") if digests else folder
    return path if path.is_file() else None


def _named(blob: Path, name: str) -> Path:
    """A link to the blob; the blob itself where no link can be made."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    link = data / "pyhobbit/ollama" / f"{re.sub(r'[/:]', '-', name)}.gguf"
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and link.readlink() != blob:  # a newer version of the model
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(blob)
    except OSError:
        return blob
    return link
