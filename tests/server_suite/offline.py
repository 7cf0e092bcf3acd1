# SPDX-License-Identifier: MIT
"""pytest plugin for llama.cpp's server tests: a model of ours in place of everything that they download."""

import functools
from typing import Any

import pytest

OPTION = "--offline-model"

_REQUEST_TIMEOUT_S = 120
_START_TIMEOUT_S = 300  # the suite's 60 are not enough where the machine has other work
# By a part of the name.
_OTHER_KINDS = {"jina-reranker": "needs a reranking model", "tinygemma3": "needs a model that sees"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, required=True, help="path of the model")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Changes the suite's helpers before its test modules copy their names."""
    import utils  # the suite's

    model = session.config.getoption(OPTION)
    original_start = utils.ServerProcess.start

    def start(self: Any, timeout_seconds: int = _START_TIMEOUT_S) -> None:
        for repository, reason in _OTHER_KINDS.items():
            if repository in f"{self.model_hf_repo}/{self.model_hf_file}":
                pytest.skip(reason)
        if self.model_hf_repo or self.model_hf_file or self.model_url:
            self.model_hf_repo = self.model_hf_file = self.model_url = None
            self.model_file = model
        if self.server_embeddings and self.pooling is None:
            self.pooling = "mean"  # the embedding models say so themselves
        original_start(self, timeout_seconds)

    utils.ServerProcess.start = start
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.DEFAULT_REQUEST_TIMEOUT = _REQUEST_TIMEOUT_S
    utils.download_file = functools.partial(_download_file, model)


def _download_file(model: str, url: str, output_file_path: str | None = None) -> str:
    if "lora" in url.lower() or "shakespeare" in url:
        pytest.skip("needs a LoRA adapter of the model that it downloads")
    if not url.endswith(".gguf"):
        pytest.skip(f"needs {url}")
    return model
