"""The doctor's report: truthful, readable, never an exception, and an exit code that counts."""

import importlib.metadata as metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from minivllm.checkpoint import builtin_model
from minivllm.cli import doctor
from minivllm.cli.doctor import Finding, checks, format_report, run_doctor

ROOT = Path(doctor.__file__).parents[2]


def found(check):
    """The findings of a check by name."""
    return {finding.name: finding for finding in check()}


@pytest.fixture
def packages(monkeypatch):
    """Made-up metadata: `packages[name]` is the installed version, which may be changed."""
    versions = {"torch": "2.8.0+cpu", "numpy": "1.26.0", "numba": "0.60", "pytest": "8.2"}
    lines = ["torch>=2.5", "numpy>=1.26", 'absent>=1; sys_platform == "nowhere"']
    lines += ['numba>=0.60; extra == "cpu"', 'numba>=0.60; extra == "course"']
    lines += ['pytest>=8.2; extra == "course"', 'flash-attn>=2; extra == "gpu"']

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": ">=3.10"})
    monkeypatch.setattr(doctor, "_import_error", lambda name: None)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: False)
    return versions


# -- packages -------------------------------------------------------------------------------------


def test_good_packages_share_a_line_per_group(packages):
    """With versions; each in the first group that asks for it, and none of another platform."""
    shown = {name: finding.found for name, finding in found(doctor.check_packages).items()}
    assert shown.pop("Python") == ".".join(map(str, sys.version_info[:3]))
    assert shown == {
        "packages": "torch 2.8.0+cpu, numpy 1.26.0",
        "for speed": "numba 0.60",
        "for the course": "pytest 8.2",
    }


@pytest.mark.parametrize(
    ("name", "required", "words", "remedy"),
    [
        ("numpy", True, "not installed", 'pip install -U "numpy>=1.26"'),
        ("numba", False, "not installed", 'pip install -U "numba>=0.60"'),
        ("pytest", False, "not installed", f'pip install -e "{ROOT}[course]"'),
    ],
)
def test_a_missing_package_has_its_cost_and_its_command(packages, name, required, words, remedy):
    """Only what minivllm itself needs is required; one command installs the course's packages."""
    del packages[name]
    finding = found(doctor.check_packages)[name]
    assert (finding.state, finding.required) == ("missing", required)
    assert (finding.found, finding.remedy) == (words, remedy)
    assert finding.cost


@pytest.mark.parametrize(
    ("version", "is_good"),
    [("1.25.9", False), ("1.9.0", False), ("1.26", True), ("1.26.1rc1", True), ("10.0", True)],
)
def test_versions_are_compared_as_versions(packages, version, is_good):
    """Against 1.26: 1.9 is older and 10 is newer, and a pre-release counts."""
    packages["numpy"] = version
    findings = found(doctor.check_packages)
    assert ("numpy" not in findings) == is_good
    if not is_good:
        assert findings["numpy"].found == f"{version} does not meet >=1.26"
        assert findings["numpy"].required


def test_an_old_python_is_reported(packages, monkeypatch):
    """With the bound that it does not meet."""
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.18")
    finding = found(doctor.check_packages)["Python"]
    assert (finding.state, finding.required) == ("problem", True)
    assert finding.found == "3.9.18 does not meet >=3.10"


def test_torch_on_linux_without_a_gpu_comes_from_the_cpu_index(packages, monkeypatch):
    """Otherwise pip downloads gigabytes of CUDA."""
    del packages["torch"]
    monkeypatch.setattr(sys, "platform", "linux")
    assert "CPU wheel index" in found(doctor.check_packages)["torch"].remedy
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: True)
    assert found(doctor.check_packages)["torch"].remedy == 'pip install -U "torch>=2.5"'


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise ImportError('libx.so: not found\\nmore')", "ImportError: libx.so: not found"),
        ("raise RuntimeError", "RuntimeError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise OSError('x' * 1000)", "OSError: " + "x" * 200),
    ],
)
def test_a_package_that_does_not_load_says_why(monkeypatch, tmp_path, statement, said):
    """Any exception in one line; Ctrl-C is passed on."""
    name = f"broken_{abs(hash(statement))}"
    (tmp_path / f"{name}.py").write_text(statement)
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._import_error(name) == said
    with pytest.raises(KeyboardInterrupt):
        doctor._import_error("interrupted")


