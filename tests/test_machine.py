"""Looking at a machine: facts are read as they are, and a look that fails is noted."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm.cli import machine
from minivllm.cli.machine import Requirement, look, parse_requirement


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch>=2.5", Requirement("torch", "2.5")),
        ("filelock", Requirement("filelock")),
        ("regex >= 2024.5.15", Requirement("regex", "2024.5.15")),
        ("numpy<3,>=1.26", Requirement("numpy", "1.26")),
        ("huggingface_hub[hf_xet]>=0.34", Requirement("huggingface_hub", "0.34")),
        ('nbval>=0.11; extra == "course"', Requirement("nbval", "0.11", "course")),
        ("triton>=3.0; sys_platform == 'linux'", Requirement("triton", "3.0", None, "linux")),
        (
            "a-b>=1; (sys_platform == 'win32') and extra == 'x-y'",
            Requirement("a-b", "1", "x-y", "win32"),
        ),
    ],
)
def test_requirements_are_read_from_metadata(line, expected):
    """Name, lower bound, extra and platform; each may be absent."""
    assert parse_requirement(line) == expected


# -- packages -------------------------------------------------------------------------------------


class Distribution:
    """What importlib.metadata says of minivllm."""

    def __init__(self, origin, folder):
        self.origin, self.folder = origin, folder

    def read_text(self, name):
        return json.dumps(self.origin) if self.origin else None

    def locate_file(self, path):
        return self.folder / path


@pytest.mark.skipif(os.name != "posix", reason="paths of POSIX")
def test_the_place_of_an_editable_install_is_its_source(monkeypatch, tmp_path):
    """Not the folder of the link; spaces in a path are written as %20."""
    source = tmp_path / "my clone"
    for editable, expected in ((True, source), (False, tmp_path / "site")):
        url = "file://" + str(source).replace(" ", "%20")
        found = Distribution({"url": url, "dir_info": {"editable": editable}}, tmp_path / "site")
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, found=found: found)
        assert machine._installed_root() == expected.resolve()
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: Distribution(None, tmp_path)
    )
    assert machine._installed_root() == tmp_path.resolve()


def test_what_is_not_installed_is_no_failure(monkeypatch):
    """The package runs from its folder: no metadata, and nothing to note."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    for name in ("requires", "metadata", "distribution", "version"):
        monkeypatch.setattr(importlib.metadata, name, missing)
    found = look()
    assert found.requirements is found.installed_root is found.python_minimum is None
    assert found.versions == {}
    assert not {"the installation", "packages"} & set(found.failed)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise ImportError('libx.so: not found\\nmore')", "ImportError: libx.so: not found"),
        ("raise RuntimeError", "RuntimeError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise OSError('x' * 1000)", "OSError: " + "x" * 200),
    ],
)
def test_a_package_that_does_not_load_is_noted(monkeypatch, tmp_path, statement, said):
    """Whatever it raises, in one line."""
    (tmp_path / "a_broken_one.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(machine.COMPILED, "broken", "a_broken_one")
    monkeypatch.setitem(machine.COMPILED, "fine", "json")
    sys.modules.pop("a_broken_one", None)
    assert machine._broken(["broken", "fine"]) == {"broken": said}


def test_ctrl_c_during_a_look_is_not_swallowed(monkeypatch, tmp_path):
    """Importing torch takes long enough for it."""
    (tmp_path / "an_interrupted_one.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(machine.COMPILED, "slow", "an_interrupted_one")
    with pytest.raises(KeyboardInterrupt):
        machine._broken(["slow"])


def test_a_look_that_fails_is_noted_and_the_others_go_on(monkeypatch):
    """Its fact is None, its reason is kept."""

    def fail():
        raise OSError("no /proc here")

    monkeypatch.setattr(machine, "_free_memory", fail)
    found = look()
    assert found.free_memory is None
    assert found.failed == {"memory": "OSError: no /proc here"}
    assert found.num_cores
    assert found.builtin is not None


def test_the_real_machine_is_seen():
    """Facts that hold wherever the tests run."""
    found = look(("numba",))
    assert found.python == sys.version_info[:3]
    assert found.root == Path(machine.__file__).parents[2]
    assert found.versions["torch"] and found.torch.version
    assert 1 <= found.num_cores <= os.cpu_count()
    assert found.free_memory > 10**6
    assert found.builtin.name == "smollm2-135m"
    assert found.failed == {}


# -- hardware -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [
        ("0x10de", "0x030000", True),
        ("0x10de", "0x030200", True),
        ("0x10de", "0x040300", False),
        ("0x8086", "0x030000", False),
    ],
)
def test_a_gpu_is_seen_on_the_bus(tmp_path, vendor, kind, expected):
    """NVIDIA's number and a display's class: its sound device is no GPU."""
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    assert machine._has_nvidia(tmp_path) is expected
    assert machine._has_nvidia(tmp_path / "nowhere") is False


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("50000 100000", 1), ("150000 100000", 2), ("max 100000", 6)],
)
def test_a_container_has_the_cores_of_its_quota(monkeypatch, tmp_path, quota, cores):
    """Of six that it sees; a part of a core counts as one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    assert machine._num_cores(tmp_path / "none") == 6
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert machine._num_cores(tmp_path / "cpu.max") == cores


def test_the_driver_is_asked_for_its_gpus(monkeypatch):
    """A line for each; none if the tool is absent or fails."""
    answers = iter([(0, "NVIDIA L4, 23034 MiB, 550.54\n\n"), (9, "no devices were found")])

    def run(command, **options):
        assert options["timeout"] <= 5
        code, text = next(answers)
        return SimpleNamespace(returncode=code, stdout=text)

    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    assert machine._driver() == ("NVIDIA L4, 23034 MiB, 550.54",)
    assert machine._driver() == ()
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine._driver() == ()
