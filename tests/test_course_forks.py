"""Forks of a warm process behave as fresh Python processes do."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from course import forks

pytestmark = [
    pytest.mark.course,
    pytest.mark.skipif(sys.platform != "linux", reason="the server is for Linux"),
]

PROGRAM = """
import json, os, sys
import package_of_its_own
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["COLOUR"], package_of_its_own.NAME]))
print("numpy" in sys.modules, "minivllm" in sys.modules, file=sys.stderr)
print(sys.stdin.read())
sys.exit(7)
"""


@pytest.fixture(scope="module", autouse=True)
def server():
    """One that ends with this process, if this run has none."""
    before = dict(os.environ)
    forks.start(["numpy"])
    assert forks.FOLDER in os.environ
    yield
    os.environ.clear()
    os.environ.update(before)


def write(folder, text: str, name: str = "program") -> None:
    (folder / f"{name}.py").write_text(text, "utf-8")


def start(folder, *arguments: str, **options) -> subprocess.Popen:
    """The program in a folder, as a fork; its streams are pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = forks.command("-m", "program", *arguments)
    return subprocess.Popen(command, cwd=folder, text=True, **pipes | options)


def test_a_fork_has_arguments_folder_environment_path_streams_and_exit_code(tmp_path):
    """Those of its client; what is slow is imported already, the package is not."""
    write(tmp_path, PROGRAM)
    (tmp_path / "path").mkdir()
    write(tmp_path / "path", "NAME = 'from the path'", "package_of_its_own")
    environment = os.environ | {"COLOUR": "red", "PYTHONPATH": str(tmp_path / "path")}
    process = start(tmp_path, "--a", "b c", env=environment)
    out, err = process.communicate("typed")
    first, typed = out.strip().split("\n")
    assert json.loads(first) == [["--a", "b c"], str(tmp_path), "red", "from the path"]
    assert (err.strip(), typed, process.returncode) == ("True False", "typed", 7)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise SystemExit('too bad')", 1, "too bad"),
        ("import os; os._exit(0)", 0, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last"),
    ],
)
def test_a_fork_ends_as_a_process_does(tmp_path, text, code, words):
    """By an exception, a message, by force, by a signal; what was registered for the end runs."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    write(tmp_path, limit + text)
    process = start(tmp_path)
    err = process.communicate()[1]
    assert process.returncode == code
    assert words in err


def test_a_fork_is_interrupted_through_its_client(tmp_path):
    """As Jupyter interrupts a kernel."""
    # Short sleeps: a signal that comes between a line and its system call does not interrupt that.
    wait = "while True: time.sleep(0.1)"
    write(tmp_path, f"import time\nprint('ready', flush=True)\n{wait}")
    process = start(tmp_path)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]


def test_a_fork_and_what_it_started_end_with_the_client(tmp_path):
    """Killing the client, as a check does with a test that does not end, is enough."""
    child = "import subprocess; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True)"
    write(tmp_path, child + "\nimport os; print(os.getpid(), flush=True); c.wait()")
    process = start(tmp_path)
    numbers = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(map(runs, numbers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(runs, numbers))
    process.communicate()


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be noticed."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it is read
        return False


def test_many_forks_run_at_once(tmp_path):
    """None waits for another: each ends when all have begun."""
    wait = "while len(os.listdir('.')) < 6: time.sleep(0.01)"
    write(tmp_path, f"import os, sys, time\nopen(sys.argv[1], 'w').close()\n{wait}")
    processes = [start(tmp_path, str(number)) for number in range(5)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 5
    for process in processes:
        process.communicate()


def test_without_a_server_and_without_m_it_is_python_itself(monkeypatch, tmp_path):
    """Also if the server has gone."""
    assert forks.command("-c", "1") == [sys.executable, "-c", "1"]
    monkeypatch.setenv(forks.FOLDER, str(tmp_path))
    write(tmp_path, "import sys; print('numpy' in sys.modules)")
    process = start(tmp_path)
    assert process.communicate()[0] == "False\n" and process.returncode == 0
    monkeypatch.delenv(forks.FOLDER)
    assert forks.command("-m", "json") == [sys.executable, "-m", "json"]


def test_the_server_ends_with_the_process_that_started_it():
    """And takes its folder along."""
    script = (
        "import os; from course import forks; forks.start([]); print(os.environ['MINIVLLM_FORKS'])"
    )
    variables = {k: v for k, v in os.environ.items() if k != forks.FOLDER}
    out = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True
    ).stdout
    assert "minivllm-forks-" in out and not os.path.exists(out.strip())
