"""The command line: answers on standard output, mistakes in one line, help that teaches."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_checkpoint import make_checkpoint

import minivllm
from minivllm.cli import bench as cli_bench
from minivllm.cli import main as cli
from minivllm.measure import results as bench_results
from minivllm.measure import workloads as bench
from minivllm.request import SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint directory."""
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024))


def test_generate_prints_the_answers(checkpoint, capsys):
    """Two prompts: each is repeated above its answer."""
    code = cli.main(
        ["generate", "abc", "xyz", "--model", checkpoint, "--max-tokens", "4", "--seed", "1"]
    )
    assert code == 0
    output = capsys.readouterr().out
    assert "> abc\n" in output
    assert "> xyz\n" in output


def test_same_seed_same_answer(checkpoint, capsys):
    """The whole way from the command line."""
    arguments = ["generate", "abc", "--model", checkpoint, "--max-tokens", "8", "--seed"]
    answers = []
    for seed in ("3", "3", "4"):
        assert cli.main([*arguments, seed]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature=-1.0 must be a finite number of at least 0"),
        (["--top-p", "2"], "top_p=2.0 must be a finite number above 0 and at most 1"),
        (["--max-tokens", "0"], "max_tokens=0 must be"),
        (["--dtype", "int4"], "dtype='int4' must be one of auto, float32"),
        (["--max-model-len", "0"], "max_model_len=0 must be"),
    ],
)
def test_an_impossible_setting_is_refused_before_the_model_is_loaded(capsys, arguments, words):
    """One line with the value, the limit and where the options are explained."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["generate", "abc", "--model", "no/such-model", *arguments])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"minivllm generate: {words}")
    assert error.endswith("(minivllm generate --help explains)\n")
    assert error.count("\n") == 1


def test_an_unknown_model_is_one_line_and_exit_code_2(capsys):
    """No traceback; the message names the value."""
    assert cli.main(["generate", "abc", "--model", "no-such-model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minivllm: model='no-such-model' is neither")
    assert error.count("\n") == 1


@pytest.mark.parametrize("prompt", ["", "  ", "caf\udce9"])
def test_a_prompt_without_text_is_refused(capsys, prompt):
    """Empty, blank, or bytes that are not UTF-8."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["generate", "--raw", prompt])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "PROMPT" in error and ("is empty" in error or "not valid UTF-8" in error)


def test_a_refused_prompt_is_exit_code_2_without_a_python_warning(checkpoint, capsys):
    """The reason in one line; the other prompt is answered."""
    arguments = ["--model", checkpoint, "--max-model-len", "30", "--max-tokens", "4"]
    assert cli.main(["generate", "x" * 40, "a", "--raw", *arguments]) == 2
    captured = capsys.readouterr()
    assert "is refused: " in captured.err
    assert "UserWarning" not in captured.err and ".py" not in captured.err
    # A first run also says that it compiles.
    lines = [line for line in captured.err.splitlines() if not line.startswith("compiling")]
    assert len(lines) == 1
    assert "> a\n" in captured.out


def test_an_empty_answer_is_exit_code_2(checkpoint, monkeypatch, capsys):
    """A script must not take it for an answer."""
    answer = SimpleNamespace(text=" \n", finish_reason="stop")
    outputs = [SimpleNamespace(outputs=[answer])]
    monkeypatch.setattr("minivllm.llm.LLM.generate", lambda *args, **options: outputs)
    assert cli.main(["generate", "x", "--model", checkpoint]) == 2
    assert "the answer is empty (finish_reason: stop)" in capsys.readouterr().err


def test_an_unfinished_exercise_is_one_line(monkeypatch, capsys):
    """It names the exercise, as the learner left it."""

    def unfinished(*_, **__):
        raise NotImplementedError("notebook 02: scheduler.Scheduler.schedule")

    monkeypatch.setattr("minivllm.llm.LLM.__init__", unfinished)
    assert cli.main(["generate", "x"]) == 2
    error = capsys.readouterr().err
    assert error == "minivllm: not implemented: notebook 02: scheduler.Scheduler.schedule\n"


