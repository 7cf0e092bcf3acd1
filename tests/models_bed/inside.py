# SPDX-License-Identifier: MIT
"""A conversation in this process, its answers as JSON.

python inside.py chat|hobbit MODEL POOLS QUESTION...
"""

import json
import sys
from pathlib import Path
from typing import Any

N_TOKENS = 8
N_CTX = 1024


def chat(model: Path, pools: int, questions: list[str]) -> list[str]:
    """The answers of `pyhobbit chat`."""
    from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
    from pyhobbit.chat.conversation import Conversation
    from pyhobbit.settings.config import ChatConfig

    config = EngineConfig(CacheConfig(pools=pools), n_ctx=N_CTX)
    answers = []
    with Engine(model, config) as engine:
        conversation = Conversation(engine, ChatConfig(config, SamplingConfig(temp=0), max_tokens=N_TOKENS))
        for question in questions:
            answers.append("".join(piece.text for piece in conversation.ask(question)))
    return answers


def hobbit(model: Path, pools: int, questions: list[str]) -> list[str]:
    """The answers of llama-cpp-python's interface."""
    from pyhobbit import Hobbit

    return _answers(Hobbit(model, pools=pools, n_ctx=N_CTX, verbose=False), questions)


def llama(model: Path, _pools: int, questions: list[str]) -> list[str]:
    """Answers of llama-cpp-python itself, with the library of LLAMA_CPP_LIB_PATH and Hobbit's attention."""
    from llama_cpp import Llama

    return _answers(Llama(str(model), n_ctx=N_CTX, flash_attn=True, verbose=False), questions)


def _answers(model: Any, questions: list[str]) -> list[str]:
    messages: list[dict[str, str]] = []
    for question in questions:
        if sys.argv[1].endswith("anew"):
            model.reset()
        messages.append({"role": "user", "content": question})
        done = model.create_chat_completion(messages, max_tokens=N_TOKENS, temperature=0.0)
        messages.append(done["choices"][0]["message"])
    model.close()
    return [message["content"] for message in messages[1::2]]


if __name__ == "__main__":
    run = {"chat": chat, "hobbit": hobbit, "llama": llama}[sys.argv[1].removesuffix("-anew")]
    print(json.dumps(run(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
