# SPDX-License-Identifier: MIT
"""A conversation on the terminal, until the user leaves."""

import os
from pathlib import Path

from prompt_toolkit.application import create_app_session
from prompt_toolkit.output import create_output

from pyhobbit.chat.answer import interrupting, print_answer
from pyhobbit.chat.commands import Commands, Next
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.screen import note, note_parts
from pyhobbit.chat.status import answer_figures, model_figures
from pyhobbit.chat.terminal import Terminal
from pyhobbit.errors import ContextError, HobbitError


def talk(conversation: Conversation, quiet: bool = False) -> None:
    """Reads messages and commands and answers them.  quiet: without figures."""
    if not quiet:
        note_parts(model_figures(conversation.engine.info(), conversation.chose_context))
    commands = Commands(conversation)
    # The prompt goes to standard error where the answers do not go to the terminal.
    with create_app_session(output=create_output(always_prefer_tty=True)):
        hint = "Send a message" if conversation.has_template else "Type a text to continue"
        terminal = Terminal(_history_path(), commands.names, hint)
        following = Next()
        while not following.leave and (text := terminal.read()) is not None:
            with terminal.silent():
                following = _handle(text, conversation, commands, quiet)


def _handle(text: str, conversation: Conversation, commands: Commands, quiet: bool) -> Next:
    """Answers a message or runs a command."""
    following = Next()
    try:
        if commands.is_command(text):
            following = commands.run(text)
            if following.ask is not None:
                _answer(conversation, following.ask, True, quiet)
        elif text.strip():
            _answer(conversation, text, False, quiet)
    except ContextError as e:
        note(f"{e}, or start over with /reset")
    except HobbitError as e:
        note(str(e))
    except KeyboardInterrupt:  # a command was interrupted
        note("interrupted")
    return following


def _answer(conversation: Conversation, question: str, replaces_last: bool, quiet: bool) -> None:
    engine = conversation.engine
    before, n_dropped, turns = engine.stats(), conversation.n_dropped, conversation.turns
    with interrupting(engine):
        finish = print_answer(conversation, question, replaces_last, quiet)
    if not quiet:
        figures = answer_figures(engine.stats().since(before), finish, engine.n_context_tokens)
        note_parts(figures)
    if (n := conversation.n_dropped) > n_dropped:
        which = "first answer" if n == 1 else f"first {n} answers"
        note(f"the context is full: the model no longer sees the {which}")
    if conversation.turns is turns and finish in ("context", "length"):
        note("the model only thought, so the question is forgotten: use /think off, or allow more tokens")
    elif finish == "context":
        info = engine.info()
        hint = "restart with a larger --ctx for longer ones"
        if info.n_ctx >= info.n_ctx_train:
            hint = "it is the model's largest; /undo or /reset makes room"
        note(f"the context is full: the answer ends here; {hint}")
    note("")


def _history_path() -> Path:
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:  # a user without a home
        return Path(os.devnull)
    return state / "pyhobbit" / "history"
