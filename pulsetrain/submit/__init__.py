"""Jobs: what a submitted command needs, and the schedulers that run it: a queue on one machine, Slurm, Kubernetes."""
