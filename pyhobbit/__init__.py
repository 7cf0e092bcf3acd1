# SPDX-License-Identifier: MIT
"""MoE models larger than memory on llama.cpp: experts on disk in several precisions, a bounded cache of them.

```python
from pyhobbit import Hobbit

with Hobbit("model.gguf", memory="8G") as model:
    print(model("def fibonacci(n):", max_tokens=100)["choices"][0]["text"])
    print(model.stats().summary())
```
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyhobbit.engine.engine import Beam, Engine, Piece
    from pyhobbit.engine.stats import CacheStats, ModelInfo, Stats
    from pyhobbit.errors import ConfigError, HobbitError
    from pyhobbit.hobbit.hobbit import Hobbit
    from pyhobbit.hobbit.text_drafts import TextDrafts
    from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig, parse_size

__all__ = [
    "Beam",
    "CacheConfig",
    "CacheStats",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "Hobbit",
    "HobbitError",
    "ModelInfo",
    "Piece",
    "SamplingConfig",
    "Stats",
    "TextDrafts",
    "parse_size",
]

_MODULES = {
    "settings.config": ("CacheConfig", "EngineConfig", "SamplingConfig", "parse_size"),
    "engine.engine": ("Beam", "Engine", "Piece"),
    "errors": ("ConfigError", "HobbitError"),
    "hobbit.hobbit": ("Hobbit",),
    "hobbit.text_drafts": ("TextDrafts",),
    "engine.stats": ("CacheStats", "ModelInfo", "Stats"),
}


def _share_libraries() -> None:
    # llama_cpp takes its libraries from there when it is imported, and brings none of its own.
    from pyhobbit.native.environment import share
    from pyhobbit.native.paths import LIB_DIR

    share("LLAMA_CPP_LIB_PATH", str(LIB_DIR))
    share("GGML_NO_BACKTRACE", "1")  # where llama.cpp aborts, it starts a debugger, which may take minutes


_share_libraries()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str) -> object:
    # The engine brings native libraries, which the converter does without, and Ctrl-C before it has started.
    from importlib import import_module

    if name == "__version__":
        return import_module("importlib.metadata").version("pyhobbit")
    for module, names in _MODULES.items():
        if name in names:
            try:
                return getattr(import_module(f"pyhobbit.{module}"), name)
            except ModuleNotFoundError as e:
                if e.name != "pyhobbit._tables":  # the build makes it
                    raise
                raise ImportError(
                    f"{__path__[0]} holds sources of pyhobbit, no libraries; start Python in another folder"
                ) from None
    raise AttributeError(f"module 'pyhobbit' has no attribute '{name}'")
