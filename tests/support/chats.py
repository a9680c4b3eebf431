"""A conversation, what is learnt of it, and the text of tokenized examples."""

from __future__ import annotations

from pulsetrain.engine.data.sequences import IGNORED

X = IGNORED  # not learnt
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": "Fine, too."},
]


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
