# SPDX-License-Identifier: MIT
"""The mechanisms of this build."""

import re
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
_LIST = (_TESTS.parent / "ggml_ext" / "mechanisms.cmake").read_text("utf-8")
MECHANISMS = re.findall(r"^    (\w+)$", _LIST, re.MULTILINE)
