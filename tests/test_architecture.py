"""The shape of the package: what may import what, how long things are, what is documented."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minivllm

PACKAGE = Path(minivllm.__file__).parent

# What may import what, from the ground up. A module at the top of the package imports modules
# above it with no larger notebook number, and the rooms its row names; a room imports what its
# row names. Layer 1 never imports torch, and its modules do not import each other.
# (name, layer, notebook that builds it or None, what else the row allows)
Row = tuple[str, int, int | None, str]
MODULES: list[Row] = [
    # layer 0: the vocabulary
    ("config", 0, None, ""),
    ("model_config", 0, None, ""),
    ("request", 0, None, ""),
    ("trace", 0, None, ""),
    # layer 1: the control plane
    ("tokenizer", 1, 1, "text"),
    ("scheduler", 1, 2, ""),
    ("block_manager", 1, 3, ""),
    ("prefix_cache", 1, 4, ""),
    # layer 2: the data plane
    ("ops", 2, 5, ""),
    ("model", 2, 5, ""),
    ("kv_cache", 2, 6, ""),
    ("rows", 2, 6, ""),
    ("step_input", 2, 6, ""),
    ("model_runner", 2, 6, ""),
    ("kernels", 2, 7, ""),
    ("decode_attention", 2, 7, ""),
    ("cuda_graphs", 2, 8, ""),
    ("tensor_parallel", 2, 9, "checkpoint"),
    ("leader", 2, 9, "distributed"),
    ("drawing", 2, 10, ""),
    ("filters", 2, 10, ""),
    ("logits_processors", 2, 10, ""),
    ("sampler", 2, 10, ""),
    # layer 3: the assembly
    ("naive", 3, 0, ""),
    ("engine", 3, 11, "text assembly"),
    ("llm", 3, None, "output"),
]
ROOMS: dict[str, str] = {
    "text": "config request",
    "checkpoint": "config model_config model ops text",
    "cpu": "ops model",
    "gpu": "ops model kernels decode_attention cuda_graphs model_runner rows step_input drawing",
    "distributed": "config",
    "assembly": "config model_config block_manager tokenizer ops model kv_cache model_runner"
    " cuda_graphs tensor_parallel leader logits_processors sampler text checkpoint cpu gpu"
    " distributed",
    "output": "config request engine",
    "pictures": "trace",
    "measure": "config request ops naive llm",
    "cli": "config request llm text checkpoint assembly output pictures measure",
}
# `python -m minivllm`, and the lazy names of the package.
DOORS = {"__main__": "cli assembly", "__init__": "config request trace llm"}
MAX_MODULES = 26  # that the listing of the package shows besides its rooms

PLACE = {name: place for place, (name, *_) in enumerate(MODULES)}
LAYER = {name: layer for name, layer, _, _ in MODULES}
NOTEBOOK = {name: notebook for name, _, notebook, _ in MODULES}
EXTRAS = {name: set(extras.split()) for name, _, _, extras in MODULES}

MAX_BODY = 30  # lines of statements in a function, without docstring, comments, empty lines
MAX_KERNEL_BODY = 60  # the same, for functions that Triton or numba compiles

# Each exemption with its reason. One that is no longer needed fails.
LONG_BODIES: dict[str, str] = {}  # "module.Class.function": why it may be longer

CONTROL_ROOMS = ("text",)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[str]:
    """Every module of the package by its dotted name, rooms included: "cpu.ops", "__init__"."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts) for path in paths)


def place_of(module: str) -> str:
    """The row of a module: a module at the top is its own, one in a room is the room's."""
    return module.split(".")[0]


def path_of(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.py"


def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all imports, wherever in the file they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["minivllm" if node.level else "", node.module]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the package among the imports: "minivllm.request.Chunk" -> "request"."""
    parts = [name.split(".") for name in imported_names(tree)]
    return {part[1] for part in parts if part[0] == "minivllm" and part[1:2] and part[1] in known}


@functools.cache
def actual_imports() -> dict[str, set[str]]:
    """For each row, the other rows that its modules import."""
    names = {place_of(module) for module in modules()}
    found: dict[str, set[str]] = {name: set() for name in names}
    for module in modules():
        found[place_of(module)] |= package_imports(tree_of(module), names) - {place_of(module)}
    return found


def reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Every row that `name` imports, directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for imported in imports.get(waiting.pop(), set()) - found:
            found.add(imported)
            waiting.append(imported)
    return found


def import_problem(importer: str, imported: str) -> str | None:
    """Why the row `importer` may not import the row `imported`, or None if it may."""
    if importer in ROOMS or importer in DOORS:
        allowed = (ROOMS | DOORS)[importer].split()
        return None if imported in allowed else f"the row of {importer} does not allow {imported}"
    if imported in ROOMS:
        is_allowed = imported in EXTRAS[importer]
        return None if is_allowed else f"the row of {importer} does not allow the room {imported}"
    if PLACE[imported] >= PLACE[importer]:
        return f"{importer} imports {imported}, which comes later: let it be handed over instead"
    if LAYER[importer] == LAYER[imported] == 1:
        return f"{importer} imports its sibling {imported}: layer 1 modules know none of the others"
    return None


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Classes, functions and methods with their dotted names, not those inside of functions."""
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, parent = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | Function):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                stack.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.If | ast.Try):
                stack.append((prefix, node))


