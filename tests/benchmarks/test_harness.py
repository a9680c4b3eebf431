"""Rows are compared with their bounds: ratios anywhere, absolute times on an idle machine only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.__main__ as command
from benchmarks.harness.check import check, summary
from benchmarks.harness.machine import BOUNDS_REFERENCE_MS, Load, Watch
from benchmarks.harness.results import HOLDS, MISSED, NOT_MEASURED, Report, Row, ratios, table
from benchmarks.harness.run import Outcome
from benchmarks.harness.tables import blocks_of, load_reports, save_report, written

IDLE = Load(average=0.1, others=0.0, reference_ms=2.0, spread=1.01)
BUSY = replace(IDLE, average=2.5, others=1.2, spread=1.4)


def ratio(measured: float, **values: Any) -> Row:
    return Row(**{"name": "ours / theirs", "measured": measured, "kind": "ratio", "bound": 1.0, **values})


def absolute(measured: float, **values: Any) -> Row:
    return Row(**{"name": "a step", "measured": measured, "kind": "absolute", "unit": "us", "bound": 4.0, **values})


def report(*rows: Row, load: Load = IDLE, name: str = "fake") -> Report:
    return Report(
        benchmark=name,
        title="a fake run",
        command=f"python -m benchmarks {name}",
        rows=rows,
        load=load,
        date="2026-11-24",
        machine="2 cores",
    )


class Results:
    """Runs nothing: gives each benchmark's reports, one a call."""

    def __init__(self, **reports: Sequence[Report | Outcome]) -> None:
        self.reports = {name: list(each) for name, each in reports.items()}
        self.calls: list[tuple[str, Sequence[str]]] = []

    def __call__(self, name: str, arguments: Sequence[str]) -> Outcome:
        self.calls.append((name, arguments))
        given = self.reports[name].pop(0)
        if isinstance(given, Outcome):
            return given
        return Outcome(name=name, status=0, output=given.to_json(), errors="", report=given)


def checked(results: Results, *, short: bool = False) -> tuple[str, int, list[str]]:
    shown: list[str] = []
    text, code = summary(
        check([(name, []) for name in results.reports], results, short=short, show=shown.append), short=short
    )
    return text, code, shown


def test_a_goal_that_is_not_reached_is_shown_and_misses_no_bound():
    rows = [ratio(0.9, goal=0.5), ratio(0.9, goal=0.95), ratio(0.9, goal=0.95, bound=0.6, at_least=True)]
    text = table(report(*rows, absolute(3.0, goal=2.0)))
    assert [line.count("goal") for line in text.splitlines()[1:5]] == [1, 0, 1, 1]
    assert "goal <= 0.5 missed" in text
    assert "<= 4  not measured  goal <= 2" in table(report(absolute(3.0, goal=2.0), load=BUSY))
    said, code, _ = checked(Results(fake=[report(ratio(0.9, goal=0.5))]))
    assert (code, "goal <= 0.5 missed: fake: ours / theirs" in said) == (0, True)
    said, code, shown = checked(Results(fake=[report(absolute(3.0, bound=None, goal=2.0))]))
    assert (code, "goal <= 2 missed: fake: a step" in said) == (0, True)
    assert "no bound" in shown[0]


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (ratio(1.0), HOLDS),
        (ratio(1.01), MISSED),
        (ratio(0.5, at_least=True), MISSED),
        (ratio(math.nan), NOT_MEASURED),
        (ratio(2.0, bound=None), ""),
        (absolute(3.9), HOLDS),
        (absolute(4.1), MISSED),
    ],
)
def test_a_bound_is_the_largest_good_value_or_the_smallest(row: Row, verdict: str):
    assert row.verdict(IDLE) == verdict


@pytest.mark.parametrize("measured", [3.9, 400.0])
def test_an_absolute_time_on_a_busy_machine_is_not_measured_whatever_it_is(measured: float):
    assert absolute(measured).verdict(BUSY) == NOT_MEASURED


def test_sizes_and_ratios_are_compared_on_busy_machines_as_well():
    assert ratio(1.2).verdict(BUSY) == MISSED
    assert replace(absolute(5.0), kind="size").verdict(BUSY) == MISSED


def test_slack_applies_to_ratios_in_both_directions_and_not_to_sizes():
    assert [ratio(value).verdict(IDLE, slack=1.5) for value in (1.5, 1.6)] == [HOLDS, MISSED]
    assert [ratio(value, bound=15.0, at_least=True).verdict(IDLE, slack=1.5) for value in (10.0, 9.9)] == [
        HOLDS,
        MISSED,
    ]
    assert replace(absolute(5.0), kind="size").verdict(IDLE, slack=1.5) == MISSED


