# SPDX-License-Identifier: MIT
"""Keeps what a calibration has measured, so that one that was stopped goes on where it was."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyhobbit.model.file_names import calibration_path
from pyhobbit.native.files import write_text
from pyhobbit.quality.evaluate import Quality

_VERSION = 4


class Measurements:
    """Measured settings by name, in a file beside the model. key: what they belong to; others are dropped."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path = path
        self._key = {"version": _VERSION, **key}
        self._found: dict[str, dict[str, Any]] = {}
        # a damaged file is measured again
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["key"] == self._key:
                self._found = {name: asdict(Quality(**values)) for name, values in stored["found"].items()}

    @staticmethod
    def path_of(model: Path) -> Path:
        """The file of a model's measurements."""
        return calibration_path(model).with_suffix(".partial.json")

    def __len__(self) -> int:
        return len(self._found)

    def measured(self, name: str, measure: Callable[[], Quality]) -> Quality:
        """An earlier run's measurement of this name, or a new one, which is stored at once."""
        if name not in self._found:
            self._found[name] = asdict(measure())
            write_text(self.path, json.dumps({"key": self._key, "found": self._found}))
        return Quality(**self._found[name])
