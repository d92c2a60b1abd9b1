"""The scripts in benchmarks/: fair to every engine, and their files are what they say."""

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm import LLM, SamplingParams
from minivllm.measure import results as bench_results

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = ["common", "compare", "control_plane", "engines", "offline", "online", "peers"]
SCRIPTS += ["random_checkpoint", "readme_table"]

sys.path.insert(0, str(FOLDER))
common, compare, control_plane, engines, offline, online, peers, random_checkpoint, readme_table = (
    importlib.import_module(name) for name in SCRIPTS
)
sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen3 of a few kilobytes with random weights."""
    path = tmp_path_factory.mktemp("tiny")
    return str(random_checkpoint.write_checkpoint("tiny", path, "float32"))


# -- two trees side by side --------------------------------------------------------------------


def make_tree(folder, speed):
    """A tree whose benchmark reports the given speed, which its own package holds."""
    (folder / "minivllm").mkdir(parents=True)
    (folder / "minivllm" / "__init__.py").write_text(f"SPEED = {speed}")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "fixed.py").write_text(
        "import json, sys, minivllm\n"
        "result = {'workload': sys.argv[1], 'output_tokens_per_s': minivllm.SPEED}\n"
        "json.dump([result, result], open(sys.argv[3], 'w'))\n"
    )
    return folder


def test_trees_take_turns_and_each_runs_its_own_package(tmp_path, monkeypatch, capsys):
    """Each round runs both, the second one in the other order; the table is narrow enough."""
    before = make_tree(tmp_path / "before", 10)
    after = make_tree(tmp_path / "after", 15)
    report = tmp_path / "report.json"
    options = ["--before", str(before), "--after", str(after), "--rounds", "2"]
    command = ["compare.py", *options, "--json", str(report), "--", "fixed.py", "batch"]
    monkeypatch.setattr(sys, "argv", command)
    compare.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[4].strip(",:") for line in printed[:4]] == [
        "before",
        "after",
        "after",
        "before",
    ]
    assert printed[6].split() == [
        "batch",
        "output",
        "tok/s",
        "10",
        "15",
        "1.500",
        "1.500",
        "1.50..1.50",
    ]
    assert printed[7].startswith("batch #2")
    assert max(map(len, printed)) <= 100
    assert json.loads(report.read_text())["rows"][0]["after"] == [15, 15]


def test_ratios_of_two_trees():
    """Best of all rounds, median, and the range within a round; less time is better."""
    key = ("batch", "output tok/s")
    process = (compare.PROCESS, "seconds")
    before = [{key: 10.0, process: 4.0}, {key: 20.0, process: 2.0}]
    after = [{key: 20.0, process: 1.0}, {key: 30.0, process: 2.0}]
    speeds, seconds = compare.compare(before, after)
    assert speeds["best_ratio"] == 1.5
    assert round(speeds["median_ratio"], 2) == 1.67
    assert (speeds["smallest_ratio"], speeds["largest_ratio"]) == (1.5, 2.0)
    assert seconds["best_ratio"] == 0.5


# -- random weights ----------------------------------------------------------------------------


def test_random_weights_are_a_whole_checkpoint(checkpoint):
    """It loads, answers the same each time, and every token has a text."""
    with LLM(checkpoint, progress=False, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        first, again = llm.generate([[5, 6, 7], [5, 6, 7]], params, use_tqdm=False)
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert all(llm.tokenizer.token_bytes(token_id) for token_id in range(600))


@pytest.mark.parametrize(
    ("shape", "millions"), [("qwen3-0.6b", 596), ("smollm2-135m", 135), ("llama-3.2-1b", 1236)]
)
def test_shapes_have_the_parameters_of_their_models(shape, millions):
    """As many as their makers say, counted without making them."""
    config = random_checkpoint.ModelConfig.from_dict(
        {**random_checkpoint.SHAPES[shape], "torch_dtype": "bfloat16"}
    )
    sizes = [size for _, size in random_checkpoint.tensor_shapes(config)]
    count = sum(size[0] * (size[1] if len(size) == 2 else 1) for size in sizes)
    assert round(count / 1e6) == millions


def test_made_up_texts_differ():
    """A vocabulary with two tokens of one text would lose one of them."""
    vocab = random_checkpoint.tokenizer(70_000)["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(70_000))


def test_an_unknown_shape_is_refused(tmp_path):
    """With the known ones."""
    with pytest.raises(ValueError, match="'gpt-5' is not known; known are qwen3-0.6b"):
        random_checkpoint.write_checkpoint("gpt-5", tmp_path)


# -- engines -----------------------------------------------------------------------------------


def setup(model_path="folder", **changes):
    return engines.Setup(**{"model_path": model_path, "max_batch": 4, "max_len": 300, **changes})


def test_ours_and_transformers_give_the_same_tokens(checkpoint):
    """Two adapters, one greedy answer to each prompt: they are asked the same."""
    prompts = [[5, 6, 7, 8], [300, 2, 9, 11]]
    answers = [
        engines.ENGINES[name](setup(checkpoint)).generate(prompts, 5)
        for name in ("minivllm", "transformers")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    for answer in answers:
        assert [len(token_ids) for token_ids in answer.token_ids] == [5, 5]
        assert [sorted(set(times)) for times in answer.token_times] == answer.token_times
        assert [len(times) for times in answer.token_times] == [5, 5]


def test_our_engine_takes_more_settings(checkpoint):
    """`--set` reaches it, and overrules what all are told."""
    engine = engines.Minivllm(setup(checkpoint, settings={"max_num_seqs": 2, "block_size": 8}))
    config = engine.llm.config
    assert (config.max_num_seqs, config.block_size, config.max_model_len) == (2, 8, 300)
    assert not config.enable_prefix_caching


def test_vllm_is_asked_for_the_same(monkeypatch):
    """A stand-in for the package, which cannot be installed everywhere."""
    seen = {}

    class LLM:
        def __init__(self, **settings):
            seen["settings"] = settings

            self.llm_engine, self.numbers, self.num_steps = self, [], 0

        def add_request(self, request_id, prompt, params):
            self.numbers.append(request_id)
            seen.setdefault("prompts", []).append(prompt)
            seen["params"] = params

        def has_unfinished_requests(self):
            return self.num_steps < 3

        def step(self):  # as vLLM's: each output holds all tokens so far
            self.num_steps += 1
            answer = SimpleNamespace(token_ids=(1, 2, 3)[: self.num_steps])
            return [SimpleNamespace(request_id=n, outputs=[answer]) for n in self.numbers]

    module = SimpleNamespace(LLM=LLM, SamplingParams=lambda **params: params)
    monkeypatch.setitem(sys.modules, "vllm", module)
    answers = engines.Vllm(setup(dtype="bfloat16")).generate([[5, 6], [7, 8]], 3)
    assert answers.token_ids == [[1, 2, 3], [1, 2, 3]]
    assert [len(set(times)) for times in answers.token_times] == [3, 3]
    assert seen["settings"] == {
        "model": "folder",
        "dtype": "bfloat16",
        "max_model_len": 300,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    assert seen["prompts"] == [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7, 8]}]
    assert seen["params"] == {
        "temperature": 0,
        "max_tokens": 3,
        "ignore_eos": True,
        "detokenize": False,
    }


class FakeLlamaCpp:
    """The calls of llama-cpp-python that the adapter makes. The token that follows is that of
    its position plus that of its sequence times 10, so that a wrong one of either shows."""

    VOCAB_SIZE = 500

    def __init__(self):
        self.calls, self.freed, self.cleared = [], 0, 0
        self.params = SimpleNamespace()

    def llama_backend_init(self):
        pass

    def llama_model_default_params(self):
        return "model params"

    def llama_model_load_from_file(self, path, params):
        assert (path, params) == (b"model.gguf", "model params")
        return "model"

    def llama_context_default_params(self):
        return self.params

    def llama_init_from_model(self, model, params):
        return "context"

    def llama_model_get_vocab(self, model):
        return "vocab"

    def llama_vocab_n_tokens(self, vocab):
        return self.VOCAB_SIZE

    def llama_get_memory(self, context):
        return "memory"

    def llama_memory_clear(self, memory, data):
        assert (memory, data) == ("memory", True)
        self.cleared += 1

    def llama_batch_init(self, num_tokens, embedding, num_sequences):
        empty = [0] * num_tokens
        sequences = [[0] for _ in empty]
        return SimpleNamespace(
            n_tokens=0, token=empty[:], pos=empty[:], n_seq_id=empty[:], seq_id=sequences,
            logits=empty[:],
        )  # fmt: skip

    def llama_batch_free(self, batch):
        self.freed += 1

    def llama_decode(self, context, batch):
        rows = zip(batch.token, batch.pos, batch.seq_id, batch.logits)
        self.calls.append([(token, pos, ids[0], bool(wants)) for token, pos, ids, wants in rows])
        assert batch.n_tokens == len(batch.token)
        assert set(batch.n_seq_id) == {1}
        return 0

    def llama_get_logits_ith(self, context, index):
        import numpy as np

        _, position, sequence, wants = self.calls[-1][index]
        assert wants, "only these rows have logits"
        row = np.zeros(self.VOCAB_SIZE, dtype=np.float32)
        row[position + 10 * sequence] = 1.0
        self.rows = row  # alive as long as the pointer
        import ctypes

        return row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_computes_a_batch(monkeypatch):
    """Two prompts of three tokens together, then a token of each in every call."""
    api = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", api)
    engine = engines.LlamaCpp(setup(gguf="model.gguf", num_threads=2))
    answers = engine.generate([[5, 6, 7], [8, 9, 4]], 3)
    assert answers.token_ids == [[2, 3, 4], [12, 13, 14]]
    assert [len(set(times)) for times in answers.token_times] == [3, 3]
    prompts, *decodes = api.calls
    assert prompts == [
        (5, 0, 0, False),
        (6, 1, 0, False),
        (7, 2, 0, True),
        (8, 0, 1, False),
        (9, 1, 1, False),
        (4, 2, 1, True),
    ]
    assert decodes == [[(2, 3, 0, True), (12, 3, 1, True)], [(3, 4, 0, True), (13, 4, 1, True)]]
    assert (api.cleared, api.freed) == (1, 3)
    assert (api.params.n_seq_max, api.params.n_ctx) == (4, 4 * 512)
    assert (api.params.n_threads, api.params.n_threads_batch) == (2, 2)


def test_llama_cpp_takes_long_prompts_in_parts(monkeypatch):
    """300 + 300 tokens are two calls of at most 512; each sequence's end is found in its own."""
    api = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", api)
    engine = engines.LlamaCpp(setup(gguf="model.gguf"))
    assert engine.generate([[1] * 300, [1] * 300], 1).token_ids == [[299], [309]]
    assert [len(call) for call in api.calls] == [512, 88]


