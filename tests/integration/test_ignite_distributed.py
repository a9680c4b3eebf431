"""A script with ignite.distributed and the functions of `pulsetrain.engine`, in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# It ends by `os._exit`: a thread of gloo that frees the last tensor while Python shuts down aborts the process, seldom,
# as a known fault of torch describes (https://github.com/pytorch/pytorch/issues/190489).
SCRIPT = """
import os

import ignite.distributed as idist
import torch
from ignite.metrics import MeanSquaredError
from {engine} import Events, create_supervised_evaluator, create_supervised_trainer


def main(rank):
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    model = idist.auto_model(torch.nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), device=idist.device())
    evaluator = create_supervised_evaluator(model, metrics={{"mse": MeanSquaredError()}}, device=idist.device())
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: loader.sampler.set_epoch(engine.state.epoch))
    trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2), lambda: evaluator.run(loader))
    trainer.run(loader, max_epochs=4)
    weights = [value.tolist() for value in model.state_dict().values()]
    mse = evaluator.state.metrics["mse"]
    found = f"result {{type(model).__name__}} {{rank}} {{len(loader)}} {{mse}} {{weights}}\\n"
    os.write(1, found.encode())  # one write: the processes share the pipe


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
os._exit(0)
"""


def results(engine: str, folder: Path) -> list[str]:
    """What each process printed."""
    script = folder / f"{engine}.py"
    script.write_text(SCRIPT.format(engine=engine))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("result"))


def test_two_processes_of_a_ported_script_have_the_weights_and_metrics_that_ignite_has(tmp_path: Path):
    ours = results("pulsetrain.engine", tmp_path)
    assert [line.split()[1:4] for line in ours] == [["DistributedDataParallel", str(rank), "4"] for rank in (0, 1)]
    assert ours == results("ignite.engine", tmp_path)
