"""Programs that act as Slurm's sbatch, srun and scontrol do, on this machine and without a queue."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

__all__ = ["install"]

SBATCH = """
import os, re, subprocess, sys
from pathlib import Path
state = Path(__file__).parent / "state"
text = Path(sys.argv[1]).read_text()
if "--partition=closed" in text:
    sys.exit("sbatch: error: invalid partition specified: closed")
(state / "script.sh").write_text(text)
found = re.search(r"--array=0-(\\d+)", text)
if os.fork() == 0:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    tasks = re.search(r"--ntasks-per-node=(\\d+)", text)[1]
    for index in range(int(found[1]) + 1) if found else [None]:
        job = 71 if index is None else 72 + index
        own = {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": tasks, "SLURM_JOB_NUM_NODES": "1"}
        if index is not None:
            own |= {"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": str(index)}
        if os.fork() == 0:
            for count in range(5):
                own["SLURM_RESTART_COUNT"] = str(count)
                done = subprocess.run(["bash", str(state / "script.sh")], env={**os.environ, **own})
                name = f"requeue-{job}" if index is None else f"requeue-71_{index}"
                if not (state / name).exists():
                    break
                (state / name).unlink()
            (state / f"end-of-{job}").write_text(str(done.returncode))
            (state / f"end-of-{job}").rename(state / f"ended-{job}")  # at once with its content
            os._exit(0)
    os._exit(0)
print("Submitted batch job 71")
"""

SRUN = """
import os, signal, subprocess, sys
from pathlib import Path
state = Path(__file__).parent / "state"
words, output = sys.argv[1:], ""
while words[0].startswith("--"):
    if words[0] == "--output":
        output = words[1]
    del words[: 2 if words[0] in ("--output", "--cpus-per-task") else 1]
os.setpgid(0, 0)
signal.signal(signal.SIGUSR2, lambda number, frame: None)
job = os.environ["SLURM_JOB_ID"]
(state / f"leader-of-{job}").write_text(str(os.getpid()))
(state / f"leader-of-{job}").rename(state / f"group-{job}")
array = os.environ.get("SLURM_ARRAY_TASK_ID", "")
count = int(os.environ["SLURM_NTASKS"])
own = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": "localhost"}
tasks = []
for rank in range(count):
    name = output.replace("%j", job).replace("%A", "71").replace("%a", array).replace("%t", str(rank))
    with open(name, "ab") as file:
        environment = {**os.environ, **own, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        tasks.append(subprocess.Popen(words, env=environment, stdout=file, stderr=file))
sys.exit(max(abs(task.wait()) for task in tasks))
"""

SCONTROL = """
import sys
from pathlib import Path
assert sys.argv[1] == "requeue"
(Path(__file__).parent / "state" / f"requeue-{sys.argv[2]}").touch()
"""


def install(folder: Path) -> Path:
    """Write the programs into the folder, which then belongs into PATH; returns the folder with their state.

    There, script.sh is what was submitted, group-JOB has the process group of a running step, and ended-JOB has the
    exit status of a job that has ended.
    """
    (folder / "state").mkdir(parents=True)
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder / "state"
