"""Run pytorch-ignite's example scripts with its Engine and, by other imports alone, with ours; compare what they print.

    python tests/ignite_examples.py FOLDER     # the folder `examples` of ignite's sources; about 3 minutes

`make ignite-suite` does it with the sources that it fetches. Examples that need a download, a service or a GPU are left
out; scikit-learn's digits replace MNIST. Exit status 1: a script prints something else with our Engine, or fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MNIST = ("--epochs", "2", "--batch_size", "64")
SAVES = ("mnist/mnist_save_resume_engine.py", *MNIST, "--log_dir", "saved")
RUNS: tuple[tuple[tuple[str, ...], ...], ...] = (  # commands of one group share a folder
    (("mnist/mnist.py", *MNIST),),
    (("mnist/mnist_with_tqdm_logger.py", *MNIST),),
    (("mnist/mnist_with_tensorboard.py", *MNIST),),
    ((*SAVES, "--crash_iteration", "12"), (*SAVES, "--resume_from", "saved/checkpoint_1.pt")),
    (("reinforcement_learning/reinforce.py", "--max-episodes", "30"),),
    (("reinforcement_learning/actor_critic.py", "--max-episodes", "30"),),
    (("siamese_network/siamese_network.py", "--epochs", "2", "--batch-size", "64"),),
    ((
        "gan/dcgan.py", "--dataset", "fake", "--dataroot", ".", "--seed", "7", "--epochs", "2", "--batch-size", "2",
        "--g-filters", "4", "--d-filters", "4", "--output-dir", "made",
    ),),
)  # fmt: skip
OURS = re.compile(r"^from ignite\.engine import", flags=re.MULTILINE)
TIMES = re.compile(r"\d+\.\d+(\[s\]| seconds)|\d\d:\d\d(:\d\d)?")
IN_TRACEBACKS = re.compile(r"^( .*|in .*, handling .*)?$")  # its lines name files of the library, ours a handler
SEEDED = """
import random, runpy, sys, numpy, torch
for seed in (random.seed, numpy.random.seed, torch.manual_seed):
    seed(0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def changed(code: str) -> str:
    """The script with our imports in the place of ignite's.

    >>> changed("from ignite.engine import Engine\\nfrom ignite.metrics import Loss")
    'from pulsetrain.engine import Engine\\nfrom ignite.metrics import Loss'
    """
    return OURS.sub("from pulsetrain.engine import", code)


def printed(command: tuple[str, ...], examples: Path, folder: Path, *, ours: bool) -> tuple[int, str, str]:
    """The status of the script, what it prints without times, and the end of its error output."""
    script, *arguments = command
    source = examples / script
    code = source.read_text()
    if ours and changed(code) == code:
        raise SystemExit(f"{script}: imports nothing from ignite.engine")
    copy = folder / source.name
    copy.write_text(changed(code) if ours else code)
    shutil.copy(REPOSITORY / "tests" / "support" / "torchvision_replacement.py", folder / "torchvision.py")
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SEEDED, copy.name, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [TIMES.sub("", line) for line in done.stdout.splitlines() if not IN_TRACEBACKS.match(line)]
    return done.returncode, "\n".join(lines), done.stderr[-2000:]


def compare(examples: Path) -> int:
    """How many scripts differ."""
    different = 0
    for group in RUNS:
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name) / kind for kind in ("ignite", "ours")]
            for folder in folders:
                (folder / "made").mkdir(parents=True)
            for command in group:
                expected, found = (
                    printed(command, examples, folder, ours=ours)
                    for folder, ours in zip(folders, (False, True), strict=True)
                )
                same = expected[:2] == found[:2] and found[0] == 0
                different += not same
                lines = len(found[1].splitlines())
                print(f"{'same' if same else 'DIFFERS'} ({lines} lines): {' '.join(command)}", flush=True)
                if not same:
                    print(f"--- ignite: status {expected[0]}\n{expected[1][-2000:]}{expected[2]}")
                    print(f"--- ours: status {found[0]}\n{found[1][-2000:]}{found[2]}")
    return different


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("examples", type=Path, help="the folder `examples` of ignite's sources")
    different = compare(parser.parse_args().examples)
    print(f"{different} example scripts differ or fail")
    raise SystemExit(int(different > 0))
