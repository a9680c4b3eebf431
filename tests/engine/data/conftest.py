"""A tokenizer that learns its pairs of bytes from a few words, as tokenizers and as transformers have it."""

from __future__ import annotations

import pytest

MARKS = ["<|im_start|>", "<|im_end|>", "<s>"]


@pytest.fixture(scope="module")
def bpe():
    """Pairs of bytes, learnt from a few words; encoding puts <s> before a text by default."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
    from transformers import PreTrainedTokenizerFast

    def make(chat_template=None):
        return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", chat_template=chat_template)

    return make
