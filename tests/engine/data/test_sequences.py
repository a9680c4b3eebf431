"""Examples to batches: padding, packing, and positions that restart with each document."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pulsetrain.engine.data.sequences import IGNORED, pack, pad_examples, restart_positions
from pulsetrain.engine.errors import ConfigurationError

X = IGNORED


def example(tokens, labels=None):
    return {"input_ids": tokens, "labels": tokens if labels is None else labels}


def plain(row):
    return {name: values.tolist() for name, values in row.items()}


# -------------------------------------------------------------------------------------------------- padding


def test_padding_is_on_the_right_and_is_not_learnt():
    batch = pad_examples([example([5, 6, 7], [X, 6, 7]), example([8, 9])], pad_token=2)
    assert plain(batch) == {"input_ids": [[5, 6, 7], [8, 9, 2]], "labels": [[X, 6, 7], [8, 9, X]]}
    assert [values.dtype for values in batch.values()] == [torch.int64, torch.int64]


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, 5),
        ({"multiple_of": 4}, 8),
        ({"multiple_of": 5}, 5),
        ({"length": 6}, 6),
        ({"length": 8, "multiple_of": 4}, 8),
    ],
)
def test_rows_are_as_long_as_the_longest_example_a_multiple_or_the_length_given(options, columns):
    batch = pad_examples([example([1, 2]), example([1, 2, 3, 4, 5])], **options)
    assert [tuple(values.shape) for values in batch.values()] == [(2, columns)] * 2


@pytest.mark.parametrize(
    ("truncation", "tokens", "labels"), [("left", [3, 4, 5], [3, X, 5]), ("right", [1, 2, 3], [X, 2, 3])]
)
def test_truncation_cuts_off_the_end_it_names(truncation, tokens, labels):
    long = example([1, 2, 3, 4, 5], [X, 2, 3, X, 5])
    batch = pad_examples([long, example([7, 8])], length=3, truncation=truncation)
    assert plain(batch) == {"input_ids": [tokens, [7, 8, 0]], "labels": [labels, [7, 8, X]]}


def test_padding_is_a_document_of_its_own_and_an_example_without_positions_is_one():
    packed = {**example([1, 2, 3, 4, 5]), "position_ids": [0, 1, 0, 1, 2]}
    batch = pad_examples([packed, example([6, 7, 8])], length=6)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]]
    assert batch["position_ids"].dtype == torch.int64


def test_truncation_cuts_positions_with_their_tokens():
    packed = {**example([1, 2, 3, 4]), "position_ids": torch.tensor([0, 1, 2, 0])}
    assert pad_examples([packed], length=2, truncation="left")["position_ids"].tolist() == [[2, 0]]


@pytest.mark.parametrize(
    "make",
    [
        torch.tensor,
        lambda tokens: torch.tensor(tokens, dtype=torch.int32),
        lambda tokens: np.array(tokens, dtype=np.uint16),
        lambda tokens: np.frombuffer(
            np.array(tokens, dtype=np.int64).tobytes(), dtype=np.int64
        ),  # cannot be written to
        tuple,
    ],
    ids=["int64", "int32", "uint16", "read-only", "tuple"],
)
def test_tokens_may_be_integers_of_any_kind(make):
    batch = pad_examples([example(make([5, 60000, 7]))])
    assert plain(batch) == {"input_ids": [[5, 60000, 7]], "labels": [[5, 60000, 7]]}
    assert plain(pack([example(make([5, 60000, 7]))], 3)[0])["input_ids"] == [5, 60000, 7]


def test_other_fields_are_left_out():
    assert set(pad_examples([{**example([1, 2]), "attention_mask": [1, 1], "source": "web"}])) == {
        "input_ids",
        "labels",
    }


def test_examples_are_not_changed():
    tokens = torch.tensor([1, 2, 3])
    given = [example(tokens), {**example([4, 5]), "position_ids": [0, 1]}]
    pad_examples(given, length=8)
    pack(given[:1], 8)
    assert (tokens.tolist(), given[0]["labels"] is tokens, given[1]["labels"]) == ([1, 2, 3], True, [4, 5])


@pytest.mark.slow
def test_it_is_a_collate_function_for_spawned_workers():
    loader = DataLoader(
        [example([1, 2]), example([3, 4, 5]), example([6, 7])],
        batch_size=2,
        collate_fn=functools.partial(pad_examples, pad_token=9, multiple_of=4),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert [batch["input_ids"].tolist() for batch in loader] == [[[1, 2, 9, 9], [3, 4, 5, 9]], [[6, 7, 9, 9]]]


# -------------------------------------------------------------------------------------------------- packing


def test_packed_documents_keep_their_labels_but_the_first_and_count_from_0():
    rows = pack([example([1, 2, 3], [X, 2, 3]), example([4, 5]), example([6, 7, 8, 9])], 5)
    assert list(map(plain, rows)) == [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [X, 2, 3, X, 5], "position_ids": [0, 1, 2, 0, 1]},
        {"input_ids": [6, 7, 8, 9], "labels": [X, 7, 8, 9], "position_ids": [0, 1, 2, 3]},
    ]
    assert {values.dtype for row in rows for values in row.values()} == {torch.int64}


def test_a_document_goes_where_it_leaves_the_least_room():
    # 11 does not go with 20 but with 17; then 2 has a choice between rooms of 10 and 2
    rows = pack([example([size] * size) for size in (20, 17, 11, 2)], 30)
    assert [row["input_ids"].tolist() for row in rows] == [[20] * 20, [17] * 17 + [11] * 11 + [2] * 2]


def test_padded_rows_restart_where_the_padding_begins():
    batch = pad_examples(pack([example([1, 2, 3]), example([4, 5])], 6), length=6)
    assert plain(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 0]],
        "labels": [[X, 2, 3, X, 5, X]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
    }


def test_packing_no_documents_makes_no_rows():
    assert pack([], 8) == []
    assert pack(iter([example([1, 2])]), 8)[0]["input_ids"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("truncation", "tokens", "labels"), [("left", [4, 5, 6], [X, X, 6]), ("right", [1, 2, 3], [X, 2, X])]
)
def test_a_document_that_is_too_long_is_cut_when_asked(truncation, tokens, labels):
    long = example([1, 2, 3, 4, 5, 6], [1, 2, X, 4, X, 6])
    assert list(map(plain, pack([long], 3, truncation=truncation))) == [
        {"input_ids": tokens, "labels": labels, "position_ids": [0, 1, 2]}
    ]


def test_a_split_document_becomes_several_of_which_each_has_something_to_learn():
    # 4 tokens that are all given, 4 to learn, and 1 without a predecessor
    rows = pack([example(list(range(1, 10)), [X, X, X, X, 5, 6, 7, 8, 9]), example([11, 12, 13, 14])], 4, split=True)
    assert list(map(plain, rows)) == [
        {"input_ids": [5, 6, 7, 8], "labels": [X, 6, 7, 8], "position_ids": [0, 1, 2, 3]},
        {"input_ids": [11, 12, 13, 14], "labels": [X, 12, 13, 14], "position_ids": [0, 1, 2, 3]},
    ]


@st.composite
def corpora(draw, longest=12):
    """A row's length, and documents whose tokens are all different, with something to learn in each."""
    length = draw(st.integers(2, longest))
    documents, token = [], 0
    for size in draw(st.lists(st.integers(2, length), min_size=1, max_size=30)):
        tokens = list(range(token, token + size))
        learnt = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda mask: any(mask[1:])))
        documents.append(example(tokens, [each if yes else X for each, yes in zip(tokens, learnt, strict=True)]))
        token += size
    return length, documents