def test_a_broken_package_is_required_to_be_repaired(packages, monkeypatch):
    """It is installed in the right version, and does not load."""
    said = {"numpy": "ImportError: no", "torch": "OSError: libcudart.so.12"}
    monkeypatch.setattr(doctor, "_import_error", said.get)
    findings = found(doctor.check_packages)
    assert findings["numpy"].found == "1.26.0 is installed but does not load: ImportError: no"
    assert findings["numpy"].remedy == "pip install --force-reinstall --no-cache-dir numpy"
    assert "pytorch.org/get-started" in findings["torch"].remedy
    assert findings["numpy"].required and findings["torch"].required


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("RuntimeError: cannot cache function 'rms_norm'", "set NUMBA_CACHE_DIR"),
        ("SyntaxError: invalid syntax", "git diff minivllm"),
    ],
)
def test_an_engine_that_does_not_load_is_not_ok(monkeypatch, said, remedy):
    """A read-only installation, or a file that you have changed."""
    monkeypatch.setattr(doctor, "_import_error", {"minivllm.llm": said}.get)
    finding = found(doctor.check_engine)["engine"]
    assert (finding.state, finding.required, finding.found) == ("problem", True, said)
    assert remedy in finding.remedy


def test_the_installed_minivllm_is_compared_with_this_one(monkeypatch):
    """Absent, elsewhere, or here; and the course lies next to it."""
    runs = [(1, ""), (0, "/old/clone/minivllm\n"), (0, f"{ROOT / 'minivllm'}\n")]
    states = []
    for code, out in runs:
        run = SimpleNamespace(returncode=code, stdout=out)
        monkeypatch.setattr(doctor.subprocess, "run", lambda *args, run=run, **options: run)
        findings = found(doctor.check_installation)
        states.append(findings["minivllm"].state)
        assert "course" not in findings
    assert states == ["missing", "problem", "ok"]
    monkeypatch.setattr(doctor, "ROOT", Path("/site-packages"))
    assert "clone the repository" in found(doctor.check_installation)["course"].remedy


# -- hardware -------------------------------------------------------------------------------------


def fake_torch(cuda="12.8", gpus=(), fails=False, threads=4):
    """As much of torch as the doctor asks; `gpus` are (name, GiB, major, minor)."""

    def ones(*args, device):
        if fails:
            raise RuntimeError("CUDA error: no kernel image is available\nmore")
        return SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 1.0))

    def properties(index):
        name, size, major, minor = gpus[index]
        return SimpleNamespace(name=name, total_memory=size * 2**30, major=major, minor=minor)

    return SimpleNamespace(
        ones=ones,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(device_count=lambda: len(gpus), get_device_properties=properties),
        get_num_threads=lambda: threads,
    )


def with_torch(monkeypatch, torch, driver=None, on_bus=False):
    """Let the doctor see `torch`, and NVIDIA's driver and GPU as given."""
    from torch.utils import collect_env

    monkeypatch.setattr(doctor, "_torch", lambda: torch)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: torch.cuda.device_count() > 0)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: on_bus)
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: driver)


def test_each_usable_gpu_has_its_line(monkeypatch):
    """Name and memory, and what an old one computes in."""
    torch = fake_torch(gpus=[("NVIDIA L4", 24, 8, 9), ("NVIDIA T4", 16, 7, 5)])
    with_torch(monkeypatch, torch)
    first, second = doctor.check_gpu()
    assert (first.state, first.found) == ("ok", "NVIDIA L4, 24 GiB")
    assert second.state == "ok"
    assert second.found.startswith("NVIDIA T4, 16 GiB; it has no bfloat16")


def test_a_gpu_on_which_kernels_fail_is_a_problem(monkeypatch):
    """It is tried, so the words are PyTorch's own."""
    with_torch(monkeypatch, fake_torch(gpus=[("GPU", 16, 12, 0)], fails=True))
    (finding,) = doctor.check_gpu()
    assert finding.state == "problem"
    assert "no kernel image is available" in finding.cost
    assert "pytorch.org/get-started" in finding.remedy


