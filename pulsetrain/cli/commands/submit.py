"""What `pulsetrain submit` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["TARGETS", "add_arguments"]

TARGETS = ("local", "slurm", "kubernetes")
HELP = "train as a job: a queue here, Slurm, Kubernetes"
SYNOPSIS = (
    "pulsetrain submit CONFIG|SWEEP.yaml --to local|slurm|kubernetes [--run FOLDER] [--print]\n"
    "                         [--launch.nproc N] [--launch.nnodes N] [OPTION ...] [--SECTION.SETTING VALUE ...]\n"
    "       pulsetrain submit --to local --status | --cancel JOB"
)
DESCRIPTION = """\
Submit the training of a configuration as a job, or a sweep as an array of jobs that divide
its trials. A job that is interrupted, preempted or killed runs again, and resumes from
its newest checkpoint. --print shows what would be submitted, and submits nothing.

--to local is a queue on this machine: jobs start in order, each when as many devices are
free as it has processes. It continues while no terminal is open.
"""
EPILOG = """\
examples:
  pulsetrain submit config.yaml --to local
  pulsetrain submit config.yaml --to local --launch.nproc 2 --devices 8
  pulsetrain submit --to local --status
  pulsetrain submit config.yaml --to slurm --launch.nproc 4 --launch.nnodes 2 --time 12:00:00
  pulsetrain submit sweep.yaml --to slurm --workers 8 --partition gpu --print
  pulsetrain submit config.yaml --to kubernetes --run runs/a --image team/train:1 --claim data:/data

exit status: 0 submitted; 1 with --wait: a job failed; 2 wrong input, or no such scheduler;
130 Ctrl-C during --wait; the jobs continue
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument(
        "config", metavar="CONFIG", type=Path, nargs="?", help="the configuration, or a sweep; see `pulsetrain sweep`"
    )
    parser.add_argument("--to", choices=TARGETS, required=True, help="where the job runs")
    parser.add_argument(
        "--run",
        "--folder",
        dest="folder",
        metavar="FOLDER",
        help="the run folder, or the sweep's; instead of the file's",
    )
    parser.add_argument("--resume", choices=("latest",), help="continue the run in the folder")
    parser.add_argument("--print", action="store_true", dest="show", help="print what would be submitted")
    parser.add_argument("--name", metavar="NAME", help="the job's name; by default that of the folder")
    parser.add_argument("--workers", metavar="N", type=int, help="of a sweep: jobs; by default the file's workers")
    parser.add_argument(
        "--restarts", metavar="N", type=int, default=10, help="the maximum number of interruptions of a job"
    )
    local = parser.add_argument_group("--to local")
    local.add_argument(
        "--devices", metavar="N", type=int, help="GPUs, or slots without GPUs, that the queue divides among its jobs"
    )
    local.add_argument("--status", action="store_true", help="print the queue; restarts it where it was killed")
    local.add_argument("--cancel", metavar="JOB", type=int, help="stop a job, with a checkpoint, or take it out")
    local.add_argument("--wait", action="store_true", help="wait until the jobs have ended")
    cluster = parser.add_argument_group("--to slurm or kubernetes")
    cluster.add_argument("--gpus", metavar="N", type=int, help="of each node; by default one for each process")
    cluster.add_argument("--cpus", metavar="N", type=int, help="of each process")
    cluster.add_argument("--memory", metavar="SIZE", help="of each node, such as 64G")
    slurm = parser.add_argument_group("--to slurm")
    slurm.add_argument("--time", metavar="TIME", help="4:00:00, or minutes; the job is requeued then (24 hours)")
    slurm.add_argument("--partition", metavar="NAME", help="of the cluster")
    slurm.add_argument("--account", metavar="NAME", help="to charge")
    kubernetes = parser.add_argument_group("--to kubernetes")
    kubernetes.add_argument("--image", metavar="NAME", help="the container's image")
    kubernetes.add_argument("--claim", metavar="NAME:PATH", help="a PersistentVolumeClaim, and where it is mounted")
    kubernetes.add_argument("--directory", metavar="PATH", help="in the container, instead of the claim's")
    kubernetes.add_argument("--namespace", metavar="NAME", help="instead of kubectl's")
    kubernetes.add_argument("--secret", metavar="NAME", help="a Secret whose entries become environment variables")
    kubernetes.add_argument("--queue", metavar="NAME", help="a LocalQueue of Kueue")