def test_the_version_is_printed(capsys):
    """For bug reports."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"minivllm {minivllm.__version__}\n"


def test_demo_answers_eight_prompts_and_draws_them(checkpoint, tmp_path, capsys):
    """Answers, speed, times and a picture."""
    figure = tmp_path / "demo.png"
    assert cli.main(["demo", "--model", checkpoint, "--figure", str(figure)]) == 0
    output = capsys.readouterr().out
    assert output.count("\n> ") == 8
    assert "tok/s" in output
    assert "time to first token" in output
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo", ["prefix cache", "KV", "default"]),
        ("chat", ["/reset", "Ctrl-C", "prefix cache", "--system", "default"]),
        ("generate", ["--raw", "--repetition-penalty", "default"]),
        ("bench", ["batch N", "p99", "two minutes", "--json", "default"]),
        ("doctor", ["what that costs", "Changes nothing", "exit code"]),
    ],
)
def test_help_explains_each_command(command, words, capsys):
    """More than a list of options: what happens, what the numbers mean, and an example."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert f"example: minivllm {command}" in output
    for word in words:
        assert word in output


def test_without_a_command_the_help_is_shown(capsys):
    """All commands with a line each; it is a mistake all the same."""
    assert cli.main([]) == 2
    output = capsys.readouterr().out
    for command in ("demo", "chat", "generate", "bench", "doctor"):
        assert f"\n    {command} " in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "--sistem", "x"], ["did you mean --system?", "--seed", "--dtype"]),
        (["bench", "--nothing"], ["unknown argument --nothing. The options are", "--json"]),
        (["chat", "hello"], ["unknown argument hello", "--system"]),
        (["bench", "--repeats", "x"], ["--repeats: 'x' must be a whole number of at least 1"]),
        (["bench", "--batch-sizes", "4", "0"], ["'0' must be a whole number"]),
        (["generate", "a", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["chat", "--temp", "1"], ["unknown argument --temp", "--temperature"]),
        (["chot"], ["unknown command chot, did you mean chat?", "demo, chat, generate, bench"]),
    ],
)
def test_a_mistyped_option_is_one_line_and_exit_code_2(capsys, arguments, words):
    """It lists the options; the usage in many lines is left to --help."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # A first run also says that it compiles.
    lines = [line for line in captured.err.splitlines() if not line.startswith("compiling")]
    assert len(lines) == 1
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(("command", "option"), [("bench", "--json"), ("demo", "--figure")])
def test_a_file_that_cannot_be_written_is_said_before_the_work(tmp_path, capsys, command, option):
    """Even before the model is looked for."""
    path = tmp_path / "no" / "file"
    assert cli.main([command, option, str(path), "--model", "no/such-model"]) == 2
    error = capsys.readouterr().err
    assert f"the folder {path.parent} does not exist" in error
    assert error.count("\n") == 1


def test_the_checkpoints_settings_are_overruled_by_the_options():
    """What was not given stays as the checkpoint recommends; where that says nothing, 0.7."""
    parser = cli.build_parser()
    given = parser.parse_args(["generate", "x", "--top-k", "3", "--max-tokens", "5"])
    llm = SimpleNamespace(
        get_default_sampling_params=lambda: SamplingParams(temperature=0.3, top_p=0.8)
    )
    assert cli.sampling_params(llm, given) == SamplingParams(
        temperature=0.3, top_p=0.8, top_k=3, max_tokens=5
    )
    silent = SimpleNamespace(get_default_sampling_params=SamplingParams)
    assert cli.sampling_params(silent, given).temperature == 0.7
    given = parser.parse_args(["generate", "x", "--temperature", "0"])
    assert cli.sampling_params(llm, given).temperature == 0


def test_bench_prints_a_row_for_each_workload(checkpoint, tmp_path, capsys):
    """And writes what it measured."""
    path = tmp_path / "speed.json"
    sizes = ["--batch-sizes", "1", "3", "--prompt-tokens", "16", "--new-tokens", "4"]
    sizes += ["--prefill-tokens", "64", "--mixed-requests", "3", "--repeats", "2"]
    assert cli.main(["bench", "--model", checkpoint, "--json", str(path), *sizes]) == 0
    output = capsys.readouterr().out
    workloads = [result["workload"] for result in bench_results.load_results(path)]
    assert workloads == [
        "prefill 1 x 64 in, 1 out",
        "batch 1 x 16 in, 4 out",
        "batch 3 x 16 in, 4 out",
        "mixed 3 x 2..16 in, 1..4 out",
    ]
    for workload in ("workload", *workloads):
        assert f"\n{workload} " in output


def test_bench_skips_workloads_when_time_is_over(checkpoint, monkeypatch, capsys):
    """On a clock on which every run takes 40 of 100 seconds: two workloads of four, once each,
    and a third that was begun in time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(cli_bench, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    shares = []

    def repeat(llm, workload, repeats, max_seconds):
        shares.append(max_seconds)
        clock.now += 40.0
        return [bench.time_offline(llm, workload)]

    monkeypatch.setattr(bench, "repeat_offline", repeat)
    sizes = ["--batch-sizes", "1", "2", "--prompt-tokens", "8", "--prefill-tokens", "8"]
    assert cli.main(["bench", "--model", checkpoint, "--new-tokens", "2", *sizes]) == 0
    assert shares == [25.0, 20.0, 10.0]
    output = capsys.readouterr().out
    assert "\nbatch 2 x 8 in" in output
    assert "skipped, because --max-seconds 100 are over: mixed 12 x" in output


def test_bench_gives_a_large_batch_a_row_for_each(checkpoint, tmp_path, capsys):
    """33 at once are more than a CPU's default of 32."""
    path = tmp_path / "speed.json"
    sizes = ["--batch-sizes", "33", "--prompt-tokens", "4", "--new-tokens", "2"]
    sizes += ["--prefill-tokens", "4", "--mixed-requests", "1", "--repeats", "1"]
    assert cli.main(["bench", "--model", checkpoint, "--json", str(path), *sizes]) == 0
    assert {result["max_num_seqs"] for result in bench_results.load_results(path)} == {33}


def test_bench_refuses_what_the_model_cannot_hold(checkpoint, capsys):
    """Before anything is timed."""
    assert cli.main(["bench", "--model", checkpoint, "--prefill-tokens", "1024"]) == 2
    captured = capsys.readouterr()
    assert "1025 tokens, more than max_model_len=1024" in captured.err
    assert "decode" not in captured.out


def test_the_doctors_code_is_the_exit_code(monkeypatch):
    """1 if something required is missing."""
    monkeypatch.setattr(cli, "run_doctor", lambda arguments: 1)
    assert cli.main(["doctor"]) == 1


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    """One line, no traceback."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("minivllm.llm.LLM.__init__", interrupt)
    assert cli.main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "minivllm: stopped\n"


OUTPUTS = {
    # The reader has left (`| head`): buffered, as in a shell, so that it shows at the end.
    "left": ("r, w = os.pipe(); os.close(r); os.dup2(w, 1)", 0, ""),
    "full": ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", 2, "No space left"),
    "closed": ("sys.stdout = None", 0, ""),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_that_cannot_be_written_gives_one_line(kind):
    """The reader has left, the disk is full, or there is no standard output at all."""
    break_it, code, words = OUTPUTS[kind]
    script = f"import os, sys; {break_it}\nfrom minivllm.cli import main as cli\n"
    script += "def run(arguments):\n    print('text')\n    return 0\n"
    script += "cli.run_doctor = run\nsys.exit(cli.main(['doctor']))"
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert run.returncode == code, run.stderr
    assert run.stderr.count("\n") == bool(words)
    assert words in run.stderr


def test_python_m_is_the_command():
    """For those whose scripts are not on the path."""
    run = subprocess.run(
        [sys.executable, "-m", "minivllm", "--help"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0
    assert run.stdout.startswith("usage: minivllm")


def test_help_needs_no_torch():
    """It answers at once."""
    code = "import sys; from minivllm.cli import main as cli; cli.build_parser();"
    code += " print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.model
def test_the_demo_knows_the_capital_of_france(tmp_path, capsys):
    """The real model, as the README's first command runs it."""
    assert cli.main(["demo", "--figure", str(tmp_path / "demo.png")]) == 0
    output = capsys.readouterr().out
    assert "The capital of France is Paris." in output


@pytest.mark.parametrize("command", [["minivllm", "--help"], ["course", "progress"]])
def test_a_pipe_with_few_characters_is_not_an_error(command):
    """As on Windows: what it does not know is a question mark."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")
    assert ran.stdout
