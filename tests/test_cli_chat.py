"""A conversation keeps what was said, stops when told to, and never ends in a traceback."""

import io
from types import SimpleNamespace

import pytest
from tiny_checkpoint import make_checkpoint

from minivllm.cli import chat as cli_chat
from minivllm.cli import main as cli
from minivllm.cli.chat import Chat, Session, figures_of, notes_on
from minivllm.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

MAX_LEN = 40


def make_output(prompt_token_ids, text, reason="stop"):
    """The output of an answer with one token per letter, a tenth of a second each."""
    times = [1.2 + 0.1 * number for number in range(len(text))]
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=list(prompt_token_ids),
        outputs=[CompletionOutput(0, text, [1] * len(text), reason)],
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0, token_times=times),
        num_cached_tokens=2,
    )


class FakeStream:
    """Pieces of text; KeyboardInterrupt stands for Ctrl-C at that place."""

    def __init__(self, pieces, output):
        self.pieces, self.final = iter(pieces), output
        self.output, self.closed = None, False

    def __iter__(self):
        return self

    def __next__(self):
        piece = next(self.pieces, None)
        if piece is None:
            self.output = self.final
            raise StopIteration
        if piece is KeyboardInterrupt:
            raise KeyboardInterrupt
        return piece

    def close(self):
        self.closed = True


class FakeLLM:
    """Answers from a script. A message has as many tokens as letters, and one for its role."""

    config = SimpleNamespace(max_model_len=MAX_LEN)

    def __init__(self, *answers, reason="stop"):
        self.answers, self.reason = list(answers), reason
        self.asked, self.params, self.streams = [], [], []
        self.tokenizer = SimpleNamespace(apply_chat_template=self.encode)

    def encode(self, messages):
        if any("refuse" in message["content"] for message in messages):
            raise ValueError("the template refuses that")
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return [1] * sum(1 + len(message["content"]) for message in messages)

    def stream(self, prompt, params):
        pieces = self.answers.pop(0)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        self.params.append(params)
        self.streams.append(FakeStream(pieces, make_output(prompt, text, self.reason)))
        return self.streams[-1]


class FakeTerminal:
    """Reads a script; remembers what was written and noted."""

    def __init__(self, *lines, is_interactive=True):
        self.lines, self.is_interactive = list(lines), is_interactive
        self.text, self.notes = "", []

    def read(self):
        return self.lines.pop(0) if self.lines else None

    def write(self, piece):
        self.text += piece

    def note(self, text):
        self.notes.append(text)


def talk(llm, *lines, seed=None, system=None, is_interactive=True):
    """Run a chat over the lines; returns its session and terminal."""
    terminal = FakeTerminal(*lines, is_interactive=is_interactive)
    session = Session(llm, SamplingParams(max_tokens=9, seed=seed), system)
    terminal.num_refused = Chat(session, terminal).run()
    return session, terminal


# -- turns -------------------------------------------------------------------------------------


def test_each_turn_sees_the_ones_before_it():
    """The second prompt holds the first question, its answer and the system message."""
    llm = FakeLLM(["Pa", "ris."], ["Yes."])
    session, terminal = talk(llm, "Capital?", "Sure?", system="Short!")
    assert llm.asked[1] == [
        ("system", "Short!"),
        ("user", "Capital?"),
        ("assistant", "Paris."),
        ("user", "Sure?"),
    ]
    assert session.turns == [("Capital?", "Paris."), ("Sure?", "Yes.")]
    assert terminal.text == "Paris.\nYes.\n"
    assert all(stream.closed for stream in llm.streams)


def test_pieces_are_written_as_they_come():
    """Not at the end: after the first piece only that one stands there."""
    seen = []
    llm = FakeLLM(["a", "b"])
    Session(llm, SamplingParams()).ask("x", seen.append)
    assert seen == ["a", "b"]


def test_an_answer_is_followed_by_its_figures():
    """Tokens, speed behind the first token, time to it, and what the cache spared."""
    _, terminal = talk(FakeLLM(["abcd"]), "Hi")
    assert terminal.notes == [
        "4 tokens, 10.0 tok/s, first token after 200 ms; 2 of 3 prompt tokens from the prefix cache"
    ]


def test_one_token_has_no_speed():
    """There is no time between tokens."""
    assert figures_of(make_output([1, 1], "a")) == (
        "1 token, first token after 200 ms; 2 of 2 prompt tokens from the prefix cache"
    )


def test_empty_lines_are_not_turns():
    """Nor are blanks."""
    session, _ = talk(FakeLLM(["a"]), "", "   ", "x", "")
    assert session.turns == [("x", "a")]


def test_a_seed_gives_another_one_to_each_answer():
    """The session can be repeated; its answers do not repeat each other."""
    llm = FakeLLM(["a"], ["b"])
    talk(llm, "x", "y", seed=2**63 - 1)
    assert [params.seed for params in llm.params] == [2**63 - 1, 0]
    llm = FakeLLM(["a"])
    talk(llm, "x")
    assert llm.params[0].seed is None


