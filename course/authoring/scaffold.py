"""The skeleton of a new chapter, in the form that all chapters share."""

from __future__ import annotations

import ast
from pathlib import Path

from course import exercises as ex
from course import splice

MAX_CANDIDATES = 6  # exercises of a chapter, at most

LESSON = """\
# {number} · {title}

<!-- The picture of the engine with this part lit; alt text in the brackets. -->

**Afterwards you can** … · **Time** 30 to 90 minutes · **Difficulty** …

```python
%load_ext course
from minivllm import {module}
```

## The problem

Show it on real numbers before you name the cure. About 60 words a text cell, 8 lines a code cell,
each ending in the value worth seeing.

## What always holds

1. The first invariant: one sentence that a reader can check. At least one wrong answer in
   `course/mistakes/{name}.py` breaks it.

## Predict

Ask for a number; the cell below answers.

## Build

The checks below say what is open until you have built it.
{exercises}
## In the engine

A real model runs on what was built here: drawn, and measured against the naive loop.

## Break it on purpose

One change, what goes wrong, and which invariant says so.

## What we left out

## How others do it

nano-vllm, Tiny-vLLM, vLLM, SGLang, TensorRT-LLM, llama.cpp: files by name.

## Recap

```python
%progress
```
"""

EXERCISE = """
### {short}

What it is for, in the reader's words; the docstring says the rest.

```python
%%build {name}
```

```python
%check {name}
```

<details><summary>Hint 1</summary>A question that points at the idea.</details>

<details><summary>Hint 2</summary>A second question, nearer to it.</details>

<details><summary>Hint 3</summary>The shape of the answer.</details>
"""

MISTAKES = '''\
"""Wrong answers that people give in chapter {number}, each with the words its check must say.

Read as text, never imported. The words stand in an assert message of `tests/test_{module}.py`, in
a test marked `@pytest.mark.exercise("{first}")`. For example:

    @mistake("{first}", "did you ...?")
    def {short}(...):
        return ...
"""
'''


def new_chapter(number: str, name: str, module: str, home: Path) -> list[Path]:
    """Write the lesson and the file of wrong answers; returns both paths."""
    if not (number.isdigit() and len(number) == 2):
        raise ex.CourseError(f"number={number!r} must have two digits, as in 04.")
    names = candidates(module, home)
    chapter = f"{number}_{name}"
    lesson = home / "course" / "lessons" / f"{chapter}.md"
    mistakes = home / "course" / "mistakes" / f"{chapter}.py"
    for path in (lesson, mistakes):
        if path.exists():
            raise ex.CourseError(f"{path} exists. Choose another number or name, or delete it.")
    short = names[0].rsplit(".", 1)[-1]
    title = name.replace("_", " ").capitalize()
    exercises = "".join(EXERCISE.format(name=n, short=n.split(".", 1)[1]) for n in names)
    words = {"number": number, "name": chapter, "title": title, "module": module}
    lesson.write_text(LESSON.format(**words, exercises=exercises), "utf-8")
    mistakes.write_text(MISTAKES.format(**words, first=names[0], short=short), "utf-8")
    return [lesson, mistakes]


def candidates(module: str, home: Path) -> list[str]:
    """The first public functions and methods of a module, helpers first."""
    path = home / "minivllm" / f"{module}.py"
    if not path.exists():
        raise ex.CourseError(
            f"minivllm/{module}.py does not exist. Write the finished module first: the notebook"
            " is made from it. Its name is given without folder and ending, as in prefix_cache."
        )
    names = []
    for node in ast.parse(ex.read(path)).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{module}.{node.name}." if isinstance(node, ast.ClassDef) else f"{module}."
        written = (n for n in inside if isinstance(n, ast.FunctionDef) and not splice.is_hole(n))
        names += [prefix + n.name for n in written if not n.name.startswith("_")]
    public = list(dict.fromkeys(names))  # a property and its setter are one exercise
    if not public:
        raise ex.CourseError(f"minivllm/{module}.py has no public function to build.")
    return sorted(public, key=lambda name: name.count("."))[:MAX_CANDIDATES]
