"""benchmarks/tensor_parallel.py: speed for each number of ranks; the ranks are threads here."""

import importlib
import sys
from pathlib import Path

from course.props.ranks import ThreadTeam
from minivllm.measure import results as bench_results

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
tensor_parallel = importlib.import_module("tensor_parallel")
sys.path.remove(str(FOLDER))


def test_it_writes_a_result_for_each_number_of_ranks(tmp_path, monkeypatch, capsys):
    """With what the leader says to its workers, and how long the sums take, per step."""
    monkeypatch.setattr("minivllm.assembly.ranks.Team", ThreadTeam)
    path = tmp_path / "r.json"
    options = ["--random-weights", "tiny", "--dtype", "float32", "--set", "max_model_len=128"]
    options += ["--set", "attention_backend=torch", "--sizes", "1", "2", "--batch-sizes", "3"]
    options += ["--prompt-tokens", "12", "--new-tokens", "5", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", *options, "--json", str(path)])
    tensor_parallel.main()
    alone, _, shared, prefill = bench_results.load_results(path)
    assert (alone["tensor_parallel_size"], shared["tensor_parallel_size"]) == (1, 2)
    assert alone["message_bytes"] == alone["sums_ms"] == 0
    assert prefill["workload"] == "prefill 3 x 12 in, 1 out"
    assert prefill["decode_tokens_per_s"] is None
    assert prefill["message_bytes"] > shared["message_bytes"]  # the prompts' tokens are in it
    # Three chunks of five numbers, such as [12,13,1,true,true].
    assert 60 < shared["message_bytes"] < 200
    assert 0 < shared["sums_share"] < 1
    assert shared["message_us"] > 0
    assert "batch 3 x 12 in, 5 out" in capsys.readouterr().out


def test_the_engine_is_as_it_was_afterwards():
    """Timing wraps the methods of one object, and lets go of them."""

    class Thing:
        def double(self, x):
            return 2 * x

    thing, noted = Thing(), []
    wrapped = tensor_parallel.timed(thing.double, lambda seconds, x: noted.append((seconds, x)))
    assert wrapped(4) == 8
    ((seconds, argument),) = noted
    assert argument == 4
    assert seconds >= 0


def test_modes_are_graphs_and_overlap_in_all_combinations(tmp_path, monkeypatch):
    """Each with a result of its own, and nothing else changed."""
    path = tmp_path / "r.json"
    options = ["--random-weights", "tiny", "--dtype", "float32", "--set", "max_model_len=128"]
    options += ["--set", "attention_backend=torch"]  # which can be captured, if only to be redone
    options += ["--sizes", "1", "--batch-sizes", "2", "--prompt-tokens", "8"]
    options += ["--modes", *list(tensor_parallel.MODES)[1:]]
    options += ["--new-tokens", "4", "--repeats", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", *options])
    opened = []

    class Opened(tensor_parallel.LLM):
        def __init__(self, model, **settings):
            super().__init__(model, progress=False, **settings)
            opened.append((self.config.enforce_eager, self.config.overlap))

    monkeypatch.setattr(tensor_parallel, "LLM", Opened)
    tensor_parallel.main()
    assert opened == [(False, True), (False, False), (True, True), (True, False)]
    modes = [result["mode"] for result in bench_results.load_results(path)[::2]]
    assert modes == ["graphs", "graphs-serial", "eager", "eager-serial"]
