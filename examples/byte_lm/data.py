"""Python's own standard library as bytes: text that every machine with Python already has."""

import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

# Independent of the training batch size, so that runs with different batch sizes are validated on the same windows.
VALIDATION_BATCH_SIZE = 64


def standard_library(folder: Path | None = None) -> tuple[list[Path], list[Path]]:
    """List the top-level modules of the standard library for training and, about one in ten, for validation.

    The split depends only on the file's name: whole files are held out, and files of the same name are
    always on the same side.

    Args:
        folder: where to look; None is the standard library of the running Python.

    Returns:
        Training files and validation files, each sorted by name.

    Raises:
        FileNotFoundError: either list is empty.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    training: list[Path] = []
    validation: list[Path] = []
    for path in sorted(folder.glob("*.py")):
        if _is_readable(path):
            # crc32, not hash(): Python salts string hashes differently in every process.
            (validation if zlib.crc32(path.name.encode()) % 10 == 0 else training).append(path)
    if not training or not validation:
        raise FileNotFoundError(
            f"standard_library(folder={str(folder)!r}): {len(training)} files for training and {len(validation)} for "
            "validation, needs at least 1 of each; run a Python whose standard library is installed as .py files"
        )
    return training, validation


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of a text."""

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class ByteWindows(Dataset[Tensor]):
    """Concatenated files, cut into windows of context + 1 bytes.

    Neighbouring windows share one byte, so every byte except the first is a target once. An incomplete window at the
    end is left out.

    Raises:
        ValueError: context is not positive, or the files are too short for one window.
    """

    def __init__(self, files: Sequence[Path], *, context: int = 128) -> None:
        if context < 1:
            raise ValueError(f"ByteWindows(context={context}): must be at least 1")
        text = bytearray(b"".join(path.read_bytes() for path in files))
        if len(text) <= context:
            raise ValueError(
                f"ByteWindows(files={len(files)} with {len(text)} bytes, context={context}): one window needs "
                f"{context + 1} bytes; give more files or a smaller context"
            )
        # A view: 1 byte of memory per byte of text; only the current batch takes the 8 bytes of an int64.
        self._windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        """Return one window, int64, shape (context + 1,)."""
        return self._windows[index].long()

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return the windows of one batch; the DataLoader prefers this to one call per window."""
        return list(self._windows[indices].long().unbind())


def loaders(
    *, batch_size: int = 8, context: int = 128, validation_batches: int = 16
) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Build the training loader (shuffled) and the validation loader (the same windows in the same order every time).

    A batch is int64 of shape (batch_size, context + 1): inputs are batch[:, :-1], targets batch[:, 1:].
    Validation uses validation_batches batches of 64 windows, spread evenly over the validation files.

    Raises:
        ValueError: a size is not positive, or there are fewer windows than asked for.
    """
    if batch_size < 1 or validation_batches < 1:
        raise ValueError(
            f"loaders(batch_size={batch_size}, validation_batches={validation_batches}): both must be at least 1"
        )
    training_files, validation_files = standard_library()
    training = ByteWindows(training_files, context=context)
    validation = ByteWindows(validation_files, context=context)
    if batch_size > len(training):  # drop_last would leave an epoch without a batch
        raise ValueError(f"loaders(batch_size={batch_size}): there are {len(training)} training windows in all")
    count = validation_batches * VALIDATION_BATCH_SIZE
    if count > len(validation):
        raise ValueError(
            f"loaders(validation_batches={validation_batches}): needs {count} windows and there are {len(validation)}; "
            f"ask for at most {len(validation) // VALIDATION_BATCH_SIZE}"
        )
    spread = [index * len(validation) // count for index in range(count)]
    return (
        DataLoader(training, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=0),
        DataLoader(Subset(validation, spread), batch_size=VALIDATION_BATCH_SIZE, num_workers=0),
    )


def _is_readable(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError:
        return False
    return True