def decorators(node: ast.ClassDef | Function) -> list[str]:
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return [ast.unparse(decorator) for decorator in calls]


def body_lines(function: Function, source: list[str]) -> int:
    """Lines of a function's statements, without docstring, comments and empty lines."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0
    lines = source[body[0].lineno - 1 : body[-1].end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def long_bodies(module: str) -> dict[str, int]:
    """The functions of a module that exceed their limit, with their number of lines."""
    source = path_of(module).read_text(encoding="utf-8").split("\n")
    found = {}
    for name, node in definitions(tree_of(module)):
        if isinstance(node, Function):
            compiled = any(d.split(".")[-1] in ("jit", "njit") for d in decorators(node))
            if (lines := body_lines(node, source)) > (MAX_KERNEL_BODY if compiled else MAX_BODY):
                found[f"{module}.{name}"] = lines
    return found


def is_stub(node: ast.ClassDef | Function) -> bool:
    """One form of several, or what a protocol asks for in a line: documented elsewhere."""
    forms = any(d.split(".")[-1] in ("overload", "setter") for d in decorators(node))
    return forms or ast.unparse(node.body[0]) == "..."


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh Python has loaded after `statement`."""
    code = "import json, sys; before = set(sys.modules)"
    code += f"\n{statement}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, f"{statement} failed:\n{ran.stderr}"
    return {name.split(".")[0] for name in json.loads(ran.stdout)}


# -- imports -----------------------------------------------------------------------------------


def test_every_module_has_its_place():
    """A new file is entered in the tables above, which say what it may import."""
    known = PLACE.keys() | ROOMS.keys() | DOORS.keys()
    unknown = {place_of(module) for module in modules()} - known
    assert not unknown, f"give {unknown} a row in tests/test_architecture.py"


def test_the_listing_shows_what_a_learner_builds():
    """Everything that no notebook builds, and no reader has to read, lives in a room."""
    names = {path.stem for path in PACKAGE.glob("*.py")} - DOORS.keys()
    assert len(names) <= MAX_MODULES, f"{len(names)} modules at the top: move one into a room"


@pytest.mark.parametrize("name", [*PLACE, *ROOMS, *DOORS])
def test_imports_follow_the_table(name):
    """Every import counts, the lazy ones and those for type checkers too."""
    imported = actual_imports()[name]
    problems = [problem for other in sorted(imported) if (problem := import_problem(name, other))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", [*PLACE, *ROOMS])
def test_no_module_reaches_itself_or_a_later_notebook(name):
    """What is imported by way of others counts as well: there are no cycles between rooms."""
    reached = reachable(name, actual_imports())
    assert name not in reached, f"{name} imports itself through {sorted(reached)}"
    later = [other for other in reached & PLACE.keys() if PLACE[other] > PLACE.get(name, 99)]
    assert not later, f"{name} reaches {later}, which come later"


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("scheduler", "request", True),
        ("tokenizer", "text", True),
        ("scheduler", "tokenizer", False),
        ("prefix_cache", "block_manager", False),
        ("model_runner", "model", True),
        ("model_runner", "sampler", False),
        ("model_runner", "gpu", False),
        ("model", "engine", False),
        ("engine", "assembly", True),
        ("engine", "sampler", True),
        ("distributed", "assembly", False),
        ("config", "request", False),
    ],
)
def test_import_rule_itself(importer, imported, is_allowed):
    """The rule says yes and no where the plan of the package does."""
    assert (import_problem(importer, imported) is None) is is_allowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import minivllm.model as m", {"model"}),
        ("from minivllm import ops, LLM", {"ops"}),
        ("from minivllm.request import Request", {"request"}),
        ("from . import ops", {"ops"}),
        ("from .request import Request", {"request"}),
        ("def f():\n    from minivllm import model", {"model"}),
        ("import torch.nn, os", set()),
    ],
)
def test_imports_are_found_in_every_form(source, expected):
    """No way to write an import hides it from the rule."""
    assert package_imports(ast.parse(source), {"model", "ops", "request"}) == expected


CONTROL_PLANE = [m for m in modules() if LAYER.get(m, 9) <= 1 or place_of(m) in CONTROL_ROOMS]


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_control_plane_never_imports_torch(module):
    """Layers 0 and 1 are free of torch, in their text ..."""
    assert "torch" not in {name.split(".")[0] for name in imported_names(tree_of(module))}


