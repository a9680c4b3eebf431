"""Prompts of texts and messages with tokenizers of several kinds, and the completions that they read."""

from __future__ import annotations

from pulsetrain.engine import GRPOStrategy
from pulsetrain.engine.data.chat import encode_prompt, tokenize_chat
from pulsetrain.engine.rollouts import TextRollouts
from tests.support.chats import CHATML, DIALOGUE, X, encode_bytes, reader
from tests.support.models import Tokens, trainer


def test_the_prompt_of_a_chat_is_what_its_answer_follows_in_an_example(bpe, make_fast):
    for tokenizer in (bpe, make_fast(), make_fast(CHATML), encode_bytes):
        prompt = encode_prompt(DIALOGUE[:2], tokenizer)
        example = tokenize_chat(DIALOGUE[:3], tokenizer)
        assert example["input_ids"][: len(prompt)] == prompt
        assert example["labels"][: len(prompt)] == [X] * len(prompt)
        assert example["labels"][len(prompt)] != X
    assert bpe.token_to_id("<s>") not in encode_prompt("How are you?", make_fast())


def test_a_tokenizer_of_transformers_writes_prompts_and_reads_completions(bpe, make_fast):
    tokenizer, seen = make_fast(CHATML), []

    def reward(prompts, completions):
        seen.append((prompts, completions))
        return [1.0] * len(prompts)

    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = tokenizer.encode("Fine, too.", add_special_tokens=False)
    options = {"max_new_tokens": 20, "prompts_per_rollout": 1, "end_token": end, "tokenizer": tokenizer}
    given = TextRollouts([DIALOGUE[:2]], reward, sampler=lambda p, most, **_: [[*answer, end]] * len(p), **options)
    assert reader(bpe)(given.prompts[0]).endswith("How are you?<|im_end|>\n<|im_start|>assistant\n")
    trainer({"max_updates": 1}, model=Tokens(400), train_loader=given, strategy=GRPOStrategy(2)).train()
    assert seen == [([DIALOGUE[:2]] * 2, [[{"role": "assistant", "content": "Fine, too."}]] * 2)]
