"""Makes batches of token sequences: padding to one length, packing documents into rows, restarting positions.

An example is a mapping with "input_ids", the tokens of a document, and "labels", of the same length. `labels[t]` is the
token at position t itself, or IGNORED if it is not trained on. The strategy shifts the labels; the label of the first
token is never used, because no token comes before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice, check_whole_number, is_whole
from pulsetrain.engine.arrays import require_tensor
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["IGNORED", "Example", "pack", "pad_examples", "restart_positions"]

IGNORED = -100
"""The label of a token that is not trained on; the losses leave it out."""

Example = Mapping[str, object]
"""An example's fields: "input_ids" and "labels" as lists of integers or tensors, shape (length,)."""


def pad_examples(
    examples: Sequence[Example],
    *,
    pad_token: int = 0,
    length: int | None = None,
    multiple_of: int = 1,
    truncation: str | None = None,
) -> dict[str, Tensor]:
    """Pads examples on the right to rows of one length; causal attention then needs no mask.

    It works as a DataLoader's `collate_fn`, also in worker processes: `functools.partial(pad_examples, pad_token=2)`.

    >>> short, long = {"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7, 8, 9], "labels": [7, 8, 9]}
    >>> batch = pad_examples([short, long])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 0], [7, 8, 9]], [[-100, 6, -100], [7, 8, 9]])

    Args:
        pad_token: the token after the end of a shorter example; its label is IGNORED.
        length: the length of every row; the default is that of the longest example.
        multiple_of: rounds the length up to a multiple, since devices are slow on odd shapes.
        truncation: cuts an example longer than `length` at this end, "left" or "right"; by default it is an error.

    Returns:
        "input_ids" and "labels", int64, shape (batch, length). If an example has "position_ids" (see `pack`), those
        too: an example without them counts as one document, and the padding as a separate document. Other fields of
        the examples are dropped.

    Raises:
        ConfigurationError: an option is out of range.
        TypeError: an example is not such a mapping; the message gives its index.
        ValueError: there is no example, or one is empty, too long, or has no trained token.
    """
    place = "pad_examples"
    check_whole_number(place, "pad_token", pad_token, at_least=0)
    check_whole_number(place, "multiple_of", multiple_of, at_least=1)
    _check_truncation(place, truncation, length)
    if length is not None:
        check_whole_number(place, "length", length, at_least=1)
        if length % multiple_of:
            raise ConfigurationError(
                f"needs a length that is a multiple; "
                f"pass length={-(-length // multiple_of) * multiple_of}, or leave one of them out",
                place,
                length=length,
                multiple_of=multiple_of,
            )
    documents = [_read(place, index, example) for index, example in enumerate(examples)]
    if not documents:
        raise ConfigurationError("needs 1 example or more", place, examples=[])
    for index, document in enumerate(documents):
        if length is not None:
            document = documents[index] = _fit(place, index, document, length, truncation)
        _require_learnable(place, index, document, length)
    columns = length or -(-max(map(len, (each.tokens for each in documents))) // multiple_of) * multiple_of
    shape = (len(documents), columns)
    tokens, labels = torch.full(shape, pad_token), torch.full(shape, IGNORED)
    for row, document in enumerate(documents):
        tokens[row, : len(document.tokens)] = document.tokens
        labels[row, : len(document.labels)] = document.labels
    if all(each.positions is None for each in documents):
        return {"input_ids": tokens, "labels": labels}
    positions = torch.arange(columns).repeat(len(documents), 1)
    for row, document in enumerate(documents):
        end = len(document.tokens)
        positions[row, end:] -= end
        if document.positions is not None:
            positions[row, :end] = document.positions
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def pack(
    examples: Iterable[Example], length: int, *, truncation: str | None = None, split: bool = False
) -> list[dict[str, Tensor]]:
    """Packs documents end to end into few rows, so that a batch has little padding (best fit decreasing).

    The same examples always give the same rows. Documents keep their order within a row, and rows are ordered by their
    first document.

    >>> documents = [[1, 1, 1], [2, 2, 2, 2], [3, 3]]
    >>> for row in pack([{"input_ids": each, "labels": each} for each in documents], length=5):
    ...     print(row["input_ids"].tolist(), row["position_ids"].tolist())
    [1, 1, 1, 3, 3] [0, 1, 2, 0, 1]
    [2, 2, 2, 2] [0, 1, 2, 3]

    Args:
        length: the largest number of tokens in a row. `pad_examples` pads the rows to one length.
        truncation: cuts a document longer than `length` at this end, "left" or "right".
        split: cuts such a document into several of at most `length` tokens. Pieces without a trained token are dropped.

    Returns:
        Examples with "input_ids", "labels" and "position_ids", int64, shape (tokens in the row,). Positions restart at
        0 in each document, which marks its start for the model. The label of a document's first token is IGNORED.

    Raises:
        ConfigurationError: an option is out of range.
        TypeError: an example is not a mapping with tokens and labels; the message gives its index.
        ValueError: a document is empty, too long, already packed, or has no trained token.
    """
    place = "pack"
    check_whole_number(place, "length", length, at_least=2)  # a document of 1 token has no trained token
    _check_truncation(place, truncation, length)
    if split and truncation is not None:
        raise ConfigurationError("pass one of them", place, truncation=truncation, split=True)
    documents: list[_Document] = []
    for index, example in enumerate(examples):
        document = _read(place, index, example)
        if document.positions is not None:
            raise ValueError(
                f"{place}(examples[{index}]): has 'position_ids', as packed rows do; pack the documents themselves"
            )
        if split:
            pieces = list(map(_Document, document.tokens.split(length), document.labels.split(length)))
            learnable = list(filter(_is_learnable, pieces))
            if not learnable:
                _require_learnable(place, index, pieces[0], length)
            documents += learnable
        else:
            document = _fit(place, index, document, length, truncation)
            _require_learnable(place, index, document, length)
            documents.append(document)
    rows = _best_fit([len(each.tokens) for each in documents], length)
    return [_join([documents[number] for number in row]) for row in rows]


def restart_positions(tokens: Tensor, separator: int) -> Tensor:
    """Positions that restart at 0 after each separator, for windows of text that contain several documents.

    >>> restart_positions(torch.tensor([4, 5, 0, 6, 7]), separator=0)
    tensor([0, 1, 2, 0, 1])

    Args:
        tokens: shape (..., length), integers.
        separator: the token that ends a document; it is the document's last token.

    Returns:
        int64, the shape and device of the tokens. Every row starts at 0, even in the middle of a document.

    Raises:
        TypeError: tokens is not a tensor of integers with at least one dimension.
        ConfigurationError: the separator is not a whole number.
    """
    require_tensor("restart_positions", "tokens", tokens)
    if not isinstance(tokens, Tensor) or tokens.ndim == 0 or not _is_whole(tokens):
        given = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"restart_positions(tokens): needs a tensor of integers, shape (batch, length), not {given}")
    if not is_whole(separator):
        raise ConfigurationError("needs a token id", "restart_positions", separator=separator)
    positions = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
    begins = torch.zeros_like(positions)
    begins[..., 1:] = positions[..., 1:] * (tokens[..., :-1] == separator)
    if tokens.shape[-1] == 0:  # cummax fails on an empty dimension
        return begins
    return positions - begins.cummax(dim=-1).values