def test_control_plane_loads_no_torch():
    """... and in what they load."""
    loaded = loaded_after(
        "import minivllm, " + ", ".join(f"minivllm.{name}" for name in CONTROL_PLANE)
    )
    assert not loaded & {"torch", "triton", "transformers", "numba"}


def test_package_imports_only_the_standard_library():
    """`import minivllm` is quick because it loads nothing that is not Python's own."""
    assert loaded_after("import minivllm") - set(sys.stdlib_module_names) == {"minivllm"}


# -- the door ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in minivllm.__all__ if name != "__version__"])
def test_lazy_names_exist(name):
    """Each name that the package offers is found where it is said to be."""
    home = minivllm._HOME_OF[name]
    assert getattr(minivllm, name) is getattr(sys.modules[home], name)
    assert name in dir(minivllm)


def test_unknown_name_is_an_attribute_error():
    """A lazy package still says which name it does not have."""
    with pytest.raises(AttributeError, match="minivllm.*nothing_of_that_name"):
        _ = minivllm.nothing_of_that_name


# -- size and documentation --------------------------------------------------------------------


@pytest.mark.parametrize("module", modules())
def test_public_names_have_docstrings(module):
    """Modules, and their public classes, functions and methods, say what they are for."""
    tree = tree_of(module)
    missing = [] if ast.get_docstring(tree) else ["the module itself"]
    for name, node in definitions(tree):
        if is_public(name) and not is_stub(node) and not ast.get_docstring(node):
            missing.append(f"{name} (line {node.lineno})")
    assert not missing, f"minivllm/{module}.py: no docstring: {', '.join(missing)}"


@pytest.mark.parametrize("module", modules())
def test_bodies_are_short(module):
    """No function is longer than a screen, unless LONG_BODIES has its reason."""
    found = {name: n for name, n in long_bodies(module).items() if name not in LONG_BODIES}
    assert not found, f"over {MAX_BODY} lines (kernels {MAX_KERNEL_BODY}), split them: {found}"


def test_exemptions_are_needed():
    """An exemption goes when its reason has gone."""
    long = {name for module in modules() for name in long_bodies(module)}
    assert set(LONG_BODIES) <= long, f"short enough now: {set(LONG_BODIES) - long}"


def test_body_lines_count_statements_only():
    """Docstring, comments and empty lines are free."""
    source = 'def f():\n    """Two\n    lines."""\n\n    # why\n    a = 1\n\n    return a\n'
    function = ast.parse(source).body[0]
    assert body_lines(function, source.split("\n")) == 2


# -- what CONTRIBUTING shows --------------------------------------------------------------------

CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
MARKS = (
    "<!-- import rule: written by `python tests/test_architecture.py` -->\n",
    "<!-- end of import rule -->",
)


def import_table() -> str:
    """The tables above as Markdown."""
    lines = ["| module or room | layer | notebook | may import |", "|---|---|---|---|"]
    for name, layer, notebook, extras in MODULES:
        number = "" if notebook is None else f"{notebook:02d}"
        rooms = "".join(f", `{room}/`" for room in extras.split())
        lines.append(f"| `{name}` | {layer} | {number} | what stands above it{rooms} |")
    for room, allowed in ROOMS.items():
        names = (f"`{name}/`" if name in ROOMS else f"`{name}`" for name in allowed.split())
        lines.append(f"| `{room}/` | | | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The text of CONTRIBUTING.md with the table of today between its marks."""
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + import_table() + MARKS[1] + rest.split(MARKS[1])[1]


def test_contributing_shows_the_table():
    """One rule, shown where contributors look for it."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert text == with_table(text), "run: python tests/test_architecture.py"


def test_every_station_of_a_request_exists():
    """CONTRIBUTING names files and functions; none of them is gone."""
    stations = re.findall(r"`([\w/]+)\.py: ([\w.]+)`", CONTRIBUTING.read_text(encoding="utf-8"))
    assert len(stations) >= 8
    for module, name in stations:
        names = {found for found, _ in definitions(tree_of(module.replace("/", ".")))}
        assert name in names, f"minivllm/{module}.py has no {name}"


def test_every_room_is_described():
    """A paragraph for each, in CONTRIBUTING and in the room's own docstring."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for room in ROOMS:
        assert f"- **{room}/** " in text, f"describe {room}/ in CONTRIBUTING.md"
        assert ast.get_docstring(tree_of(f"{room}.__init__")), f"minivllm/{room}/__init__.py"


if __name__ == "__main__":
    CONTRIBUTING.write_text(with_table(CONTRIBUTING.read_text(encoding="utf-8")), encoding="utf-8")
