"""Chat messages and prompts to tokens: the learnt tokens, with tokenizers of several kinds."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pulsetrain.engine.data.chat import chatml, tokenize_chat, tokenize_prompt
from pulsetrain.engine.data.sequences import IGNORED, pad_examples
from pulsetrain.engine.errors import ConfigurationError

X = IGNORED
MARKS = ["<|im_start|>", "<|im_end|>", "<s>"]
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
# the same text, which says itself what the assistant speaks
CHATML_GENERATION = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>
{% endgeneration %}{% else %}{{ message.content }}<|im_end|>
{% endif %}{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
# thoughts are dropped from a turn once another one follows
FORGETFUL = CHATML.replace(
    "{{ message.content }}", "{{ message.content if loop.last else message.content.split('</think>')[-1] }}"
)

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": "Fine, too."},
]


@pytest.fixture(scope="module")
def bpe():
    """Pairs of bytes, learnt from a few words; encoding puts <s> before a text by default."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["How are you? Fine, the weather is fine, too.\n\n\nassistant user system"] * 9, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@pytest.fixture
def make_fast(bpe):
    def make(chat_template=None):
        return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", chat_template=chat_template)

    return make


def encode_bytes(text):
    return list(text.encode())


def texts(tokens, read):
    """The text of the example, and its learnt stretches."""
    example, learnt, before = tokens, [], X
    for label in example["labels"]:
        if label != X:
            if before == X:
                learnt.append([])
            learnt[-1].append(label)
        before = label
    return read(example["input_ids"]), [read(stretch) for stretch in learnt]


def read_bytes(tokens):
    return bytes(tokens).decode()


def reader(bpe):
    return lambda tokens: bpe.decode(tokens, skip_special_tokens=False)


WHOLE = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in DIALOGUE)
LEARNT = {
    "assistant": ["Fine.<|im_end|>\n", "Fine, too.<|im_end|>\n"],
    "last": ["Fine, too.<|im_end|>\n"],
    "all": [f"{each['content']}<|im_end|>\n" for each in DIALOGUE],
}

# ------------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("train_on", LEARNT)
def test_the_replies_are_learnt_or_the_last_one_or_every_turn(train_on):
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


def test_a_template_of_ones_own_goes_before_that_of_the_tokenizer(bpe, make_fast):
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


# --------------------------------------------------------------------------------- the tokenizer's own template


@pytest.mark.parametrize("chat_template", [CHATML, CHATML_GENERATION], ids=["plain", "generation"])
@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_what_follows_the_generation_prompt_is_learnt(bpe, make_fast, chat_template, train_on):
    example = tokenize_chat(DIALOGUE, make_fast(chat_template), train_on=train_on)
    assert texts(example, reader(bpe)) == (WHOLE, LEARNT[train_on])
    whole = make_fast(chat_template).apply_chat_template(DIALOGUE, return_dict=False)
    assert example["input_ids"] == whole
    assert set(map(type, example["labels"])) == {int}


def test_the_mask_is_the_one_that_a_template_with_generation_marks_itself(make_fast):
    tokenizer = make_fast(CHATML_GENERATION)
    theirs = tokenizer.apply_chat_template(DIALOGUE, return_dict=True, return_assistant_tokens_mask=True)
    ours = tokenize_chat(DIALOGUE, tokenizer)
    assert ours["input_ids"] == theirs["input_ids"]
    assert [int(label != X) for label in ours["labels"]] == theirs["assistant_masks"]


def test_trained_on_all_every_token_of_the_chat_template_is_learnt(bpe, make_fast):
    example = tokenize_chat(DIALOGUE, make_fast(CHATML), train_on="all")
    assert texts(example, reader(bpe)) == (WHOLE, [WHOLE])


def test_turns_after_the_last_reply_are_given(bpe, make_fast):
    example = tokenize_chat(DIALOGUE[:4], make_fast(CHATML))
    assert texts(example, reader(bpe)) == (
        WHOLE[: WHOLE.index("<|im_start|>assistant\nFine, too")],
        ["Fine.<|im_end|>\n"],
    )


def test_a_generation_prompt_may_say_more_than_the_role(bpe, make_fast):
    """What the model will be given when it speaks is never learnt."""
    thoughtless = CHATML.replace(
        "{{ message.content }}", "{{ '<think></think>' if message.role == 'assistant' }}{{ message.content }}"
    ).replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think></think>")
    example = tokenize_chat(DIALOGUE, make_fast(thoughtless))
    assert texts(example, reader(bpe))[1] == LEARNT["assistant"]


