"""A process that trains on JAX is killed and another one resumes; each compiles its own programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

import pytest

from pulsetrain.handlers import EventRecorder
from tests.faults.everything import logged
from tests.support.runs_backends import JAX_FUNCTION, make, needs_jax, programs_kept, saved, whole_state

pytestmark = pytest.mark.slow

VICTIM = """
import os, signal, sys
from pathlib import Path
import torch
from pulsetrain.engine import Events
from tests.support.runs_backends import JAX_FUNCTION, make

torch.set_num_threads(1)
trainer = make(JAX_FUNCTION, Path(sys.argv[1]))

@trainer.on(Events.ITERATION_STARTED)
def die(engine):
    if engine.state.iteration == 18:
        os.kill(os.getpid(), signal.SIGKILL)

trainer.train(resume="latest")
"""


@needs_jax
def test_the_run_ends_as_if_it_had_not_been_killed(tmp_path: Path):
    """In iteration 18, so that it resumes from the checkpoint of 15, which is inside an update."""
    with programs_kept():
        whole = make(JAX_FUNCTION, tmp_path / "whole")
        whole.train()
        command = [sys.executable, "-c", VICTIM, str(tmp_path / "killed")]
        died = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
        assert died.returncode == -SIGKILL, died.stderr
        assert saved(tmp_path / "killed", 15).exists()
        again = make(JAX_FUNCTION, tmp_path / "killed")
        again.train(resume="latest")
    assert whole_state(again) == whole_state(whole)
    assert dict(logged(tmp_path / "killed")) == dict(logged(tmp_path / "whole"))
    (check,) = (each.resume_check for each in again.handlers if isinstance(each, EventRecorder))
    assert (check.difference, check.agreed > 0) == (None, True)
