# SPDX-License-Identifier: MIT
"""Why a file cannot be loaded as a model: the same sentence for every verb, from llama.cpp and our reader."""

import os
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from errno import EINVAL, EMFILE, ENOMEM, errorcode
from pathlib import Path
from typing import Any

from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.gguf_file import GgufFile, pack_header
from pyhobbit.model.model_file import check_form, model_parts
from pyhobbit.model.tiers import ALIGNMENT
from pyhobbit.native.ffi import last_error, lib, llama, lost_machine

_LOG_LEVEL_ERROR = 4
_LOG_LEVEL_CONTINUED = 5
_NO_MEMORY = (os.strerror(ENOMEM), "bad_alloc", "allocate")  # in a reason
_UNKNOWN = re.compile(r"unknown (?:model )?(architecture|tokenizer|pre-tokenizer type): '([^']*)'")


class Log:
    """Takes llama.cpp's log, one per process: keeps the error lines, shows everything when verbose."""

    def __init__(self) -> None:
        self.verbose = False
        self.errors: list[str] = []
        self._level = 0
        self.callback = llama.llama_log_callback(self._on_text)
        llama.llama_log_set(self.callback, None)

    def start(self, verbose: bool) -> None:
        """Forgets the errors so far, the engine's last one too."""
        self.verbose = verbose
        self.errors.clear()
        lib.hobbit_clear_last_error()

    def reason(self) -> str | None:
        """The first error since start(), without the names of the functions that wrote it."""
        return re.sub(r"^(\w+: |error loading model: )+", "", self.errors[0]).strip() if self.errors else None

    def _on_text(self, level: int, text: bytes, _user_data: object) -> None:
        line = text.decode("utf-8", "replace")
        if level != _LOG_LEVEL_CONTINUED:
            self._level = level
        if self._level == _LOG_LEVEL_ERROR:
            self.errors.append(line)
        if self.verbose:
            sys.stderr.write(line)


log = Log()
llama.llama_backend_init()

opening = threading.RLock()
"""Held while a model is opened or closed: llama.cpp's log and hobbit's last error belong to the process."""


def load_failure(path: str | Path, hint: str | None = None, name: Path | None = None) -> str:
    """Why llama.cpp could not open the file, as our reader, the engine or llama.cpp's log says.

    hint: what to do where neither the file, nor the system, nor a lack of memory is the cause.  name: of the
    model, where the file is only its header.
    """
    if (lost := lost_machine()) is not None:
        return lost
    name = name or Path(path)
    reason = log.reason() or "llama.cpp gave no reason"
    if "the override of " in reason:
        hint = "correct it, or leave it out"
    elif os.strerror(EMFILE) in reason:
        hint = "raise the limit of open files, in the shell: ulimit -n 65536"
    elif any(word in reason for word in _NO_MEMORY):
        hint = "free some memory, or use a smaller context"
    elif any(os.strerror(error) in reason for error in errorcode if error != EINVAL):
        hint = "the system refused it, so the file itself may be sound"
    else:
        try:
            files = model_parts(Path(path))
            check_form(files)
        except LoadError as e:
            return str(e)
        except HobbitError:
            pass  # the engine says it better
    if (what := _UNKNOWN.search(reason)) is not None:
        known = f"this pyhobbit's llama.cpp does not know the {what[1]} '{what[2]}'"
        return f"{name} cannot be loaded: {known}; a newer pyhobbit may"
    hint = hint or "take another file of the model, or a newer pyhobbit"
    return (last_error() or f"{path} cannot be loaded: {reason}; {hint}").replace(str(path), str(name))


def _loads(path: Path, **params: Any) -> bool:
    """Tells if llama.cpp loads a model with these parameters; if not, the log says why."""
    given = llama.llama_model_default_params()
    for name, value in params.items():
        setattr(given, name, value)
    log.start(False)
    model = llama.llama_model_load_from_file(bytes(path), given)
    llama.llama_model_free(model)
    return bool(model)


def check_loads(path: Path, name: Path | None = None, hint: str | None = None) -> None:
    """Raises LoadError where llama.cpp cannot load the model's header. name, hint: as of load_failure()."""
    with opening:
        if not _loads(path, no_alloc=True, load_mode=llama.LLAMA_LOAD_MODE_NONE):
            raise LoadError(load_failure(path, hint, name))


def check_known(files: Sequence[GgufFile]) -> None:
    """As check_loads() before a download, by what headers tell alone: form, architecture and tokenizer."""
    check_form(files)
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file, opening:
        file.write(pack_header([*files[0].metadata.values()], [], ALIGNMENT))
        file.flush()
        if not _loads(Path(file.name), vocab_only=True) and _UNKNOWN.search(log.reason() or ""):
            raise LoadError(load_failure(files[0].path))
