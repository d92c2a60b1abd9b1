"""Workers as real processes: they start, answer, end with the leader, and their errors are told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.distributed.process_group import GroupError

pytestmark = pytest.mark.long

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [5] * 20]
QUICK = 20.0  # seconds in which everything here has ended; nothing waits longer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Six query and six key/value heads: one, two, three or six ranks."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", **sizes)


def load(path, size=2, **settings):
    """An LLM on `size` processes, this one included."""
    settings = {"attention_backend": "torch", "num_kv_blocks": 20, "progress": False} | settings
    return LLM(str(path), tensor_parallel_size=size, **settings)


def answers(llm):
    """Token ids for the prompts."""
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def processes_of(llm):
    """The worker processes of an LLM."""
    return [psutil.Process(worker.process.pid) for worker in llm.engine.runner.group.workers]


def assert_gone(processes):
    """Soon: the system needs a moment to take a process down."""
    _, alive = psutil.wait_procs(processes, timeout=QUICK)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_two_engines_at_once_each_with_its_own_workers(checkpoint):
    """No port, file or group is shared; closing one leaves the other; closing twice is fine."""
    with load(checkpoint, 1) as alone:
        expected = answers(alone)
    first, second = load(checkpoint), load(checkpoint)
    processes = processes_of(first) + processes_of(second)
    assert addresses_of(processes) == {"127.0.0.1"}, "only this host may reach them"
    assert answers(first) == answers(second) == expected
    assert answers(first) == expected
    first.close()
    first.close()
    assert_gone(processes[:1])
    assert answers(second) == expected
    second.close()
    assert_gone(processes[1:])


def addresses_of(processes):
    """The addresses at which these processes listen."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_a_killed_worker_ends_the_engine_with_its_name(checkpoint):
    """At once, and every later call says it again; the other workers are ended."""
    llm = load(checkpoint, 3)
    processes = processes_of(llm)
    answers(llm)
    processes[1].kill()
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(GroupError, match="worker 2 of 3 ended: killed by signal 9"):
            answers(llm)
    assert time.monotonic() - started < QUICK
    assert_gone(processes)
    assert not llm.has_unfinished_requests()
    llm.close()


def test_a_worker_that_stands_still_is_given_up(checkpoint):
    """After `distributed_timeout_seconds`, with the remedy; it is ended all the same."""
    llm = load(checkpoint, distributed_timeout_seconds=1)
    processes = processes_of(llm)
    answers(llm)
    processes[0].suspend()
    started = time.monotonic()
    with pytest.raises(GroupError, match="worker 1 of 2 did not answer within 1 s"):
        answers(llm)
    assert time.monotonic() - started < QUICK
    assert_gone(processes)
    llm.close()


def test_the_error_of_a_worker_is_the_engines(checkpoint):
    """Here it receives something else than a step."""
    llm = load(checkpoint)
    processes = processes_of(llm)
    llm.engine.runner.group.send(b'{"nonsense": 1}')
    with pytest.raises(GroupError, match=r"worker 1 of 2 ended: TypeError: .*nonsense"):
        answers(llm)
    assert_gone(processes)
    llm.close()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_leaves_no_worker(checkpoint):
    """The leader's error is the one that is raised."""
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match="max_model_len=1000 is more than the model was trained"):
        load(checkpoint, max_model_len=1000)
    assert_gone([p for p in psutil.Process().children(recursive=True) if p not in before])


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_answers_the_same_on_three_ranks():
    """9 query and 3 key/value heads, 576, 1536 and 49,152: all divide by three. One prompt and
    three at once, on packed weights and on plain ones."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    for backend in ("torch", "cpu"):
        found = []
        for size in (1, 3):
            with load("smollm2-135m", size, dtype="float32", attention_backend=backend) as llm:
                outputs = llm.generate(prompts, params, False)
                outputs += llm.generate(prompts[:1], params, False)
            found.append([output.outputs[0].token_ids for output in outputs])
        assert found[0] == found[1], backend


# -- scripts of their own ----------------------------------------------------------------------

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
from minivllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, attention_backend="torch", num_kv_blocks=200,
          max_num_seqs=2, progress=False)
print(*(worker.process.pid for worker in llm.engine.runner.group.workers), flush=True)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
prompts = [[1 + n, 2, 3] for n in range(200)]
try:
    llm.generate(prompts, params, use_tqdm=False)
except KeyboardInterrupt:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    print(llm.generate(prompts[:1], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
"""


def start(path):
    """The script; returns the process and its workers' processes."""
    leader = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [psutil.Process(int(pid)) for pid in leader.stdout.readline().split()]
    assert len(workers) == 1, leader.stderr.read()
    return leader, workers


def test_workers_end_with_a_leader_that_is_killed(checkpoint):
    """They notice by themselves, in the middle of a step."""
    leader, workers = start(checkpoint)
    leader.kill()
    leader.communicate(timeout=QUICK)
    assert_gone(workers)


def test_ctrl_c_leaves_an_engine_that_works(checkpoint):
    """A terminal sends it to all processes of the group: it comes between two steps, no rank is
    left waiting, and the next prompt is answered. The script closes nothing: its workers end with
    it all the same."""
    with load(checkpoint, 1) as alone:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        expected = alone.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    leader, workers = start(checkpoint)
    time.sleep(0.3)  # into the first steps
    os.killpg(leader.pid, signal.SIGINT)
    output, errors = leader.communicate(timeout=QUICK)
    assert (leader.returncode, errors) == (0, "")
    assert output.strip() == str(expected)
    assert_gone(workers)


def torchrun(path, node, port, *arguments):
    """One of two nodes on this host."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = ["-m", "minivllm", "generate", "abc", "--raw", "--model", str(path)]
    return subprocess.Popen(
        [sys.executable, *launcher, *meeting, *command, "--temperature", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow  # it imports PyTorch six times
@pytest.mark.skipif(sys.platform == "win32", reason="needs torchrun")
def test_torchrun_runs_one_engine_on_two_nodes(tmp_path, unused_port):
    """The first one answers, like an engine alone; the other one works and says nothing."""
    path, options = make_checkpoint(tmp_path / "tiny"), ["--max-tokens", "6"]
    nodes = [
        torchrun(path, node, unused_port, *options, "--tensor-parallel-size", "2")
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=4 * QUICK) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    with load(path, 1) as alone:
        params = SamplingParams(temperature=0, max_tokens=6)
        expected = alone.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    assert outputs[0][0] == expected.strip() + "\n"
    assert outputs[1][0] == ""


@pytest.fixture
def unused_port():
    """A port that was free a moment ago; torchrun wants a number."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_torchrun_and_the_setting_must_agree(checkpoint, monkeypatch):
    """Two processes were started for three ranks: the engine does not wait for the third."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="tensor_parallel_size=3, but torchrun has started 2"):
        load(checkpoint, 3)
