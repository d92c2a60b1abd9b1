"""A result stands alone, a file is written whole, and figures are rounded alike everywhere."""

import json
from pathlib import Path

import pytest

from minivllm.config import EngineConfig
from minivllm.measure import results as bench_results
from minivllm.measure.results import percentile

RESULT = {
    "workload": "batch 1",
    "device": "cpu",
    "output_tokens_per_s": 12.345,
    "prompt_tokens_per_s": 1234.5,
    "seconds": 2.0,
    "versions": {"python": "3.12"},
    "command": "minivllm bench",
    "date": "2026-11-29",
}


def error_of(function, *args):
    """The name of the exception that a call ends with; every ValueError is one."""
    try:
        function(*args)
    except Exception as error:
        return "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return "no error"


# -- percentiles -------------------------------------------------------------------------------

# Those with an `exercise` mark are the checks of notebook 00; what a failed assert says is the
# hint a learner reads.


@pytest.mark.exercise("bench_results.percentile")
def test_values_come_in_any_order_and_stay_in_it():
    """Times are handed in as they were measured, and are read again afterwards."""
    waits = [40, 10, 30, 20]
    assert percentile(waits, 0) == 10, (
        "the 0th is the smallest, wherever it stands: do you sort first?"
    )
    assert waits == [40, 10, 30, 20], "the caller's list has changed: do you sort it, or a copy?"


@pytest.mark.exercise("bench_results.percentile")
def test_between_two_places_the_value_changes_evenly():
    """Place 1.5 is half of the way from 20 to 30, place 2.7 most of the way from 30 to 40."""
    assert percentile([10, 20, 30, 40], 50) == 25, (
        "4 values have 3 steps between them: do you multiply by 4? Or do you round place 1.5?"
    )
    assert round(percentile([10, 20, 30, 40], 90), 6) == 37, (
        "place 2.7 is 0.7 of the way to 40: do you take the middle?"
    )


@pytest.mark.exercise("bench_results.percentile")
def test_both_ends_are_values():
    """The last of 4 values stands at place 3, and a single value at place 0."""
    assert percentile([10, 20, 30, 40], 100) == 40, "the 100th stands at place 3, the last one"
    assert percentile([7], 50) == 7, "a single value is every percentile"


@pytest.mark.exercise("bench_results.percentile")
def test_places_count_and_not_the_size_of_the_values():
    """One slow token in five does not move the middle."""
    assert percentile([1, 2, 3, 4, 100], 50) == 3, "3 stands in the middle: do you look at places?"


@pytest.mark.exercise("bench_results.percentile")
def test_nothing_has_no_percentile():
    """An invented 0 would look like a very fast engine."""
    words = "no values: do you raise a ValueError before all else?"
    assert error_of(percentile, [], 50) == "ValueError", words


@pytest.mark.exercise("bench_results.percentile")
def test_every_measurement_counts():
    """Equal values are as many places, and fractions of a second stay fractions."""
    assert percentile([1, 1, 1, 9], 50) == 1, (
        "1 was measured three times: does each of the three take a place?"
    )
    assert percentile([0.25, 0.75, 0.5], 25) == 0.375, (
        "between 0.25 and 0.5: do you round, or leave the float as it is?"
    )


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10), (50, 25), (90, 37), (99, 39.7), (100, 40)]
)
def test_percentiles_lie_between_neighbours(percent, expected):
    """Of 10, 20, 30, 40 the 90th lies at 0.9 x 3 = 2.7: 0.7 of the way from 30 to 40."""
    assert percentile([40, 10, 30, 20], percent) == pytest.approx(expected)


def test_every_percentile_of_one_value_is_that_value():
    """There is no neighbour to look at."""
    assert bench_results.percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0, "max": 7.0}


def test_a_summary_goes_through_percentile(monkeypatch):
    """What a learner builds in notebook 00 is what `minivllm bench` prints."""
    monkeypatch.setattr(bench_results, "percentile", lambda values, percent: -percent)
    assert bench_results.percentiles([3.0, 1.0]) == {"p50": -50, "p90": -90, "p99": -99, "max": 3.0}


def test_there_are_no_percentiles_of_nothing():
    """None in a result; asked for by itself, a mistake."""
    assert bench_results.percentiles([]) is None
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 50)


# -- facts -------------------------------------------------------------------------------------


