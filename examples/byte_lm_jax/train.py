"""The byte-level GPT learns Python's standard library on JAX: the same trainer and handlers, a different backend.

    python -m examples.byte_lm_jax.train [--iterations N] [--run-dir FOLDER] [--resume]

Run it from the folder that contains examples/. It needs jax, optax and flax (pip install 'pulsetrain[jax]').
"""

import argparse
from collections.abc import Sequence

from examples.byte_lm.data import loaders
from examples.byte_lm_jax.model import ByteGPT
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, JaxBackend, PretrainStrategy
from pulsetrain.handlers import Checkpointer, ConsoleLogger, EventRecorder


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=300, help="batches of 8 x 128 bytes [%(default)s]")
    parser.add_argument("--run-dir", default="runs/byte_lm_jax", help="log and checkpoints go there [%(default)s]")
    parser.add_argument("--resume", action="store_true", help="continue that run; pass the same --iterations")
    options = parser.parse_args(arguments)

    training, validation = loaders(batch_size=8, context=128, validation_batches=4)
    every = Every(iterations=100)
    config = TrainingConfig(
        max_iterations=options.iterations,
        optimizer="adamw",
        learning_rate=1e-3,
        schedule="cosine",
        warmup_steps=min(30, options.iterations // 10),
        clip_grad_norm=1.0,
        seed=0,
        validate_every=every,
        log_every_n_steps=20,
    )
    model = ByteGPT(layers=4, width=128, heads=4, context=128, seed=0)
    trainer = Trainer(
        model,
        training,
        validation,
        strategy=PretrainStrategy(unit="byte"),
        backend=JaxBackend(),
        config=config,
        handlers=[ConsoleLogger(), EventRecorder(options.run_dir), Checkpointer(options.run_dir, every=every)],
    )
    history = trainer.train(resume="latest" if options.resume else None)

    print(f"validation: {history['val/bits_per_byte'][-1]:.3f} bits per byte")
    print(model.generate(b"def ", 300, temperature=0.7).decode(errors="replace"))
    return history


if __name__ == "__main__":
    main()
