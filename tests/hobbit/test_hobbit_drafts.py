# SPDX-License-Identifier: MIT
"""Draft models of Hobbit: they change no token, and are refused where a state cannot go back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import architecture_file
import models
import numpy as np
import pytest
import random_moe
from hobbits import PROMPT, open_model, text_of

from pyhobbit import (
    ConfigError,
    Hobbit,
    HobbitError,
    TextDrafts,
)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[Hobbit]:
    with open_model(tiny_gguf) as opened:
        yield opened


def test_a_draft_model_changes_no_token(tiny_gguf: Path, model: Hobbit) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with open_model(tiny_gguf, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4)) as drafted:
        assert text_of(drafted, max_tokens=48) == text_of(model, max_tokens=48)


def test_drafts_from_the_text_change_no_token_and_keep_few_logits(tiny_gguf: Path, model: Hobbit) -> None:
    prompts = ["for i in range(10):\n    print(i)\n" * 4, PROMPT]
    drafts = TextDrafts(4)
    with open_model(tiny_gguf, draft_model=drafts) as drafted:
        assert [text_of(drafted, each, max_tokens=64) for each in prompts] == [
            text_of(model, each, max_tokens=64) for each in prompts
        ]
        assert drafted.scores.shape == model.scores.shape
        assert drafted.info().pool_bytes_high == model.info().pool_bytes_high
        assert drafted.n_batch == model.n_batch
    assert 0 < drafts.n_accepted <= drafts.n_drafted


def test_drafts_go_on_where_the_text_does_and_begin_anew_elsewhere() -> None:
    drafts = TextDrafts(3)
    text = [1, 2, 3, 4, 5]
    for new in range(10, 15):  # four passes of one token, before the first draft
        text.append(new)
        assert drafts(np.array(text, np.intc)).tolist() == []
        drafts.note_pass(1, 1.0)
    text += [1, 2, 3]
    drafts.note_pass(3, 1.0)  # not a pass of drafts: the caller added tokens
    assert drafts(np.array(text, np.intc)).tolist() == [4]
    drafts.note_pass(2, 1.2)
    text += [4, 5]  # the draft was right, and 5 is the token after it
    assert drafts(np.array(text, np.intc)).tolist() == [10, 11, 12]
    assert (drafts.n_drafted, drafts.n_accepted) == (1, 1)
    drafts.note_pass(4, 1.4)
    assert drafts(np.array([7, 8], np.intc)).tolist() == []  # another text
    assert (drafts.n_drafted, drafts.n_accepted) == (1, 1)


@pytest.mark.parametrize("number", [0, 16, 2.5])
def test_a_number_of_drafts_that_cannot_be_is_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="num_pred_tokens is"):
        TextDrafts(number)


def test_a_model_whose_state_cannot_go_back_takes_no_drafts(tmp_path: Path) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    path = architecture_file.write("jamba", tmp_path / "m.gguf")
    for drafts in (TextDrafts(), LlamaPromptLookupDecoding(4), lambda _ids: np.array([], np.intc)):
        with pytest.raises(HobbitError, match="leave draft_model out"):
            open_model(path, draft_model=drafts)


class _Wrong(TextDrafts):
    def __call__(self, input_ids: Any, /, **_kwargs: Any) -> np.ndarray:
        self.n_drafted += 3
        return np.array([3, 4, 5], np.intc)


def test_a_state_goes_back_over_wrong_drafts(tmp_path: Path) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    path, drafts = tmp_path / "hybrid.gguf", _Wrong(3)
    random_moe.write_model(random_moe.hybrid(), path, models.stock_dir())
    with open_model(path) as plain, open_model(path, draft_model=drafts) as drafted:
        for prompt in ("import os\n", "x = 3"):
            assert text_of(drafted, prompt, max_tokens=24) == text_of(plain, prompt, max_tokens=24)
    assert drafts.n_drafted > 100
    with pytest.raises(HobbitError, match="leave draft_model out, or use TextDrafts"):
        open_model(path, draft_model=LlamaPromptLookupDecoding(4))
