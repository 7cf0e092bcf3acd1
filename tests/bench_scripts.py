# SPDX-License-Identifier: MIT
"""The scripts of bench/ as modules, for tests of their functions."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import models


def load(name: str) -> ModuleType:
    """The script bench/NAME.py, under a name that no package has."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", models.ROOT / f"bench/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclass looks there
    spec.loader.exec_module(module)
    return module
