"""The rules by which a mesh splits parameters, which need no device."""

import re
from pathlib import Path

import pytest
import yaml

from pulsetrain.engine import ConfigurationError
from pulsetrain.engine.backends.jax_sharding import ShardingRules

MESH = {"data": 2, "model": 4}
SHAPES = {"blocks/0/kernel": (64, 48), "blocks/0/bias": (48,), "blocks/1/kernel": (64, 48), "table": (33, 64)}


def specs(sharding, annotated=None, shapes=SHAPES, mesh=MESH):
    return ShardingRules(mesh, sharding).specs(shapes, annotated or {})


def test_everything_is_replicated_unless_something_says_otherwise():
    assert specs("replicated") == dict.fromkeys(SHAPES, ())
    assert specs({}) == dict.fromkeys(SHAPES, ())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 48), (("data",),)),
        ((48, 64), ((), ("data",))),
        ((64, 64), (("data",),)),  # the first of equals
        ((65, 32), ((), ("data",))),  # the largest that divides
        ((65, 33), ()),
        ((1022,), ()),  # small
        ((1024,), (("data",),)),
        ((), ()),
    ],
    ids=str,
)
def test_fully_sharded_splits_the_largest_dimension_that_divides(shape, expected):
    assert specs({"*": "fsdp"}, shapes={"kernel": shape})["kernel"] == expected


def test_the_first_pattern_that_matches_counts():
    rules = {"blocks/0/*": [None, "model"], "blocks/*/kernel": ["model"], "*": "fsdp"}
    found = specs(rules, shapes={**SHAPES, "blocks/0/bias": (3, 48)})
    assert found == {
        "blocks/0/kernel": ((), ("model",)),
        "blocks/0/bias": ((), ("model",)),
        "blocks/1/kernel": (("model",),),
        "table": ((), ("data",)),
    }


def test_a_dimension_may_be_split_over_both_axes():
    assert specs({"table": [None, ["data", "model"]]})["table"] == ((), ("data", "model"))
    with pytest.raises(ConfigurationError, match=r"dimension 0 of the parameter 'blocks/0/kernel' .* data=2 x model=4"):
        specs({"blocks/0/kernel": [["data", "model"]]}, shapes={"blocks/0/kernel": (12, 8)})


def test_metadata_counts_where_no_pattern_matches():
    annotated = dict.fromkeys(("blocks/0/kernel", "blocks/1/kernel", "table"), (None, "model"))
    found = specs({"blocks/0/*": "replicated"}, annotated)
    assert found["blocks/0/kernel"] == ()
    assert found["blocks/1/kernel"] == found["table"] == ((), ("model",))
    assert specs("fsdp", annotated)["table"] == ((), ("model",)), "a word is for what has no metadata"
    assert specs("replicated", annotated, mesh={"data": 2})["table"] == ((), ()), "a mesh without this axis"


@pytest.mark.parametrize(
    ("annotated", "parts"),
    [
        (
            (None, "embed"),
            r"mesh={.*}\): flax's metadata of the parameter 'table' names the axis 'embed'; name 'data' or",
        ),
        (
            ("model",),
            r"dimension 0 of the parameter 'table' of shape \(33, 64\) does not divide by model=4; .* `sharding`",
        ),
        (
            (None, None, "model"),
            r"the parameter 'table' has 2 dimensions, not 3; give its path a pattern in `sharding`",
        ),
    ],
    ids=str,
)
def test_metadata_that_does_not_fit_is_refused(annotated, parts):
    with pytest.raises(ConfigurationError, match=parts):
        specs("replicated", {"table": annotated})


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [
        ({"blocks/*/kernels": ["model"]}, r"{'blocks/\*/kernels': \['model'\]}\): matches none of the model's 4 param"),
        ({"blocks/*/kernels": "fsdp"}, r"such as 'blocks/[01]/kernel'"),
        (
            {"table": ["model"]},
            r"dimension 0 of the parameter 'table' of shape \(33, 64\) does not divide by model=4; ch",
        ),
        (
            {"blocks/0/*": [None, "model"]},
            r"the parameter 'blocks/0/bias' has 1 dimensions, not 2; leave it out of the",
        ),
        ({"table": [None, "modell"]}, r"the mesh has no axis 'modell', only data=2, model=4; did you mean 'model'\?"),
        ({"table": ["data", "data"]}, r"splits two dimensions over 'data'; an axis can split one"),
        ({"table": 3}, r"{'table': 3}\): needs 'fsdp', 'replicated' or a list with an axis, several axes or None"),
        ({"table": [3]}, r"{'table': \[3\]}\): needs 'fsdp', 'replicated' or a list"),
        ({"table": "fdsp"}, r"{'table': 'fdsp'}\): needs 'fsdp', 'replicated' or a list"),
        ("fdsp", r"sharding='fdsp'\): needs 'fsdp', 'replicated' or a mapping of patterns"),
        (3, r"sharding=3\): needs 'fsdp', 'replicated' or a mapping of patterns"),
    ],
    ids=str,
)
def test_rules_that_do_not_fit_are_refused(sharding, parts):
    with pytest.raises(ConfigurationError, match=parts) as error:
        specs(sharding)
    assert error.value.argument == "sharding"


def test_fully_sharded_needs_something_to_split():
    with pytest.raises(
        ConfigurationError, match=r"'fsdp'\): splits none of the model's parameters: none has 1024 elem"
    ):
        specs("fsdp", shapes={"kernel": (65, 33), "bias": (64,)})
    for sharding in ("fsdp", {"*": "fsdp"}):
        with pytest.raises(
            ConfigurationError, match="splits over the axis 'data', which the mesh does not have; add it"
        ):
            ShardingRules({"model": 2}, sharding)


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ({}, r"mesh={}\): needs axes with their sizes, such as {'data': 4}"),
        (4, r"mesh=4\): needs axes with their sizes"),
        ({"dat": 2}, r"mesh={'dat': 2}\): the axes are 'data' and 'model'; did you mean 'data'\?"),
        ({"data": 0}, r"mesh={'data': 0}\): a size is a whole number of at least 1"),
        ({"data": True}, r"a size is a whole number"),
        ({"data": 2.0}, r"a size is a whole number"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_exist_is_refused(mesh, parts):
    with pytest.raises(ConfigurationError, match=parts) as error:
        ShardingRules(mesh)
    assert error.value.argument == "mesh"


def test_the_guide_splits_the_example():
    guide = (Path(__file__).parents[3] / "docs" / "jax_devices.md").read_text()
    (block,) = [each for each in re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL) if "JaxBackend" in each]
    found = ShardingRules(**yaml.safe_load(block)["backend"]["init_args"]).specs(
        {"blocks/0/expand/kernel": (128, 512), "blocks/0/mix/kernel": (128, 128), "norm/bias": (128,)}, {}
    )
    assert list(found.values()) == [((), ("model",)), (("data",),), ()]
