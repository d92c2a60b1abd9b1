"""The shape of the package: what may import what, how long things are, what is documented."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minivllm

PACKAGE = Path(minivllm.__file__).parent

# The package from the ground up: (module, layer, notebook that builds it or None where given).
# A module imports only modules above it in this table, and in layer 1 no other notebook's.
TABLE: list[tuple[str, int, int | None]] = [
    # layer 0: the vocabulary
    ("config", 0, None),
    ("model_config", 0, None),
    ("request", 0, None),
    ("trace", 0, None),
    ("waiting", 0, None),
    # layer 1: the control plane, no torch
    ("long_words", 1, None),
    ("tokenizer_json", 1, None),
    ("generation_config", 1, None),
    ("chat_template", 1, None),
    ("hf_tokenizer", 1, None),
    ("tokenizer", 1, 1),
    ("scheduler", 1, 2),
    ("block_manager", 1, 3),
    ("prefix_cache", 1, 4),
    # layer 2: the data plane
    ("ops", 2, 5),
    ("model", 2, 5),
    ("weights", 2, None),  # fills a model, so it comes after it
    ("cpu_vectors", 2, None),
    ("cpu_kernels", 2, None),
    ("cpu_attention", 2, None),
    ("cpu_layers", 2, None),
    ("cpu_ops", 2, None),
    ("packed", 2, None),
    ("sampling_settings", 2, None),
    ("kv_cache", 2, 6),
    ("rows", 2, 6),
    ("step_input", 2, 6),
    ("model_runner", 2, 6),
    ("devices", 2, None),
    ("kernels", 2, 7),
    ("decode_attention", 2, 7),
    ("prefill_attention", 2, None),
    ("flash_attention", 2, None),
    ("gpu_ops", 2, None),
    ("gpu_model", 2, None),
    ("cuda_graphs", 2, 8),
    ("chunk_graphs", 2, None),
    ("tensor_parallel", 2, 9),
    ("process_group", 2, None),
    ("leader", 2, 9),
    ("workers", 2, None),
    ("noise", 2, 10),
    ("sampling_kernels", 2, None),
    ("drawing", 2, 10),
    ("filters", 2, 10),
    ("logits_processors", 2, 10),
    ("sampler", 2, 10),
    ("backends", 2, None),
    # layer 3: the assembly
    ("gguf_checkpoint", 3, None),
    ("model_wheel", 3, None),
    ("hf_hub", 3, None),
    ("hub", 3, None),
    ("timeline", 3, None),
    ("figures", 3, None),
    ("kv_sizing", 3, None),
    ("parts", 3, None),
    ("flight", 3, None),
    ("engine", 3, 11),
    ("worker", 3, None),
    ("prompts", 3, None),
    ("text_stream", 3, None),
    ("output_processor", 3, None),
    ("llm", 3, None),
    ("naive", 3, None),
    ("bench_results", 3, None),
    ("bench", 3, None),
    ("machine", 3, None),
    ("doctor_packages", 3, None),
    ("doctor_hardware", 3, None),
    ("doctor", 3, None),
    ("cli_options", 3, None),
    ("cli_chat", 3, None),
    ("cli_bench", 3, None),
    ("cli", 3, None),
    ("__main__", 3, None),
]
PLACE = {name: place for place, (name, _, _) in enumerate(TABLE)}
LAYER = {name: layer for name, layer, _ in TABLE}
NOTEBOOK = {name: notebook for name, _, notebook in TABLE}

MAX_BODY = 30  # lines of statements in a function, without docstring, comments, empty lines
MAX_KERNEL_BODY = 60  # the same, for functions that Triton or numba compiles
MAX_FILE = 320  # lines

# Each exemption with its reason. One that is no longer needed fails.
LONG_BODIES: dict[str, str] = {}  # "module.Class.function": why it may be longer
LONG_FILES: dict[str, str] = {}  # "module": why it may be longer

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[str]:
    """Every module of the package that exists, `__init__` aside."""
    return sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


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


def import_problem(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`, or None if it may."""
    if PLACE[imported] >= PLACE[importer]:
        return f"{importer} imports {imported}, which comes later: let it be handed over instead"
    siblings = LAYER[importer] == LAYER[imported] == 1
    if siblings and NOTEBOOK[imported] is not None:
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
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8").split("\n")
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
    """A new file is entered in the table above, which says what it may import."""
    unknown = [name for name in modules() if name not in PLACE]
    assert not unknown, f"give {', '.join(unknown)} a layer in TABLE, tests/test_architecture.py"


