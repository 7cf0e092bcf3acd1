# SPDX-License-Identifier: MIT
"""Training of other shapes: the weights that it starts from."""

import pytest
import sentencepiece as spm
import torch
from conftest import TESTS, TINY_MODEL

from evaluate import perplexity
from model import ModelConfig, TinyMixtral, load_hf
from train import upcycled


@pytest.mark.slow
def test_more_layers_and_experts_begin_with_what_the_model_has_learnt() -> None:
    shape = ModelConfig(layers=12, expert_ffn=96, experts=32, top_k=4)
    model = TinyMixtral(shape)
    model.load_state_dict(upcycled(TINY_MODEL, shape, torch.Generator().manual_seed(1)))
    tokenizer = spm.SentencePieceProcessor(model_file=str(TINY_MODEL / "tokenizer.model"))
    ids = tokenizer.encode((TESTS / "tiny_moe/heldout.txt").read_text("utf-8")[:6000])
    before = perplexity(load_hf(ModelConfig(), TINY_MODEL), ids)
    assert 0.8 < perplexity(model, ids) / before < 1.2