def test_a_missed_bound_fails_with_the_row_and_both_figures():
    text, code, _ = checked(Results(fake=[report(ratio(1.2), absolute(3.0))] * 3))
    assert code == 1
    assert "missed: fake: ours / theirs: measured 1.200, bound <= 1 (missed in 3 of 3 measurements)\n" in text
    assert "bounds: 1 hold, 1 missed" in text


def test_where_all_bounds_hold_the_exit_status_is_0():
    text, code, shown = checked(Results(fake=[report(ratio(0.9), absolute(3.0))], other=[report(ratio(1.0))]))
    assert (text, code) == ("bounds: 3 hold", 0)
    assert "measured 3 us, bound <= 4 us; load average 0.10" in shown[0]


def test_a_busy_machine_neither_passes_nor_fails_and_its_load_is_shown():
    text, code, shown = checked(Results(fake=[report(ratio(0.9), absolute(3.0), load=BUSY)]))
    assert code == 3
    assert "bounds: 1 hold, 1 not measured" in text
    assert shown[0].splitlines()[1].startswith("not measured  fake: a step")
    assert "load average 2.50, other processes 1.20 cores" in shown[0]


def test_a_benchmark_that_fails_is_missed_with_its_last_words():
    crashed = Outcome(name="fake", status=1, output="", errors="Traceback\nOSError: the disk is full\n", report=None)
    text, code, _ = checked(Results(fake=[crashed]))
    assert code == 1
    assert "exit status 1, no rows: OSError: the disk is full" in text


def test_the_short_form_compares_ratios_alone_and_with_slack():
    results = Results(fake=[report(ratio(1.4), absolute(400.0), load=BUSY)])
    text, code, shown = checked(results, short=True)
    assert (text, code) == ("bounds: 1 hold", 0)
    assert "bound <= 1 with 1.5 times slack" in shown[0]


def test_the_short_form_measures_again_before_it_fails():
    noisy = Results(fake=[report(ratio(1.6)), report(ratio(1.1))])
    assert checked(noisy, short=True)[1] == 0
    slow = Results(fake=[report(ratio(1.6)), report(ratio(1.7))])
    text, code, _ = checked(slow, short=True)
    assert code == 1
    assert "measured 1.700" in text


def test_a_missed_bound_is_reported_if_two_of_three_measurements_miss_it():
    noisy = Results(fake=[report(ratio(1.6)), report(ratio(0.9)), report(ratio(0.8))])
    text, code, shown = checked(noisy)
    assert (text, code) == ("bounds: 1 hold", 0)
    assert "measured 0.800, bound <= 1 (holds in 2 of 3 measurements)" in shown[1]
    slow = Results(fake=[report(ratio(1.6)), report(ratio(0.9)), report(ratio(1.1))])
    text, code, _ = checked(slow)
    assert code == 1
    assert "measured 1.100, bound <= 1 (missed in 2 of 3 measurements)" in text
    assert [len(results.calls) for results in (noisy, slow)] == [3, 3]


def test_three_measurements_that_all_differ_are_a_missed_bound():
    found = [report(ratio(1.6)), report(ratio(0.9)), report(ratio(math.nan))]
    assert checked(Results(fake=found))[1] == 1


def test_a_row_that_only_another_rows_repetition_misses_once_holds():
    found = [report(ratio(missed), ratio(other, name="another")) for missed, other in ((2, 1), (2, 1), (2, 3))]
    text, code, _ = checked(Results(fake=found))
    assert code == 1
    assert "bounds: 1 hold, 1 missed" in text


def test_a_benchmark_that_fails_in_a_repetition_is_missed():
    crashed = Outcome(name="fake", status=1, output="", errors="OSError: the disk is full\n", report=None)
    text, code, _ = checked(Results(fake=[report(ratio(1.6)), crashed, report(ratio(0.9))]))
    assert code == 1
    assert "the disk is full" in text


def test_a_row_that_held_at_first_is_not_missed_because_of_another_rows_second_measurement():
    first = report(ratio(1.6), ratio(1.0, name="another"))
    second = report(ratio(1.1), ratio(1.9, name="another"))
    assert checked(Results(fake=[first, second]), short=True)[:2] == ("bounds: 2 hold", 0)


def test_a_ratio_that_the_run_does_not_determine_does_not_fail_the_short_form():
    text, code, _ = checked(Results(fake=[report(ratio(math.nan))]), short=True)
    assert (text, code) == ("bounds: 1 not measured", 0)


