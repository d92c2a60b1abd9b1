"""Results are complete, files are written whole, and numbers are rounded alike everywhere."""

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


# -- percentiles -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10), (50, 25), (90, 37), (99, 39.7), (99.9, 39.97), (100, 40)]
)
def test_a_percentile_is_between_its_neighbours(percent, expected):
    """Of 10, 20, 30, 40 the 90th is at place 0.9 x 3 = 2.7: 0.7 of the way from 30 to 40."""
    assert percentile([40, 10, 30, 20], percent) == pytest.approx(expected)


def test_the_values_are_not_changed():
    """A caller may need the order of the measurements."""
    waits = [40, 10, 30, 20]
    percentile(waits, 50)
    assert waits == [40, 10, 30, 20]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1, 1, 1, 9], 50, 1), ([1, 2, 3, 4, 100], 50, 3), ([0.0, 0.0], 50, 0.0)],
)
def test_every_measurement_counts(values, percent, expected):
    """Equal values are several places, a large value is one, and 0 is a value."""
    assert percentile(values, percent) == expected


def test_fractions_are_not_rounded():
    """Waits are fractions of a second."""
    assert percentile([0.25, 0.75, 0.5], 25) == 0.375


def test_every_percentile_of_one_value_is_that_value():
    """It has no neighbours."""
    assert bench_results.percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0, "max": 7.0}


def test_there_are_no_percentiles_of_nothing():
    """A result has None there; `percentile` itself raises."""
    assert bench_results.percentiles([]) is None
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 50)


# -- facts -------------------------------------------------------------------------------------


def test_facts_complete_a_measurement():
    """Together with the measured numbers they are a valid result."""
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
    """The command contains no folder of this machine."""
    assert bench_results.command_line(argv) == expected


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bench_results.REQUIRED)
def test_a_result_without_one_of_its_parts_is_refused(name, tmp_path):
    """The error names the part, and no file is written."""
    result = {key: value for key, value in RESULT.items() if key != name}
    with pytest.raises(ValueError, match=f"lacks {name}"):
        bench_results.save_results(tmp_path / "r.json", [RESULT, result])
    assert list(tmp_path.iterdir()) == []


def test_results_are_read_as_they_were_written(tmp_path):
    """The file is readable by other users too."""
    path = tmp_path / "r.json"
    bench_results.save_results(path, [RESULT])
    assert bench_results.load_results(path) == [RESULT]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """JSON has no NaN: the old results stay, and no half-written file is left."""
    path = tmp_path / "r.json"
    bench_results.save_results(path, [RESULT])
    with pytest.raises(ValueError, match="JSON"):
        bench_results.save_results(path, [{**RESULT, "seconds": float("nan")}])
    assert bench_results.load_results(path) == [RESULT]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    """Ctrl-C before the file has its name changes nothing."""
    path = tmp_path / "r.json"
    bench_results.save_results(path, [RESULT])

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_results.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench_results.save_results(path, [{**RESULT, "seconds": 3.0}])
    assert bench_results.load_results(path) == [RESULT]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_file_without_a_list_of_results_is_refused(tmp_path):
    """A single result isn't a list of results."""
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    with pytest.raises(ValueError, match="r.json does not hold a list"):
        bench_results.load_results(tmp_path / "r.json")


def test_a_path_is_refused_before_the_work(tmp_path):
    """A folder or a missing folder is an error; a new file and an old one are fine."""
    with pytest.raises(ValueError, match="is a folder"):
        bench_results.require_writable(tmp_path)
    with pytest.raises(ValueError, match="does not exist; make it first"):
        bench_results.require_writable(tmp_path / "no" / "r.json")
    bench_results.require_writable(tmp_path / "r.json")
    bench_results.require_writable(Path("r.json"))


def test_a_path_without_permission_is_refused(tmp_path, monkeypatch):
    """Root may write everywhere, so the system's answer is simulated."""
    monkeypatch.setattr(bench_results.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="no permission"):
        bench_results.require_writable(tmp_path / "r.json")


def test_saved_results_say_day_and_device(tmp_path):
    """The kind of device is in the name, without its number."""
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
    """They have a decimal place only below ten."""
    assert bench_results.milliseconds(seconds) == expected


def test_numbers_that_were_not_measured_are_dashes():
    """With only the required parts, the prompt speed is that of the whole run."""
    cells = bench_results.table_cells(RESULT)
    assert cells == ["batch 1", "12.3", "-", "1,234", "-", "-", "-"]
    assert len(cells) == len(bench_results.HEADER)


def test_a_row_has_prefill_speed_and_percentiles():
    """If they were measured."""
    more = {
        "prefill_tokens_per_s": 500.0,
        "decode_tokens_per_s": 20.0,
        "first_token_s": {"p50": 0.1},
        "inter_token_s": {"p50": 0.02, "p99": 0.05},
    }
    expected = ["batch 1", "12.3", "20", "500", "100 ms", "20 ms", "50 ms"]
    assert bench_results.table_cells({**RESULT, **more}) == expected


def test_tables_line_up():
    """Names are left-aligned, numbers right-aligned."""
    assert bench_results.text_table([("ab", "7"), ("c", "19")], (4, 3)) == "ab      7\nc      19"
    assert bench_results.markdown_table(("a", "b"), [("x", "1")]) == (
        "| a | b |\n| --- | --: |\n| x | 1 |"
    )
