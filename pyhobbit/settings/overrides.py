# SPDX-License-Identifier: MIT
"""Settings as llama.cpp carries them. Loads no library: the caller chooses the build of llama.cpp."""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from pyhobbit.settings.config import Setting


def kv_overrides(llama: Any, settings: Mapping[str, Setting]) -> "ctypes.Array[Any]":
    """The array for params.kv_overrides, by the bindings `llama`; must live as long as the params."""
    overrides = (llama.llama_model_kv_override * (len(settings) + 1))()  # an empty key ends it
    for override, (key, setting) in zip(overrides, settings.items(), strict=False):
        override.key = key.encode()
        if isinstance(setting, bool):
            override.tag, override.value.val_bool = llama.LLAMA_KV_OVERRIDE_TYPE_BOOL, setting
        elif isinstance(setting, int):
            override.tag, override.value.val_i64 = llama.LLAMA_KV_OVERRIDE_TYPE_INT, setting
        elif isinstance(setting, float):
            override.tag, override.value.val_f64 = llama.LLAMA_KV_OVERRIDE_TYPE_FLOAT, setting
        else:
            override.tag, override.value.val_str = llama.LLAMA_KV_OVERRIDE_TYPE_STR, os.fsencode(setting)
    return overrides