def test_missing_engines_are_reported(monkeypatch, capsys):
    """The others are still timed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlamaCpp())
    assert peers.load_peers(["vllm", "llama.cpp"], setup()) == {}
    output = capsys.readouterr().out
    assert "vllm: not installed" in output
    assert "llama.cpp: not installed (llama.cpp needs the model as a GGUF file" in output


# -- peers -------------------------------------------------------------------------------------


class FakePeer:
    """Every call takes as many seconds of the clock as it makes tokens, times `cost`."""

    def __init__(self, name, cost, clock, order):
        self.name, self.cost, self.clock, self.order = name, cost, clock, order

    def generate(self, prompts, num_tokens):
        self.order.append(self.name)
        times = [self.clock.now + self.cost * (k + 1) for k in range(num_tokens)]
        self.clock.now = times[-1]
        return engines.Answers([[1] * num_tokens for _ in prompts], [times for _ in prompts])


def fake_peers(monkeypatch, **costs):
    clock, order = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    made = {name: FakePeer(name, cost, clock, order) for name, cost in costs.items()}
    return made, order


def test_peers_take_turns(monkeypatch):
    """The order changes in each round; the first round is not counted."""
    made, order = fake_peers(monkeypatch, minivllm=1.0, other=2.0)
    calls = peers.time_calls(made, [[1, 2]], 3, repeats=2)
    assert order == ["minivllm", "other", "other", "minivllm", "minivllm", "other"]
    assert calls == {
        "minivllm": [peers.Call(3.0, 1.0, 2)] * 2,
        "other": [peers.Call(6.0, 2.0, 2)] * 2,
    }


def test_a_peer_that_stops_early_is_refused(monkeypatch):
    """It did less than the others."""
    made, _ = fake_peers(monkeypatch, minivllm=1.0)
    generate = made["minivllm"].generate
    made["minivllm"].generate = lambda prompts, num_tokens: generate(prompts, num_tokens - 1)
    with pytest.raises(RuntimeError, match="minivllm gave other lengths"):
        peers.time_calls(made, [[1, 2]], 3, repeats=1)


def test_decoding_begins_when_every_request_has_its_first_token():
    """The example of `Call.of`, begun at 0.5: a token that one request has by then counts
    neither here nor there."""
    answers = engines.Answers([[7, 8, 9]] * 2, [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    call = peers.Call.of(0.5, 4.0, answers)
    assert call == peers.Call(3.5, 1.5, 3)
    assert call.decode_tokens_per_s == 1.5
    alone = peers.Call.of(0.5, 1.0, engines.Answers([[7]], [[1.0]]))
    assert alone.decode_tokens_per_s is None


def test_figures_take_medians_and_bests():
    """Two prompts of 5 tokens, 3 new ones each: calls of 4, 2, 3 s, with first tokens after 2,
    1, 1 s and four after those."""
    calls = [peers.Call(4.0, 2.0, 4), peers.Call(2.0, 1.0, 4), peers.Call(3.0, 1.0, 4)]
    found = peers.figures(calls, [[1] * 5] * 2, 3)
    assert (found["seconds"], found["best_seconds"]) == (3.0, 2.0)
    assert (found["output_tokens_per_s"], found["best_output_tokens_per_s"]) == (2.0, 3.0)
    assert (found["prompt_tokens_per_s"], found["best_prompt_tokens_per_s"]) == (10.0, 10.0)
    assert (found["decode_tokens_per_s"], found["best_decode_tokens_per_s"]) == (2.0, 4.0)
    assert found["seconds_all"] == [4.0, 2.0, 3.0]
    assert found["first_token_seconds_all"] == [2.0, 1.0, 1.0]
    assert found["decode_tokens_per_s_all"] == [2.0, 4.0, 2.0]


def test_ratios_say_how_many_times_as_fast_ours_is(monkeypatch):
    """Costs of 1 and 2 a token: twice as fast at decoding, and at prompts alone."""
    made, _ = fake_peers(monkeypatch, minivllm=1.0, other=2.0)
    for num_tokens in (1, 3):
        results = peers.compare(made, [[1, 2]], num_tokens, repeats=1)
        peers.add_ratios(results)
        assert [(r["engine"], r["ratio"], r["best_ratio"]) for r in results] == [
            ("minivllm", 1.0, 1.0),
            ("other", 2.0, 2.0),
        ]


def test_ready_is_timed_to_the_first_token(tmp_path, monkeypatch):
    """A fresh process that says more than that, and one that never gets there."""
    script = tmp_path / "engines.py"
    monkeypatch.setattr(peers, "ENGINES_SCRIPT", script)
    script.write_text("print('loading, ready soon')\nprint('ready', flush=True)\ninput()")
    assert len(peers.time_ready("minivllm", setup(), 2)) == 2
    script.write_text("print('loading, ready soon')")
    with pytest.raises(RuntimeError, match="minivllm ended before its first token"):
        peers.time_ready("minivllm", setup(), 1)


# -- scripts -----------------------------------------------------------------------------------


def run(monkeypatch, module, *arguments):
    """Run a script's `main` with arguments."""
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{module.__name__}.py", *arguments])
    module.main()