# -- Ctrl-C ------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_said():
    """The half answer is part of the conversation, and the next question can be asked."""
    llm = FakeLLM(["One ", "two ", KeyboardInterrupt, "three"], ["Four."])
    session, terminal = talk(llm, "Count", "Go on")
    assert session.turns == [("Count", "One two "), ("Go on", "Four.")]
    assert llm.streams[0].closed
    assert terminal.notes[0] == "stopped; what was said is kept"


def test_ctrl_c_before_the_first_word_forgets_the_question():
    """A question without an answer would confuse the model."""
    session, terminal = talk(FakeLLM([KeyboardInterrupt], ["Yes."]), "Hm", "Well?")
    assert session.turns == [("Well?", "Yes.")]
    assert "forgotten" in terminal.notes[0]


def test_ctrl_c_while_writing_keeps_the_piece_that_was_written():
    """The terminal is slow; the signal comes there."""

    def write(piece):
        raise KeyboardInterrupt

    session = Session(FakeLLM(["One ", "two"]), SamplingParams())
    assert session.ask("Count", write).stopped
    assert session.turns == [("Count", "One ")]


def test_ctrl_c_in_a_pipe_ends_the_whole():
    """Stopping a script means all of it."""
    with pytest.raises(KeyboardInterrupt):
        talk(FakeLLM(["One", KeyboardInterrupt]), "Count", "Go on", is_interactive=False)


# -- the end of the room -----------------------------------------------------------------------


def test_a_conversation_that_is_too_long_says_what_to_do():
    """20 + 20 tokens leave no room in 40: nothing is lost, and after /drop it goes on."""
    llm = FakeLLM(["b" * 9], ["c"])
    session, terminal = talk(llm, "a" * 9, "d" * 19, "/drop", "d" * 19)
    assert session.turns == [("d" * 19, "c")]
    assert "40 tokens" in terminal.notes[1]
    assert "max_model_len=40" in terminal.notes[1]
    assert "/drop" in terminal.notes[1]
    assert "/reset" in terminal.notes[1]
    assert terminal.num_refused == 1


def test_one_token_less_fits():
    """39 of 40 leave room for one token of an answer."""
    session, terminal = talk(FakeLLM(["b" * 9], ["c"]), "a" * 9, "d" * 18)
    assert len(session.turns) == 2
    assert terminal.num_refused == 0


def test_a_message_that_is_too_long_by_itself_must_be_shortened():
    """There is nothing to drop, so that is not what it says."""
    session, terminal = talk(FakeLLM(), "a" * 60)
    assert session.turns == []
    assert "61 tokens" in terminal.notes[0]
    assert "shorten" in terminal.notes[0]
    assert "/drop" not in terminal.notes[0]


def test_an_answer_that_was_cut_says_why():
    """By max_tokens, or because the conversation is full."""
    session, terminal = talk(FakeLLM(["a" * 9], reason="length"), "x")
    assert terminal.notes[1] == "cut after --max-tokens 9"
    answer = SimpleNamespace(
        output=make_output([1] * 31, "a" * 9, "length"), stopped=False, text="a"
    )
    assert "reached max_model_len=40" in notes_on(answer, session)[1]


def test_a_refused_message_changes_nothing():
    """The template's own words, and on it goes."""
    session, terminal = talk(FakeLLM(["Yes."]), "refuse", "Well?")
    assert terminal.notes[0] == "the template refuses that"
    assert session.turns == [("Well?", "Yes.")]


# -- commands ----------------------------------------------------------------------------------


def test_reset_forgets_the_turns_and_keeps_the_system_message():
    """The next prompt is the first one again."""
    llm = FakeLLM(["a"], ["b"])
    talk(llm, "x", "/reset", "y", system="Short!")
    assert llm.asked[1] == [("system", "Short!"), ("user", "y")]


def test_system_sets_and_takes_back():
    """From the next answer on."""
    llm = FakeLLM(["a"], ["b"])
    talk(llm, "/system  Be kind. ", "x", "/system", "y")
    assert llm.asked[0][0] == ("system", "Be kind.")
    assert llm.asked[1] == [("user", "x"), ("assistant", "a"), ("user", "y")]


def test_drop_forgets_the_oldest_turn():
    """And says so where there is none."""
    session, terminal = talk(FakeLLM(["a"], ["b"]), "/drop", "x", "y", "/drop")
    assert session.turns == [("y", "b")]
    assert terminal.notes[0] == "there is nothing to forget yet"
    assert terminal.notes[-1] == "forgotten: 'x' and its answer"