def test_a_report_survives_json_and_any_other_text_is_rejected():
    made = report(ratio(1.2, least=1.0, most=1.4, also={"us": 3.0}), load=replace(IDLE, others=None))
    assert Report.from_json(made.to_json()).to_json() == made.to_json()
    for text in ("[]", "{}", "text", '{"rows": [{"name": "a"}], "load": {}}'):
        with pytest.raises(ValueError, match=r"not the report|Expecting"):
            Report.from_json(text)


def test_the_rounds_give_median_least_and_most_of_their_ratios():
    assert ratios([2.0, 6.0, 9.0], [2.0, 2.0, 3.0]) == {"measured": 3.0, "least": 1.0, "most": 3.0}


def test_a_table_has_aligned_columns_and_marks_what_is_missed():
    lines = table(report(ratio(1.25, also={"us": 1234.5}), absolute(3.0), load=BUSY)).splitlines()
    assert lines == [
        "a fake run     measured     us  bound",
        "ours / theirs     1.250  1,234   <= 1        missed",
        "a step, us            3          <= 4  not measured",
        str(BUSY),
    ]


def watch(others: float, passes: Sequence[float]) -> Load:
    """The load of ten seconds in which other processes used so many cores."""
    now, busy, own = 0.0, 0.0, 0.0
    lengths = iter(passes * 40)

    def reference() -> None:
        nonlocal now, busy, own
        taken = next(lengths)
        now, busy, own = now + taken, busy + (1 + others) * taken, own + taken

    return Watch(lambda: busy, lambda: own, lambda: now, reference).load()


def test_the_machine_is_idle_where_others_use_no_core_and_the_reference_loop_is_steady():
    assert watch(0.0, [0.005]).is_idle
    assert watch(1.0, [0.005]).others == pytest.approx(1.0)
    assert not watch(1.0, [0.005]).is_idle
    assert not watch(0.0, [0.005, 0.009, 0.008]).is_idle


def test_on_a_slower_processor_a_bound_can_hold_and_not_be_missed():
    slow = replace(IDLE, reference_ms=3.2)
    text, code, shown = checked(Results(fake=[report(absolute(40.0, goal=1.0), ratio(0.9), load=slow)]))
    assert (code, "bounds: 1 hold, 1 not measured" in text) == (3, True)
    assert "goal <= 1 not measured: fake: a step" in text
    assert f"idle; bounds of absolute times apply up to {BOUNDS_REFERENCE_MS} ms" in shown[0]
    assert checked(Results(fake=[report(absolute(3.0), load=slow)]))[:2] == ("bounds: 1 hold", 0)


@pytest.mark.parametrize(("taken", "slow"), [(0.002, False), (0.005, True)])
def test_the_reference_loop_decides_whether_a_processor_is_slow(taken: float, slow: bool):
    assert watch(0.0, [taken]).is_slow == slow


def test_where_the_system_does_not_say_what_others_use_the_load_average_decides():
    assert not replace(BUSY, others=None, spread=1.0).is_idle
    assert replace(IDLE, others=None).is_idle


DOCUMENT = """# Figures
<!-- benchmark: fake; rows: a step | absent -->
old
<!-- end -->
Text.
<!-- benchmark: other -->
kept
<!-- end -->
"""


def test_the_tables_of_a_document_are_replaced_by_those_of_the_results(tmp_path: Path):
    save_report(tmp_path, report(ratio(1.2), absolute(3.0)))
    text = written(DOCUMENT, load_reports(tmp_path))
    assert "old" not in text
    assert "`python -m benchmarks fake`, 2026-11-24, 2 cores:" in text
    assert "a step, us" in text
    assert "ours / theirs" not in text
    assert "<!-- benchmark: other -->\nkept\n<!-- end -->" in text
    assert written(text, load_reports(tmp_path)) == text
    first, second = blocks_of(text)
    assert (first.benchmark, first.rows, first.command) == (
        "fake",
        ["a step", "absent"],
        ["python", "-m", "benchmarks", "fake"],
    )
    assert (second.benchmark, second.rows, second.command) == ("other", None, None)


def test_writing_without_results_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    document = tmp_path / "page.md"
    document.write_text(DOCUMENT)
    assert command.main(["--write", str(document), "--results", str(tmp_path / "none")]) == 2
    assert "run a benchmark first" in capsys.readouterr().err
    save_report(tmp_path / "some", report(absolute(3.0)))
    assert command.main(["--write", str(document), "--results", str(tmp_path / "some")]) == 0
    assert "old" not in document.read_text()
