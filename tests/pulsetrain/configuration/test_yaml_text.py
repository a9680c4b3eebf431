"""The YAML of the configuration: PyYAML's C parser reads it as its Python one, and what is written is read back."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain.configuration import claim
from pulsetrain.configuration.resolve import Resolved
from pulsetrain.configuration.yaml_text import dump_yaml, load_yaml, yaml_word

TEXTS = [
    "{a: 1, b: 3e-4, c: .5, d: yes, e: null, f: text, g: '1', h: 2026-01-01, i: 0x1f}",
    "a: {b: {c: [1, two, {three: 3}]}, d: []}\ne: {}\nf: ''",
    "1: one\nnull: nothing\nyes: true\n2.5: number\ntext: text",
    "base: &base {a: 1, b: x}\nmerged: {<<: *base, b: y}\nsame: *base",
    "a: !!str 5\n!!str 6: !!int '7'\nb: !!set {x, y}\nc: !!omap [x: 1]",
    "a: |\n  two\n  lines\n'<<': quoted\n=: 1",
    "- a\n- {b: c}",
    "text",
    "",
]
WRONG = [
    "{a: 1, a: 2}",
    "{a: {b: x, b: x}}",
    "{[1]: 2}",
    "a: !!str [1]",
    "!!str [1]: a",
    "a: !other 1",
    "{a: *b}",
    "{a",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_fast_parser_reads_the_same(text: str):
    slow, fast = load_yaml(text), load_yaml(text, fast=True)
    assert repr(fast) == repr(slow)


def test_the_fast_parser_keeps_what_aliases_share():
    found = load_yaml("a: &a {x: y}\nb: *a", fast=True)
    assert found["a"] is found["b"]


@pytest.mark.parametrize("text", WRONG)
def test_the_fast_parser_refuses_the_same(text: str):
    for fast in (False, True):
        with pytest.raises(yaml.YAMLError):
            load_yaml(text, fast=fast)


VALUES: list[Any] = [
    "1e3", "1234e56", "1.5e3", "-1e-3", ".5", "007", "0x1f", "yes", "null", ".inf", "2026-01-01", "a: b", "😀", "",
    "two\nlines ", "\x7f\x85\u2028", "...", ["..."], ["😀"], {"a b": {"c": -math.inf}},
    1e3, 1e-7, 1e22, math.inf, -math.inf, datetime.date(2026, 1, 1), None, True, 7, {0: 0.1, 5: {True: "1e3"}}, ["1e3"],
]  # fmt: skip


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_read_back_as_it_was_written(value: Any, fast: bool):
    found = load_yaml(dump_yaml({"a": value}), fast=fast)
    assert repr(found) == repr({"a": value})
    assert repr(load_yaml(yaml_word(value), fast=fast)) == repr(value)


def test_a_word_is_one_line():
    assert yaml_word({"a": ["x " * 100, {"b": [1] * 100}], "c": "..."}).count("\n") == 0


def test_the_configuration_of_a_run_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config: dict[str, Any] = {"data": {"class_path": "a.b", "init_args": {"commit": "1234e56", "tag": "1e3"}}}
    monkeypatch.setattr(claim, "write_run_file", lambda folder, trainer, base: None)
    claim.write_description(tmp_path, config, None, tmp_path)  # type: ignore[arg-type]  # of which nothing is written
    assert load_yaml((tmp_path / "config.yaml").read_text()) == config
    assert load_yaml(Resolved(config, tmp_path).as_yaml()) == config
