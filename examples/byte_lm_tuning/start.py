"""How the scripts start: their command line, and a ByteGPT with the weights of an earlier run."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from examples.byte_lm.model import ByteGPT
from pulsetrain.configuration.claim import resolve_folder
from pulsetrain.engine import CheckpointError
from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints, load_weights

CONTEXT = 128  # the demo's
REMEDY = "`pulsetrain train examples/byte_lm/config.yaml` makes a run to start from"


def command_line(name: str, description: str | None) -> ArgumentParser:
    """Make a parser with the options of all scripts; `start` reads them."""
    parser = ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--start", help="run whose weights to start from [the demo's newest in runs/]")
    folder = f"runs/byte_lm_{name}-{{n}}"
    parser.add_argument("--run", default=folder, help="folder for log and checkpoints [%(default)s]")
    return parser


def start(parser: ArgumentParser, arguments: Sequence[str] | None) -> tuple[Namespace, ByteGPT, Path]:
    """Read the arguments, and load the model to start from and the name of its checkpoint.

    The run folder in the options has its number. Exits with a remedy if there is no such model.
    """
    options = parser.parse_args(arguments)
    try:
        model, checkpoint = load_model(options.start)
    except (FileNotFoundError, CheckpointError) as error:
        parser.error(str(error))
    options.run = resolve_folder(options.run)
    return options, model, checkpoint


def load_model(start: str | Path | None = None, context: int = CONTEXT) -> tuple[ByteGPT, Path]:
    """Make a model of the demo's sizes, with the weights of a run's best checkpoint or, if there is none, of its last.

    Args:
        start: the run's folder; None means the demo's newest run in runs/ that has a checkpoint.
        context: any number, since positions are not weights.

    Returns:
        The model, and the checkpoint with its weights.

    Raises:
        FileNotFoundError: there is no such run, or it has no checkpoint.
        CheckpointError: it is damaged, or from a model of other sizes.
    """
    run = newest_demo_run() if start is None else Path(start)
    if not find_checkpoints(run / "checkpoints"):
        raise FileNotFoundError(f"load_model(start={str(start)!r}): {run / 'checkpoints'} has no checkpoint; {REMEDY}")
    manager = CheckpointManager(run / "checkpoints")
    checkpoint = manager.get_best() or manager.get_latest()
    assert isinstance(checkpoint, Path)  # not a URL, and it exists
    model = ByteGPT(context=context)
    load_weights(model, checkpoint)
    return model, checkpoint


def newest_demo_run(runs: Path = Path("runs")) -> Path:
    """Find the run folder with the highest number that has a checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    numbered = {int(match[1]): path for path in runs.glob("*") if (match := re.fullmatch(r"byte_lm-(\d+)", path.name))}
    found = [number for number, path in numbered.items() if find_checkpoints(path / "checkpoints")]
    if not found:
        raise FileNotFoundError(
            f"{runs / 'byte_lm-*'}: no run with a checkpoint; {REMEDY}, or choose another with --start"
        )
    return numbered[max(found)]
