# SPDX-License-Identifier: MIT
"""Leaves out the tests of mechanisms that are not built."""

import re
from pathlib import Path

_HERE = Path(__file__).parent
_LIST = _HERE.parents[1] / "ggml_ext" / "mechanisms.cmake"
_BUILT = re.findall(r"^    (\w+)$", _LIST.read_text("utf-8"), re.MULTILINE)

collect_ignore = [path.name for path in _HERE.iterdir() if path.is_dir() and path.name not in _BUILT]
