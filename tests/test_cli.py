"""The command line: answers on standard output, mistakes in one line, help that teaches."""

import subprocess
import sys

import pytest
from tiny_checkpoint import make_checkpoint

from minivllm import cli


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
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--dtype", "int4"], "dtype='int4'"),
        (["--model", "no/such-model"], "no/such-model"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(checkpoint, capsys, arguments, words):
    """No traceback; the message names the value."""
    assert cli.main(["generate", "abc", "--model", checkpoint, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("minivllm: ") == 1
    assert words in error
    assert "Traceback" not in error


def test_demo_answers_eight_prompts_and_draws_them(checkpoint, tmp_path, capsys):
    """Answers, speed, times and a picture."""
    figure = tmp_path / "demo.png"
    assert cli.main(["demo", "--model", checkpoint, "--figure", str(figure)]) == 0
    output = capsys.readouterr().out
    assert output.count("\n> ") == 8
    assert "tok/s" in output
    assert "time to first token" in output
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_help_explains_each_command(command, capsys):
    """More than a list of options: it says what happens."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert "default" in output
    assert len(output) > 400


def test_help_needs_no_torch():
    """It answers at once."""
    code = "import sys; from minivllm import cli; cli.build_parser(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.model
def test_the_demo_knows_the_capital_of_france(tmp_path, capsys):
    """The real model, as the README's first command runs it."""
    assert cli.main(["demo", "--figure", str(tmp_path / "demo.png")]) == 0
    output = capsys.readouterr().out
    assert "The capital of France is Paris." in output
