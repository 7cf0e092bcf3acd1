# SPDX-License-Identifier: MIT
"""A conversation on the terminal, until the user leaves."""

import os
from pathlib import Path

from prompt_toolkit.application import create_app_session
from prompt_toolkit.output import create_output

from pyhobbit.chat.answer import interrupting, print_answer
from pyhobbit.chat.commands import Commands
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.screen import note, note_parts
from pyhobbit.chat.status import answer_figures, model_figures
from pyhobbit.chat.terminal import Terminal
from pyhobbit.errors import ContextError, HobbitError


def talk(conversation: Conversation) -> None:
    """Reads messages and commands and answers them."""
    note_parts(model_figures(conversation.engine.info()))
    commands = Commands(conversation)
    # The prompt goes to standard error where the answers do not go to the terminal.
    with create_app_session(output=create_output(always_prefer_tty=True)):
        terminal = Terminal(_history_path(), commands.names, commands.candidates)
        while (text := terminal.read()) is not None and _handle(text, conversation, commands):
            pass


def _handle(text: str, conversation: Conversation, commands: Commands) -> bool:
    """Answers a message or runs a command; False when that was to leave."""
    try:
        if commands.is_command(text):
            return commands.run(text)
        if text.strip():
            _answer(text, conversation)
    except ContextError as e:
        note(f"{e}, or start over with /reset")
    except HobbitError as e:
        note(str(e))
    except KeyboardInterrupt:  # while a command ran
        note("interrupted")
    return True


def _answer(text: str, conversation: Conversation) -> None:
    engine = conversation.engine
    before = engine.stats()
    with interrupting(engine):
        finish = print_answer(conversation.ask(text))
    note_parts(answer_figures(engine.stats().since(before), finish))
    if finish == "context":
        note("the context is full: start over with /reset, or restart with a larger --ctx")
    note("")


def _history_path() -> Path:
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:  # a user without a home
        return Path(os.devnull)
    return state / "pyhobbit" / "history"