def test_regenerate_answers_the_last_question_again():
    """The old answer is not part of the prompt, and its place is taken."""
    llm = FakeLLM(["a"], ["b"])
    session, _ = talk(llm, "x", "/regenerate")
    assert session.turns == [("x", "b")]
    assert llm.asked[1] == [("user", "x")]


def test_regenerate_that_fails_keeps_the_old_answer():
    """Stopped before a word came; and with nothing to answer again it says so."""
    session, _ = talk(FakeLLM(["a"], [KeyboardInterrupt]), "x", "/regenerate")
    assert session.turns == [("x", "a")]
    _, terminal = talk(FakeLLM(), "/regenerate")
    assert terminal.notes == ["no answer yet"]


def test_help_names_every_command():
    """One line each."""
    _, terminal = talk(FakeLLM(), "/help")
    assert [note.split()[0] for note in terminal.notes] == [
        name.split()[0] for name in cli_chat.COMMANDS
    ]


def test_quit_leaves():
    """Text after it is not read."""
    session, _ = talk(FakeLLM(["a"]), "x", "/quit", "y")
    assert session.turns == [("x", "a")]


def test_an_unknown_command_is_not_sent():
    """Only if it begins with a blank."""
    session, terminal = talk(FakeLLM(["a"]), "/foo", " /usr?")
    assert "there is no /foo" in terminal.notes[0]
    assert session.turns == [("/usr?", "a")]


def test_an_empty_answer_is_named():
    """And counts, so that a script can tell."""
    _, terminal = talk(FakeLLM([""]), "x")
    assert terminal.notes[1] == "the answer is empty"
    assert terminal.num_refused == 1


# -- the real thing ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint directory."""
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128))


def chat(checkpoint, monkeypatch, capsys, lines, *options):
    """`minivllm chat` with lines from a pipe: exit code, answers, notes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    arguments = ["chat", "--model", checkpoint, "--temperature", "0", "--max-tokens", "6"]
    code = cli.main([*arguments, *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_pipe_is_answered_line_by_line(checkpoint, monkeypatch, capsys):
    """Answers alone on standard output; the second turn finds the first in the prefix cache."""
    code, out, err = chat(checkpoint, monkeypatch, capsys, ["Hello, who are you?", "/regenerate"])
    assert code == 0
    assert "\x1b" not in out + err
    assert "prefix cache" not in out
    first, again = [line for line in err.splitlines() if "prompt tokens from the prefix" in line]
    assert "; 0 of 37 prompt" in first
    assert "; 32 of 37 prompt" in again
    halves = out[: len(out) // 2], out[len(out) // 2 :]
    assert halves[0] == halves[1], "greedy: the same answer again"


def test_a_pipe_whose_message_does_not_fit_ends_with_code_2(checkpoint, monkeypatch, capsys):
    """The other lines are answered all the same."""
    code, out, err = chat(checkpoint, monkeypatch, capsys, ["x" * 200, "hi"])
    assert code == 2
    assert "max_model_len=128" in err
    assert "Traceback" not in err
    assert "prompt tokens from the prefix cache" in err
    assert out


def test_an_impossible_setting_is_one_line(checkpoint, monkeypatch, capsys):
    """Before the first turn."""
    with pytest.raises(SystemExit) as exit_info:
        chat(checkpoint, monkeypatch, capsys, ["hi"], "--top-p", "2")
    captured = capsys.readouterr()
    assert (exit_info.value.code, captured.out) == (2, "")
    assert "minivllm chat: top_p=2.0 must be" in captured.err
    assert captured.err.count("\n") == 1


def make_terminal(monkeypatch, *keys, no_colour=False):
    """A terminal whose user types `keys`: lines, or exceptions."""
    script = iter(keys)

    def typed(prompt):
        key = next(script)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setenv("NO_COLOR", "1") if no_colour else monkeypatch.delenv("NO_COLOR", False)
    terminal = cli_chat.Terminal()
    terminal.is_interactive = True
    return terminal


@pytest.mark.parametrize("key", [EOFError(), KeyboardInterrupt()])
def test_ctrl_d_and_ctrl_c_at_the_prompt_leave(monkeypatch, capsys, key):
    """After the lines that came before."""
    terminal = make_terminal(monkeypatch, "hello", key)
    assert [terminal.read(), terminal.read()] == ["hello", None]


def test_notes_are_dim_unless_colour_is_not_wanted(monkeypatch, capsys):
    """NO_COLOR is the common way to say so."""
    make_terminal(monkeypatch).note("x")
    assert capsys.readouterr().out == "\x1b[2mx\x1b[0m\n"
    make_terminal(monkeypatch, no_colour=True).note("x")
    assert capsys.readouterr().out == "x\n"


def test_an_empty_line_of_a_pipe_does_not_end_it(monkeypatch):
    """Only its end does; the last line needs no newline."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb"))
    terminal = cli_chat.Terminal()
    assert [terminal.read() for _ in range(4)] == ["a", "", "b", None]
