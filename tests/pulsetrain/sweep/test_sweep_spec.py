"""SWEEP.yaml: what is refused, and what may change of a sweep that has begun."""

from __future__ import annotations

import datetime
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pulsetrain.cli.sweep import _write_config
from pulsetrain.configuration.parse import read_config
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.sweep.results import Trial
from pulsetrain.sweep.spec import differing, read_saved, read_spec, write_saved
from pulsetrain.sweep.trials import check_settings, settings_of
from tests.faults.sweeps import CONFIG, MODEL

SWEEP = {
    "config": "base.yaml",
    "space": "{training.learning_rate: [1e-3, 1e-2]}",
    "sampler": "grid",
    "metric": "val/loss",
    "folder": "out",
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "base.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, **entries: str) -> Path:
    path = folder / "s.yaml"
    path.write_text("\n".join(f"{name}: {text}" for name, text in {**SWEEP, **entries}.items()))
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"space": "{training.learning_rate: {low: 0, high: 1, log: true}}", "sampler": "random"}, "begin above 0"),
        ({"space": "{training.learning_rate: {low: 1, high: 0.1}}"}, "low has to be below high"),
        ({"space": "{training.learning_rate: {low: 0.1, high: 1}}"}, "a grid needs a list of values"),
        ({"space": "{training.learning_rate: [1, 1]}"}, "each once"),
        ({"space": "{training.learning_rate: {low: 0.1, hihg: 1}}"}, "needs a list of values, or low and high"),
        ({"sampler": "tpe"}, "needs their number"),
        ({"sampler": "tpa", "trials": "2"}, "did you mean 'tpe'"),
        ({"workers": "100000"}, "use at most"),
        ({"workers": "0"}, "at least 1"),
        ({"mertic": "val/loss"}, "did you mean 'metric'"),
        ({"metric": "val/quality"}, "give min or max"),
        ({"metric": "[val/loss, val/accuracy]", "pruner": "asha"}, "pruners compare one metric"),
        ({"sampler": "population"}, "a population needs it"),
        ({"sampler": "population", "interval": "4", "trials": "4"}, "a population trains population x generations"),
        ({"storage": "mysql://me:secret@host/a"}, "storage: mysql is not supported"),
        ({"replay": "3"}, "needs a run folder"),
        ({"replay": "{a: b}"}, "needs a run folder"),
        ({"metric": "[val/loss, val/loss]"}, "names a metric twice"),
        ({"study": "[a]"}, "study=['a']: needs text"),
        ({"config": "5"}, "config=5: needs text"),
        ({"space": "{}"}, "the entry 'space' is empty"),
        ({"space": "{a: [1"}, "not valid YAML"),
        ({"space": "{training.learning_rate: [1, 1.0]}"}, "each once"),
        ({"space": "{training.shuffle: [1, true]}"}, "each once"),
        ({"space": "{run: [a, b]}"}, "space.run: the sweep gives each trial its run folder"),
        ({"generations": "3"}, "generations: is for the sampler population, not grid"),
    ],
    ids=[
        "log-of-0",
        "low-above-high",
        "range-in-grid",
        "twice",
        "unknown-bound",
        "no-trials",
        "sampler",
        "many-workers",
        "no-workers",
        "entry",
        "mode",
        "pruner",
        "interval",
        "trials-of-population",
        "storage",
        "replay-number",
        "replay-mapping",
        "metric-twice",
        "study",
        "config",
        "empty-space",
        "yaml",
        "equal-numbers",
        "equal-bool",
        "run-folder",
        "generations",
    ],
)
def test_what_cannot_be_used_is_refused(base: Path, entries: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_spec(written(base, **entries))
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_options_of_the_command_are_checked_as_entries_of_the_file(base: Path) -> None:
    space = "{training.learning_rate: {low: 0.1, high: 1}}"
    path = written(base, space=space, sampler="tpe")
    assert read_spec(path, {"trials": 5}).total == 5
    with pytest.raises(ConfigurationError, match=r"workers=100000: .* use at most"):
        read_spec(path, {"trials": 5, "workers": 100_000})
    with pytest.raises(ConfigurationError, match="trials=0: needs a whole number of at least 1"):
        read_spec(path, {"trials": 0})


def with_handlers(folder: Path, *modes: str) -> Path:
    handlers = [f"{{class_path: EarlyStopping, init_args: {{metric: val/quality, mode: {mode}}}}}" for mode in modes]
    (folder / "base.yaml").write_text(CONFIG.replace("EventRecorder,", f"EventRecorder, {', '.join(handlers)},"))
    return written(folder, metric="val/quality")


def test_the_mode_of_a_handler_that_judges_the_metric_is_that_of_the_sweep(base: Path) -> None:
    assert read_spec(with_handlers(base, "max")).mode == ("max",)
    assert read_spec(with_handlers(base, "min")).mode == ("min",)
    assert read_spec(written(base, metric="val/quality", mode="max")).mode == ("max",)


def test_handlers_that_disagree_about_a_metric_are_refused(base: Path) -> None:
    with pytest.raises(ConfigurationError, match="the handlers disagree about val/quality"):
        read_spec(with_handlers(base, "max", "min"))


def test_a_setting_that_the_configuration_does_not_know_is_refused_with_near_names(base: Path) -> None:
    spec = read_spec(written(base, space="{training.learning_rat: [1e-3]}"))
    with pytest.raises(ConfigurationError, match=r"space\.training\.learning_rat: .*learning_rate"):
        check_settings(spec)


def test_a_handler_that_the_configuration_does_not_list_is_refused(base: Path) -> None:
    spec = read_spec(written(base, space="{handlers.CSVLoger.every: [1]}"))
    with pytest.raises(ConfigurationError, match="did you mean 'CSVLogger'"):
        check_settings(spec)


def test_an_argument_of_a_listed_handler_can_be_varied(base: Path) -> None:
    spec = read_spec(written(base, space="{handlers.Checkpointer.keep_last: [1, 2]}"))
    check_settings(spec)
    assert "keep_last: 2" in settings_of(spec, {"handlers.Checkpointer.keep_last": 2})["handlers"]


def test_the_saved_sweep_is_the_same_and_holds_no_credentials(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:secret@host/sweeps"
    spec = read_spec(written(base, storage=url))
    Path(spec.folder).mkdir()
    write_saved(spec)
    assert "secret" not in (base / "out" / "sweep.yaml").read_text()
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", url)
    assert read_saved(Path("out")) == spec


def test_only_trials_and_workers_may_change(base: Path) -> None:
    spec = read_spec(written(base))
    assert differing(spec, replace(spec, workers=2, trials=1)) == []
    assert differing(spec, replace(spec, seed=2)) == ["seed"]
    assert differing(spec, replace(spec, base={**(spec.base or {}), "data": "tiny.others"})) == [
        "the configuration (data: 'tiny.loaders' -> 'tiny.others')"
    ]


def test_a_renamed_folder_keeps_its_study_and_a_sweep_its_kind_of_storage(base: Path) -> None:
    spec = read_spec(written(base))
    assert differing(spec, read_spec(written(base), {"folder": "renamed"})) == []
    assert "storage" in differing(spec, replace(spec, storage="postgresql://host/sweeps"))


def test_a_grid_has_every_combination(base: Path) -> None:
    spec = read_spec(written(base, space="{training.learning_rate: [1e-3, 1e-2], model.init_args.width: [4, 6]}"))
    assert spec.total == 4
    assert [list(each.values()) for each in spec.combinations] == [[1e-3, 4], [1e-3, 6], [1e-2, 4], [1e-2, 6]]


def test_the_file_that_starts_a_sweep_is_not_taken_for_a_saved_one(base: Path) -> None:
    written(base).rename(base / "sweep.yaml")
    with pytest.raises(ConfigurationError, match=r"starts a sweep; give the folder that the sweep writes, .*out"):
        read_saved(base)


@pytest.mark.parametrize(
    ("before", "after", "location"),
    [
        (
            "{every: {iterations: 7}}",
            "{folder: s3://bucket/run}",
            r"handlers\[0\]\.init_args\.folder='s3://bucket/run'",
        ),
        ("seed: 3", "seed: 3, run_dir: kept", r"base\.yaml: training\.run_dir='kept'"),
    ],
    ids=["handler", "training"],
)
def test_a_folder_that_the_trials_would_share_is_refused(base: Path, before: str, after: str, location: str) -> None:
    (base / "base.yaml").write_text(CONFIG.replace(before, after))
    spec = read_spec(written(base))
    with pytest.raises(ConfigurationError, match=rf"{location}: the trials of a sweep would share this folder .*leave"):
        check_settings(spec)
    check_settings(replace(spec, replay=("runs/a",)))  # whose handlers are not made


@pytest.mark.parametrize(
    ("handlers", "saves", "message"),
    [
        ("EventRecorder", "null", "there is no Checkpointer; add Checkpointer to `handlers`"),
        ("EventRecorder, tiny.Own, Checkpointer", "null", r"2 Checkpointers: handlers\[1\], handlers\[2\]; leave one"),
        ("EventRecorder, Checkpointer", "2", r"2 Checkpointers: training\.save_every_n_epochs, handlers\[1\]"),
        ("EventRecorder, tiny.Own", "null", None),
        ("EventRecorder, pulsetrain.handlers.Checkpointer", "null", None),
        ("EventRecorder, handlers.checkpointer.Checkpointer", "null", None),
        ("EventRecorder, tiny.made", "null", None),
        ("EventRecorder", "2", None),
    ],
)
def test_trials_that_could_not_resume_are_refused(base: Path, handlers: str, saves: str, message: str | None) -> None:
    (base / "tiny.py").write_text(
        "from pulsetrain.handlers import Checkpointer\ndef net(width): ...\ndef loaders(): ...\n"
        "class Own(Checkpointer): ...\ndef made(folder): return Checkpointer(folder)\n"
    )
    text = CONFIG.replace("seed: 3", f"seed: 3, save_every_n_epochs: {saves}").partition("handlers:")[0]
    (base / "base.yaml").write_text(f"{text}handlers: [{handlers}]\n")
    spec = read_spec(written(base))
    if message is None:
        check_settings(spec)
        return
    with pytest.raises(ConfigurationError, match=rf"^\S*base\.yaml: handlers: .*{message}"):
        check_settings(spec)
    check_settings(replace(spec, replay=("runs/a",)))  # whose runs are not resumed


def test_a_checkpointer_may_be_added_by_a_setting_that_varies(base: Path) -> None:
    (base / "base.yaml").write_text(f"{CONFIG.partition('handlers:')[0]}handlers: [EventRecorder]\n")
    check_settings(read_spec(written(base, space="{training.save_every_n_epochs: [1, 2]}")))


def test_a_folder_cannot_be_varied(base: Path) -> None:
    spec = read_spec(written(base, space="{handlers.Checkpointer.folder: [a, b]}"))
    with pytest.raises(ConfigurationError, match=r"space\.handlers\.Checkpointer\.folder=\['a', 'b'\]: .*own run"):
        check_settings(spec)


ODD = """{class_path: tiny.net, init_args:
  {width: 4, commit: '1234e56', tag: '1e3', face: "😀", since: 2026-01-01, limit: .inf, rates: {0: 0.1}}}"""


def test_the_files_of_a_sweep_are_read_back_as_they_were_written(base: Path) -> None:
    (base / "base.yaml").write_text(CONFIG.replace("{class_path: tiny.net, init_args: {width: 4}}", ODD))
    spec = read_spec(written(base, space="{model.init_args.tag: ['1e3', '5e1']}"))
    (base / "out").mkdir()
    write_saved(spec)
    saved = read_saved(Path("out"))
    assert (saved, differing(saved, spec)) == (spec, [])
    trial = Trial(1, "completed", {"model.init_args.tag": "5e1"}, {"val/loss": 0.5}, Path("out"), "")
    _write_config(spec, trial, base / "out" / "best.yaml")
    best = read_config(base / "out" / "best.yaml", {})
    assert best["model"]["init_args"] == {
        "width": 4, "commit": "1234e56", "tag": "5e1", "face": "😀", "since": datetime.date(2026, 1, 1),
        "limit": math.inf, "rates": {0: 0.1},
    }  # fmt: skip


def test_a_trial_gets_the_handlers_of_the_configuration_as_they_are(base: Path) -> None:
    own = (
        "{class_path: tiny.Own, init_args: {face: \"😀\", since: 2026-01-01, limit: .inf, rates: {0: 0.1, '1': '1e3'}}}"
    )
    (base / "base.yaml").write_text(CONFIG.replace("EventRecorder,", f"{own}, EventRecorder,"))
    spec = read_spec(written(base, space='{handlers.CSVLogger.every: [1], model.init_args.name: ["😀"]}'))
    texts = settings_of(spec, {"handlers.CSVLogger.every": 1, "model.init_args.name": "😀"})
    config = read_config(base / "base.yaml", texts)
    assert config["model"]["init_args"] == {"width": 4, "name": "😀"}
    assert config["handlers"][1] == (spec.base or {})["handlers"][1]
    assert config["handlers"][-1] == {"class_path": "CSVLogger", "init_args": {"every": 1}}


def test_a_handler_that_the_configuration_lists_twice_is_refused(base: Path) -> None:
    two = "{class_path: CSVLogger, init_args: {every: 1}}, {class_path: CSVLogger, init_args: {every: 2}}]"
    (base / "base.yaml").write_text(CONFIG.replace("CSVLogger]", two))
    spec = read_spec(written(base, space="{handlers.CSVLogger.every: [1, 2]}"))
    with pytest.raises(ConfigurationError, match=r"^space\.handlers\.CSVLogger\.every: .* lists 2 handlers CSVLogger"):
        check_settings(spec)
