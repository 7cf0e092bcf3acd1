# SPDX-License-Identifier: MIT
"""A conversation in this process, its answers as JSON.

python inside.py chat|hobbit MODEL POOLS QUESTION...
"""

import json
import sys
from pathlib import Path

from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit, SamplingConfig
from pyhobbit.chat.conversation import Conversation
from pyhobbit.settings.config import ChatConfig

N_TOKENS = 8
N_CTX = 1024


def chat(model: Path, pools: int, questions: list[str]) -> list[str]:
    """The answers of `pyhobbit chat`."""
    config = EngineConfig(CacheConfig(pools=pools), n_ctx=N_CTX)
    answers = []
    with Engine(model, config) as engine:
        conversation = Conversation(engine, ChatConfig(config, SamplingConfig(temp=0), N_TOKENS))
        for question in questions:
            answers.append("".join(piece.text for piece in conversation.ask(question)))
    return answers


def hobbit(model: Path, pools: int, questions: list[str]) -> list[str]:
    """The answers of llama-cpp-python's interface."""
    messages: list[dict[str, str]] = []
    with Hobbit(model, pools=pools, n_ctx=N_CTX, verbose=False) as model_:
        for question in questions:
            messages.append({"role": "user", "content": question})
            done = model_.create_chat_completion(messages, max_tokens=N_TOKENS, temperature=0.0)
            messages.append(done["choices"][0]["message"])
    return [message["content"] for message in messages[1::2]]


if __name__ == "__main__":
    run = {"chat": chat, "hobbit": hobbit}[sys.argv[1]]
    print(json.dumps(run(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
