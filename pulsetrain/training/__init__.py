"""The parts of a Trainer that train: the step, validation, reporting, run length."""
