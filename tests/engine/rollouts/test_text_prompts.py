"""Prompts as texts, as messages and in rows with columns, and what reward functions get of them."""

import math

import pytest

from pulsetrain.engine import GRPOStrategy
from pulsetrain.engine.data.chat import encode_prompt
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.rollouts import TextRollouts
from tests.support.models import Tokens, trainer
from tests.support.models_language import assert_refused, refusal
from tests.support.rollouts import texts

END = 0


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode()


class Templated(Bytes):
    """One with a chat template, and special tokens that it can leave out."""

    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, *, tokenize, return_dict, add_generation_prompt=False):
        text = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))

    def decode(self, tokens, skip_special_tokens=False):
        return super().decode([token for token in tokens if not (skip_special_tokens and token == 1)])


def sampler(prompts, count, **options):
    """An answer that depends on its number; every other one ends."""
    return [[*str(number).encode(), *([END] if number % 2 else [])] for number, _ in enumerate(prompts)]


def run_of(prompts, reward, strategy=None, **options):
    rollouts = TextRollouts(
        prompts, reward, max_new_tokens=2, prompts_per_rollout=2, end_token=END, sampler=sampler, **options
    )
    strategy = strategy or GRPOStrategy(2)
    return trainer({"max_updates": 1}, model=Tokens(256), train_loader=rollouts, strategy=strategy)


class Seen:
    """A reward function that keeps what it gets."""

    def __init__(self):
        self.given = None

    def __call__(self, prompts, completions, completion_ids, **columns):
        self.given = (prompts, completions, completion_ids, columns)
        return [float(number) for number, _ in enumerate(prompts)]


IDS = [[48], [49, END], [50], [51, END]]


def in_rows(given):
    """The prompts and columns of the two groups, in the order of the first."""
    prompts, completions, ids, columns = given
    assert ids == IDS
    return prompts, completions, columns


def test_texts_are_encoded_and_completions_are_texts_without_their_end():
    seen = Seen()
    rows = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "2+3=", "answer": "5", "level": 2}]
    run = run_of(rows, seen, tokenizer=Bytes())
    assert run.train_loader.prompts == [list(b"1+1="), list(b"2+3=")]
    run.train()
    prompts, completions, columns = in_rows(seen.given)
    assert completions == ["0", "1", "2", "3"]
    assert sorted(set(prompts)) == ["1+1=", "2+3="]
    by_prompt = {"1+1=": ("2", 1), "2+3=": ("5", 2)}
    assert columns == {
        "answer": [by_prompt[prompt][0] for prompt in prompts],
        "level": [by_prompt[prompt][1] for prompt in prompts],
    }
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_messages_are_answered_by_a_message():
    seen = Seen()
    turns = (("user", "hi"), ("system", "x"), ("user", "y"))
    one, two, three = ({"role": role, "content": text} for role, text in turns)
    chats = [[one], [two, three]]
    run = run_of(chats, seen, tokenizer=Templated())
    assert run.train_loader.prompts == [list(b"<user>hi<assistant>"), list(b"<system>x<user>y<assistant>")]
    run.train()
    prompts, completions, columns = in_rows(seen.given)
    assert completions == [[{"role": "assistant", "content": str(number)}] for number in range(4)]
    assert all(prompt in chats for prompt in prompts)
    assert columns == {}


def test_token_ids_are_shown_as_texts_where_there_is_a_tokenizer():
    seen = Seen()
    run_of([list(b"ab"), list(b"c")], seen, tokenizer=Bytes()).train()
    assert sorted(set(seen.given[0])) == ["ab", "c"]
    assert seen.given[1] == ["0", "1", "2", "3"]
    without = Seen()
    run_of([list(b"ab"), list(b"c")], without).train()
    assert sorted(map(tuple, without.given[0])) == sorted([tuple(b"ab")] * 2 + [tuple(b"c")] * 2)
    assert without.given[1] == without.given[2] == IDS


