# SPDX-License-Identifier: MIT
"""The sub-commands, one module per verb.

Its add_arguments(parser) declares the verb's options; run(args) runs it with parsed ones and returns the exit
status. Raises HobbitError.
"""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from pyhobbit.cli.help import ANY, COMMON, EXAMPLES, Parser
from pyhobbit.errors import ConfigError

_VERBS: Mapping[str, str] = {
    "chat": "talk to a model, or have it continue a text; also: run",
    "serve": "answer over HTTP, like OpenAI's API",
    "top": "watch a running server",
    "pull": "download a model",
    "list": "show the models that have been downloaded",
    "rm": "delete a downloaded model",
    "inspect": "say how a model fits here, and what would help; also: show",
    "convert": "make a multi-precision GGUF",
    "config": "show the settings that apply, and where each comes from",
    "calibrate": "fit thresholds and cache to a model",
    "bench": "measure the speed of a model on this machine",
    "simulate": "replay a route trace through cache policies",
    "worker": "lend this machine to a pyhobbit on another one",
    "llama": "run another program of llama.cpp",
}

_TITLES = {"chat": "\ntalk:\n", "pull": "models:\n", "config": "tune, measure, others:\n"}  # before these

# Names that users of other programs type, and ours.
_OTHER_VERBS = {"run": "chat", "ls": "list", "show": "inspect", "info": "inspect"}
_MODEL_OPTIONS = ("-m", "--model")
# Options that users of llama.cpp and ollama type by habit, and our names for them.
_HABITS: Mapping[str, str] = {
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "--batch"),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx"), "--ctx"),
    **dict.fromkeys(("-cmoe", "--cpu-moe"), "--device=CPU"),
    **dict.fromkeys(("--predict", "--n-predict", "--max-tokens"), "-n"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("--json-schema", "-j", "--json-schema-file", "-jf"), "--format"),
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-f": "--file",
    "-t": "--threads",
    "-s": "--seed",
    "--temperature": "--temp",
    "--hf-repo": "-hf",
    "--output": "-o",
    "--quiet": "-q",
    "--tokens": "-n",
}

_LEAST_LIKENESS = 0.7  # a suggestion is at least so like the given word


def parser_of(verb: str, typed: str | None = None) -> Parser:
    """The parser of a verb's options. typed: the user's name for the verb."""
    module = _module(verb)
    parser = Parser(prog=f"pyhobbit {typed or verb}", description=module.__doc__)
    module.add_arguments(parser)
    parser.add_help_options(COMMON.get(verb, ()))
    parser.example = EXAMPLES.get(verb, ANY)
    return parser


def _answered(option: str) -> bool:
    """Prints the version or the verbs, where the option asks for them."""
    if option == "--version":
        print(f"pyhobbit {import_module('importlib.metadata').version('pyhobbit')}")
    elif option in ("-h", "--help"):
        width = shutil.get_terminal_size().columns
        print("usage: pyhobbit COMMAND [...] [options]\n")
        print(textwrap.fill("MoE models larger than memory. Further help: pyhobbit COMMAND --help", width))
        for name, summary in _VERBS.items():
            print(_TITLES.get(name, ""), end="")
            print(textwrap.fill(f"    {name:<12} {summary}", width, subsequent_indent=" " * 17))
    else:
        return False
    return True


def _module(verb: str) -> Any:
    """The verb's module. One with parse(parser, arguments) reads its arguments itself."""
    return import_module("pyhobbit.convert" if verb == "convert" else f"pyhobbit.cli.{verb}")


def run(arguments: Sequence[str] | None) -> int:
    """Runs the verb that the arguments name; returns the exit status. Raises HobbitError, SystemExit."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    verb, *arguments = _with_our_verb(typed)
    if _answered(verb):
        sys.exit(0)
    _check_verb(verb)
    module, parser = _module(verb), parser_of(verb, typed[0] if typed[0] in _OTHER_VERBS else verb)
    if hasattr(module, "parse"):
        return module.run(module.parse(parser, arguments))
    args, unknown = parser.parse_known_args(_with_our_options(arguments, parser))
    is_prompt = unknown and not unknown[0].startswith("-") and not unknown[0].endswith(".gguf")
    if is_prompt and getattr(args, "prompt", "") is None:
        args.prompt = unknown.pop(0)  # as of `ollama run`
    if unknown:
        raise ConfigError(_unknown(unknown[0], parser))
    return module.run(args)


def _with_our_verb(arguments: list[str]) -> list[str]:
    """The arguments with the verb as we call it; `help VERB` as `VERB --help`, and none as --help."""
    if arguments[:1] in (["version"], ["-v"], ["-V"]):
        return ["--version"]
    if arguments[:1] in ([], ["help"]):
        arguments = [*arguments[1:2], "--help"]
    return [*(_OTHER_VERBS.get(each, each) for each in arguments[:1]), *arguments[1:]]


def _with_our_options(arguments: Sequence[str], parser: Parser) -> list[str]:
    """The arguments with our names of a verb's options, and the model without one."""
    known = parser.options()
    ours: list[str] = []
    models: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--":
            return [*models, *ours, argument, *rest]
        if name in _MODEL_OPTIONS and name not in known and (equals or rest):
            models.append(value if equals else rest.pop(0))
        elif name not in known and _HABITS.get(name, "").partition("=")[0] in known:
            ours += [_HABITS[name], *([value] if equals else ())]
        else:
            ours.append(argument)
    return [*models, *ours]


def _check_verb(verb: str) -> None:
    if verb in _VERBS:
        return
    if verb.startswith("-"):
        raise ConfigError(f"a command comes before {verb}; see: pyhobbit --help")
    if verb.lower().endswith(".gguf") or "/" in verb:
        raise ConfigError(f"a command is missing before '{verb}'; to talk to the model: pyhobbit chat {verb}")
    names = [*_VERBS, *_OTHER_VERBS]
    near = [*get_close_matches(verb, names, n=1, cutoff=_LEAST_LIKENESS)]
    near += [name for name in names if name.startswith(verb)]
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_VERBS)}"
    raise ConfigError(f"there is no command '{verb}'; {hint}")


def _unknown(argument: str, parser: Parser) -> str:
    """The error for an argument that the verb does not know."""
    if not argument.startswith("-"):
        hint = "put a prompt between quotes" if "-p" in parser.options() else f"see: {parser.prog} --help"
        return f"'{argument}' is one argument too many; {hint}"
    option = argument.partition("=")[0]
    known = () if option in _HABITS else parser.options()
    habits = {each: ours for each, ours in _HABITS.items() if ours in known}
    near = get_close_matches(option, [*known, *habits], n=1, cutoff=_LEAST_LIKENESS)
    hint = f"did you mean {habits.get(near[0], near[0])}?" if near else f"see: {parser.prog} --help"
    return f"{parser.prog.removeprefix('pyhobbit ')} has no option {option}; {hint}"
