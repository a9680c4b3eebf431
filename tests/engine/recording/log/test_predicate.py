"""Conditions on events as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.predicate import predicate

EVENT = LoggedEvent(
    ord=3,
    event="epoch_completed",
    epoch=2,
    payload={"path": "a/b", "items": [1, 2]},
    output={"loss": "NaN", "n": 3, "top": "Infinity"},
    metrics={"val/loss": 1.5},
    lr=[0.1, 0.2],
)


@pytest.mark.parametrize(
    "text",
    [
        'metrics["val/loss"] < 2',
        "1 < epoch <= 2",
        'epoch == 2 and "val/loss" in metrics',
        'event in ("epoch_completed", "completed")',
        'epoch > 5 or not output["n"] == 4',
        'output["n"] % 2 == 1 and -output["n"] + 5 == 2 and output["n"] // 2 == 1',
        'abs(metrics["val/loss"] - 2) == 0.5',
        "len(lr) == 2 and lr[-1] == 0.2",
        'payload["items"][1] == 2',
        'isnan(output["loss"])',
        'output["loss"] == "NaN"',
        'output["top"] > 1e300',
        "error is None and lr is not None",
        "error == None and lr != None",
        "  epoch == 2  ",
    ],
)
def test_true(text):
    assert predicate(text)(EVENT) is True


@pytest.mark.parametrize(
    "text",
    [
        'output["missing"] > 1',
        'output["missing"] < 1',
        'output["missing"] == 1',
        'output["missing"] != 1',
        'output["missing"]["deeper"] + 1 > 0',
        'error["message"] == "x"',
        '"x" in error',
        '"x" not in error',
        "epoch < event",
        'output["n"] / 0 == 1',
        'output["n"] / 0 != 1',
        "isnan(error)",
        "abs(error) > 0",
        "len(epoch) > 0",
        'output["loss"] > 0',
        "payload + 1 == 2",
        "lr[7] > 0",
        "error",
    ],
)
def test_missing_and_unordered_values_make_a_comparison_false(text):
    assert predicate(text)(EVENT) is False


@pytest.mark.parametrize(
    ("text", "reason", "column"),
    [
        ('output["loss" > 4', "'[' was never closed", 6),
        ("epoch > > 4", "invalid syntax", 8),
        ("epoch >", "invalid syntax", 7),
        ("", "invalid syntax", 0),
        ("epoch = 3", "", None),
        ("epcoh == 3", "no field 'epcoh'; did you mean 'epoch'?", 0),
        ('"äöü" == evnt', "no field 'evnt'; did you mean 'event'?", 9),
        ("1 < loss", "no field 'loss'; events have ord, engine,", 4),
        ('output.loss > 4 and "x"', 'a field of output is written output["loss"]', 0),
        ("output[loss] > 4", 'the key loss has no quotes; did you mean output["loss"]?', 7),
        ("metrics[val/loss] > 4", 'the key val/loss has no quotes; did you mean metrics["val/loss"]?', 8),
        ("output[epcoh + 1] > 4", "no field 'epcoh'; did you mean 'epoch'?", 7),
        ('__import__("os")', "not supported", 0),
        ("abs(epoch, 2) > 1", "not supported", 0),
        ("output.get(1)", "not supported", 0),
        ("epoch ** 9", "not supported", 0),
        ("(lambda: 1)()", "not supported", 0),
        ("[x for x in lr]", "not supported", 0),
        ("epoch is 3", "`is` compares with None only", 9),
        ("-" * 20_000 + "1", "nested too deeply", 0),
        ("epoch\0", "null bytes", None),
    ],
)
def test_a_caret_marks_the_error(text, reason, column):
    with pytest.raises(ConfigurationError) as caught:
        predicate(text)
    first, _, caret = str(caught.value).split("\n")
    assert first.startswith("where: ")
    assert reason in first
    assert caret.endswith("^")
    assert column is None or len(caret) - 3 == column


@given(st.text(alphabet='epoch lr[]().,"x19<>=!+-*/%notinadis\n\\', max_size=40))
def test_any_text_is_a_condition_or_an_error(text):
    try:
        condition = predicate(text)
    except ConfigurationError:
        return
    assert condition(EVENT) in (True, False)