SMALL = ["--random-weights", "tiny", "--dtype", "float32", "--set", "max_model_len=128"]


def test_offline_writes_a_result_for_each_workload(tmp_path, monkeypatch, capsys):
    """With everything a result must have."""
    path = tmp_path / "r.json"
    sizes = ["--num-requests", "3", "--min-tokens", "4", "--max-prompt-tokens", "20"]
    sizes += ["--max-output-tokens", "9", "--prompt-tokens", "12", "--new-tokens", "4"]
    sizes += ["--prefill-tokens", "40", "--batch-sizes", "1", "3", "--repeats", "2"]
    run(monkeypatch, offline, *SMALL, *sizes, "--json", str(path))
    results = bench_results.load_results(path)
    assert [result["workload"] for result in results] == [
        "mixed 3 x 4..20 in, 4..9 out",
        "batch 1 x 12 in, 4 out",
        "batch 3 x 12 in, 4 out",
        "prefill 1 x 40 in, 1 out",
    ]
    assert {len(result["seconds_all"]) for result in results} == {2}
    assert {result["num_cached_tokens"] for result in results} == {0}
    assert {result["model"] for result in results} == {"tiny shape, random weights"}
    assert "batch 3 x 12 in" in capsys.readouterr().out


def test_online_writes_percentiles_for_each_rate(tmp_path, monkeypatch):
    """And a picture."""
    path, figure = tmp_path / "r.json", tmp_path / "r.png"
    sizes = ["--num-requests", "5", "--min-tokens", "4", "--max-prompt-tokens", "20"]
    sizes += ["--max-output-tokens", "9", "--rates", "50", "500"]
    run(monkeypatch, online, *SMALL, *sizes, "--json", str(path), "--figure", str(figure))
    results = bench_results.load_results(path)
    assert [result["requests_per_s"] for result in results] == [50.0, 500.0]
    for result in results:
        assert set(result["first_token_s"]) == {"p50", "p90", "p99", "max"}
        assert len(result["first_token_s_all"][0]) == 5
        assert result["num_cached_tokens"] == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_peers_writes_engines_side_by_side(tmp_path, monkeypatch, capsys):
    """Ours compared with transformers, which is always there."""
    path = tmp_path / "r.json"
    sizes = ["--batch-sizes", "2", "--prompt-tokens", "8", "--new-tokens", "3"]
    sizes += ["--prefill-tokens", "16", "--repeats", "1", "--no-ready"]
    sizes += ["--engines", "minivllm", "transformers"]
    run(monkeypatch, peers, *SMALL, *sizes, "--json", str(path))
    results = bench_results.load_results(path)
    assert [(result["workload"], result["engine"]) for result in results] == list(
        itertools.product(
            ["batch 2 x 8 in, 3 out", "prefill 1 x 16 in, 1 out"], ["minivllm", "transformers"]
        )
    )
    table = readme_table.format_results(results)
    assert "| workload | minivllm | transformers | ours / transformers |" in table


