"""What `pulsetrain completion` accepts, and its help."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments"]

SHELLS = ("bash", "zsh", "fish")
HELP = "print a completion script for the shell"
DESCRIPTION = """\
Print a completion script for the shell. It completes commands, options, files, and the
settings of a configuration, such as --training.learning_rate, with their choices.
Needs shtab: pip install 'pulsetrain[completion]'.
"""
EPILOG = """\
examples:
  eval "$(pulsetrain completion bash)"                              in ~/.bashrc
  pulsetrain completion zsh > "${fpath[1]}/_pulsetrain"
  pulsetrain completion fish > ~/.config/fish/completions/pulsetrain.fish

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")
