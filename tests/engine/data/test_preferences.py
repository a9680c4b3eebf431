"""Prompts with preferred answers to batches: texts and chats, what is cut, and mismatched answers."""

import functools
import math
import re

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from pulsetrain.engine.data.chat import tokenize_chat
from pulsetrain.engine.data.preferences import from_preferences, from_unpaired, pad_pairs, pad_unpaired
from pulsetrain.engine.errors import ConfigurationError
from tests.support.chats import CHATML, X, encode_bytes, read_bytes, texts

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "eleven"}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]


def said(content):
    return [{"role": "assistant", "content": content}]


def side(example, name):
    return {field: example[f"{name}_{field}"] for field in ("input_ids", "labels")}


def test_both_answers_follow_the_prompt_and_are_learnt_alone():
    (example,) = from_preferences([{**PAIR, "margin": 0.5, "source": "a book"}], encode_bytes, end=0)
    assert texts(side(example, "chosen"), read_bytes) == ("1+1=2\0", ["2\0"])
    assert texts(side(example, "rejected"), read_bytes) == ("1+1=eleven\0", ["eleven\0"])
    assert set(example) == {"margin"} | {f"{s}_{f}" for s in ("chosen", "rejected") for f in ("input_ids", "labels")}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION, "chosen": said("Fine."), "rejected": said("Who asks?")},
        {"prompt": QUESTION, "chosen": "Fine.", "rejected": "Who asks?"},
        {"chosen": QUESTION + said("Fine."), "rejected": QUESTION + said("Who asks?")},
        {"prompt": None, "chosen": QUESTION + said("Fine."), "rejected": QUESTION + said("Who asks?")},
    ],
    ids=["messages", "texts as answers", "conversations", "no prompt"],
)
def test_chats_of_every_form_are_the_same(row, bpe, make_fast):
    for tokenizer in (encode_bytes, bpe, make_fast(CHATML)):
        (example,) = from_preferences([row], tokenizer)
        for name, answer in (("chosen", "Fine."), ("rejected", "Who asks?")):
            assert side(example, name) == tokenize_chat(QUESTION + said(answer), tokenizer, train_on="last")


def test_an_answer_of_an_earlier_turn_is_given():
    turns = QUESTION + said("Fine.") + [{"role": "user", "content": "And the weather?"}]
    (example,) = from_preferences([{"prompt": turns, "chosen": "Fine, too.", "rejected": "Bad."}], encode_bytes)
    assert texts(side(example, "chosen"), read_bytes)[1] == ["Fine, too.<|im_end|>\n"]


def test_a_template_writes_the_turns():
    def template(role, content):
        return f"{role[0]}:", content

    row = {"prompt": QUESTION[1:], "chosen": "Fine.", "rejected": "Bad."}
    (example,) = from_preferences([row], encode_bytes, template=template)
    assert texts(side(example, "rejected"), read_bytes) == ("u:How are you?a:Bad.", ["Bad."])


# ----------------------------------------------------------------------------------------------------- what is cut


def test_a_pair_that_fits_is_not_cut():
    for truncation in (None, "prompt", "answer"):
        assert from_preferences([PAIR], encode_bytes, length=10, truncation=truncation) == from_preferences(
            [PAIR], encode_bytes
        )


def test_both_answers_keep_the_same_end_of_the_prompt():
    (example,) = from_preferences([PAIR], encode_bytes, length=8, truncation="prompt")
    assert texts(side(example, "chosen"), read_bytes) == ("1=2", ["2"])
    assert texts(side(example, "rejected"), read_bytes) == ("1=eleven", ["eleven"])


def test_an_answer_loses_its_end():
    (example,) = from_preferences([PAIR], encode_bytes, length=7, truncation="answer")
    assert texts(side(example, "chosen"), read_bytes) == ("1+1=2", ["2"])
    assert texts(side(example, "rejected"), read_bytes) == ("1+1=ele", ["ele"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 9}, "from_preferences(rows[1]): has 10 tokens, more than length=9; pass a greater length, or tru"),
        ({"length": 6, "truncation": "prompt"}, "rows[1]): its answer of 6 tokens leaves no room for the prompt in le"),
        ({"length": 4, "truncation": "answer"}, "rows[1]): its prompt of 4 tokens fills length=4; pass a greater"),
    ],
)
def test_a_row_of_which_nothing_useful_is_left_is_named(options, message):
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError, match=re.escape(message)):
        from_preferences([short, PAIR], encode_bytes, **options)
    assert len(from_preferences([short], encode_bytes, **options)) == 1


