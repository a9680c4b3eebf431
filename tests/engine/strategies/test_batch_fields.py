"""Fields of a batch that the strategy does not read: they reach the model, or are refused by name."""

import pytest
import torch

from pulsetrain.engine import PretrainStrategy, SFTStrategy
from pulsetrain.engine.strategies import DPOStrategy, KTOStrategy, ORPOStrategy, RewardModelStrategy
from tests.support.formulas import VOCABULARY
from tests.support.models import Tokens
from tests.support.models_language import PAIRS, TEXTS, TOKENS, Short, assert_refused, run_of


class Typed(Tokens):
    """Embeds types and an image beside the tokens; keeps what it was given."""

    def __init__(self):
        super().__init__(VOCABULARY)
        self.given = []

    def forward(
        self, input_ids, position_ids=None, token_type_ids=None, pixel_values=None, attention_mask=None, **rest
    ):
        self.given.append({"token_type_ids": token_type_ids, "pixel_values": pixel_values, "rest": rest})
        return self.table(input_ids)


class Open(Tokens):
    """Passes everything on, so that its signature says nothing."""

    def __init__(self):
        super().__init__(VOCABULARY)
        self.given = []

    def forward(self, *args, **kwargs):
        self.given.append(kwargs)
        return self.table(kwargs["input_ids"])


TYPES = torch.arange(12).reshape(2, 6)
IMAGES = torch.ones(2, 3, 4, 4)
STRATEGIES = pytest.mark.parametrize("strategy", [SFTStrategy, PretrainStrategy])


@STRATEGIES
def test_tensors_that_the_model_accepts_reach_it_and_those_of_tokens_are_cut_as_the_tokens_are(strategy):
    model = Typed()
    run_of([{**TEXTS, "token_type_ids": TYPES, "pixel_values": IMAGES}], strategy(), model).train()
    given = model.given[-1]
    assert torch.equal(given["token_type_ids"], TYPES[:, :-1])
    assert torch.equal(given["pixel_values"], IMAGES)
    assert given["rest"] == {}


@STRATEGIES
def test_they_reach_a_model_beside_positions_and_one_that_passes_everything_on(strategy):
    packed = {**TEXTS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2), "token_type_ids": TYPES}
    made, model = strategy(), Typed()
    made.bind(model)
    inputs = made.prepare_batch(packed).inputs
    assert set(inputs) == {"input_ids", "position_ids", "token_type_ids"}
    model = Open()
    run_of([{**TEXTS, "pixel_values": IMAGES}], strategy(), model).train()
    assert set(model.given[-1]) == {"input_ids", "pixel_values"}


@STRATEGIES
@pytest.mark.parametrize("model", [Typed, Short])
def test_a_tensor_that_the_model_does_not_accept_is_refused_by_name(strategy, model):
    length = torch.tensor([6, 6])
    parts = ["'length', int64 (2,)", "drop the column"]
    assert_refused(run_of([{**TEXTS, "length": length}], strategy(), model()), TypeError, parts)


@STRATEGIES
def test_an_array_of_another_library_is_refused_by_name(strategy):
    run = run_of([{**TEXTS, "pixel_values": IMAGES.numpy()}], strategy(), Typed())
    assert_refused(run, TypeError, ["pixel_values=numpy.ndarray", "torch.from_numpy"])


@STRATEGIES
def test_texts_and_the_fields_that_the_strategy_reads_stay_with_it(strategy):
    model = Typed()
    mask = torch.ones_like(TOKENS)
    run_of([{**TEXTS, "attention_mask": mask, "text": ["a", "b"], "source": "web"}], strategy(), model).train()
    assert model.given[-1] == {"token_type_ids": None, "pixel_values": None, "rest": {}}


# ------------------------------------------------------------------------------------------------------------ answers

PAIRED = {**PAIRS, "margin": torch.ones(2), "reference_chosen_log_probs": -torch.ones(2), "prompt": ["a", "b"]}
PAIRED |= {"reference_rejected_log_probs": -torch.ones(2)}
JUDGED = {**TEXTS, "kl_input_ids": TOKENS, "kl_labels": TEXTS["labels"], "desirable": torch.tensor([True, False])}
ANSWERS = pytest.mark.parametrize(
    ("strategy", "batch"), [(DPOStrategy, PAIRED), (ORPOStrategy, PAIRED), (KTOStrategy, JUDGED)]
)


@ANSWERS
def test_each_answer_of_a_row_gets_its_further_tensors(strategy, batch):
    model, images = Typed(), torch.arange(2.0).reshape(2, 1, 1, 1)
    run_of([{**batch, "pixel_values": images}], strategy(), model).train()
    assert model.given[-1]["pixel_values"].flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


@ANSWERS
@pytest.mark.parametrize(
    ("field", "error", "parts"),
    [
        ({"chosen_token_type_ids": TYPES}, TypeError, ["'chosen_token_type_ids'", "drop the column"]),
        ({"prompt_input_ids": TYPES}, TypeError, ["'prompt_input_ids'", "drop the column"]),
        ({"pixel_values": torch.ones(3, 1)}, ValueError, ["'pixel_values' is float32 (3, 1)", "there are 2 rows"]),
        ({"pixel_values": IMAGES.numpy()}, TypeError, ["pixel_values=numpy.ndarray"]),
    ],
)
def test_other_tensors_beside_answers_are_refused_by_name(strategy, batch, field, error, parts):
    assert_refused(run_of([{**batch, **field}], strategy(), Typed()), error, parts)


def test_a_reward_model_gets_them_too():
    made, model = RewardModelStrategy(), Typed()
    made.bind(model)
    inputs = made.prepare_batch({**PAIRED, "token_type_ids": TYPES}).inputs
    assert torch.equal(inputs["token_type_ids"], torch.cat([TYPES, TYPES]))
    with pytest.raises(TypeError, match="'length', int64"):
        made.prepare_batch({**PAIRED, "length": torch.tensor([6, 6])})