def test_no_folders():
    """The package is flat: its listing is its table of contents."""
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert not folders, f"move the modules of {folders} up into {PACKAGE.name}/"


@pytest.mark.parametrize("module", modules())
def test_imports_go_backwards(module):
    """A module imports layer 0, given modules below it, and smaller notebook numbers only.

    Every import counts, the lazy ones and those for type checkers too; so there are no cycles.
    """
    imported = package_imports(tree_of(module), set(modules()))
    problems = [p for name in sorted(imported) if (p := import_problem(module, name))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("scheduler", "request", True),
        ("tokenizer", "hf_tokenizer", True),
        ("scheduler", "tokenizer", False),
        ("prefix_cache", "block_manager", False),
        ("model_runner", "model", True),
        ("model_runner", "sampler", False),
        ("model", "engine", False),
        ("engine", "sampler", True),
        ("config", "request", False),
    ],
)
def test_import_rule_itself(importer, imported, allowed):
    """The rule says yes and no where the plan of the package does."""
    assert (import_problem(importer, imported) is None) is allowed


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


@pytest.mark.parametrize("module", [name for name in modules() if LAYER.get(name, 9) <= 1])
def test_control_plane_never_imports_torch(module):
    """Layers 0 and 1 are free of torch, in their text ..."""
    assert "torch" not in {name.split(".")[0] for name in imported_names(tree_of(module))}


def test_control_plane_loads_no_torch():
    """... and in what they load."""
    names = [name for name in modules() if LAYER.get(name, 9) <= 1]
    loaded = loaded_after("import minivllm, " + ", ".join(f"minivllm.{name}" for name in names))
    assert not loaded & {"torch", "triton", "transformers", "numba"}


def test_package_imports_only_the_standard_library():
    """`import minivllm` is quick because it loads nothing that is not Python's own."""
    assert loaded_after("import minivllm") - set(sys.stdlib_module_names) == {"minivllm"}


# -- the door ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in minivllm.__all__ if name != "__version__"])
def test_lazy_names_exist(name):
    """Each name that the package offers is found where it is said to be."""
    home = minivllm._HOME_OF[name]
    if home.split(".")[1] not in modules():
        pytest.skip(f"{home} does not exist yet")
    assert getattr(minivllm, name) is getattr(sys.modules[home], name)
    assert name in dir(minivllm)


def test_unknown_name_is_an_attribute_error():
    """A lazy package still says which name it does not have."""
    with pytest.raises(AttributeError, match="minivllm.*nothing_of_that_name"):
        _ = minivllm.nothing_of_that_name


# -- size and documentation --------------------------------------------------------------------


@pytest.mark.parametrize("module", ["__init__", *modules()])
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
    """No function is longer than a screen, unless its reason stands in LONG_BODIES."""
    found = {name: n for name, n in long_bodies(module).items() if name not in LONG_BODIES}
    assert not found, f"over {MAX_BODY} lines (kernels {MAX_KERNEL_BODY}), split them: {found}"


@pytest.mark.parametrize("module", modules())
def test_files_are_short(module):
    """No file is longer than one can keep in mind, unless its reason stands in LONG_FILES."""
    lines = len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE or module in LONG_FILES, f"minivllm/{module}.py: {lines} lines"


def test_exemptions_are_needed():
    """An exemption goes when its reason has gone."""
    long = {name for module in modules() for name in long_bodies(module)}
    assert set(LONG_BODIES) <= long, f"short enough now: {set(LONG_BODIES) - long}"
    for module in LONG_FILES:
        lines = len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines())
        assert lines > MAX_FILE, f"{module} is short enough now"


def test_body_lines_count_statements_only():
    """Docstring, comments and empty lines are free."""
    source = 'def f():\n    """Two\n    lines."""\n\n    # why\n    a = 1\n\n    return a\n'
    function = ast.parse(source).body[0]
    assert body_lines(function, source.split("\n")) == 2
