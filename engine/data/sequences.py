"""Token sequences to batches: padding to one length, packing of documents into rows, positions that restart.

An example is a mapping with "input_ids", the tokens of a document, and "labels", of the same length: `labels[t]` is the
token at t itself, or IGNORED where nothing is to be learnt. The strategy shifts them: the label of a first token is
never learnt, since nothing stands before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pulsetrain.engine.arrays import require_tensor
from pulsetrain.engine.errors import ConfigurationError, unknown_name

__all__ = ["IGNORED", "Example", "pack", "pad_examples", "restart_positions"]

IGNORED = -100
"""The label of a token that is not to be learnt; the losses leave it out."""

Example = Mapping[str, Any]
"""Tokens under "input_ids", and under "labels" the same or IGNORED: lists of integers, or tensors, shape (length,)."""


def pad_examples(
    examples: Sequence[Example],
    *,
    pad_token: int = 0,
    length: int | None = None,
    multiple_of: int = 1,
    truncation: str | None = None,
) -> dict[str, Tensor]:
    """Examples as rows of one length, padded on the right, where causal attention needs no mask.

    As a DataLoader's `collate_fn`, worker processes included: `functools.partial(pad_examples, pad_token=2)`.

    Args:
        pad_token: what stands behind an example; its labels are IGNORED.
        length: of every row; by default that of the longest example.
        multiple_of: the length is rounded up to a multiple of it, which spares a device odd shapes.
        truncation: the end at which an example longer than `length` is cut, "left" or "right"; it is an error
            by default.

    Returns:
        "input_ids" and "labels", int64, shape (batch, length). Where an example has "position_ids" (see `pack`), those
        too: an example without them counts as one document, and the padding as a document of its own. Other fields of
        the examples are left out.

    Raises:
        ConfigurationError: an option that cannot be used.
        TypeError: an example that is no such mapping; it is named by its index.
        ValueError: no example, or one that is empty, too long, or has nothing to learn.
    """
    place = "pad_examples"
    _check_number(place, "pad_token", pad_token, least=0)
    _check_number(place, "multiple_of", multiple_of, least=1)
    _check_truncation(place, truncation, length)
    if length is not None:
        _check_number(place, "length", length, least=1)
        if length % multiple_of:
            raise ConfigurationError(
                f"{place}(length={length}, multiple_of={multiple_of}): the length must be a multiple; "
                f"pass length={-(-length // multiple_of) * multiple_of}, or leave one of them out"
            )
    documents = [_read(place, index, example) for index, example in enumerate(examples)]
    if not documents:
        raise ValueError(f"{place}(examples=[]): needs 1 example or more")
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
    """Documents laid end to end in few rows, so that little of a batch is padding: best fit, the longest first.

    The same examples always give the same rows. Rows and the documents in them stand in the order of the examples, a
    row by its first document.

    Args:
        length: most tokens of a row; `pad_examples` makes rows of them.
        truncation: the end at which a document longer than `length` is cut, "left" or "right".
        split: cut such a document into several of at most `length` tokens. A piece with nothing to learn is left out.

    Returns:
        Examples with "input_ids", "labels" and "position_ids", int64, shape (tokens of the row,). Positions count from
        0 in each document, which tells a model where it begins; the label of a document's first token is IGNORED.

    Raises:
        ConfigurationError: an option that cannot be used.
        TypeError: an example that is no mapping with tokens and labels; it is named by its index.
        ValueError: a document that is empty, too long, packed already, or has nothing to learn.
    """
    place = "pack"
    _check_number(place, "length", length, least=2)  # a document of 1 token has nothing to learn
    _check_truncation(place, truncation, length)
    if split and truncation is not None:
        raise ConfigurationError(f"{place}(truncation={truncation!r}, split=True): pass one of them")
    documents: list[_Document] = []
    for index, example in enumerate(examples):
        document = _read(place, index, example)
        if document.positions is not None:
            raise ValueError(
                f"{place}(examples[{index}]): it has 'position_ids', as packed rows do; pack the documents themselves"
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
    """Positions that begin anew behind each separator: for windows of a text that hold several documents.

    Args:
        tokens: shape (..., length), integers.
        separator: the token that ends a document; it is the document's last.

    Returns:
        int64, the shape of the tokens, on their device. A row begins with 0, be it in the middle of a document.

    Raises:
        TypeError: no tensor of integers with a dimension or more.
        ConfigurationError: a separator that is no whole number.
    """
    require_tensor("restart_positions", "tokens", tokens)
    if not isinstance(tokens, Tensor) or tokens.ndim == 0 or not _is_whole(tokens):
        given = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"restart_positions: tokens are a tensor of integers, shape (batch, length), not {given}")
    if isinstance(separator, bool) or not isinstance(separator, int):
        raise ConfigurationError(f"restart_positions(separator={separator!r}): needs the number of a token")
    places = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
    begins = torch.zeros_like(places)
    begins[..., 1:] = places[..., 1:] * (tokens[..., :-1] == separator)
    if tokens.shape[-1] == 0:  # of which there is no maximum
        return begins
    return places - begins.cummax(dim=-1).values


# ------------------------------------------------------------------------------------------------ documents


class _Document(NamedTuple):
    """Shape (length,) each, int64."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def cut(self, part: slice) -> _Document:
        positions = None if self.positions is None else self.positions[part]
        return _Document(self.tokens[part], self.labels[part], positions)


