"""Python processes that start in no time: forks of one that has imported what is slow to import.

The gates and a run of all tests start hundreds of processes (checks, kernels, commands), and
most of their time is the import of torch, pytest and Jupyter. After `start()` a server holds
these; `command("-m", ...)` is then a small client (this file, run as a script) that hands its
working directory, environment and standard streams to a fork, and ends as that ends. Without a
server `command` is Python itself, and that is what a learner has.

What differs from a fresh process: packages of others are imported already, those that read no
settings at import. Never the package under test, never the course.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "MINIVLLM_FORKS"  # in the environment: the folder of the server
START_LIMIT = 120  # seconds
# Not `ipykernel.kernelapp`, triton and the Hub's, which read the environment when imported.
WARM = (
    "pytest",
    "numpy",
    "torch",
    "numba",
    "tokenizers",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "nbclient",
    "jupytext",
)


def command(*arguments: str) -> list[str]:
    """`python ARGUMENTS` for subprocess; as a fork if there is a server and they begin with -m."""
    folder = os.environ.get(FOLDER)
    if folder is None or arguments[0] != "-m":
        return [sys.executable, *arguments]
    return [sys.executable, "-IS", __file__, "ask", f"{folder}/socket", *arguments]


def start(warm: Iterable[str] = WARM) -> None:
    """Have a server from now on until this process ends; one that runs already will do.

    It imports `warm`. Without effect where it cannot be had: all works without it, only slower.
    """
    if FOLDER in os.environ or sys.platform != "linux":
        return
    import atexit
    import subprocess
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="minivllm-forks-"))
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(folder / "socket"), *warm],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdin=subprocess.PIPE,  # its end is the end of the server
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(server.communicate)
    ready = server.stdout
    assert ready is not None, "a pipe, as asked for above"
    if select.select([ready], [], [], START_LIMIT)[0] and ready.read(1):
        os.environ[FOLDER] = str(folder)
        _show_kernel(folder)


def _show_kernel(folder: Path) -> None:
    """Let Jupyter find forks under the name python3."""
    argv = command("-m", "ipykernel_launcher", "-f", "{connection_file}")
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    path = folder / "kernels" / "python3" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec), "utf-8")
    paths = [str(folder), os.environ.get("JUPYTER_PATH", "")]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, paths))


# -- the client --------------------------------------------------------------------------------


def ask(path: str, arguments: list[str]) -> NoReturn:
    """Let the server run Python with these arguments; be interrupted and end as that is."""
    job = {"arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ)}
    connection = socket.socket(socket.AF_UNIX)
    answers = connection.makefile()
    try:
        connection.connect(path)
        socket.send_fds(connection, [b"job"], [0, 1, 2])
        connection.sendall(json.dumps(job).encode() + b"\n")
        pid = int(answers.readline())
    except (OSError, ValueError):  # the server is gone
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _signal_group(pid, number))
    code = int(answers.readline() or 1)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


# -- the server --------------------------------------------------------------------------------


def serve(path: str, warm: list[str]) -> NoReturn:
    """Fork for each client until stdin ends; a fork and all that it started end with its client."""
    del sys.path[0]  # the folder of this file
    _warm_up(warm)
    gc.freeze()  # else the collectors of the forks would write to every page
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.close(os.pidfd_open(os.getpid()))  # Linux 5.3; without it this ends here, and no harm done
    os.write(1, b"!")
    _serve_clients(listener)
    import shutil

    shutil.rmtree(Path(path).parent, ignore_errors=True)
    os._exit(0)


def _warm_up(names: list[str]) -> None:
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type] # as in `notebooks`
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    if "pytest" in names:
        for name in sys.modules["_pytest.config"].default_plugins:  # else imported in each run
            importlib.import_module(f"_pytest.{name}")
    if "numba" in names:
        _prepare_numba()


def _prepare_numba() -> None:
    """Have numba know its own functions, for which it takes a second at the first call of any."""
    with suppress(ImportError, AttributeError):  # its inside may change
        target = importlib.import_module("numba.core.registry").cpu_target
        target.typing_context.refresh()
        target.target_context.refresh()


def _serve_clients(listener: socket.socket) -> None:
    clients: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> its number
    while True:
        connections = [connection.fileno() for _, connection in clients.values()]
        ready = select.select([0, listener.fileno(), *clients, *connections], [], [])[0]
        if 0 in ready:
            return
        if listener.fileno() in ready and (started := _start(listener)):
            clients[os.pidfd_open(started[0])] = started
        for end, (pid, connection) in list(clients.items()):
            if end in ready or connection.fileno() in ready:
                _finish(pid, connection)
                os.close(end)
                del clients[end]


def _start(listener: socket.socket) -> tuple[int, socket.socket] | None:
    """Take the job of the next client and fork for it; None if the client has gone."""
    connection = listener.accept()[0]
    streams = socket.recv_fds(connection, 3, 3)[1]
    line = connection.makefile().readline()
    if not line.endswith("\n"):
        return None
    pid = os.fork()
    if pid == 0:
        _become(json.loads(line), streams)
    for stream in streams:
        os.close(stream)
    with suppress(OSError):
        connection.sendall(f"{pid}\n".encode())
    return pid, connection


def _finish(pid: int, connection: socket.socket) -> None:
    """A process has ended, or its client has: nothing of its group stays."""
    _signal_group(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # before it has a group of its own; no matter if it has ended
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with connection, suppress(OSError):
        connection.sendall(f"{code}\n".encode())


def _become(job: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be what Python is when it starts with `-m`."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    # A server started in the background of a script ignores it, and its client passes it on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numba" in sys.modules:  # it read the server's number of threads
        sys.modules["numba"].config.reload_config()
    first = [] if os.environ.get("PYTHONSAFEPATH") else [job["cwd"]]
    sys.path[:0] = first + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    _, module, *sys.argv[1:] = job["arguments"]
    os._exit(_run(module))


def _run(module: str) -> int:
    """Run a module as the main program; the code that Python would exit with."""
    import atexit
    import runpy
    import traceback

    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        code = 1
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # What follows in Python's own end, taking all that is imported apart, takes half a second.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    serve(sys.argv[2], sys.argv[3:])
