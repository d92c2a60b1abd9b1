"""The ladder benchmark: every rung does the same work, and its figures are what they say."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minivllm import LLM
from minivllm.block_manager import BlockManager
from minivllm.measure import results as bench_results
from minivllm.request import Request, SamplingParams

pytestmark = pytest.mark.long

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"

sys.path.insert(0, str(FOLDER))
ladder, rungs, step_timeline, random_checkpoint = map(
    importlib.import_module, ["ladder", "rungs", "step_timeline", "random_checkpoint"]
)
sys.path.remove(str(FOLDER))

SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen3 of a few kilobytes with random weights."""
    path = tmp_path_factory.mktemp("tiny")
    return str(random_checkpoint.write_checkpoint("tiny", path, "float32"))


# -- the rungs ---------------------------------------------------------------------------------


def test_every_rung_changes_one_thing():
    """But for torch.compile, which the next rung does not keep."""
    steps = [rung for rung in rungs.rungs("cuda") if rung.name != "torch.compile"]
    assert [len(low.settings.items() ^ high.settings.items()) // 2
            for low, high in zip(steps, steps[1:])] == [1, 1, 0, 1]  # fmt: skip
    prepared = [rung.prepare.__name__ for rung in steps]
    assert prepared == ["<lambda>", "<lambda>", "sample_outside", "<lambda>", "<lambda>"]


def test_a_cpu_has_rungs_of_the_same_names():
    """Its kernels are numba's."""
    gpu, cpu = (rungs.names_of(kind) for kind in ("cuda", "cpu"))
    assert [name for name in gpu if name not in cpu] == ["Triton kernels"]
    assert [name for name in cpu if name not in gpu] == ["numba kernels"]


def answers(checkpoint, prepare=lambda llm: None, **settings):
    """Sampled tokens of two requests."""
    params = SamplingParams(temperature=0.6, max_tokens=6, ignore_eos=True, seed=1)
    with LLM(checkpoint, progress=False, **(SETTINGS | settings)) as llm:
        prepare(llm)
        outputs = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_rungs_give_the_same_tokens(checkpoint):
    """Sampler outside of the graph, inside, one step ahead; prompts alone."""
    plain = rungs.rungs("cpu")[0]
    expected = answers(checkpoint, **plain.settings)
    for rung in rungs.rungs("cpu"):
        if rung.name.startswith(("graph", "overlap")):
            assert answers(checkpoint, rung.prepare, **rung.settings) == expected, rung.name
    assert answers(checkpoint, rungs.prompts_first, **plain.settings) == expected


def test_a_sampler_outside_of_the_graph_is_called_in_each_step(checkpoint):
    """The forward pass is replayed, the sampler is not."""
    rung = next(rung for rung in rungs.rungs("cpu") if rung.name == "graph: forward")
    calls = []

    def prepare(llm):
        sample = llm.engine.runner.sample
        llm.engine.runner.sample = lambda *args: calls.append(1) or sample(*args)
        rung.prepare(llm)

    answers(checkpoint, prepare, **rung.settings)
    assert len(calls) == 6


def request(name, num_tokens):
    return Request(name, list(range(num_tokens)), num_tokens, SamplingParams(), num_tokens + 9)


def test_prompts_alone_hold_decodes_up():
    """A request that decodes waits while a newcomer's prompt is computed in two parts."""
    scheduler = rungs.PromptsFirst(BlockManager(8, 4), 4, max_num_batched_tokens=4)
    scheduler.add_request(request("a", 3))
    steps = []
    for number in range(5):
        output = scheduler.schedule()
        steps.append([(chunk.request.request_id, chunk.length) for chunk in output.chunks])
        scheduler.update(output, [1] * sum(chunk.samples for chunk in output.chunks))
        if number == 0:
            scheduler.add_request(request("b", 7))
    assert steps == [[("a", 3)], [("b", 4)], [("b", 3)], [("a", 1), ("b", 1)], [("a", 1), ("b", 1)]]


# -- figures -----------------------------------------------------------------------------------


def test_a_step_is_held_against_what_it_must_read():
    """The example of `against_limit`: 4 tokens in 10 ms, 1 GB of 10 GB that could be read."""
    found = ladder.against_limit(400.0, 4, 1e9, 1e12)
    assert found["step_s"] == 0.01
    assert found["bytes_per_s"] == pytest.approx(1e11)
    assert found["share_of_limit"] == pytest.approx(0.1)
    assert found["limit_tokens_per_s"] == pytest.approx(4000.0)


def test_a_step_reads_weights_and_cache(checkpoint):
    """Tied weights once; 2 layers of keys and values, 2 heads of 16 numbers, for each token."""
    with LLM(checkpoint, progress=False, **SETTINGS, attention_backend="torch") as llm:
        model = llm.engine.runner.model
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert ladder.step_bytes(model, 3, 10.0) - weights == 3 * 10 * (2 * 2 * 2 * 16 * 4)
        model.lm_head = SimpleNamespace()
        embedding = model.model.embed_tokens.weight.nbytes
        assert weights - ladder.step_bytes(model, 0, 0.0) == embedding
        model.lm_head = None


def test_only_decode_steps_are_on_the_stopwatch():
    """A step with a prompt in it is another kind of step."""
    runner = SimpleNamespace(launch=lambda chunks: "pending", model="a model")
    watch = ladder.Stopwatch(runner)
    for kinds in ([True, True], [True, False], [True]):
        assert watch.launch([SimpleNamespace(is_decode=kind) for kind in kinds]) == "pending"
    assert len(watch.seconds) == 2
    assert watch.model == "a model"


