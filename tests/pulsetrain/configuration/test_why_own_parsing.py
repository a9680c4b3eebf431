"""What jsonargparse does not do, for each part of the configuration's parsing that is not left to it.

Each test shows the library's answer beside ours. When one fails, the library has learned to do it: remove our code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from torch import nn

from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.resolve import resolve
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.errors import ConfigurationError

HERE = __name__


class Inner:
    def __init__(self, width: int = 2) -> None:
        self.width = width


class Part(nn.Module):
    def __init__(
        self, size: int = 4, inner: Inner | None = None, gate: Any = lambda x: x, folder: str = "none"
    ) -> None:
        super().__init__()
        self.size, self.inner, self.folder = size, inner, folder


def build(size=4):  # type: ignore[no-untyped-def]
    return Part(size)


def loaders(rows: int = 3) -> tuple[list[int], list[int]]:
    return [rows], []


def parser(kind: Any) -> jsonargparse.ArgumentParser:
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_argument("--part", type=kind)
    return made


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the text is what is compared
        call()
    return str(caught.value)


def test_a_section_may_name_a_function_of_any_return_type() -> None:
    assert "does not correspond to a subclass" in refused(
        lambda: parser(nn.Module).parse_object({"part": f"{HERE}.build"})
    )
    assert instantiate(f"{HERE}.build", "model").size == 4
    assert instantiate(f"{HERE}.loaders", "data") == ([3], [])


def test_a_class_in_a_section_of_any_type_is_called() -> None:
    spec = {"class_path": f"{HERE}.Inner", "init_args": {"width": 3}}
    assert "expects a function or a callable class" in refused(
        lambda: parser(Callable[..., Any]).parse_object({"part": spec})
    )
    assert parser(Any).parse_object({"part": spec}).part.as_dict() == spec  # not called
    assert instantiate(spec, "model").width == 3


def test_overrides_reach_into_a_section_of_any_type(tmp_path: Path) -> None:
    words = [f"--part={{class_path: {HERE}.Inner, init_args: {{width: 3}}}}", "--part.init_args.width=5"]
    found = parser(Any).parse_args(words).part
    assert "class_path" not in str(found)  # the section is lost
    (tmp_path / "config.yaml").write_text(f"model: {HERE}.Inner\ndata: {HERE}.loaders\n")
    config = read_config(tmp_path / "config.yaml", {"model.init_args.width": "5"})
    assert config["model"] == {"class_path": f"{HERE}.Inner", "init_args": {"width": 5}}


@pytest.mark.parametrize(
    ("init_args", "message"),
    [
        (
            {"inner": {"class_path": f"{HERE}.Inner", "init_args": {"widht": 3}}},
            "model.init_args.inner.init_args.widht: unknown argument of Inner; choose one of width; "
            "did you mean 'width'?",
        ),
        (
            {"inner": {"class_path": f"{HERE}.Inner", "init_args": {"width": "x"}}},
            "model.init_args.inner.init_args.width='x': needs a whole number",
        ),
    ],
)
def test_an_error_inside_a_value_has_its_location_and_what_would_be_right(
    init_args: dict[str, Any], message: str
) -> None:
    spec = {"class_path": f"{HERE}.Part", "init_args": init_args}
    theirs = refused(lambda: parser(nn.Module).parse_object({"part": spec}))
    assert "\n" in theirs
    assert "inner.init_args" not in theirs
    assert "did you mean" not in theirs
    with pytest.raises(ConfigurationError) as caught:
        instantiate(spec, "model")
    assert str(caught.value) == message


def test_an_error_of_a_constructor_has_its_location() -> None:
    class Refusing(Inner):
        def __init__(self, width: int = 2) -> None:
            raise ValueError("too wide")

    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_class_arguments(Refusing, "part")
    assert refused(lambda: made.instantiate(made.parse_object({"part": {"width": 2}}))) == "too wide"
    with pytest.raises(ConfigurationError, match=r"^in model: ValueError: too wide \(.*_own_parsing.py, line \d+\)$"):
        instantiate({"class_path": Refusing}, "model")


def test_whole_numbers_may_have_an_exponent() -> None:
    spec = {"class_path": f"{HERE}.Part", "init_args": {"size": 1e3}}
    assert "Got value: 1000.0" in refused(lambda: parser(nn.Module).parse_object({"part": spec}))
    assert instantiate(spec, "model").size == 1000


def test_a_key_that_is_given_twice_is_an_error() -> None:
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_argument("--size", type=int)
    assert made.parse_string("size: 1\nsize: 2").size == 2
    assert "given twice" in refused(lambda: load_yaml("size: 1\nsize: 2"))


def test_arguments_that_the_run_provides_are_filled_in_where_they_are_taken() -> None:
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_class_arguments(Inner)
    assert "folder" in refused(lambda: made.parse_object({"folder": "runs/a"}))
    assert instantiate(f"{HERE}.Inner", "handlers[0]", folder="runs/a").width == 2
    assert instantiate(f"{HERE}.Part", "handlers[0]", folder="runs/a").folder == "runs/a"


def test_printing_names_the_origin_of_values_and_leaves_out_what_yaml_cannot_write(tmp_path: Path) -> None:
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_class_arguments(Part, fail_untyped=False)
    with pytest.warns(UserWarning, match="Unable to serialize"):
        printed = made.dump(made.get_defaults())
    assert "#" not in printed
    assert "gate: Unable to serialize" in printed  # which is read back as text
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {HERE}.Part\ndata: {HERE}.loaders\n")
    ours = resolve(path, {"model.init_args.size": "8"}).as_yaml()
    assert f"class_path: {HERE}.Part  # not written: gate (<lambda>)" in ours
    assert "    size: 8  # command line" in ours
    assert "    folder: none  # default" in ours
