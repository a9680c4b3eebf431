"""From a section of a configuration to an object: checked arguments, and errors that name the setting."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.engine.errors import ConfigurationError


@dataclass(frozen=True)
class Size:
    width: int
    depth: int = 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"Size(width={self.width}): needs at least 1")


class Part:
    def __init__(
        self,
        number: int,
        ratio: float | None = None,
        mode: Literal["min", "max"] = "min",
        options: Mapping[str, Any] | None = None,
        names: list[str] | None = None,
        size: Size | None = None,
        other: Part | None = None,
        flag: bool = False,
        folder: str = "none",
    ) -> None:
        self.__dict__.update(number=number, ratio=ratio, size=size, other=other, folder=folder, options=options)


def made(**arguments: Any) -> Any:
    return instantiate({"class_path": Part, "init_args": {"number": 1, **arguments}}, "part")


def untyped(prompt, fold=None, rate=1.0, tag="1e3"):  # type: ignore[no-untyped-def]
    return prompt, fold, rate, tag


def of_any(
    text: Any,
    thing: object = "1e3",
    maybe: Any | None = "007",
    options: Mapping[str, Any] | None = None,
    rows: list[dict[str, Any]] | None = None,
) -> Any:
    return text, thing, maybe, options, rows


class TestBuild:
    def test_arguments_take_their_annotated_types(self) -> None:
        part = made(number=1e3, ratio="3e-4", size={"width": 2}, options={"class_path": "kept"})
        assert (part.number, part.ratio, part.size, part.options) == (1000, 3e-4, Size(2), {"class_path": "kept"})
        assert type(part.number) is int

    @pytest.mark.parametrize("text", ["007", "1e3", "Answer: yes", "null", "2026-01-01", "[1, 2]"])
    def test_a_text_stays_one_where_any_value_is_taken(self, text: str) -> None:
        given = {"class_path": untyped, "init_args": {"prompt": text, "fold": text, "rate": "3e-4"}}
        assert instantiate(given, "data") == (text, text, 3e-4, "1e3")
        arguments = {"text": text, "options": {"a": text, "b": [1]}, "rows": [{"a": text}, {"b": 2}]}
        assert instantiate({"class_path": of_any, "init_args": arguments}, "data") == (
            text, "1e3", "007", arguments["options"], arguments["rows"]
        )  # fmt: skip

    def test_a_schedule_of_a_policy_is_made_from_its_settings(self) -> None:
        schedule = {
            "class_path": "pulsetrain.engine.schedules.Linear",
            "init_args": {"initial_lr": 0.2, "total_steps": 4},
        }
        spec = {
            "class_path": "pulsetrain.engine.PPOStrategy",
            "init_args": {"clip_range": schedule, "entropy_coef": 0.1},
        }
        assert instantiate(spec, "strategy").scheduled(1) == {"clip_range": 0.2 * (1 - 1 / 4)}

    def test_objects_inside_objects_are_made_too(self) -> None:
        inner = {"class_path": f"{__name__}.Part", "init_args": {"number": 2}}
        assert made(other=inner).other.number == 2

    def test_functions_are_named_by_their_paths_and_the_configuration_keeps_the_paths(self) -> None:
        rows = [{"prompt": [1], "answer": "a"}]
        for given in (["math.hypot", "textwrap.indent"], {"a": "math.hypot", "b": "textwrap.indent"}):
            arguments = {"prompts": rows, "reward": given, "reward_weights": [1, 0.5]}
            before = copy.deepcopy(arguments)
            spec = {"class_path": "pulsetrain.engine.rollouts.TextRollouts", "init_args": arguments}
            rollouts = instantiate(spec, "data")
            functions = rollouts.reward.values() if isinstance(given, dict) else rollouts.reward
            assert list(functions) == [math.hypot, textwrap.indent]
            assert arguments == before

    def test_provided_arguments_fill_in_missing_parameters(self) -> None:
        spec = {"class_path": Part, "init_args": {"number": 1}}
        assert instantiate(spec, "part", folder="runs/a", unasked=1).folder == "runs/a"
        assert instantiate({**spec, "init_args": {"number": 1, "folder": "b"}}, "part", folder="runs/a").folder == "b"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"number": "two"}, "part.init_args.number='two': needs a whole number"),
            ({"number": 1.5}, "part.init_args.number=1.5: needs a whole number"),
            ({"ratio": "much"}, "part.init_args.ratio='much': needs a number or null"),
            ({"mode": "mni"}, "part.init_args.mode='mni': needs min or max"),
            ({"options": [1]}, "part.init_args.options=[1]: needs a mapping or null"),
            ({"names": 3}, "part.init_args.names=3: needs a list or null"),
            ({"flag": "perhaps"}, "part.init_args.flag='perhaps': needs true or false"),
            ({"size": 3}, "part.init_args.size=3: needs a mapping with width, depth or null"),
            ({"size": {"width": "x"}}, "part.init_args.size.width='x': needs a whole number"),
            (
                {"size": {"height": 1}},
                "part.init_args.size.height: unknown argument of Size; choose one of depth, width",
            ),
            ({"size": {"depth": 1}}, "part.init_args.size: Size needs width as well"),
            ({"size": {"width": 0}}, "in part.init_args.size: Size(width=0): needs at least 1"),
            ({"other": 3}, "part.init_args.other=3: needs a mapping with the class_path of a Part or null"),
            ({"nmber": 3}, "unknown argument of Part; choose one of flag, folder, mode, names, number"),
        ],
    )
    def test_errors_name_the_settings_of_the_file(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            made(**arguments)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "<class" not in str(caught.value)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (3, "part=3: needs a class path"),
            ({"init_args": {}}, "needs a class path"),
            ({"class_path": Part, "init_arg": {}}, "part.init_arg: unknown key.*did you mean 'init_args'"),
            ({"class_path": Part, "init_args": 3}, "part.init_args=3: needs a mapping"),
            ({"class_path": Part}, "part.init_args: Part needs number as well"),
            ("Part", r"class_path='Part': needs a path with a module"),
            ("nowhere.Part", "there is no module 'nowhere'"),
            ("pulsetrain.engine.nowhere.Part", "there is no module 'pulsetrain.engine.nowhere'"),
            (f"{__name__}.Prat", r"unknown name in .*did you mean 'Part'"),
            (
                "pulsetrain.engine.metrics.Acuracy",
                "unknown name in pulsetrain.engine.metrics; choose one of Accuracy, .*mean 'Accuracy'",
            ),
            (
                "pulsetrain.engine.schedules.Cosin",
                "unknown name in pulsetrain.engine.schedules; choose one of .*did you mean 'Cosine'",
            ),
            (
                "pulsetrain.engine.strategies.SupervisdStrategy",
                "PPOStrategy, PretrainStrategy, .*, SupervisedStrategy.*did you mean 'SupervisedStrategy'",
            ),
            ("torch.nn.Linaer", r"unknown name in torch.nn; there are \d+ others; did you mean 'Linear'"),
        ],
    )
    def test_names_that_do_not_exist_are_rejected(self, spec: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            instantiate(spec, "part")

    def test_an_error_of_the_callable_keeps_its_text_and_gains_its_location(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^in data: ZeroDivisionError: ") as caught:
            instantiate({"class_path": lambda: 1 // 0}, "data")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_names_that_need_no_path_are_listed(self) -> None:
        assert instantiate("Part", "part", {"Part": lambda: 7}) == 7
        with pytest.raises(ConfigurationError, match=r"class_path='Prat'.*choose one of Part; did you mean 'Part'"):
            instantiate("Prat", "part", {"Part": Part})