def test_special_tokens_are_left_out_of_texts():
    seen = Seen()
    rollouts = TextRollouts(
        ["a"], seen, max_new_tokens=3, prompts_per_rollout=1, end_token=END, tokenizer=Templated(),
        sampler=lambda prompts, count, **options: [[1, 65, END], [66]],
    )  # fmt: skip
    trainer({"max_updates": 1}, model=Tokens(256), train_loader=rollouts, strategy=GRPOStrategy(2)).train()
    assert seen.given[1] == ["A", "B"]


@pytest.mark.parametrize("tokenizer", [str.encode, Bytes()], ids=["function", "object"])
def test_a_prompt_is_what_the_answer_of_an_example_follows(tokenizer):
    assert bytes(encode_prompt("2+2=", tokenizer)) == b"2+2="
    chat = [{"role": "user", "content": "hi"}]
    assert bytes(encode_prompt(chat, tokenizer)) == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_that_the_assistant_has_answered_is_refused_as_a_prompt():
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    message = refusal(lambda: encode_prompt(chat, str.encode))
    assert message.startswith("encode_prompt(prompt): the last message is the assistant's; leave it out")
    with pytest.raises(ConfigurationError) as caught:
        run_of([[{"role": "user", "content": "a"}], chat], Seen(), tokenizer=Bytes())
    assert caught.value.__notes__ == ["in TextRollouts, prompts[1]"]


