"""A model must keep the documents of a row apart."""

import pytest
import torch

from pulsetrain.engine import PretrainStrategy, SFTStrategy
from pulsetrain.engine.errors import ConfigurationError
from tests.support.models_language import TEXTS, TOKENS, Mean, assert_refused, run_of

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)


PACKED = {**TEXTS, "labels": TOKENS, "position_ids": POSITIONS}


class Swallowing(Mean):
    """Takes whatever it is given, and looks at the tokens alone."""

    def __init__(self):
        super().__init__(apart=False)

    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids, torch.zeros_like(input_ids))


@pytest.mark.parametrize("make", [lambda: Mean(apart=False), Swallowing], ids=["seen", "swallowed"])
@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        (SFTStrategy, PACKED),
        (PretrainStrategy, {"input_ids": TOKENS, "position_ids": POSITIONS}),
        (lambda: PretrainStrategy(separator=0), TOKENS),
    ],
    ids=["sft", "pretrain", "separator"],
)
def test_a_model_that_sees_the_document_before_is_refused(make, strategy, batch):
    torch.manual_seed(0)
    model = make()
    expected = [
        "several documents share a row, and",
        f"{type(model).__name__} lets each see the one before it",
        "no separ",
    ]
    run = run_of([batch], strategy(), model)
    assert_refused(run, ConfigurationError, expected)
    assert_refused(run, ConfigurationError, expected)  # a second attempt fails too
    assert run.state.update == 0


def test_a_model_that_keeps_documents_apart_is_checked_once():
    torch.manual_seed(0)
    model = Mean(apart=True)
    run = run_of([PACKED] * 3, SFTStrategy(), model)
    run.train()
    assert run.state.update == 3
    assert model.calls == 3 + 1
    assert model.training


def test_a_head_of_zeros_proves_nothing_and_the_model_is_checked_again():
    torch.manual_seed(0)
    run = run_of([PACKED] * 3, SFTStrategy(), Mean(apart=False, zero=True))
    with pytest.raises(ConfigurationError, match="lets each see the one before it"):
        run.train()
    assert run.state.update == 1  # which has made the head another
