"""Chat messages and prompts to tokens: the learnt tokens, with tokenizers of several kinds."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch

from pulsetrain.engine.data.chat import chatml, tokenize_chat, tokenize_prompt
from pulsetrain.engine.data.sequences import pad_examples
from pulsetrain.engine.errors import ConfigurationError
from tests.support.chats import CHATML, DIALOGUE, LEARNT, WHOLE, X, encode_bytes, read_bytes, reader, texts

# ------------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("train_on", LEARNT)
def test_all_replies_the_last_one_or_every_turn_can_be_learnt(train_on):
    example = tokenize_chat(DIALOGUE, encode_bytes, train_on=train_on)
    assert texts(example, read_bytes) == (WHOLE, LEARNT[train_on])
    assert [token for token, label in zip(*example.values(), strict=True) if label not in (X, token)] == []


@pytest.mark.parametrize("train_on", LEARNT)
def test_tokenizers_of_every_kind_learn_the_same_text(bpe, make_fast, train_on):
    for tokenizer in (bpe, make_fast()):
        example = tokenize_chat(DIALOGUE, tokenizer, train_on=train_on)
        assert texts(example, reader(bpe)) == (WHOLE, LEARNT[train_on])
        assert set(map(type, example["input_ids"])) == {int}
        assert bpe.token_to_id("<s>") not in example["input_ids"]


def test_no_token_spans_what_is_given_and_what_is_learnt(bpe):
    def template(role, content):
        return "the wea", "ther" + content

    given, learnt = (bpe.encode(text, add_special_tokens=False).ids for text in ("the wea", "ther is fine"))
    assert bpe.encode("the weather is fine", add_special_tokens=False).ids != given + learnt
    example = tokenize_chat([{"role": "assistant", "content": " is fine"}], bpe, template=template)
    assert example == {"input_ids": given + learnt, "labels": [X] * len(given) + learnt}


def test_a_given_template_takes_precedence_over_the_tokenizers(bpe, make_fast):
    def template(role, content):
        return f"{role}: ", f"{content}\n"

    example = tokenize_chat(DIALOGUE[1:3], make_fast(CHATML), template=template)
    assert texts(example, reader(bpe)) == ("user: How are you?\nassistant: Fine.\n", ["Fine.\n"])


class Tiktoken:
    """Encodes as tiktoken does: marks in a text are refused unless they are allowed."""

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        if "<|" in text and allowed_special != "all":
            raise ValueError("disallowed special token")
        return encode_bytes(text)


class Keywords:
    """Names no keyword that it takes, and would fail on one."""

    def encode(self, text, **options):
        assert not options
        return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tiktoken(),
        Keywords(),
        str.encode,
        functools.partial(bytes, encoding="utf-8"),  # whose parameters inspect cannot read
        lambda text: torch.tensor(encode_bytes(text)),
        lambda text: list(np.frombuffer(text.encode(), dtype=np.uint8)),
        lambda text: {"input_ids": encode_bytes(text), "attention_mask": [1] * len(text)},
    ],
    ids=["tiktoken", "array", "bytes", "built in", "tensor", "numpy integers", "mapping"],
)
def test_anything_that_makes_integers_of_text_is_a_tokenizer(tokenizer):
    example = tokenize_chat(DIALOGUE, tokenizer)
    assert example == tokenize_chat(DIALOGUE, encode_bytes)
    assert set(map(type, example["input_ids"] + example["labels"])) == {int}


def test_a_chat_that_ends_with_the_user_is_kept_to_its_end():
    example = tokenize_chat(DIALOGUE[:4], encode_bytes, train_on="last")
    whole, learnt = texts(example, read_bytes)
    assert (whole.endswith("And the weather?<|im_end|>\n"), learnt) == (True, ["Fine.<|im_end|>\n"])


def test_the_default_template_gives_the_role_and_leaves_the_rest_to_learn():
    assert chatml("user", "Hi") == ("<|im_start|>user\n", "Hi<|im_end|>\n")


def test_examples_go_into_a_batch():
    chats = [tokenize_chat(DIALOGUE, encode_bytes), tokenize_prompt("2 + 2 = ", "4", encode_bytes, end=0)]
    batch = pad_examples(chats, multiple_of=8)
    assert batch["labels"][1, :10].tolist() == [X] * 8 + [ord("4"), 0]
    assert batch["input_ids"].shape == batch["labels"].shape == (2, -(-len(WHOLE) // 8) * 8)


# ------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_is_given_and_its_completion_learnt(bpe, make_fast):
    assert tokenize_prompt("ab", "cd", encode_bytes, end=0) == {
        "input_ids": [97, 98, 99, 100, 0],
        "labels": [X, X, 99, 100, 0],
    }
    for tokenizer in (bpe, make_fast(CHATML)):
        example = tokenize_prompt("How are ", "you? Fine", tokenizer)
        assert texts(example, reader(bpe)) == ("How are you? Fine", ["you? Fine"])
        assert bpe.token_to_id("<s>") not in example["input_ids"]


def test_a_prompt_may_be_empty_and_a_completion_only_its_end():
    assert tokenize_prompt("", "cd", encode_bytes)["labels"] == [99, 100]
    assert tokenize_prompt("ab", "", encode_bytes, end=0)["labels"] == [X, X, 0]


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("Hi", TypeError, "tokenize_chat(messages): needs a list of messages, each with 'role' and 'content', not str"),
        ({"role": "user", "content": "Hi"}, TypeError, "needs a list of messages"),
        ([], ValueError, "tokenize_chat(messages=[]): needs 1 message or more"),
        ([*DIALOGUE, "Hi"], TypeError, "tokenize_chat(messages[5]): needs 'role' and 'content', not str"),
        ([{"role": "user"}], TypeError, "tokenize_chat(messages[0]): needs 'role' and 'content', not 'role'"),
        ([{}], TypeError, "not no field"),
        ([{"role": 1, "content": "Hi"}], TypeError, "tokenize_chat(messages[0]): needs text as 'role', not int"),
        (
            [{"role": "assistant", "content": None}],
            TypeError,
            "tokenize_chat(messages[0]): a template needs a turn of text, and this one has a content of NoneType",
        ),
        (
            [*DIALOGUE, {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]}],
            TypeError,
            "tokenize_chat(messages[5]): a template needs a turn of text, and this one has 'tool_calls'; write",
        ),
        (
            [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hi"}],
            ValueError,
            "tokenize_chat(train_on='assistant'): nothing to learn, no turn has the role 'assistant', only "
            "'gpt', 'human'; rename the role, pass train_on='all', or leave the conversation out",
        ),
    ],
)
def test_a_bad_message_is_named(messages, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tokenize_chat(messages, encode_bytes)


def test_an_unknown_choice_of_turns_lists_the_choices():
    with pytest.raises(ConfigurationError, match=r"train_on='asistant'\): unknown.*all, assistant, last; did you mean"):
        tokenize_chat(DIALOGUE, encode_bytes, train_on="asistant")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "tokenize_chat(tokenizer=None): needs an object with an encode, or a function from text to a list"),
        (
            str.split,
            "tokenize_chat(tokenizer): returned ['<|im_start|>system']; needs a list of integers, the token ids",
        ),
        (str.upper, "returned '<|IM_START|>SYSTEM\\n'; needs a list of integers"),
        (lambda text: [0.5], "returned [0.5]; needs a list of integers"),
        (lambda text: [[1, 2]], "returned [[1, 2]]; needs a list of integers"),
        (lambda text: None, "returned None; needs a list of integers"),
    ],
)
def test_what_is_not_a_tokenizer_is_refused(tokenizer, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        tokenize_chat(DIALOGUE, tokenizer)


@pytest.mark.parametrize("texts", ["ab", ("a",), ("a", None), ["a", "b"]])
def test_a_template_returns_two_texts(texts):
    with pytest.raises(
        TypeError, match=r"tokenize_chat\(template\): for messages\[0\] it returned .*; return two texts"
    ):
        tokenize_chat(DIALOGUE, encode_bytes, template=lambda role, content: texts)


def test_a_chat_whose_replies_are_empty_has_nothing_to_learn():
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    with pytest.raises(
        ValueError, match=r"tokenize_chat\(messages\): nothing to learn.*give a trained turn some content"
    ):
        tokenize_chat(chat, encode_bytes, template=lambda role, content: (f"{role}: ", content))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ("ab", "", None),
            ValueError,
            "tokenize_prompt(completion): nothing to learn, every label after the first token",
        ),
        (("", "c", None), ValueError, "give the completion some text, or pass end="),
        (
            ("ab", "cd", "</s>"),
            ConfigurationError,
            "tokenize_prompt(end='</s>'): needs a token id, 0 or more",
        ),
        (("ab", "cd", True), ConfigurationError, "tokenize_prompt(end=True)"),
        (("ab", "cd", -1), ConfigurationError, "tokenize_prompt(end=-1)"),
        ((None, "cd", None), TypeError, "tokenize_prompt(prompt): needs text, not NoneType"),
        (("ab", [99], None), TypeError, "tokenize_prompt(completion): needs text, not list"),
    ],
)
def test_a_bad_prompt_is_refused(arguments, error, message):
    prompt, completion, end = arguments
    with pytest.raises(error, match=re.escape(message)):
        tokenize_prompt(prompt, completion, encode_bytes, end=end)
