#!/bin/bash

# Parameters
#SBATCH --account=vision
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --job-name=a
#SBATCH --mem=65536M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/data/runs/a/submit/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=720

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /data/runs/a/submit/%j_%t_log.out --kill-on-bad-exit=0 --cpus-per-task 8 /opt/train/bin/python -u -m submitit.core._submit /data/runs/a/submit
