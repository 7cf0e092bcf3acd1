# SPDX-License-Identifier: MIT
"""A conversation on the terminal, until the user leaves."""

import os
from pathlib import Path

from prompt_toolkit.application import create_app_session
from prompt_toolkit.output import create_output

from pyhobbit._tables import COUNTERS
from pyhobbit.chat.answer import interrupting, print_answer
from pyhobbit.chat.commands import Commands, Next
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.screen import note, note_parts
from pyhobbit.chat.terminal import Terminal
from pyhobbit.engine.engine import Finish
from pyhobbit.engine.stats import ModelInfo, Stats
from pyhobbit.errors import ContextError, HobbitError
from pyhobbit.settings.config import counted_tokens, format_size

_ENDS: dict[Finish | None, str] = {
    "length": " (max_tokens)",
    "context": " (context full)",
    "interrupted": " (interrupted)",
}


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


# --- figures


def answer_figures(stats: Stats, finish: Finish | None, n_context: int) -> list[str]:
    """Parts of the line. stats: of this answer alone (Stats.since).  n_context: tokens in the context."""
    parts = [counted_tokens(stats.generated_tokens) + _ENDS.get(finish, "")]
    if finish == "interrupted" and not stats.generated_tokens:
        parts = ["stopped while reading the prompt: /retry goes on, /undo forgets the question"]
    if (rate := stats.decode_tokens_per_second) is not None:
        parts.append(f"{rate:.1f} token/s")
    if stats.drafted_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts right")
    if stats.info.cached:
        parts += _cache_figures(stats)
    return [*parts, f"context {n_context} of {stats.info.n_ctx}"]


def model_figures(info: ModelInfo, chose_context: bool) -> list[str]:
    """Figures of the opened model. chose_context: the engine chose the size of the context."""
    parts = [Path(info.model).name, info.description, f"context {info.context_text(chose_context)}"]
    if info.cached:
        parts += [f"experts in memory: {', '.join(info.pool_texts())}", info.precision or "full precision"]
    return parts


def _cache_figures(stats: Stats) -> list[str]:
    cache, found = stats.cache, stats.cache.rates
    parts = []
    if found.low_share or found.skipped_share:
        shares = (found.high_share, found.low_share, found.skipped_share)
        high, low, skipped = (f"{100 * (share or 0):.0f} %" for share in shares)
        parts.append(f"experts {high} high, {low} low, {skipped} skipped")
    tokens = (each.name for each in COUNTERS if each.name.startswith("tokens_"))  # some mechanisms count them
    parts += [f"{n} {name.replace('_', ' ')}" for name in tokens if (n := getattr(cache, name))]
    hits, read = found.hit_rate, stats.bytes_read_per_token
    if hits is not None and read is not None:
        parts.append(f"{100 * hits:.0f} % from memory, {format_size(read)}/token from disk")
    return parts
