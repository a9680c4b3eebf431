"""Which modules of a model each part of a pipeline has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.byte_lm.model import ByteGPT
from pulsetrain.engine.distributed.pipeline_parts import PipelineParts, leave_out
from pulsetrain.engine.distributed.pipeline_plan import Span, check_parts, find_plan
from pulsetrain.engine.errors import ConfigurationError


def test_what_is_registered_before_the_layers_is_in_the_first_part_and_the_rest_in_the_last():
    model = ByteGPT(layers=4, width=8, heads=1)
    plan = find_plan(model)
    assert (plan.before, plan.after) == (("embedding",), ("norm", "head"))
    first, second = plan.spans(2)
    assert plan.names(first) == ("embedding", "blocks.0", "blocks.1")
    assert plan.names(second) == ("blocks.2", "blocks.3", "norm", "head")
    names = {name for span in plan.spans(4) for name in plan.names(span)}
    covered = {each for name in names for each in model.get_submodule(name).parameters()}
    assert covered == set(model.parameters())


@pytest.mark.parametrize(
    ("kind", "path", "before", "after"),
    [
        ("Llama", None, ("model.embed_tokens",), ("model.norm", "lm_head")),
        ("GPT2", "transformer.h", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")),
    ],
)
def test_models_of_transformers(kind: str, path: str | None, before: tuple[str, ...], after: tuple[str, ...]):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    with torch.device("meta"):
        plan = find_plan(transformers.AutoModelForCausalLM.from_config(config), path)
    assert (plan.before, plan.after, len(plan.blocks)) == (before, after, 2)


def test_a_tied_head_is_refused():
    model = ByteGPT(layers=2, width=8, heads=1)
    model.head.weight = model.embedding.weight
    plan = find_plan(model)
    parts = {name: at for at, span in enumerate(plan.spans(2)) for name in plan.names(span)}
    with pytest.raises(ConfigurationError, match=r"embedding.weight and head.weight are one parameter"):
        check_parts(model, parts, 2)
    check_parts(model, parts, 1)  # one process has both


@pytest.mark.parametrize("given", [3, ["blocks"]])
def test_a_plan_that_is_not_a_path_is_refused(given: object):
    model = nn.Linear(2, 2)
    model.pipeline_plan = given  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="needs the path of the list of layers"):
        find_plan(model)


@torch.no_grad()
def test_parts_that_compute_one_after_the_other_give_the_outputs_of_the_model():
    model = ByteGPT(layers=4, width=8, heads=1, dropout=0.0)
    tokens, positions = torch.randint(0, 256, (2, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    expected = model(tokens, positions)
    parts, passed = PipelineParts(model, find_plan(model)), None
    for span in (Span(0, 1), Span(1, 3), Span(3, 4)):
        passed = parts.run(lambda: model(tokens, positions), span, passed)
    assert torch.equal(passed, expected)
    with pytest.raises(RuntimeError, match="embedding is a part of a model that several processes compute"):
        model(tokens)


def test_what_is_left_out_keeps_its_names_shapes_and_flags():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    before = {name: (each.shape, each.requires_grad) for name, each in model.named_parameters()}
    names = list(model.state_dict())
    replaced = leave_out(model, ["0", "1"])
    assert {name: (each.shape, each.requires_grad) for name, each in model.named_parameters()} == before
    assert list(model.state_dict()) == names
    assert all(each.is_meta for each in model.state_dict().values())
    assert set(replaced.values()) == set(model.parameters())


def test_layers_that_do_not_divide_are_named_with_the_setting_that_was_given():
    plan = find_plan(nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))))
    assert len(plan.spans(6, 3)) == 6
    with pytest.raises(ConfigurationError) as refused:
        plan.spans(4)
    assert str(refused.value).startswith("Topology(pipeline=4): the 6 layers from '0' on cannot be split into 4 equal")
    with pytest.raises(ConfigurationError) as refused:
        plan.spans(4, 2)
    said = str(refused.value)
    assert said.startswith("Topology(pipeline=2, schedule='interleaved'): the 6 layers from '0' on cannot be split")
    assert "into 4 equal parts, 2 for each process; " in said
    assert "or a schedule with one part for each, or give the model another number of layers" in said