def test_a_copy_reads_and_writes(monkeypatch):
    """1,000 bytes in a second are 2,000 bytes of traffic."""
    ticks = iter(range(100))
    monkeypatch.setattr(ladder, "COPY_BYTES", {"cpu": 1000})
    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    assert ladder.copy_speed(torch.device("cpu")) == 2000.0


# -- timelines ---------------------------------------------------------------------------------


def event(name, start, end, on_device=False, parent=None):
    kind = torch.autograd.DeviceType
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=kind.CUDA if on_device else kind.CPU,
        cpu_parent=parent,
    )


def test_a_timeline_has_steps_launches_and_kernels():
    """From the first recorded step on, in microseconds; what was before is left out."""
    events = [
        event("cudaLaunchKernel", 40.0, 45.0),  # before the first step
        event(step_timeline.STEP, 100.0, 150.0),
        event(step_timeline.STEP, 150.0, 200.0),
        event(step_timeline.STEP, 101.0, 149.0, on_device=True),  # the mark's shadow
        event("cudaLaunchKernel", 110.0, 114.0),
        event("cudaGraphLaunch", 160.0, 170.0),
        event("aten::mul", 109.0, 115.0),
        event("mul_kernel", 120.0, 130.0, on_device=True),
        event("mul_kernel", 131.0, 141.0, on_device=True),
        event("gemm", 175.0, 195.0, on_device=True),
    ]
    found = step_timeline.summarise(events)
    assert (found["num_steps"], found["num_launches"], found["num_kernels"]) == (2, 2, 3)
    assert found["seconds"] == pytest.approx(100e-6)
    assert found["busy_seconds"] == pytest.approx(40e-6)
    assert found["steps"] == [[0.0, 50.0], [50.0, 50.0]]
    assert found["launches"] == [[10.0, 4.0], [60.0, 10.0]]
    # The gap of 1 us between the first two kernels is not drawn.
    assert found["kernels"] == [[20.0, 21.0], [75.0, 20.0]]


def test_on_a_cpu_operations_stand_for_launches():
    """Those that no other operation has called."""
    outer = event("aten::linear", 10.0, 30.0)
    events = [
        event(step_timeline.STEP, 0.0, 100.0),
        outer,
        event("aten::addmm", 12.0, 28.0, parent=outer),
        event("aten::mul", 40.0, 50.0),
    ]
    found = step_timeline.summarise(events)
    assert found["launches"] == [[10.0, 20.0], [40.0, 10.0]]
    assert (found["num_kernels"], found["kernels"]) == (0, [])


def test_spans_that_touch_become_one():
    """The example of `merge`."""
    spans = [(9.0, 10.0), (0.0, 2.0), (3.0, 4.0)]
    assert step_timeline.merge(spans, 2.0) == [(0.0, 4.0), (9.0, 10.0)]
    assert step_timeline.merge([], 2.0) == []


# -- the script --------------------------------------------------------------------------------

SMALL = ["--random-weights", "tiny", "--dtype", "float32", "--device", "cpu", "--repeats", "1"]
SMALL += ["--prompt-tokens", "6", "--new-tokens", "5", "--mixed-rows", "2"]


def run(monkeypatch, *arguments):
    """Run the script's `main` with arguments."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/ladder.py", *SMALL, *arguments])
    monkeypatch.setattr(ladder, "COPY_BYTES", {"cpu": 2**16})
    ladder.main()


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_the_ladder_writes_a_result_for_each_rung_and_batch(tmp_path, monkeypatch, capsys):
    """With everything a result must have, a timeline, and the two policies."""
    path = tmp_path / "r.json"
    names = ["naive loop", "torch operations", "graph: all", "prompts alone", "prompts in chunks"]
    run(monkeypatch, "--batch-sizes", "1", "2", "--rungs", *names, "--json", str(path))
    results = bench_results.load_results(path)
    assert [(r["rung"], r.get("batch_size")) for r in results] == [
        *((name, size) for name in names[:3] for size in (1, 2)),
        (names[3], None),
        (names[4], None),
    ]
    assert [r["rung"] for r in results if "timeline" in r] == ["torch operations", "graph: all"]
    for result in results[:6]:
        assert (
            0
            < result["share_of_limit"]
            == pytest.approx(result["decode_tokens_per_s"] / result["limit_tokens_per_s"])
        )
        assert result["launch_s"] is None  # on a CPU to launch is to compute
    assert "extrapolated" in results[0] and "extrapolated" not in results[2]
    assert {r["num_requests"] for r in results[6:]} == {6}
    assert "graph: all" in capsys.readouterr().out


def test_an_unknown_rung_is_refused(monkeypatch):
    """With the known ones."""
    with pytest.raises(ValueError, match="--rungs 'graphs' is none of naive loop, torch"):
        run(monkeypatch, "--rungs", "graphs")


def test_a_rung_that_cannot_be_measured_is_left_out(monkeypatch, capsys, tmp_path):
    """With the reason; the others are still measured."""

    def fail(llm):
        raise RuntimeError("no compiler here\nand more")

    real = ladder.rungs("cpu")
    broken = [rungs.Rung("torch.compile", real[0].settings, fail), real[0]]
    monkeypatch.setattr(ladder, "rungs", lambda kind: broken)
    path = tmp_path / "r.json"
    run(monkeypatch, "--batch-sizes", "1", "--rungs", "torch.compile", "torch operations",
        "--json", str(path))  # fmt: skip
    assert "torch.compile: left out (no compiler here)" in capsys.readouterr().out
    assert [r["rung"] for r in bench_results.load_results(path)] == ["torch operations"]