@pytest.mark.slow
@given(corpora())
def test_packing_keeps_every_document_whole_and_once(corpus):
    length, documents = corpus
    rows = list(map(plain, pack(documents, length)))
    found = []
    for row in rows:
        tokens, labels, positions = row["input_ids"], row["labels"], row["position_ids"]
        assert 0 < len(tokens) == len(labels) == len(positions) <= length
        begins = [at for at, position in enumerate(positions) if position == 0]
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            assert positions[begin:end] == list(range(end - begin))
            assert labels[begin] == X
            found.append((tokens[begin:end], labels[begin + 1 : end]))
        assert begins[0] == 0
    assert sorted(found) == [(each["input_ids"], each["labels"][1:]) for each in documents]
    assert [row["input_ids"][0] for row in rows] == sorted(row["input_ids"][0] for row in rows)  # the order of examples
    assert rows == list(map(plain, pack(documents, length)))


@pytest.mark.slow
@given(corpora())
def test_packing_leaves_no_two_rows_that_would_fit_into_one(corpus):
    length, documents = corpus
    sizes = sorted(len(row["input_ids"]) for row in pack(documents, length))
    assert len(sizes) == 1 or sizes[0] + sizes[1] > length


@pytest.mark.slow
@given(corpora(), st.integers(2, 12))
def test_split_documents_lose_only_the_labels_that_nothing_comes_before(corpus, length):
    _, documents = corpus
    expected = []
    for document in documents:
        tokens, labels = document["input_ids"], document["labels"]
        kept = [label for at, label in enumerate(labels) if at % length and label != X]
        expected += [kept] if kept else [None]
    if None in expected:
        with pytest.raises(ValueError, match=re.escape(f"examples[{expected.index(None)}], length={length}): nothing")):
            pack(documents, length, split=True)
        return
    rows = list(map(plain, pack(documents, length, split=True)))
    assert max(len(row["input_ids"]) for row in rows) <= length
    tokens = [token for row in rows for token in row["input_ids"]]
    assert len(tokens) == len(set(tokens))
    learnt = sorted(label for row in rows for label in row["labels"] if label != X)
    assert learnt == [label for kept in expected for label in kept]


