# SPDX-License-Identifier: MIT
"""A pytest plugin for llama-cpp-python's tests: Hobbit in place of Llama, small models for downloaded ones.

pytest -p hobbit_for_llama --substitutes FOLDER: where hobbit_substitutes wrote its models, as KIND.gguf.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hobbit_substitutes import POOL_BYTES

from pyhobbit import Hobbit

KIND_OF_FILE = {
    "Qwen3.5-0.8B-Q8_0.gguf": "transformer",
    "tinyllamas/stories15M-q4_0.gguf": "transformer",
    "mamba-130m-hf.Q2_K.gguf": "recurrent",
    "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": "hybrid",
    "bge-small-en-v1.5-q4_k_m.gguf": "embedding",
}

SKIPPED = {
    "test_real_model": "asks for token ids of a model that must be downloaded, through LlamaModel, not Llama",
}


class _WithFewExperts(Hobbit):
    """Pools for half of the substitutes' experts; dense models and vocabularies have none."""

    def __init__(self, model_path: str, **arguments: Any) -> None:
        is_dense = Path(model_path).stem == "recurrent" or arguments.get("vocab_only", False)
        super().__init__(model_path, **({} if is_dense else {"pools": POOL_BYTES}), **arguments)
        assert is_dense or self.info().cached


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--substitutes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    import llama_cpp

    def substitute(_repo: str, file: str) -> str:
        return str(config.getoption("--substitutes") / f"{KIND_OF_FILE[file]}.gguf")

    huggingface_hub.hf_hub_download = substitute
    llama_cpp.Llama = _WithFewExperts
    # The tests import one function of it and never call that.
    scipy, special = types.ModuleType("scipy"), types.ModuleType("scipy.special")
    special.log_softmax = None
    sys.modules.update({"scipy": scipy, "scipy.special": special})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := SKIPPED.get(item.name):
            item.add_marker(pytest.mark.skip(reason=reason))