@pytest.mark.parametrize("make", [from_preferences, from_unpaired])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": "left", "length": 5}, "(truncation='left'): unknown; choose one of answer, prompt"),
        ({"truncation": "answer"}, "(truncation='answer'): needs a length to cut to"),
        ({"length": 1}, "(length=1): needs a whole number of at least 2"),
    ],
)
def test_options_are_checked_before_any_row_is_read(make, options, message):
    with pytest.raises(ConfigurationError, match=re.escape(f"{make.__name__}{message}")):
        make(iter([object()]), encode_bytes, **options)


# ------------------------------------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (("1+1=", "2", "11"), TypeError, "from_preferences(rows[0]): needs a mapping with 'chosen', 'rejected', not t"),
        ({"prompt": "1+1=", "chosen": "2"}, TypeError, "from_preferences(rows[0]): lacks 'rejected', it has prompt, c"),
        ({"chosen": "2", "rejected": "11"}, TypeError, "rows[0]): lacks 'prompt'; only conversations of 2 messages"),
        ({"chosen": said("a"), "rejected": said("b")}, TypeError, "rows[0]): lacks 'prompt'"),
        ({**PAIR, "chosen": 2}, TypeError, "needs a prompt that is a list of messages, as the answer is, not str"),
        ({**PAIR, "prompt": QUESTION, "chosen": said("a") * 2}, TypeError, "needs an answer that is a text, or a list"),
        ({**PAIR, "prompt": QUESTION, "chosen": QUESTION[1:]}, ValueError, "needs an answer of the role 'assistant'"),
        (
            {"chosen": QUESTION + said("a"), "rejected": QUESTION[1:] + said("a")},
            ConfigurationError,
            "rows[0]): needs conversations that differ in their last message alone",
        ),
        ({**PAIR, "rejected": ""}, ValueError, "nothing to learn"),
    ],
)
def test_a_row_that_is_not_a_preference_is_named(row, error, message):
    with pytest.raises(error) as caught:
        from_preferences([row], encode_bytes)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert message in text
    assert "from_preferences(rows[0])" in text


def test_a_template_of_texts_is_refused():
    with pytest.raises(ConfigurationError, match=r"from_preferences\(template=.*: texts are not written by a template"):
        from_preferences([PAIR], encode_bytes, template=lambda role, content: (role, content))


def test_a_chat_ends_with_the_marks_of_its_template():
    row = {"prompt": QUESTION, "chosen": "a", "rejected": "b"}
    with pytest.raises(ConfigurationError, match=r"from_preferences\(end=0\): a conversation ends with the marks"):
        from_preferences([row], encode_bytes, end=0)


# -------------------------------------------------------------------------------------------------------- batches


def test_pairs_go_into_batches_of_a_loader():
    rows = [{"prompt": "a" * n, "chosen": "b", "rejected": "cc", "margin": n / 2} for n in range(1, 5)]
    examples = from_preferences(rows, encode_bytes)
    loader = DataLoader(examples, batch_size=2, collate_fn=functools.partial(pad_pairs, pad_token=7, multiple_of=4))
    first, second = loader
    assert first["chosen_input_ids"].tolist() == [[97, 98, 7, 7], [97, 97, 98, 7]]
    assert first["rejected_labels"].tolist() == [[X, 99, 99, X], [X, X, 99, 99]]
    assert second["chosen_input_ids"].shape == (2, 8)
    assert (second["margin"].dtype, second["margin"].tolist()) == (torch.float32, [1.5, 2.0])
    stored = [{**each, "reference_chosen_log_probs": torch.tensor(-1.0)} for each in examples]
    assert pad_pairs(stored)["reference_chosen_log_probs"].tolist() == [-1.0] * 4


