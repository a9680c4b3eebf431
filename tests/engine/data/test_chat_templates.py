"""Chat messages to tokens by the chat template of the tokenizer."""

from __future__ import annotations

import re

import pytest

from pulsetrain.engine.data.chat import ChatTemplate, chatml, tokenize_chat
from pulsetrain.engine.errors import ConfigurationError
from tests.support.chats import CHATML, DIALOGUE, LEARNT, WHOLE, X, reader, texts

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


BEGINNING = [{"role": "assistant", "content": "Hi"}, *DIALOGUE[1:3]]


@pytest.mark.parametrize("before", ["", "{{ bos_token }}", "{{ bos_token }}<|im_start|>system\nBe kind.<|im_end|>\n"])
def test_a_reply_that_comes_first_is_learnt(bpe, make_fast, before):
    tokenizer = make_fast(before + CHATML)
    example = tokenize_chat(BEGINNING, tokenizer)
    assert example["input_ids"] == tokenizer.apply_chat_template(BEGINNING, return_dict=False)
    whole, learnt = texts(example, reader(bpe))
    assert learnt == ["Hi<|im_end|>\n", "Fine.<|im_end|>\n"]
    assert whole.endswith("<|im_start|>assistant\nFine.<|im_end|>\n")
    assert texts(tokenize_chat(BEGINNING, make_fast()), reader(bpe))[1] == learnt


def test_a_template_without_a_generation_prompt_has_none_for_a_reply_that_comes_first(bpe, make_fast):
    silent = CHATML.replace("<|im_start|>assistant\n", "")
    message = r"messages\[0\]\): the conversation begins with 'assistant'.*template="
    with pytest.raises(ConfigurationError, match=message):
        tokenize_chat(BEGINNING, make_fast(silent))


# the tools first, then turns with their calls, as Hermes and Qwen write them
TOOLS = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def weather(city: str) -> str:
    """The weather.

    Args:
        city: where.
    """
    return city


SCHEMA = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"name": "weather", "arguments": {"city": "Ulm"}}
CALLING = [
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "fine"},
    {"role": "assistant", "content": "Fine, too."},
]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_tools_are_described_to_the_model_and_calls_are_learnt(bpe, make_fast, train_on):
    tokenizer = make_fast(TOOLS)
    example = tokenize_chat(CALLING, tokenizer, tools=[weather, SCHEMA], train_on=train_on)
    assert example["input_ids"] == tokenizer.apply_chat_template(CALLING, tools=[weather, SCHEMA], return_dict=False)
    whole, learnt = texts(example, reader(bpe))
    assert whole.startswith("<tools>weather time </tools>\n<|im_start|>user\n")
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call><|im_end|>\n'
    last = "Fine, too.<|im_end|>\n"
    assert learnt == {"assistant": [call, last], "last": [last], "all": [whole]}[train_on]
    assert texts(tokenize_chat(CALLING, tokenizer), reader(bpe))[0] == whole[whole.index("<|im_start|>") :]


def test_tools_need_a_chat_template(make_fast):
    with pytest.raises(ConfigurationError, match=r"^tokenize_chat\(tools=.*\): only the chat template of a tokenizer"):
        tokenize_chat(DIALOGUE, make_fast(), tools=[SCHEMA])
    with pytest.raises(ConfigurationError, match=r"leave template= out$"):
        tokenize_chat(DIALOGUE, make_fast(TOOLS), tools=[SCHEMA], template=chatml)
    with pytest.raises(TypeError, match=r"tokenize_chat\(tools=.*needs a list of JSON schemas or functions"):
        tokenize_chat(DIALOGUE, make_fast(TOOLS), tools=weather)


def test_an_error_of_the_chat_template_names_the_turn(make_fast):
    strict = "{{ raise_exception('no system, please') if messages[0].role == 'system' }}" + CHATML
    with pytest.raises(Exception, match="no system, please") as caught:
        tokenize_chat(DIALOGUE, make_fast(strict))
    assert caught.value.__notes__ == ["in tokenize_chat, the chat template applied to messages[:2]"]


def test_a_turn_with_parts_needs_a_chat_template(make_fast):
    parts = CHATML.replace("message.content", "message.content[0].text")
    chat = [{"role": role, "content": [{"type": "text", "text": "Hi"}]} for role in ("user", "assistant")]
    assert tokenize_chat(chat, make_fast(parts)) == tokenize_chat(
        [{"role": role, "content": "Hi"} for role in ("user", "assistant")], make_fast(CHATML)
    )
    with pytest.raises(TypeError, match=r"messages\[0\].* a content of list"):
        tokenize_chat(chat, make_fast())


@pytest.mark.parametrize("tools", ["ab", [3], [["add"]]], ids=str)
def test_tools_are_schemas_or_functions(tools):
    with pytest.raises(TypeError, match=r"^ChatTemplate\(tools=.*\): needs JSON schemas or functions$"):
        ChatTemplate(object(), tools)


def test_a_turn_without_content_and_calls_is_named():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]
    with pytest.raises(
        TypeError, match=r"^tokenize_chat\(messages\[1\]\): .* has a content of NoneType; write it as text"
    ):
        tokenize_chat(messages, str.encode)