@pytest.mark.parametrize(
    ("cuda", "driver", "hidden", "words", "remedy"),
    [
        (None, "550.54", None, "PyTorch is a CPU build", "PyTorch's CUDA build"),
        ("12.8", "470.57", None, "driver 470.57 does not work with PyTorch for CUDA", "update"),
        ("12.8", "470.57", "0", "driver 470.57 does not work with PyTorch for CUDA", "update"),
        ("12.8", None, None, "its driver does not answer", "install the NVIDIA driver"),
        ("12.8", "550.54", "", "CUDA_VISIBLE_DEVICES='' hides it", "unset CUDA_VISIBLE"),
        ("12.8", None, "-1", "CUDA_VISIBLE_DEVICES='-1' hides it", "unset CUDA_VISIBLE"),
    ],
)
def test_a_gpu_that_torch_cannot_use_has_its_reason(
    monkeypatch, cuda, driver, hidden, words, remedy
):
    """The wrong build, an old driver, none at all, or a variable that hides it."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with_torch(monkeypatch, fake_torch(cuda), driver, on_bus=True)
    (finding,) = doctor.check_gpu()
    assert finding.state == "problem"
    assert words in finding.found
    assert remedy in finding.remedy


def test_a_missing_gpu_is_not_a_fault(monkeypatch):
    """It costs speed, but nothing is broken."""
    for platform, words in (("linux", "no NVIDIA GPU found"), ("darwin", "Apple's GPU")):
        monkeypatch.setattr(sys, "platform", platform)
        with_torch(monkeypatch, fake_torch())
        (finding,) = doctor.check_gpu()
        assert (finding.state, finding.remedy) == ("missing", "")
        assert words in finding.found


def test_a_gpu_is_seen_on_the_bus(tmp_path):
    """By NVIDIA's number."""
    for number, vendor in enumerate(("0x8086", "0x10de")):
        assert doctor._has_nvidia(tmp_path) is False
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(vendor + "\n")
    assert doctor._has_nvidia(tmp_path)


@pytest.mark.parametrize(
    ("platform", "has_gpu", "value", "state", "words"),
    [
        ("linux", True, "1", "problem", "unset TRITON_INTERPRET"),
        ("linux", True, "0", None, ""),
        ("linux", False, "1", None, ""),
        ("win32", False, "", "missing", "WSL"),
    ],
)
def test_triton_compiles_where_it_can(monkeypatch, platform, has_gpu, value, state, words):
    """The interpreter on a GPU is a variable left over from a laptop."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: has_gpu)
    monkeypatch.setenv("TRITON_INTERPRET", value)
    findings = list(doctor.check_triton())
    assert [finding.state for finding in findings] == ([state] if state else [])
    assert all(words in finding.found + finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("threads", "logical", "physical", "state", "remedy"),
    [
        (4, 8, 4, "ok", ""),
        (8, 8, 4, "ok", ""),
        (16, 2, 2, "problem", "export OMP_NUM_THREADS=2"),
        (1, 8, 4, "problem", "export OMP_NUM_THREADS=4"),
    ],
)
def test_threads_suit_the_cores(monkeypatch, threads, logical, physical, state, remedy):
    """Neither more than the cores of a container nor fewer than the real ones."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    finding = doctor._threads(threads, logical, physical)
    assert (finding.state, finding.remedy) == (state, remedy)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor._threads(1, 8, 4).remedy == "unset OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("quota", "cores"),
    [(None, (6, 3)), ("200000 100000", (2, 2)), ("50000 100000", (1, 1)), ("max 1", (6, 3))],
)
def test_a_container_has_the_cores_of_its_quota(monkeypatch, tmp_path, quota, cores):
    """Of six hyperthreads on three cores; a part of a core counts as one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 3)
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert doctor._cores(tmp_path / "cpu.max") == cores


def test_a_busy_machine_and_little_memory_are_problems(monkeypatch):
    """Other programs cost speed; too little memory makes the machine swap."""
    monkeypatch.setattr(psutil, "getloadavg", lambda: (2.0 * os.cpu_count(), 0, 0))
    assert found(doctor.check_cores)["load"].state == "problem"
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.0, 0, 0))
    assert found(doctor.check_cores)["load"].state == "ok"
    for free, state in ((doctor.MODEL_MEMORY, "ok"), (doctor.MODEL_MEMORY - 1, "problem")):
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert found(doctor.check_memory)["memory"].state == state


# -- the model ------------------------------------------------------------------------------------


def test_the_state_of_the_model_is_told(monkeypatch, tmp_path):
    """Not there, damaged, no room, no permission, and finished."""

    def model():
        (finding,) = doctor.check_model()
        return finding.state, f"{finding.found} / {finding.cost} / {finding.remedy}"

    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "deep" / "cache"))
    state, text = model()
    assert state == "missing"
    assert "not here yet / the next start downloads 93 MB and converts it, once" in text
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "MINIVLLM_CACHE to a directory that you can write to" in model()[1]
    monkeypatch.undo()
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    directory = tmp_path / "smollm2-135m"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert model()[0] == "problem"
    assert "is damaged or outdated" in model()[1]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert "0.0 GB of disk free" in model()[1]
    builtin_model.write_marker(directory, builtin_model.BUILTIN_MODELS[0])
    assert model() == ("ok", f"in {directory} /  / ")
    (directory / "config.json").write_text("")
    assert model()[0] == "problem"


# -- the report -----------------------------------------------------------------------------------


def test_a_check_that_fails_becomes_a_finding(monkeypatch):
    """The others go on; a missing package of the doctor's own has its command."""

    def check_the_weather():
        yield Finding("sun", "ok", "shines")
        raise OSError("no window")

    def check_packages():
        raise ModuleNotFoundError("No module named 'packaging'")

    monkeypatch.setattr(doctor, "CHECKS", (check_the_weather, check_packages))
    sun, weather, packages = checks()
    assert (sun.name, weather.name, weather.state) == ("sun", "the weather", "problem")
    assert "OSError: no window" in weather.found
    assert packages.remedy == f'pip install -e "{ROOT}[course]"'