# ------------------------------------------------------------------------------------------------ documents


class _Document(NamedTuple):
    """Shape (length,) each, int64."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def cut(self, part: slice) -> _Document:
        positions = None if self.positions is None else self.positions[part]
        return _Document(self.tokens[part], self.labels[part], positions)


def _read(place: str, index: int, example: object) -> _Document:
    name = f"{place}(examples[{index}])"
    if not isinstance(example, Mapping):
        raise TypeError(f"{name}: needs a mapping with 'input_ids' and 'labels', not {type(example).__name__}")
    for field in ("input_ids", "labels"):
        if field not in example:
            remedy = "; to train on every token, pass the input_ids as labels" if field == "labels" else ""
            raise TypeError(f"{name}: lacks {field!r}, it has {', '.join(map(str, example)) or 'no field'}{remedy}")
    tokens = _as_tensor(name, "input_ids", example["input_ids"])
    labels = _as_tensor(name, "labels", example["labels"])
    positions = example.get("position_ids")
    if positions is not None:
        positions = _as_tensor(name, "position_ids", positions)
    for field, values in (("labels", labels), ("position_ids", positions)):
        if values is not None and len(values) != len(tokens):
            raise ValueError(f"{name}: {len(tokens)} input_ids, but {len(values)} {field}; each token needs one")
    if not len(tokens):
        raise ValueError(f"{name}: has no token; leave it out")
    return _Document(tokens, labels, positions)


def _as_tensor(name: str, field: str, values: object) -> Tensor:
    try:
        # torch.tensor copies; as_tensor would warn about read-only arrays, such as memory-mapped files
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: {field} are not a list of integers ({error})") from error
    if tensor.ndim != 1 or (len(tensor) and not _is_whole(tensor)):
        raise TypeError(
            f"{name}: {field} need to be a list or tensor of integers, shape (length,), "
            f"not {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor.detach().to("cpu", torch.int64)  # batches are made on the host


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _fit(place: str, index: int, document: _Document, length: int, truncation: str | None) -> _Document:
    """The document, truncated to the length if that is allowed."""
    tokens = len(document.tokens)
    if tokens <= length:
        return document
    if truncation is None:
        remedy = ", or split=True to make several documents of it" if place == "pack" else ""
        raise ValueError(
            f"{place}(examples[{index}], length={length}): has {tokens} tokens; pass a greater length, or "
            f"truncation='right' to cut off its end, 'left' its beginning{remedy}"
        )
    return document.cut(slice(length) if truncation == "right" else slice(tokens - length, None))


def _is_learnable(document: _Document) -> bool:
    return bool((document.labels[1:] != IGNORED).any())


def _require_learnable(place: str, index: int, document: _Document, length: int | None) -> None:
    if _is_learnable(document):
        return
    limit = "" if length is None else f", length={length}"
    raise ValueError(
        f"{place}(examples[{index}]{limit}): nothing to learn, every label after the first token is {IGNORED}; if its "
        "prompt fills the length, pass a greater one or truncation='left'; if none of its roles is trained on, choose "
        "another train_on; else leave the example out"
    )


# -------------------------------------------------------------------------------------------------- packing


def _best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """The documents of each row: the longest first, each into the row where it leaves the least room."""
    rows: list[list[int]] = []
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the distinct remaining rooms, ascending: at most `length`, however many rows there are
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        nearest = bisect_left(rooms, size)
        if nearest == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[nearest]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rooms[nearest]
        rows[row].append(number)
        room -= size
        if room:
            if not rows_by_room[room]:
                insort(rooms, room)
            rows_by_room[room].append(row)
    return sorted(map(sorted, rows))


def _join(documents: Sequence[_Document]) -> dict[str, Tensor]:
    tokens = torch.cat([each.tokens for each in documents])
    labels = torch.cat([each.labels for each in documents])
    positions = torch.cat([torch.arange(len(each.tokens)) for each in documents])
    labels[positions == 0] = IGNORED  # the previous document must not predict it
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


# -------------------------------------------------------------------------------------------------- options


def _check_truncation(place: str, truncation: str | None, length: int | None) -> None:
    if truncation is None:
        return
    check_choice(place, "truncation", truncation, ("left", "right"))
    if length is None:
        raise ConfigurationError("needs a length to cut to; pass length=", place, truncation=truncation)
