"""What differs between two configurations, and mixtures of them."""

from __future__ import annotations

from typing import Any

import pytest

from pulsetrain.bisect.changes import changes_between, settings_with

GOOD: dict[str, Any] = {
    "run": "runs/{n}",
    "model": {"class_path": "m.Net", "init_args": {"width": 8, "depth": 2}},
    "training": {"learning_rate": 0.1, "max_epochs": 3},
    "handlers": [{"class_path": "EMA", "init_args": {"decay": 0.9, "every": 1}}, "EventRecorder"],
}


def changed(**sections: Any) -> list[str]:
    bad = {**GOOD, **sections}
    return [str(each) for each in changes_between(GOOD, bad, {"schedule": None}, {"schedule": None})]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"run": "elsewhere"}, []),
        ({"training": {"learning_rate": 3, "max_epochs": 3}}, ["training.learning_rate: 0.1 -> 3"]),
        (
            {"training": {"learning_rate": 0.1, "max_epochs": 3, "schedule": "cosine"}},
            ["training.schedule: null -> cosine"],
        ),
        (
            {"model": {"class_path": "m.Net", "init_args": {"width": 9, "depth": 1}}},
            ["model.init_args.width: 8 -> 9", "model.init_args.depth: 2 -> 1"],
        ),
        (
            {"model": "m.Other"},
            ['model: {"class_path": "m.Net", "init_args": {"width": 8, "depth": 2}} -> m.Other'],
        ),
        (
            {"model": {"class_path": "m.Net", "init_args": {"width": 8, "dropout": 0.5}}},
            ["model.init_args.depth: 2 -> not given", "model.init_args.dropout: not given -> 0.5"],
        ),
        ({"model": "m.Net"}, ["model.init_args.width: 8 -> not given", "model.init_args.depth: 2 -> not given"]),
        ({"strategy": "SFT"}, ["strategy: null -> SFT"]),
        ({"handlers": ["EventRecorder"]}, ["handlers.EMA: present -> absent"]),
        (
            {"handlers": [{"class_path": "EMA", "init_args": {"decay": 0.5, "every": 1}}, "EventRecorder", "a.SWA"]},
            ["handlers.EMA.decay: 0.9 -> 0.5", "handlers.SWA: absent -> present"],
        ),
        (
            {"handlers": [{"class_path": "mine.EMA", "init_args": {"decay": 0.9, "every": 1}}, "EventRecorder"]},
            ["handlers.EMA: EMA -> mine.EMA"],
        ),
    ],
)
def test_each_setting_is_a_change_of_its_own(sections: dict[str, Any], expected: list[str]):
    assert changed(**sections) == expected


def test_some_changes_are_applied():
    handlers = [{"class_path": "EMA", "init_args": {"decay": 0.5, "every": 2}}, "EventRecorder", "a.SWA"]
    bad = {**GOOD, "training": {"learning_rate": 3, "max_epochs": 3}, "handlers": handlers}
    every = changes_between(GOOD, bad, {}, {})
    assert settings_with(GOOD, bad, []) == {}
    by_name = {each.name: each for each in every}
    some = [by_name["training.learning_rate"], by_name["handlers.EMA.every"]]
    assert settings_with(GOOD, bad, some) == {
        "training.learning_rate": 3,
        "handlers": [
            {"class_path": "EMA", "init_args": {"decay": 0.9, "every": 2}}, {"class_path": "EventRecorder"},
        ],
    }  # fmt: skip
    mixed = settings_with(GOOD, bad, every)["handlers"]
    assert mixed == [handlers[0], {"class_path": "EventRecorder"}, {"class_path": "a.SWA"}]
    assert "decay" in GOOD["handlers"][0]["init_args"]
    assert GOOD["handlers"][0]["init_args"]["decay"] == 0.9  # the originals stay as they are


def test_arguments_that_only_one_of_the_runs_gives_are_added_and_taken_out():
    handlers = [{"class_path": "EMA", "init_args": {"decay": 0.9, "start": 5}}, "EventRecorder"]
    arguments = {"width": 8, "dropout": 0.5, "bias": False}
    bad = {**GOOD, "model": {"class_path": "m.Net", "init_args": arguments}, "handlers": handlers}
    every = {each.name: each for each in changes_between(GOOD, bad, {}, {})}
    assert list(every) == [
        "model.init_args.depth", "model.init_args.dropout", "model.init_args.bias", "handlers.EMA.every",
        "handlers.EMA.start",
    ]  # fmt: skip
    some = [every[name] for name in ("model.init_args.depth", "model.init_args.bias", "handlers.EMA.every")]
    assert settings_with(GOOD, bad, some) == {
        "model": {"class_path": "m.Net", "init_args": {"width": 8, "bias": False}},
        "handlers": [{"class_path": "EMA", "init_args": {"decay": 0.9}}, {"class_path": "EventRecorder"}],
    }
    assert settings_with(GOOD, bad, list(every.values())) == {
        "model": bad["model"], "handlers": [handlers[0], {"class_path": "EventRecorder"}],
    }  # fmt: skip


def test_two_handlers_of_a_class_are_distinguished():
    good = {"handlers": [{"class_path": "EMA", "init_args": {"decay": 0.9}}] * 2}
    bad = {"handlers": [good["handlers"][0], {"class_path": "EMA", "init_args": {"decay": 0.1}}]}
    (change,) = changes_between(good, bad, {}, {})
    assert str(change) == "handlers.EMA#2.decay: 0.9 -> 0.1"
    assert settings_with(good, bad, [change])["handlers"] == bad["handlers"]