class Wrapped:
    """A tokenizer with a chat template that returns what those of transformers do by default."""

    chat_template = CHATML

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages, **options):
        return self.tokenizer.apply_chat_template(messages, **{**options, "return_dict": True})


def test_a_chat_template_may_give_a_batch_encoding(make_fast):
    tokenizer = make_fast(CHATML)
    assert tokenize_chat(DIALOGUE, Wrapped(tokenizer)) == tokenize_chat(DIALOGUE, tokenizer)


THOUGHTS = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "fine</think>Fine."},
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": "too</think>Fine, too."},
]


def test_a_template_that_changes_an_earlier_turn_is_refused_and_the_turn_named(bpe, make_fast):
    tokenizer = make_fast(FORGETFUL)
    message = (
        r"tokenize_chat\(messages\[2\]\): this turn changes what the tokenizer's chat template wrote before it, from "
        r"token (\d+) on .*; pass template=, such as pulsetrain\.engine\.data\.chat\.chatml, or train_on='last'$"
    )
    with pytest.raises(ConfigurationError, match=message) as caught:
        tokenize_chat(THOUGHTS, tokenizer)
    first = int(re.search(message, str(caught.value))[1])
    before = tokenizer.apply_chat_template(THOUGHTS[:2], return_dict=False)[:first]
    assert bpe.decode(before, skip_special_tokens=False).endswith("<|im_start|>assistant\n")

    example = tokenize_chat(THOUGHTS, tokenizer, train_on="last")  # both remedies hold
    assert texts(example, reader(bpe))[1] == ["too</think>Fine, too.<|im_end|>\n"]
    example = tokenize_chat(THOUGHTS, tokenizer, template=chatml)
    assert texts(example, reader(bpe))[1] == ["fine</think>Fine.<|im_end|>\n", "too</think>Fine, too.<|im_end|>\n"]


def test_a_last_turn_that_changes_the_reply_before_it_is_named(make_fast):
    with pytest.raises(ConfigurationError, match=r"messages\[2\]\): this turn changes.*engine\.data\.chat\.chatml$"):
        tokenize_chat(THOUGHTS[:3], make_fast(FORGETFUL))


def test_a_reply_whose_first_token_swallows_the_end_of_the_prompt_is_refused(make_fast):
    tokenizer = make_fast(CHATML)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nFine."}]
    with pytest.raises(ConfigurationError, match=r"messages\[1\]\): this turn changes"):
        tokenize_chat(chat, tokenizer)
    assert tokenize_chat(chat, tokenizer, template=chatml)["labels"].count(X) > 0


def test_a_chat_template_has_no_prompt_for_a_reply_that_comes_first(bpe, make_fast):
    chat = [{"role": "assistant", "content": "Hi"}, *DIALOGUE[1:3]]
    with pytest.raises(
        ConfigurationError, match=r"messages\[0\]\): the conversation begins with 'assistant'.*template="
    ):
        tokenize_chat(chat, make_fast(CHATML))
    assert texts(tokenize_chat(chat, make_fast(CHATML), train_on="last"), reader(bpe))[1] == ["Fine.<|im_end|>\n"]
    assert texts(tokenize_chat(chat, make_fast()), reader(bpe))[1] == ["Hi<|im_end|>\n", "Fine.<|im_end|>\n"]


def test_an_error_of_the_chat_template_says_how_far_it_came(make_fast):
    strict = "{{ raise_exception('no system, please') if messages[0].role == 'system' }}" + CHATML
    with pytest.raises(Exception, match="no system, please") as caught:
        tokenize_chat(DIALOGUE, make_fast(strict))
    assert caught.value.__notes__ == ["in tokenize_chat, the chat template applied to messages[:2]"]


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


def test_a_prompt_may_be_empty_and_a_completion_its_end_alone():
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


def test_a_turn_with_parts_is_for_the_chat_template_alone(make_fast):
    parts = CHATML.replace("message.content", "message.content[0].text")
    chat = [{"role": role, "content": [{"type": "text", "text": "Hi"}]} for role in ("user", "assistant")]
    assert tokenize_chat(chat, make_fast(parts)) == tokenize_chat(
        [{"role": role, "content": "Hi"} for role in ("user", "assistant")], make_fast(CHATML)
    )
    with pytest.raises(TypeError, match=r"messages\[0\].* a content of list"):
        tokenize_chat(chat, make_fast())


def test_an_unknown_choice_of_turns_lists_the_choices():
    with pytest.raises(ConfigurationError, match=r"train_on='asistant'\): unknown.*all, assistant, last; did you mean"):
        tokenize_chat(DIALOGUE, encode_bytes, train_on="asistant")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "tokenize_chat(tokenizer=NoneType): needs an object with an encode, or a function from text to a list"),
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
