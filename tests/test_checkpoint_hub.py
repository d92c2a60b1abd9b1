"""Names of models become directories; what the Hub offers is refused early, with the remedy."""

import errno
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_server import hub as running_hub
from huggingface_hub import errors

from minivllm.checkpoint import hub
from minivllm.checkpoint.hub import HUB_NAME, fetch_repository, resolve_model

FILES = ("config.json", "model.safetensors", "tokenizer.json")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 5,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 3,
    "max_position_embeddings": 64,
}
READ = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
}
NOT_READ = {
    "README.md": b"words",
    "pytorch_model.bin": b"a pickle",
    "modeling_custom.py": b"code",
    "consolidated.safetensors": b"the weights once more",
    "onnx/model.safetensors": b"for another program",
}
GOOD = {**READ, **NOT_READ}
REPOS = {
    "owner/good": GOOD,
    "owner/licence": {**GOOD, "config.json": (403, "GatedRepo")},
    "owner/gated": (403, "GatedRepo"),
    "owner/fault": (500, ""),
    "owner/limit": (429, ""),
    "owner/token": (401, ""),
    "owner/gpt2": {**GOOD, "config.json": b'{"architectures": ["GPT2LMHeadModel"]}'},
    "owner/yarn": {
        **GOOD,
        "config.json": json.dumps(CONFIG | {"rope_scaling": {"type": "yarn"}}).encode(),
    },
    "owner/broken": {**GOOD, "config.json": b"{"},
    "owner/pickle": {
        **{name: GOOD[name] for name in ("config.json", "tokenizer.json")},
        "a.bin": b"p",
    },
    "owner/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"},
}


# -- names --


def checkpoint(directory, *names):
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    return directory


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


@pytest.fixture
def no_hub(monkeypatch):
    """Nothing may be asked of the Hub."""

    def never(name):
        raise AssertionError(f"the Hub was asked for {name}")

    monkeypatch.setattr(hub, "fetch_repository", never)


@pytest.mark.parametrize("name", ["gpt2", "./owner/name", "/no/such/directory", Path("a/b")])
def test_an_unknown_name_is_refused_with_what_works(name, no_hub):
    """The message has the name, the built-in models, a directory, and a name of the Hub."""
    with pytest.raises(ValueError) as caught:
        resolve_model(name)
    for words in (repr(str(name)), "Built-in models: smollm2-135m", "directory works", "Qwen/Qwen"):
        assert words in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "smollm2-360m", "smolm2-135m"])
def test_a_misspelt_built_in_name_is_recognised(name, no_hub):
    """With the name that was meant."""
    with pytest.raises(ValueError, match="Did you mean 'smollm2-135m'"):
        resolve_model(name)


def test_a_directory_comes_before_a_name_of_the_hub(tmp_path, monkeypatch, no_hub):
    """What lies here is meant, even if it is incomplete or a file."""
    (tmp_path / "owner").mkdir()
    directory = checkpoint(tmp_path / "owner" / "name", *FILES)
    (tmp_path / "owner" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == directory.resolve()
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="it has no config.json"):
        resolve_model("owner/name")
    with pytest.raises(ValueError, match="is a file"):
        resolve_model("owner/file")


def test_a_file_is_refused(tmp_path):
    """A GGUF, say, by its path."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="is a file.*A directory works"):
        resolve_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_git_lfs_pointer_is_named_for_what_it_is(tmp_path, name):
    """A clone made without Git LFS holds three lines of text in place of each large file."""
    directory = checkpoint(tmp_path / "clone", *FILES)
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer.*git lfs pull"):
        resolve_model(directory)


def test_files_of_other_programs_do_not_make_a_checkpoint(tmp_path):
    """Weights under the name of another format are not what the engine reads."""
    small = ["config.json", "tokenizer.json"]
    directory = checkpoint(tmp_path / "x", *small, "consolidated.safetensors", "model.gguf")
    with pytest.raises(ValueError, match=r"it has no \*.safetensors"):
        resolve_model(directory)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("01-ai/Yi_1.5@v1.0", ("01-ai/Yi_1.5", "v1.0")),
        ("a/b@refs/pr/1", ("a/b", "refs/pr/1")),
        *((name, None) for name in ("smollm2", "./owner/name", "../name", "/owner/name")),
        *((name, None) for name in ("~/name", "a/b/c", "a/", "a/b@", "a b/c")),
    ],
)
def test_names_of_the_hub(name, groups):
    """Owner, name, and behind an @ a branch, tag or commit; no paths, no single words."""
    match = HUB_NAME.fullmatch(name)
    assert (match and match.groups()) == groups


# -- the Hub, with the real library and a server on this machine --

# Fetches each name and prints what came of it; a process of its own, because the library reads
# its settings when it is imported.
CODE = """
import json, os, sys
from minivllm.checkpoint.hub import resolve_model
results = {}
for name in sys.argv[1:]:
    try:
        results[name] = sorted(os.listdir(resolve_model(name)))
    except ValueError as error:
        results[name] = str(error)
