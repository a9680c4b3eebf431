"""Tools that a policy calls: which are run, and how their results are shown."""

import json

import pytest

from pulsetrain.engine import GRPOStrategy
from pulsetrain.engine.data.chat import ChatTemplate
from pulsetrain.engine.rollouts import ConversationRollouts, ToolEnvironment
from pulsetrain.engine.rollouts.completions import Completion
from pulsetrain.engine.rollouts.tools import parse_tool_calls
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal
from tests.support.rollouts import Observed

END = ord("$")


class Bytes:
    """A tokenizer of bytes, whose template writes turns as `role:content$` and a newline."""

    chat_template, eos_token_id = "its own", END

    def decode(self, tokens):
        return bytes(tokens).decode()

    def apply_chat_template(self, messages, *, tokenize, return_dict, add_generation_prompt=False, tools=None):
        assert tokenize
        assert not return_dict
        text = "".join(f"[{tool.__name__}]" for tool in tools or ())
        for message in messages:
            calls = "".join(
                f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls", ())
            )
            text += f"{message['role']}:{message['content']}{calls}$\n"
        return list((text + "assistant:" * add_generation_prompt).encode())


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one number.
        b: the other one.
    """
    return a + b


def fail() -> None:
    """Never works."""
    raise KeyError("no key")


def made(**options):
    return ToolEnvironment(Bytes(), [add, fail], **options)


def call(name="add", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answered(turn, environment=None):
    observation, reward, done = (environment or made()).step(list(turn.encode()))
    assert reward == 0.0
    return bytes(observation).decode(), done


def test_a_turn_without_a_call_ends_the_conversation():
    assert made().reset([1, 2]) == []
    assert answered("It is 3.$") == ("", True)


def test_the_result_of_a_call_is_shown_by_the_template_before_the_next_turn():
    # what the template writes after the end token, the result, and the prompt for the next turn
    assert answered(f"I add. {call(a=1, b=2)}$") == ("\ntool:3$\nassistant:", False)


def test_several_calls_are_answered_in_their_order():
    shown, done = answered(f"{call(a=1, b=2)}{call(a=3, b=4)}$")
    assert (shown, done) == ("\ntool:3$\ntool:7$\nassistant:", False)


FAILING = [
    (call("subtract", a=1), "error: there is no tool subtract; there are add, fail"),
    (call("fail"), "error: KeyError: 'no key'"),
    (call("add", a=1), "error: TypeError: add() missing 1 required positional argument: 'b'"),
    ("<tool_call>{</tool_call>", "error: Expecting property name enclosed in double quotes"),
    ('<tool_call>{"arguments": {}}</tool_call>', "error: a tool call needs a 'name' and 'arguments'"),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "error: the arguments of add need to be an object"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: a tool call is nested too deeply"),
    # lone surrogates, which JSON can write and a tokenizer rejects
    ('<tool_call>{"name": "\\ud800"}</tool_call>', "error: there is no tool ?; there are add, fail"),
    (call("add", a="\ud800", b="!"), "?!"),
    (
        '<tool_call>{"name": "add", "arguments": {"\\ud800": 1}}</tool_call>',
        "error: TypeError: add() got an unexpected",
    ),
]


@pytest.mark.parametrize(("turn", "error"), FAILING)
def test_a_call_that_fails_is_answered_with_its_error(turn, error):
    shown, done = answered(f"{turn}$")
    assert shown.startswith(f"\ntool:{error}")
    assert not done


def test_a_turn_that_was_cut_ends_the_conversation_and_runs_nothing():
    ran = []

    def note() -> None:
        """Notes that it was run."""
        ran.append(1)

    environment = ToolEnvironment(Bytes(), [note])
    assert answered(call("note"), environment) == ("", True)
    assert ran == []
    assert answered(call("note") + "$", environment)[1] is False
    assert ran == [1]


def test_calls_may_be_written_in_another_form():
    environment = made(parse=lambda text: [{"name": "add", "arguments": {"a": len(text), "b": 0}}])
    assert answered("abc$", environment)[0].startswith("\ntool:4$")


def test_a_call_without_arguments_has_none():
    assert parse_tool_calls('<tool_call>{"name": "f"}</tool_call>') == [{"name": "f", "arguments": {}}]


def test_a_policy_learns_its_own_turns_and_not_the_results():
    prompt = ChatTemplate(Bytes(), [add])([{"role": "user", "content": "1+2?"}], add_generation_prompt=True)
    assert bytes(prompt) == b"[add]user:1+2?$\nassistant:"
    first, last = f"{call(a=1, b=2)}$", "3$"

    def sampler(prompts, count, *, temperature, end_token):
        assert end_token == END
        return [Completion(list((last if b"tool:" in bytes(each) else first).encode())) for each in prompts]

    def reward(prompts, completions):
        return [float(bytes(each).endswith(b"assistant:3$")) + number for number, each in enumerate(completions)]

    rollouts = ConversationRollouts(
        [prompt], lambda: ToolEnvironment(Bytes(), [add]), reward, max_length=200, max_new_tokens=80, end_token=END,
        prompts_per_rollout=1, sampler=sampler,
    )  # fmt: skip
    run = trainer({"max_updates": 1}, model=Tokens(256), train_loader=rollouts, strategy=GRPOStrategy(2))
    recorded = Observed(run)
    run.train()
    (batch,) = recorded.batches
    for tokens, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True):
        text = "".join(chr(token) if own else "." for token, own in zip(tokens.tolist(), mask.tolist(), strict=True))
        shown = "\ntool:3$\nassistant:"
        assert text == "." * len(prompt) + first + "." * len(shown) + last
    assert recorded.rewards[0].mean == 1.5


# ------------------------------------------------------------------------------------------------------------- refusals


def test_rollouts_whose_turns_end_with_a_token_that_the_environment_does_not_know_are_refused():
    rollouts = ConversationRollouts(
        [[1]], lambda: ToolEnvironment(Bytes(), [add]), max_length=20, max_new_tokens=4, end_token=[1, 2],
        prompts_per_rollout=1,
    )  # fmt: skip
    run = trainer({"max_updates": 1}, model=Tokens(256), train_loader=rollouts, strategy=GRPOStrategy(2))
    assert refusal(run.train).startswith(
        f"ConversationRollouts(end_token=[1, 2]): the environment expects turns to end with the token {END}; pass it"
    )


def test_tools_are_functions_with_different_names():
    assert refusal(lambda: ToolEnvironment(Bytes(), [])).startswith("ToolEnvironment(tools=[]): needs functions")
    assert refusal(lambda: ToolEnvironment(Bytes(), [add, add])).startswith("ToolEnvironment(tools=['add']): needs")
    assert refusal(lambda: ToolEnvironment(Bytes(), [3]), TypeError) == "ToolEnvironment(tools=3): needs functions"


def test_a_tokenizer_has_a_chat_template_and_an_end_token():
    class Plain(Bytes):
        chat_template = None

    assert refusal(lambda: ToolEnvironment(Plain(), [add])).startswith(
        "ToolEnvironment(tokenizer=Plain): has no chat template"
    )

    class Endless(Bytes):
        eos_token_id = None

    message = refusal(lambda: ToolEnvironment(Endless(), [add]))
    assert message == "ToolEnvironment(end_token=None): needs a whole number of at least 0"


def test_a_template_that_changes_a_turn_is_refused():
    class Forgetful(Bytes):
        def apply_chat_template(self, messages, **options):
            return super().apply_chat_template(messages[-1:], **options)

    with pytest.raises(ValueError, match="the chat template changes a turn when results follow"):
        ToolEnvironment(Forgetful(), [add]).step(list(f"{call(a=1, b=2)}$".encode()))


HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endif -%}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def test_a_conversation_with_tools_is_what_the_template_of_transformers_writes():
    transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not there: pip install tokenizers")
    bytes_alone = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = tokenizers.decoders.ByteLevel()
    learning = tokenizers.trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bytes_alone.train_from_iterator([], learning)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token="<|im_end|>", chat_template=HERMES
    )
    chat, environment = ChatTemplate(tokenizer, [add]), ToolEnvironment(tokenizer, [add])
    messages = [{"role": "user", "content": "1+2?"}]
    prompt = chat(messages, add_generation_prompt=True)
    turn = tokenizer.encode(f"I add.{call(a=1, b=2)}<|im_end|>", add_special_tokens=False)
    shown, _, done = environment.step(turn)
    assert not done
    called = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages += [
        {"role": "assistant", "content": "I add.", "tool_calls": [called]},
        {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"},
    ]
    assert [*prompt, *turn, *shown] == chat(messages, add_generation_prompt=True)
    assert tokenizer.decode(shown) == (
        "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
