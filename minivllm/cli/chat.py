"""`minivllm chat`: a conversation in the terminal, or one turn per line of a pipe.

Not built in the course.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.cli.options import (
    add_command,
    add_engine_options,
    add_sampling_options,
    load,
    note,
    sampling_params,
)

if TYPE_CHECKING:
    from minivllm.request import RequestOutput, SamplingParams

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation; the system message stays",
    "/drop": "forget the oldest question and its answer",
    "/system TEXT": "tell the model how to behave; without TEXT, take that back",
    "/regenerate": "answer the last question again",
    "/quit": "leave (as Ctrl-D does)",
}
REMEDY = "/drop forgets the oldest question and its answer, /reset everything"


def add_chat(commands: Any) -> None:
    """Add the command and its options."""
    listed = "\n".join(f"  {name:14} {what}" for name, what in COMMANDS.items())
    chat = add_command(
        commands,
        "chat",
        run_chat,
        summary="talk with the model",
        teaches="Answers word by word, and remembers the conversation. All of it is the prompt of\n"
        "each turn, but the engine computes only what is new: the line below an answer says how\n"
        "many prompt tokens came from the prefix cache, how long the first token took and how\n"
        "many tokens per second followed it.\n\n"
        f"In the conversation:\n{listed}\n"
        "Ctrl-C stops an answer and keeps what was said; at the prompt it leaves.\n"
        "From a pipe, each line is a turn: answers go to standard output, notes to standard\n"
        "error, and the exit code is 2 if a line was refused or an answer is empty.",
        example='example: minivllm chat --system "You answer in one sentence." --temperature 0.3',
    )
    chat.add_argument("--system", metavar="TEXT", help="tells the model how to behave")
    add_sampling_options(chat, max_tokens=512)
    add_engine_options(chat)


def run_chat(arguments: argparse.Namespace) -> int:
    """Load the model and talk until the user leaves."""
    terminal = Terminal()
    with load(arguments) as llm:
        session = Session(llm, sampling_params(llm, arguments), arguments.system)
        terminal.note(
            f"{llm.config.model}, {llm.config.dtype} on {llm.config.device}, room for"
            f" {llm.config.max_model_len:,} tokens. /help lists the commands, Ctrl-D leaves."
        )
        num_refused = Chat(session, terminal).run()
    return 2 if num_refused and not terminal.is_interactive else 0


# -- the session --------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The model's answer to one message."""

    text: str
    output: RequestOutput | None  # None if it was stopped before the engine could report
    stopped: bool  # by Ctrl-C


