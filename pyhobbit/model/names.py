# SPDX-License-Identifier: MIT
"""How a user names a model: a GGUF file, or a repository on Hugging Face."""

import json
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from pyhobbit.errors import ConfigError, HobbitError, LoadError
from pyhobbit.model import file_names

_MAX_NAMES = 5
_UNREADABLE = ("aqlm", "awq", "bitsandbytes", "exl2", "exl3", "hqq", "MLX", "quanto", "torchao")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[^:]+)?")
_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.+?)/?(?:[?#].*)?", re.IGNORECASE)
_ADDRESS = re.compile(r"\w+://")


def parse_repository(name: str) -> tuple[str, str | None]:
    """USER/NAME and QUANT, None without one, of USER/NAME[:QUANT]. Raises ConfigError."""
    repo, _, quant = name.partition(":")
    pieces = repo.split("/")
    if len(pieces) != 2 or not all(pieces) or ":" in quant:
        raise ConfigError(f"'{name}' is not a repository; write USER/NAME or USER/NAME:QUANT")
    return repo, quant or None


def repository_in(model: str) -> str | None:
    """USER/NAME[:QUANT] if that is what a user means by MODEL, in place of a file; also of a page's address.

    Raises ConfigError.
    """
    if (page := _PAGE.fullmatch(model)) is not None:
        if not _REPOSITORY.fullmatch(page[1]):
            raise ConfigError(f"{model} is not the page of a model; write USER/NAME[:QUANT]")
        return page[1]
    if _ADDRESS.match(model):
        raise ConfigError(f"{model} is not an address on Hugging Face; download the file and give its path")
    is_name = _REPOSITORY.fullmatch(model) and (":" in model or not file_names.is_gguf(model))
    folder = Path(model).parent
    return model if is_name and not Path(model).exists() and not folder.is_dir() else None


def check_model_file(path: Path) -> None:
    """Raises HobbitError for what a user can get wrong about the name of a GGUF file."""
    if path.is_dir():
        is_checkpoint = (path / "config.json").exists()
        convert = f"; convert this checkpoint first with: pyhobbit convert {path}" if is_checkpoint else ""
        raise HobbitError(f"{path} is a folder; give a GGUF file{suggestion(path) or convert}")
    if path.parent.is_dir() and (path.suffix.lower() != ".gguf" or not path.exists()):
        for whole, pieces in file_names.raw_pieces(each.name for each in path.parent.iterdir()).items():
            if path.name in (whole, *pieces):
                raise HobbitError(file_names.in_pieces(whole, pieces))
    try:
        head = file_names.read_head(path)
    except FileNotFoundError:
        hint = suggestion(path.parent, path.name)
        if ":" in path.name or not path.suffix:  # may be meant as a name
            hint += "; pyhobbit list shows models, and on Hugging Face they are called USER/NAME[:QUANT]"
        gone = "is a link to a file that is gone; pull it again"
        raise HobbitError(f"{path} {gone if path.is_symlink() else f'does not exist{hint}'}") from None
    except OSError as e:
        raise HobbitError(f"{path} cannot be read: {e.strerror}") from e
    if head[:4] != b"GGUF":
        what = "not a GGUF file; make one of a checkpoint: pyhobbit convert FOLDER" if head else "empty"
        raise HobbitError(f"{path} is {what}")
    check_kind(path, head)


def check_kind(path: Path, head: bytes) -> None:
    """Raises LoadError for a GGUF that comes with a model, by its first bytes."""
    if file_names.is_other(head):
        uses = "a projector for --mmproj or an importance matrix for convert --imatrix"
        own = (f"holds only {of} of one" for kind, of in file_names.OWN_TYPES.items() if kind in head)
        what = next(own, f"comes with one, like {uses}")
        raise LoadError(f"{path} is no model but {what}; give the model")


def check_quantised(name: object, config: Path, failure: str = "") -> None:
    """Raises HobbitError for a form that llama.cpp's converter never reads, by config.json.

    failure: of the converter, of which any form is the likely cause.
    """
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # the conversion names these
        values = json.loads(config.read_text("utf-8"))
        quantised = values.get("quantization_config") or {}
        form = quantised.get("quant_method") or "MLX" * bool(values.get("quantization"))
        if form in _UNREADABLE or (form and failure):
            what = f"{name} is quantised already ({form}): take the checkpoint it was made from"
            raise HobbitError(f"{what} ({failure})" if failure else what)


def models_below(folder: Path, *patterns: str) -> tuple[list[Path], list[str]]:
    """First files of the models in a folder, and why other GGUF files are none. Raises HobbitError."""
    if not folder.is_dir():
        raise HobbitError(f"{folder} is not a folder; give one that holds GGUF files")
    models, problems = [], []
    found = (each for pattern in patterns for each in folder.glob(pattern))
    for path in sorted(filter(file_names.is_gguf, found)):
        try:
            if _is_model(path):
                models.append(path)
        except (HobbitError, OSError) as e:
            problems.append(str(e) if isinstance(e, HobbitError) else f"{path}: {e.strerror}")
    return models, problems


def _is_model(path: Path) -> bool:
    """False for what comes with a model. Raises HobbitError, OSError for a file that cannot be one."""
    split = file_names.split_name(path)
    if split is not None and split[1] > 1:
        if not path.with_name(file_names.part_names(path.name)[0]).exists():
            raise HobbitError(f"{path} is a part of a model whose first part is missing")
        return False
    if not file_names.is_model_file(path):
        return False
    from pyhobbit.model.model_file import check_form, model_parts  # takes a while to import

    check_model_file(path)
    check_form(model_parts(path))
    return True


def suggestion(folder: Path, name: str = "") -> str:
    """Suggests files instead of `name`, in words that follow a sentence."""
    if not folder.is_dir():
        return f", nor does the folder {folder}"
    try:
        files = (path.name for path in folder.iterdir() if file_names.is_gguf(path) and path.exists())
        names = sorted(filter(file_names.is_model_name, files))
    except OSError:
        return ""
    near = get_close_matches(name, names, n=3, cutoff=0.75)
    if near:
        return "; did you mean " + " or ".join(str(folder / each) for each in near) + "?"
    if names:
        more = " and others" if len(names) > _MAX_NAMES else ""
        return f"; {folder} holds {', '.join(names[:_MAX_NAMES])}{more}"
    return ""