def test_a_users_mistake_is_one_line(monkeypatch, capsys):
    """Exit code 2, no traceback."""
    monkeypatch.setattr(sys, "argv", ["online.py", "--random-weights", "tiny", "--rates", "0"])
    with pytest.raises(SystemExit) as exit_info:
        common.run(online.main)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "online.py: --rates 0 must be above 0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_num_seqs=64", ("max_num_seqs", 64)),
        ("enable_prefix_caching=false", ("enable_prefix_caching", False)),
        ("dtype=float32", ("dtype", "float32")),
    ],
)
def test_settings_are_numbers_truths_or_texts(text, expected):
    """A value that is not JSON is text."""
    assert common.parse_setting(text) == expected


@pytest.mark.parametrize("text", ["max_num_seqs", "max_num_seq=3"])
def test_wrong_settings_are_refused(text):
    """Without a value, or of no setting's name."""
    with pytest.raises(common.argparse.ArgumentTypeError):
        common.parse_setting(text)


# -- the control plane -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        control_plane.Case(3, 0, 40),
        control_plane.Case(3, 5, 40),
        control_plane.Case(3, 5, 40, short_of="memory"),
        control_plane.Case(3, 5, 40, short_of="memory", streamed=True),
    ],
)
def test_control_plane_times_decode_steps_alone(case):
    """No request starts, ends or is preempted; every step has a token of each."""
    engine, outputs = control_plane.make_engine(case, num_steps=20)
    for _ in range(20):
        control_plane.step(engine, outputs)
    running = engine.scheduler.running
    assert [request.num_output_tokens for request in running] == [21] * case.num_running
    assert [request.num_preemptions for request in running] == [0] * case.num_running
    assert len(engine.scheduler.waiting) == case.num_waiting
    assert (len(running) < engine.scheduler.max_num_seqs) == (case.short_of == "memory")
    texts = [outputs.answers[request.request_id][1].stream.text for request in running]
    assert texts == ["a" * 21 if case.streamed else ""] * case.num_running