print(json.dumps(results))
"""


def fetch(address, home, *names, **env):
    """What each name gave with the real library: a list of files or a message; and stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    settings |= {"PYTHONPATH": os.pathsep.join(sys.path), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", CODE, *names]
    ran = subprocess.run(
        command, env=kept | settings | env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Five visits: a first one, a second one, refusals, the Hub gone, offline mode."""
    home = tmp_path_factory.mktemp("hf")
    results = {}
    with running_hub(REPOS) as (address, log):
        for visit, names in {
            "first": ["owner/good"],
            "second": ["owner/good"],
            "refused": [*REPOS, "owner/none", "owner/good@nope"],
        }.items():
            results[visit] = (*fetch(address, home, *names), list(log))
            log.clear()
    names = ["owner/good", "owner/none"]
    results["gone"] = (*fetch(address, home, *names), [])
    results["offline"] = (*fetch(address, home, *names, HF_HUB_OFFLINE="1"), [])
    return results


def test_only_what_the_engine_reads_is_fetched(seen):
    """Data in the repository's first level: no pickle, no code, no second set of weights."""
    files, said, log = seen["first"]
    assert files["owner/good"] == sorted(READ)
    assert not [line for line in log if any(name in line for name in NOT_READ)]
    assert "Fetching" in said


def test_a_complete_copy_is_not_downloaded_again(seen):
    """The Hub is only asked what main is today."""
    files, _, log = seen["second"]
    assert files["owner/good"] == sorted(READ)
    assert not any("/resolve/" in line for line in log)


@pytest.mark.parametrize("name", ["owner/gpt2", "owner/yarn", "owner/broken", "owner/licence"])
def test_weights_are_never_asked_for_before_config_json_is_accepted(seen, name):
    """An unsupported model costs a second and a few kilobytes."""
    asked = [line for line in seen["refused"][2] if f"/{name}/" in line]
    assert any(line.endswith("/config.json") for line in asked)
    assert not any(line.endswith(".safetensors") for line in asked)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/gpt2", ["owner/gpt2", "GPT2LMHeadModel", "Qwen3ForCausalLM", "not downloaded"]),
        ("owner/yarn", ["'yarn'", "llama3", "not downloaded"]),
        ("owner/broken", ["config.json is not valid JSON"]),
        ("owner/pickle", ["owner/pickle", "no *.safetensors", "Only safetensors are read"]),
        ("owner/adapter", ["no config.json, no tokenizer.json", "Choose another repository"]),
        ("owner/gated", ["'owner/gated'", "gated", "licence", "model's page", "hf auth login"]),
        ("owner/licence", ["gated", "licence", "model's page", "hf auth login"]),
        ("owner/none", ["'owner/none'", "not a directory here", "spelling", "hf auth login"]),
        ("owner/good@nope", ["'owner/good@nope'", "no such revision", "main"]),
        ("owner/token", ["access token", "`hf auth login`"]),
        ("owner/limit", ["too many requests", "wait"]),
        ("owner/fault", ["status 500", "try again later"]),
    ],
)
def test_refusals_name_the_reason_and_the_remedy(seen, name, words):
    """One line for each way that the Hub says no."""
    message = seen["refused"][0][name]
    assert isinstance(message, str)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_copy_serves_when_the_hub_cannot_be_reached(seen):
    """What is not in the cache is refused with the reason."""
    files, _, _ = seen["gone"]
    assert files["owner/good"] == sorted(READ)
    for words in ("cannot be reached", "check the network", "smollm2-135m", "'owner/none'"):
        assert words in files["owner/none"]
    files, _, _ = seen["offline"]
    assert files["owner/good"] == sorted(READ)
    assert "HF_HUB_OFFLINE is set" in files["owner/none"]


def http_error(kind, status):
    """An error of the library, with an answer of the Hub."""
    answer = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("what the library says\nin several lines", response=answer)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            http_error(errors.DisabledRepoError, 403),
            "access token is not valid for it; run `hf auth login`",
        ),
        (http_error(errors.HfHubHTTPError, 503), "status 503; try again later"),
        (errors.LocalEntryNotFoundError("not here"), "LocalEntryNotFoundError: not here"),
        (OSError(errno.ENOSPC, "No space left"), "cache .* cannot be written .*HF_HOME"),
        (PermissionError(errno.EACCES, "denied"), "cache .* cannot be written .*HF_HOME"),
        (ConnectionError(), "ConnectionError: no message"),
        (RuntimeError("reset\nby peer"), "RuntimeError: reset.* what has arrived is kept"),
    ],
)
def test_each_error_of_the_library_is_one_line(monkeypatch, error, words):
    """An exception of any class: the HTTP library below has changed several times."""

    def fail(*args, **options):
        inspect.signature(real).bind(*args, **options)
        raise error

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=words) as caught:
        fetch_repository("owner/good")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_ctrl_c_is_not_swallowed(monkeypatch):
    """A long download can be interrupted."""

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_repository("owner/good")