@pytest.mark.slow
@given(corpora())
def test_padded_rows_hold_the_packed_ones_and_nothing_to_learn_after_them(corpus):
    length, documents = corpus
    rows = pack(documents, length)
    batch = pad_examples(rows, length=length, pad_token=9999)
    for at, row in enumerate(rows):
        end = len(row["input_ids"])
        for name, values in row.items():
            assert batch[name][at, :end].equal(values)
        assert batch["input_ids"][at, end:].eq(9999).all()
        assert batch["labels"][at, end:].eq(X).all()
        assert batch["position_ids"][at, end:].tolist() == list(range(length - end))


# -------------------------------------------------------------------------------------------------- positions


def test_a_document_begins_after_each_separator():
    tokens = torch.tensor([[5, 6, 0, 7, 8, 0], [0, 0, 5, 6, 7, 8]])
    assert restart_positions(tokens, 0).tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3]]
    assert restart_positions(tokens[0], 0).tolist() == [0, 1, 2, 0, 1, 2]
    assert restart_positions(tokens.to(torch.uint8), 8).tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5]]
    assert restart_positions(tokens, 0).dtype == torch.int64


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 1), (2, 3, 4)])
def test_positions_have_the_shape_of_the_tokens(shape):
    assert tuple(restart_positions(torch.ones(shape, dtype=torch.int64), 0).shape) == shape


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=4))
def test_positions_are_those_of_a_count_that_separators_reset(rows):
    expected = []
    for row in rows:
        counts, count = [], 0
        for token in row:
            counts.append(count)
            count = 0 if token == 2 else count + 1
        expected.append(counts)
    assert restart_positions(torch.tensor(rows), 2).tolist() == expected


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("call", [pad_examples, lambda examples: pack(examples, 8)], ids=["pad", "pack"])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([1, 2], TypeError, "needs a mapping with 'input_ids' and 'labels', not list"),
        (
            {"input_ids": [1, 2], "text": ""},
            TypeError,
            "lacks 'labels', it has input_ids, text; to train on every token",
        ),
        ({}, TypeError, "lacks 'input_ids', it has no field"),
        (
            example([[1, 2]], [1, 2]),
            TypeError,
            "input_ids need to be a list or tensor of integers, shape (length,), not",
        ),
        (example([1, 2], [1.0, 2.0]), TypeError, "labels need to be a list or tensor of integers"),
        (example([True, False]), TypeError, "not torch.bool (2,)"),
        (example("text"), TypeError, "input_ids are not a list of integers"),
        (example([1, None]), TypeError, "input_ids are not a list of integers"),
        (example([1, 2, 3], [1, 2]), ValueError, "3 input_ids, but 2 labels; each token needs one"),
        ({**example([1, 2]), "position_ids": [0]}, ValueError, "2 input_ids, but 1 position_ids; each token needs one"),
        (example([]), ValueError, "has no token; leave it out"),
        (
            example([1, 2], [X, X]),
            ValueError,
            "nothing to learn, every label after the first token is -100; if its prompt",
        ),
        (example([1, 2], [1, X]), ValueError, "if none of its roles is trained on, choose another train_on"),
        (example([1]), ValueError, "nothing to learn"),
    ],
)
def test_a_bad_example_is_named_by_its_index(call, bad, error, message):
    with pytest.raises(error, match=rf"examples\[1\].*{re.escape(message)}"):
        call([example([1, 2]), bad])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda long: pad_examples([example([1, 2]), long], length=4),
            "pad_examples(examples[1], length=4): has 5 tokens; pass a greater length, or truncation='right' "
            "to cut off its end, 'left' its beginning",
        ),
        (
            lambda long: pack([example([1, 2]), long], 4),
            "pack(examples[1], length=4): has 5 tokens; pass a greater length, or truncation='right' to cut "
            "off its end, 'left' its beginning, or split=True to make several documents of it",
        ),
    ],
    ids=["pad", "pack"],
)
def test_an_example_that_is_too_long_is_an_error_that_says_how_to_cut_it(call, message):
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        call(example([1, 2, 3, 4, 5]))


