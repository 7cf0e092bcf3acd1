# SPDX-License-Identifier: MIT
"""Prints what a shell needs to complete commands, options and files.

bash: eval "$(pyhobbit completion bash)" in ~/.bashrc
zsh: eval "$(pyhobbit completion zsh)" in ~/.zshrc
fish: pyhobbit completion fish > ~/.config/fish/completions/pyhobbit.fish
"""

import argparse

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=f"one of {', '.join(_SHELLS)}")


def run(args: argparse.Namespace) -> int:
    from argcomplete import shellcode

    print(shellcode(["pyhobbit"], shell=args.shell))
    return 0