def test_control_plane_results_are_results():
    """With the raw times of every round."""
    result = control_plane.measure(control_plane.Case(2, 1, 16))
    bench_results.check_result(result)
    assert result["workload"] == "control plane, 2 running, 1 waiting for rows, context 16"
    assert len(result["microseconds_all"]) == 9
    assert 0 < result["best_microseconds"] <= result["microseconds"]


# -- the README's tables -----------------------------------------------------------------------

FACTS = {
    "device": "cpu",
    "machine": "a laptop",
    "model": "m",
    "dtype": "float32",
    "versions": {"python": "3.12"},
    "command": "python benchmarks/peers.py",
    "date": "2026-11-29",
    "prompt_tokens_per_s": 300.0,
}


def result(engine, workload, seconds, **more):
    return {
        **FACTS,
        "engine": engine,
        "workload": workload,
        "seconds": seconds,
        "output_tokens_per_s": 10.0 / seconds,
        **more,
    }


PEERS = [
    result("minivllm", "batch 1", 1.0, decode_tokens_per_s=30.0, ratio=1.0),
    result("other", "batch 1", 2.0, decode_tokens_per_s=12.0, ratio=2.5),
    result("minivllm", "prefill 1", 1.0, ratio=1.0),
    result("minivllm", "ready: first token", 4.5),
]
TABLE = """\
| workload | minivllm | other | ours / other |
| --- | --: | --: | --: |
| batch 1 | 30 tok/s | 12 tok/s | 2.50 |
| prefill 1 | 300 tok/s | - | - |
| ready: first token | 4.5 s | - | - |

m, float32 on a laptop; python 3.12; `python benchmarks/peers.py`, 2026-11-29."""