def test_a_prompt_that_fills_the_length_is_named_with_the_remedy():
    prompt = example([1, 2, 3, 4, 5], [X, X, X, 4, 5])
    for call in (pad_examples, pack):
        with pytest.raises(
            ValueError, match=r"examples\[0\], length=3\): nothing .* pass a greater one or truncation='left'"
        ):
            call([prompt], length=3, truncation="right")
    assert pad_examples([prompt], length=3, truncation="left")["labels"].tolist() == [[X, 4, 5]]


def test_a_packed_row_is_not_packed_again():
    with pytest.raises(ValueError, match=r"pack\(examples\[0\]\): has 'position_ids'.*pack the documents themselves"):
        pack(pack([example([1, 2])], 4), 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda some: pad_examples(some, pad_token=None),
            "pad_examples(pad_token=None): needs a whole number of at least 0",
        ),
        (lambda some: pad_examples(some, length=0), "pad_examples(length=0): needs a whole number of at least 1"),
        (
            lambda some: pad_examples(some, multiple_of=2.0),
            "pad_examples(multiple_of=2.0): needs a whole number of at least 1",
        ),
        (
            lambda some: pad_examples(some, length=10, multiple_of=4),
            "needs a length that is a multiple; pass length=12, or",
        ),
        (lambda some: pad_examples(some, length=4, truncation="rigth"), "did you mean 'right'?"),
        (
            lambda some: pad_examples(some, truncation="left"),
            "pad_examples(truncation='left'): needs a length to cut to",
        ),
        (lambda some: pack(some, 1), "pack(length=1): needs a whole number of at least 2"),
        (lambda some: pack(some, True), "pack(length=True): needs a whole number of at least 2"),
        (lambda some: pack(some, 4, truncation="both"), "pack(truncation='both'): unknown; choose one of left, right"),
        (lambda some: pack(some, 4, truncation="left", split=True), "pass one of them"),
        (
            lambda some: restart_positions(torch.zeros(1, 2).long(), None),
            "restart_positions(separator=None): needs a token id",
        ),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(call, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        call([example([1, 2])])


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match=re.escape("pad_examples(examples=[]): needs 1 example or more")):
        pad_examples([])


@pytest.mark.parametrize("tokens", [[1, 2], torch.zeros(2, 3), torch.tensor(1), torch.zeros(2, dtype=torch.bool)])
def test_positions_are_of_a_tensor_of_integers(tokens):
    with pytest.raises(TypeError, match=r"restart_positions\(tokens\): needs a tensor of integers"):
        restart_positions(tokens, 0)


def test_positions_of_numpy_tokens_say_how_to_make_a_tensor():
    with pytest.raises(TypeError, match=r"torch\.from_numpy"):
        restart_positions(np.zeros((2, 3), dtype=np.int64), 0)
