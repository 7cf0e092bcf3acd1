# SPDX-License-Identifier: MIT
"""MoE models larger than memory on llama.cpp: experts on disk in several precisions, a bounded cache of them.

from pyhobbit import CacheConfig, Engine, EngineConfig

with Engine("model.gguf", EngineConfig(cache=CacheConfig(memory=8 << 30))) as engine:
    for piece in engine.generate("def fibonacci(n):", max_tokens=100):
        print(piece.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from pyhobbit.config import CacheConfig, EngineConfig, SamplingConfig, parse_size
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.stats import CacheStats, ModelInfo, Stats

if TYPE_CHECKING:
    from pyhobbit.engine import Engine, Piece

__all__ = [
    "CacheConfig",
    "CacheStats",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "HobbitError",
    "ModelInfo",
    "Piece",
    "SamplingConfig",
    "Stats",
    "parse_size",
]


def __getattr__(name: str) -> Any:
    # The engine brings the native libraries, which the converter does without.
    if name in ("Engine", "Piece"):
        from pyhobbit import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'pyhobbit' has no attribute '{name}'")
