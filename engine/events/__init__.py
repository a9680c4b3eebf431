"""Events, the bus that carries them, and the run loop that fires them."""
