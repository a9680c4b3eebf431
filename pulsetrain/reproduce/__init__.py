"""Running a recorded run again: rerun, diagnosis, fork."""
