"""The parts of a training step, each independent of the loop: protocols, gradients, precision, averaging."""
