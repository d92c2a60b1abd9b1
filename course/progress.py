"""How far the learner is, as text."""

from __future__ import annotations

import textwrap

from course.exercises import MINE, exercises

SIGNS = {"passed": "■", "yours": "◧", "borrowed": "□", "open": "·"}
LEGEND = "■ passed   ◧ yours, not checked   □ borrowed   · open"


def chapter_line(notebook: str, states: dict[str, str]) -> str:
    """One chapter: `03 block manager  ■■□□□□  2 of 6 yours`."""
    words = [states[n] for n, e in exercises().items() if e.notebook == notebook and n in states]
    boxes = "".join(SIGNS[word] for word in words)
    num_yours = sum(word in MINE for word in words)
    unchecked = words.count("yours")
    note = f", {unchecked} not checked" if unchecked else ""
    title = notebook.replace("_", " ")
    return f"{title}  {boxes}  {num_yours} of {len(words)} yours{note}"


def progress_map(states: dict[str, str]) -> str:
    """One line for each chapter; the names of its exercises where it has been begun and not
    finished; and how many are still borrowed."""
    if not states:
        return "There are no exercises yet."
    lines = []
    known = exercises()
    for notebook in dict.fromkeys(known[name].notebook for name in states):
        lines.append(chapter_line(notebook, states))
        names = [name for name in states if known[name].notebook == notebook]
        kinds = {states[name] for name in names}
        if kinds not in ({"borrowed"}, {"passed"}):
            lines += [f"    {SIGNS[states[n]]} {n.split('.', 1)[1]}" for n in names]
    words = list(states.values())
    num_yours = sum(word in MINE for word in words)
    lines.append(
        f"{num_yours} of {len(words)} exercises are yours; borrowed: {words.count('borrowed')}"
    )
    return "\n".join([*lines, LEGEND])


def whose_engine(states: dict[str, str]) -> str:
    """Whether the engine is the learner's alone: "borrowed: 0", or how many exercises are still
    ours or open, and which.

    Example: "borrowed: 2 (03 block manager: allocate, free)".
    """
    missing: dict[str, list[str]] = {}
    known = exercises()
    for name, word in states.items():
        if word in ("borrowed", "open"):
            chapter = known[name].notebook.replace("_", " ")
            missing.setdefault(chapter, []).append(name.rsplit(".", 1)[-1])
    num_borrowed, num_open = (list(states.values()).count(word) for word in ("borrowed", "open"))
    text = f"borrowed: {num_borrowed}" + (f", open: {num_open}" if num_open else "")
    if not missing:
        return f"{text}. All {len(states)} exercises of the engine are yours."
    lines = [f"    {chapter}: {', '.join(names)}" for chapter, names in missing.items()]
    # Jupyter breaks a line where the page ends, within a word.
    return "\n".join([text, *(textwrap.fill(x, 95, subsequent_indent=" " * 8) for x in lines)])