class Session:
    """The messages so far. Invariant: after the system message, if there is one, questions and
    answers take turns, and every question has its answer."""

    def __init__(self, llm: Any, params: SamplingParams, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.turns: list[tuple[str, str]] = []  # question, answer
        self.num_asked = 0

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the conversation with one more question, as chat templates want it."""
        listed = [("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            listed += [("user", asked), ("assistant", answered)]
        listed.append(("user", question))
        return [{"role": role, "content": content} for role, content in listed]

    def ask(self, question: str, write: Callable[[str], None]) -> Answer:
        """Answer one more question; pass each piece of the answer to `write` as it comes.

        Ctrl-C ends the answer and keeps what was said until then. Raises ValueError, and
        forgets the question, if the conversation has grown too long or the model refuses it.
        """
        token_ids = self.llm.tokenizer.apply_chat_template(self.messages(question))
        self._check_room(len(token_ids))
        said: list[str] = []
        stopped = False
        with contextlib.closing(self.llm.stream(token_ids, self._next_params())) as stream:
            try:
                for piece in stream:
                    said.append(piece)
                    write(piece)
            except KeyboardInterrupt:
                stopped = True
        text = "".join(said)
        if text or not stopped:
            self.turns.append((question, text))
        return Answer(text, getattr(stream, "output", None), stopped)

    def _next_params(self) -> SamplingParams:
        # A seed makes the session repeatable, and no answer repeats the one before it.
        self.num_asked += 1
        if self.params.seed is None:
            return self.params
        seed = (self.params.seed + self.num_asked - 1) % 2**63
        return dataclasses.replace(self.params, seed=seed)

    def _check_room(self, num_tokens: int) -> None:
        limit = self.llm.config.max_model_len
        if num_tokens < limit:
            return
        whose = "with your message the conversation" if self.turns else "your message"
        remedy = f"{REMEDY}. Then try again" if self.turns else "shorten it or the system message"
        raise ValueError(
            f"{whose} has {num_tokens:,} tokens, and max_model_len={limit:,} leaves no room for an"
            f" answer: {remedy}"
        )


# -- the terminal ------------------------------------------------------------------------------


class Terminal:
    """Reads lines and writes answers and notes; from a pipe without prompt and colour."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_interactive:
            with contextlib.suppress(ImportError):  # Windows has none
                import readline  # noqa: F401  (from here on input() edits lines and remembers them)

    def read(self) -> str | None:
        """Return the next line; None at the end of the input, and for Ctrl-C at the prompt."""
        if not self.is_interactive:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def write(self, piece: str) -> None:
        """Write a piece of an answer at once."""
        print(piece, end="", flush=True)

    def note(self, text: str) -> None:
        """Write a line about the conversation: dim in a terminal, to standard error from a pipe."""
        if not self.is_interactive:
            note(text)
        elif "NO_COLOR" in os.environ:
            print(text)
        else:
            print(f"\x1b[2m{text}\x1b[0m")


class Chat:
    """The loop: a line is a command or a question."""

    def __init__(self, session: Session, terminal: Any) -> None:
        """`terminal` is a `Terminal`, or reads and writes like one."""
        self.session = session
        self.terminal = terminal
        self.num_refused = 0  # lines that were refused or got an empty answer
        self._actions: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/drop": self._drop,
            "/system": self._system,
            "/regenerate": self._regenerate,
        }

    def run(self) -> int:
        """Talk until the input ends or the user leaves; return `num_refused`."""
        while (line := self.terminal.read()) is not None:
            word, _, rest = line.partition(" ")
            if word in ("/quit", "/exit"):
                break
            if word in self._actions:
                self._actions[word](rest.strip())
            elif word.startswith("/"):
                self._refuse(
                    f"there is no {word}; /help lists the commands (a message may begin"
                    " with a blank before its /)"
                )
            elif line.strip():
                self._ask(line.strip())
        return self.num_refused

    def _ask(self, question: str) -> bool:
        """Ask one question; return whether it became part of the session."""
        num_turns = len(self.session.turns)
        try:
            answer = self.session.ask(question, self.terminal.write)
        except ValueError as error:
            self._refuse(str(error))
            return False
        self.terminal.write("\n")
        self.num_refused += not (answer.text or answer.stopped)
        for text in notes_on(answer, self.session):
            self.terminal.note(text)
        if answer.stopped and not self.terminal.is_interactive:
            raise KeyboardInterrupt  # Ctrl-C ends a script as a whole
        return len(self.session.turns) > num_turns

    def _refuse(self, why: str) -> None:
        self.num_refused += 1
        self.terminal.note(why)

    def _help(self, rest: str) -> None:
        for name, what in COMMANDS.items():
            self.terminal.note(f"  {name:14} {what}")

    def _reset(self, rest: str) -> None:
        self.session.turns.clear()
        self.terminal.note("forgotten; the next message begins a new conversation")

    def _drop(self, rest: str) -> None:
        if not self.session.turns:
            self.terminal.note("there is nothing to forget yet")
            return
        question, _ = self.session.turns.pop(0)
        short = textwrap.shorten(question, 40, placeholder="…")
        self.terminal.note(f"forgotten: {short!r} and its answer")

    def _system(self, rest: str) -> None:
        self.session.system = rest or None
        self.terminal.note("from the next answer on" if rest else "no system message any more")

    def _regenerate(self, rest: str) -> None:
        if not self.session.turns:
            self.terminal.note("no answer yet")
            return
        last = self.session.turns.pop()
        if not self._ask(last[0]):
            self.session.turns.append(last)


def notes_on(answer: Answer, session: Session) -> list[str]:
    """Return what is worth knowing of an answer: its figures, and why it was cut."""
    output = answer.output
    notes = [figures_of(output)] if output is not None else []
    if answer.stopped:
        kept = "what was said is kept" if answer.text else "nothing was said: message forgotten"
        return [*notes, f"stopped; {kept}"]
    if not answer.text:
        notes.append("the answer is empty")
    if output is None or output.outputs[0].finish_reason != "length":
        return notes
    limit = session.llm.config.max_model_len
    if len(output.prompt_token_ids) + len(output.outputs[0].token_ids) >= limit:
        return [*notes, f"cut: the conversation has reached max_model_len={limit:,}. {REMEDY}"]
    return [*notes, f"cut after --max-tokens {session.params.max_tokens}"]


def figures_of(output: RequestOutput) -> str:
    """Return "42 tokens, 31.4 tok/s, first token after 120 ms; 143 of 160 prompt tokens from the
    prefix cache". The speed is that of the tokens after the first."""
    count = len(output.outputs[0].token_ids)
    parts = ["1 token" if count == 1 else f"{count} tokens"]
    gaps = output.metrics.inter_token_latencies
    if gaps:
        parts.append(f"{len(gaps) / max(sum(gaps), 1e-9):.1f} tok/s")
    if output.metrics.time_to_first_token is not None:
        parts.append(f"first token after {output.metrics.time_to_first_token * 1e3:.0f} ms")
    cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens"
    return f"{', '.join(parts)}; {cached} from the prefix cache"