NEEDS = "needs a list of token ids for each prompt; texts and messages need tokenizer=, the model's tokenizer"
ROW = {"prompt": [1], "answer": "a"}
REFUSED = [
    (["a", "b"], {}, ArgumentTypeError, f"TextRollouts(prompts=['a', 'b']): {NEEDS}"),
    ([[{"role": "user", "content": "a"}]], {}, ArgumentTypeError, "TextRollouts(prompts="),
    ("text", {"tokenizer": Bytes()}, ArgumentTypeError, f"TextRollouts(prompts='text'): {NEEDS}"),
    ({"prompt": ["a"]}, {"tokenizer": Bytes()}, ArgumentTypeError, "TextRollouts(prompts="),
    (
        [[1, 2], "a"], {"tokenizer": Bytes()}, ArgumentTypeError,
        "TextRollouts(prompts[1]='a'): is a prompt of text, and prompts[0] of token ids; give all of them in one form",
    ),
    (["a", ""], {"tokenizer": Bytes()}, ConfigurationError, "TextRollouts(prompts[1]=[]): needs token ids"),
    (
        [ROW, {"prompt": [2]}], {}, ConfigurationError,
        "TextRollouts(prompts[1]): has the columns 'prompt', and prompts[0] has 'prompt', 'answer'; give every row",
    ),
    ([ROW, [2]], {}, ConfigurationError, "TextRollouts(prompts[1]): has the columns none, and prompts[0] has 'prompt'"),
    (
        [{"text": [1]}], {}, ConfigurationError,
        "TextRollouts(prompts): the rows have the columns 'text'; name that of the prompts 'prompt'",
    ),
    (
        [{"prompt": [1], "completions": 1}], {}, ConfigurationError,
        "TextRollouts(prompts): reward functions get something else as 'completions'; give the column 'completions' an",
    ),
    ([[1]], {"tokenizer": str.encode}, ArgumentTypeError, "TextRollouts(tokenizer="),
    ([[1]], {"log_completions": -1}, ConfigurationError, "TextRollouts(log_completions=-1): needs a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "options", "error", "message"), REFUSED, ids=[each[-1][:60] for each in REFUSED])
def test_prompts_that_cannot_be_used_are_refused(prompts, options, error, message):
    assert refusal(lambda: TextRollouts(prompts, Seen(), **options), error).startswith(message)


def test_a_function_that_needs_a_column_is_refused_before_training():
    def correct(completions, answer):
        return [0.0] * len(completions)

    message = refusal(lambda: TextRollouts([[1]], correct))
    assert message.startswith("TextRollouts(reward='correct'): the function needs 'answer', and the prompts are")
    assert TextRollouts([ROW], correct).prompts == [[1]]


def test_a_tokenizer_that_does_not_give_text_is_reported():
    class Raw(Bytes):
        def decode(self, tokens):
            return bytes(tokens)

    run = run_of(["a", "b"], Seen(), tokenizer=Raw())
    assert_refused(run, TypeError, ["TextRollouts(tokenizer): its decode returned bytes; needs a text"])


# ---------------------------------------------------------------------------------------------- several rewards, groups


def test_several_functions_have_their_weights_and_metrics():
    def first(completions):
        return [1.0, 2.0, None, 4.0]

    def second(prompts, completions):
        return [None, 10.0, 20.0, 30.0]

    run = run_of([[65], [66]], [first, second], reward_weights=[1.0, 0.1])
    run.train()
    values = {name: history[0] for name, history in run.history.get_history().items()}
    assert values["rollout/reward"] == pytest.approx((1.0 + 3.0 + 2.0 + 7.0) / 4)
    assert values["rollout/reward/first"] == pytest.approx(7 / 3)
    assert values["rollout/reward/second"] == pytest.approx(20.0)
    assert values["rollout/reward_std/second"] == pytest.approx(math.sqrt(200 / 3))


def test_decoupled_advantages_come_from_the_functions_own_rewards():
    def rare(completions):
        return [0.0, 1.0, 0.0, 0.0]

    def large(completions):
        return [100.0, 0.0, 0.0, 100.0]

    def learnt(**options):
        run, recorded, _ = texts(
            GRPOStrategy(2, **options), prompts=[[1], [2]], prompts_per_rollout=2, reward={"rare": rare, "large": large}
        )
        run.train()
        return sorted(recorded.batches[0]["advantages"].tolist())

    decoupled, summed = learnt(advantages="gdpo"), learnt()
    assert decoupled[1] == pytest.approx(decoupled[2], abs=1e-2), "both of the first group: each is best at one"
    assert summed[0] < -0.7 < 0.7 < summed[3]
    assert len({round(each, 2) for each in map(abs, summed)}) == 1


def test_groups_without_a_difference_and_truncated_texts_are_counted():
    completions = [[2, 0], [1, 1], [0], [4, 4], [3], [5, 0]]  # one ends early, and not by the end token
    run, recorded, _ = texts(
        GRPOStrategy(2), prompts_per_rollout=3, end_token=0, max_new_tokens=2,
        reward=lambda prompts, completions: [1.0, 1.0, 4.0, -1.0, 0.0, 0.0],
        sampler=lambda prompts, count, **options: completions,
    )  # fmt: skip
    run.train()
    values = recorded.rollouts[0].metrics
    assert values["rollout/zero_variance_groups"] == pytest.approx(2 / 3)
    assert values["rollout/truncated"] == pytest.approx(2 / 6)
    assert values["rollout/ended"] == pytest.approx(3 / 6)
    assert (values["rollout/length_min"], values["rollout/length_max"]) == (1.0, 2.0)


def test_truncated_texts_are_left_out_of_the_loss_of_a_run():
    completions = [[2, 0], [1, 1], [0], [4, 4], [0], [5, 0]]
    found = {}
    for masks in (False, True):
        run, recorded, _ = texts(
            GRPOStrategy(2, mask_truncated=masks), prompts_per_rollout=3, end_token=0, max_new_tokens=2, pad_token=3,
            sampler=lambda prompts, count, **options: completions,
        )  # fmt: skip
        run.train()
        found[masks] = recorded.batches[0]
    assert "truncated" not in found[False]
    batch = found[True]
    rows = zip(batch["input_ids"], batch["completion_mask"], strict=True)
    cut = [row[mask].tolist() in ([1, 1], [4, 4]) for row, mask in rows]
    assert batch["truncated"].tolist() == cut
    assert sum(cut) == 2


def test_without_an_end_token_every_text_would_be_truncated():
    message = refusal(lambda: texts(GRPOStrategy(2, mask_truncated=True)))
    assert message == (
        "GRPOStrategy(mask_truncated=True): without an end token every text is cut at max_new_tokens; pass "
        "TextRollouts(end_token=...)"
    )