def test_peers_stand_side_by_side():
    """A row per workload with the figure that it is about; what was not measured is a dash."""
    assert readme_table.format_results(PEERS) == TABLE


def test_one_engine_has_a_row_per_result():
    """With the columns of `minivllm bench`."""
    table = readme_table.format_results([PEERS[0]])
    assert table.startswith("| workload | output tok/s |")
    assert "| batch 1 | 10 | 30 | 300 | - | - | - |" in table


def test_results_of_two_machines_are_not_mixed():
    """A table claims that its numbers can be compared."""
    with pytest.raises(ValueError, match="differ in machine"):
        readme_table.format_results([PEERS[0], {**PEERS[1], "machine": "another"}])
    with pytest.raises(ValueError, match="no results"):
        readme_table.format_results([])


def test_a_page_is_filled_between_its_marks(tmp_path):
    """What stood there goes, the rest stays; filling again changes nothing."""
    (tmp_path / "r.json").write_text(json.dumps(PEERS))
    begin, end = "<!-- results: r.json -->", "<!-- end of results -->"
    page = f"above\n{begin}\nold\n{end}\nbelow\n"
    filled = readme_table.fill(page, tmp_path)
    assert filled == f"above\n{begin}\n{TABLE}\n{end}\nbelow\n"
    assert readme_table.fill(filled, tmp_path) == filled


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda p: p.name)
def test_stored_results_are_results(path):
    """Every file that was kept has machine, versions, command and date."""
    assert bench_results.load_results(path)


@pytest.mark.parametrize("page", ["README.md"])
def test_tables_of_the_pages_are_their_files(page):
    """`python benchmarks/readme_table.py --write README.md` would change nothing."""
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    assert readme_table.fill(text, FOLDER.parent) == text
