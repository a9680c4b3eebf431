"""The state of a run: what a checkpoint holds and how a run resumes from it."""