def test_each_prompt_is_combined_with_the_answer_to_the_one_before():
    rows = [("1", "abc", True), ("22", "de", False), ("333", "f", True)]
    examples = from_unpaired(
        [{"prompt": p, "completion": c, "label": good} for p, c, good in rows], encode_bytes, end=0
    )
    batch = pad_unpaired(examples)
    assert batch["desirable"].tolist() == [True, False, True]

    def rows_of(tokens, labels):
        padded = zip(batch[tokens].tolist(), batch[labels].tolist(), strict=True)
        return [texts({"input_ids": row, "labels": marks}, read_bytes)[1] for row, marks in padded]

    assert rows_of("input_ids", "labels") == [["abc\0"], ["de\0"], ["f\0"]]
    assert rows_of("kl_input_ids", "kl_labels") == [["f\0"], ["abc\0"], ["de\0"]]
    assert [read_bytes(row).rstrip("\0") for row in batch["kl_input_ids"].tolist()] == ["1f", "22abc", "333de"]
    tensors = [{name: torch.tensor(value) for name, value in each.items() if name != "desirable"} for each in examples]
    again = pad_unpaired([{**each, "desirable": True} for each in tensors], length=5)
    assert [read_bytes(row) for row in again["kl_input_ids"].tolist()] == ["1f\0\0\0", "22abc", "333de"]


def test_a_single_answer_is_combined_with_itself():
    (example,) = from_unpaired([{"prompt": "a", "completion": "b", "label": False}], encode_bytes)
    batch = pad_unpaired([example])
    assert batch["kl_input_ids"].tolist() == batch["input_ids"].tolist() == [[97, 98]]


@pytest.mark.parametrize("scalar", [numpy.bool_, torch.tensor])
def test_labels_and_margins_may_be_scalars_of_arrays(scalar):
    rows = [{"prompt": "a", "completion": "b", "label": scalar(label)} for label in (True, False)]
    examples = from_unpaired(rows, encode_bytes)
    assert [each["desirable"] for each in examples] == [True, False]
    batch = pad_unpaired([{**each, "desirable": scalar(each["desirable"])} for each in examples])
    assert batch["desirable"].tolist() == [True, False]
    number = numpy.float32 if scalar is numpy.bool_ else torch.tensor
    assert from_preferences([{**PAIR, "margin": number(0.5)}], encode_bytes)[0]["margin"] == 0.5


def test_judged_chats_are_learnt_in_their_last_turn():
    for row in (
        {"prompt": QUESTION, "completion": "Fine.", "label": True},
        {"completion": QUESTION + said("Fine."), "label": True},
    ):
        (example,) = from_unpaired([row], encode_bytes)
        assert example.pop("desirable") is True
        assert example == tokenize_chat(QUESTION + said("Fine."), encode_bytes, train_on="last")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_unpaired([{"prompt": "a", "completion": "b"}], encode_bytes), "rows[0]): lacks 'label'"),
        (
            lambda: from_unpaired([{"prompt": "a", "completion": "b", "label": "yes"}], encode_bytes),
            "from_unpaired(rows[0]): 'label' is 'yes'; needs True or False",
        ),
        (
            lambda: from_preferences([{**PAIR, "margin": "high"}], encode_bytes),
            "from_preferences(rows[0]): 'margin' is 'high'; needs a finite number",
        ),
        (
            lambda: pad_pairs([{**from_preferences([PAIR], encode_bytes)[0], "margin": math.nan}]),
            "pad_pairs(examples[0]): 'margin' is nan; needs a finite number",
        ),
        (lambda: pad_pairs([{"input_ids": [1], "labels": [1]}]), "examples[0]): lacks 'chosen_input_ids', it has inpu"),
        (lambda: pad_pairs([[1, 2]]), "pad_pairs(examples[0]): needs a mapping, not list"),
        (lambda: pad_unpaired([{"input_ids": [1, 2], "labels": [1, 2]}]), "examples[0]): 'desirable' is None; needs T"),
        (
            lambda: pad_pairs(from_preferences([{**PAIR, "margin": 1.0}, PAIR], encode_bytes)),
            "pad_pairs(examples[1]): lacks one of margin, which others have",
        ),
    ],
)
def test_examples_that_are_not_of_this_kind_are_named(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()
