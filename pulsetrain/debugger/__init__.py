"""Steps through a recorded run, or through the computation of one."""
