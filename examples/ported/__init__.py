"""Common programs (a GAN, a small GPT, an actor-critic ...), each in at most half the lines it takes by hand.

    python -m examples.ported.NAME

Run it from the folder that contains examples/. Each validates, keeps the best checkpoint, shows its progress, and
continues after its last checkpoint when it is run again.
"""