def test_the_report_is_readable_without_colour():
    """A mark, the name, what is there; cost and remedy only below what is not ok."""
    report = format_report(
        [
            Finding("numpy", "ok", "2.0", "unseen", "unseen"),
            Finding("Triton", "missing", "not installed", "no kernels", "pip install triton"),
            Finding("torch", "problem", "does not load", "nothing runs", "reinstall", True),
        ]
    )
    assert report.splitlines() == [
        "[ok] numpy   2.0",
        "[--] Triton  not installed",
        "       costs: no kernels",
        "       do:    pip install triton",
        "[!!] torch   does not load",
        "       costs: nothing runs",
        "       do:    reinstall",
        "",
        "[ok] present   [--] missing   [!!] broken",
        "Fix this first: torch.",
    ]
    assert format_report([]).endswith("Everything required works.")
    assert report.isascii()


@pytest.mark.parametrize("columns", [40, 100, 300])
def test_long_lines_are_broken_at_spaces(monkeypatch, columns):
    """At the terminal's width or 100; a path stays in one piece."""
    monkeypatch.setenv("COLUMNS", str(columns))
    path = "/" + "-".join(["very"] * 30)
    lines = format_report([Finding("x", "ok", f"{'word ' * 30}{path}")]).splitlines()[:-3]
    assert max(len(line) for line in lines if path not in line) <= min(columns, 100)
    assert lines[1].startswith("        word")
    assert any(line.strip() == path for line in lines)


@pytest.mark.parametrize(
    ("state", "required", "code"),
    [("ok", True, 0), ("missing", False, 0), ("problem", False, 0), ("missing", True, 1)],
)
def test_the_exit_code_counts_what_is_required(monkeypatch, capsys, state, required, code):
    """0 unless minivllm is useless here."""
    monkeypatch.setattr(doctor, "checks", lambda: [Finding("x", state, "y", required=required)])
    assert run_doctor() == code
    assert ("Fix this first" in capsys.readouterr().out) == bool(code)


@pytest.mark.long
def test_the_real_machine_is_looked_at_in_a_fresh_python():
    """From the import to the report; nothing is downloaded, whatever the cache holds."""
    code = "import json, sys; from minivllm.cli import doctor; code = doctor.run_doctor()\n"
    code += "bad = [f.name for f in doctor.checks() if 'could not be checked' in f.found]\n"
    code += "print(json.dumps(bad)); sys.exit(code)"
    env = os.environ | {"PYTHONPATH": str(ROOT), "MINIVLLM_CACHE": str(ROOT / "nowhere" / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []
    assert "[ok] Python" in ran.stdout
    assert "not here yet" in ran.stdout
    assert not (ROOT / "nowhere").exists()


def test_the_doctor_itself_loads_nothing_heavy():
    """It must start where nothing else does."""
    code = "import sys, minivllm.cli.doctor;"
    code += "print(*{'torch', 'numpy', 'psutil', 'packaging'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == ""