def test_facts_complete_a_measurement():
    """With what a measurement brings, nothing that a result must have is missing."""
    config = EngineConfig(device="cpu", dtype="float32")
    measured = {"workload": "w", "seconds": 1.0}
    measured |= {"output_tokens_per_s": 1.0, "prompt_tokens_per_s": 1.0}
    facts = bench_results.facts(config, "a name")
    bench_results.check_result({**facts, **measured})
    assert facts["model"] == "a name"
    assert {"python", "torch"} <= set(facts["versions"])
    assert "threads" in facts["machine"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/opt/bin/minivllm", "bench", "--repeats", "2"], "minivllm bench --repeats 2"),
        (["/x/minivllm/__main__.py", "bench"], "minivllm bench"),
        (["benchmarks/offline.py", "--json", "/tmp/a.json"],
         "python benchmarks/offline.py --json a.json"),
        (["peers.py", "--x", "two words"], "python benchmarks/peers.py --x 'two words'"),
    ],
)  # fmt: skip
def test_commands_can_be_repeated_elsewhere(argv, expected):
    """No folder of this machine is in it."""
    assert bench_results.command_line(argv) == expected


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bench_results.REQUIRED)
def test_a_result_without_one_of_its_parts_is_refused(name, tmp_path):
    """It is named, and no file appears."""
    result = {key: value for key, value in RESULT.items() if key != name}
    with pytest.raises(ValueError, match=f"lacks {name}"):
        bench_results.save_results(tmp_path / "r.json", [RESULT, result])
    assert list(tmp_path.iterdir()) == []


def test_results_are_read_as_they_were_written(tmp_path):
    """And readable by others."""
    path = tmp_path / "r.json"
    bench_results.save_results(path, [RESULT])
    assert bench_results.load_results(path) == [RESULT]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """JSON has no NaN: the old results stay, without a half-written file beside them."""
    path = tmp_path / "r.json"
    bench_results.save_results(path, [RESULT])
    with pytest.raises(ValueError, match="JSON"):
        bench_results.save_results(path, [{**RESULT, "seconds": float("nan")}])
    assert bench_results.load_results(path) == [RESULT]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch):
    """Ctrl-C before the file has its name: the same."""
    path = tmp_path / "r.json"
    bench_results.save_results(path, [RESULT])

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_results.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench_results.save_results(path, [{**RESULT, "seconds": 3.0}])
    assert bench_results.load_results(path) == [RESULT]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_file_of_something_else_is_refused(tmp_path):
    """A single result is not a list of results."""
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    with pytest.raises(ValueError, match="r.json does not hold a list"):
        bench_results.load_results(tmp_path / "r.json")


def test_a_path_is_refused_before_the_work(tmp_path):
    """A folder, a file in a folder that is not there; a new and an old file are fine."""
    with pytest.raises(ValueError, match="is a folder"):
        bench_results.require_writable(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        bench_results.require_writable(tmp_path / "no" / "r.json")
    bench_results.require_writable(tmp_path / "r.json")
    bench_results.require_writable(Path("r.json"))


def test_a_path_without_permission_is_refused(tmp_path, monkeypatch):
    """The tests may run as root, who may write everywhere: the system's answer is simulated."""
    monkeypatch.setattr(bench_results.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="no permission"):
        bench_results.require_writable(tmp_path / "r.json")


def test_saved_results_say_day_and_device(tmp_path):
    """ "cuda:0" is a cuda machine's."""
    name = bench_results.result_path("peers", "cuda:0", tmp_path).name
    assert name.endswith("-cuda-peers.json")
    assert len(name) == len("2026-11-29-cuda-peers.json")


# -- tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "expected"),
    [(None, "-"), (9.1234, "9.12"), (41.67, "41.7"), (123.4, "123"), (20451.9, "20,452")],
)
def test_speeds_are_rounded_to_what_was_measured(speed, expected):
    """Three digits, or whole numbers."""
    assert bench_results.speed(speed) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "-"), (0.00123, "1.2 ms"), (0.0312, "31 ms"), (2.5, "2,500 ms")],
)
def test_times_are_milliseconds(seconds, expected):
    """A digit behind the point only below ten."""
    assert bench_results.milliseconds(seconds) == expected


def test_what_was_not_measured_is_a_dash():
    """A result with nothing but the required; the prompt speed is then that of the whole."""
    cells = bench_results.table_cells(RESULT)
    assert cells == ["batch 1", "12.3", "-", "1,234", "-", "-", "-"]
    assert len(cells) == len(bench_results.HEADER)


def test_a_row_has_prefill_speed_and_percentiles():
    """Where they were measured."""
    more = {
        "prefill_tokens_per_s": 500.0,
        "decode_tokens_per_s": 20.0,
        "first_token_s": {"p50": 0.1},
        "inter_token_s": {"p50": 0.02, "p99": 0.05},
    }
    expected = ["batch 1", "12.3", "20", "500", "100 ms", "20 ms", "50 ms"]
    assert bench_results.table_cells({**RESULT, **more}) == expected


def test_tables_line_up():
    """Names to the left, numbers to the right."""
    assert bench_results.text_table([("ab", "7"), ("c", "19")], (4, 3)) == "ab      7\nc      19"
    assert bench_results.markdown_table(("a", "b"), [("x", "1")]) == (
        "| a | b |\n| --- | --: |\n| x | 1 |"
    )