def _read(place: str, index: int, example: Any) -> _Document:
    name = f"{place}(examples[{index}])"
    if not isinstance(example, Mapping):
        raise TypeError(f"{name}: needs a mapping with 'input_ids' and 'labels', not {type(example).__name__}")
    for field in ("input_ids", "labels"):
        if field not in example:
            remedy = "; to learn every token, let them be the input_ids" if field == "labels" else ""
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
        raise ValueError(f"{name}: it has no token; leave it out")
    return _Document(tokens, labels, positions)


def _as_tensor(name: str, field: str, values: Any) -> Tensor:
    try:
        # torch.tensor copies: as_tensor would warn of arrays that cannot be written to, as those of a file are
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: {field} are no list of integers ({error})") from error
    if tensor.ndim != 1 or (len(tensor) and not _is_whole(tensor)):
        raise TypeError(
            f"{name}: {field} are a list of integers or a tensor of them, shape (length,), "
            f"not {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor.detach().to("cpu", torch.int64)  # where batches are made


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _fit(place: str, index: int, document: _Document, length: int, truncation: str | None) -> _Document:
    """The document, cut to the length where it is longer and that is allowed."""
    tokens = len(document.tokens)
    if tokens <= length:
        return document
    if truncation is None:
        remedy = ", or split=True to make several documents of it" if place == "pack" else ""
        raise ValueError(
            f"{place}(examples[{index}], length={length}): it has {tokens} tokens; give a greater length, or pass "
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
        f"{place}(examples[{index}]{limit}): nothing to learn, every label behind the first token is {IGNORED}; if its "
        "prompt fills the length, give a greater one or truncation='left'; if none of its roles is trained on, choose "
        "another train_on; else leave the example out"
    )


# -------------------------------------------------------------------------------------------------- packing


def _best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which documents make each row: each goes where it leaves the least room, the longest first."""
    rows: list[list[int]] = []
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # those that some row has, ascending: at most `length` of them, however many rows there are
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
    labels[positions == 0] = IGNORED  # the document before has nothing to say about it
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


# -------------------------------------------------------------------------------------------------- options


def _check_number(place: str, name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{place}({name}={value!r}): needs a whole number of {least} or more")


def _check_truncation(place: str, truncation: str | None, length: int | None) -> None:
    if truncation is None:
        return
    if truncation not in ("left", "right"):
        raise unknown_name(place, "truncation", truncation, ("left", "right"))
    if length is None:
        raise ConfigurationError(f"{place}(truncation={truncation!r}): needs a length to cut to; pass length=")
