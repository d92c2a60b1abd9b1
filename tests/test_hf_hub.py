"""Models of the Hub by name: what cannot be served is refused early, and every error explained.

The real library talks to a Hub on this machine (`hub_server`); where a test needs an error that
is hard to bring about there, a stand-in raises it with the library's own classes.
"""

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
from hub_server import COMMIT, hub
from huggingface_hub import constants, errors

from minivllm.checkpoint import hf_hub
from minivllm.checkpoint.hf_hub import HubName, check_files, explain, fetch_repository, parse_name

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
    "owner/pickle": {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"p"},
    "owner/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"},
}

# Fetches each name and prints what came of it; a process of its own, because the library reads
# its settings when it is imported.
CODE = """
import json, os, sys
from minivllm.checkpoint.hf_hub import fetch_repository, parse_name
results = {}
for name in sys.argv[1:]:
    try:
        results[name] = sorted(os.listdir(fetch_repository(parse_name(name))))
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
    with hub(REPOS) as (address, log):
        for visit, names in {
            "first": ["owner/good"],
            "second": ["owner/good"],
            "refused": [*REPOS, "owner/none", "owner/good@nope"],
        }.items():
            results[visit] = (*fetch(address, home, *names), list(log))
            log.clear()
    names = ["owner/good", "owner/gpt2"]
    results["gone"] = (*fetch(address, home, *names), [])
    results["offline"] = (*fetch(address, home, *names, HF_HUB_OFFLINE="1"), [])
    return results


# -- with the real library ------------------------------------------------------------------------


def test_only_what_the_engine_reads_is_fetched(seen):
    """Data in the repository's first level: no pickle, no code, no second set of weights."""
    files, said, log = seen["first"]
    assert files["owner/good"] == sorted(READ)
    assert not [line for line in log if any(name in line for name in NOT_READ)]
    assert "fetching owner/good" in said


def test_a_whole_copy_costs_one_question(seen):
    """The Hub is asked what main is today, and nothing is drawn or said."""
    files, said, log = seen["second"]
    assert files["owner/good"] == sorted(READ)
    assert log == ["GET /api/models/owner/good"]
    assert said == ""


@pytest.mark.parametrize("name", ["owner/gpt2", "owner/yarn", "owner/broken", "owner/licence"])
def test_weights_are_never_asked_for_before_config_json_is_accepted(seen, name):
    """An unsupported model costs a second and a few kilobytes."""
    asked = [line for line in seen["refused"][2] if f"/{name}/" in line]
    assert asked
    assert all(line.endswith("/config.json") for line in asked)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/gpt2", ["owner/gpt2", "GPT2LMHeadModel", "Qwen3ForCausalLM", "not fetched"]),
        ("owner/yarn", ["'yarn'", "llama3", "not fetched"]),
        ("owner/broken", ["config.json is not valid JSON"]),
        ("owner/pickle", ["pytorch_model.bin", "pickle", "safetensors only"]),
        ("owner/adapter", ["no config.json, no tokenizer.json", "Choose another repository"]),
        ("owner/gated", ["gated", "licence", "model's page", "hf auth login"]),
        ("owner/licence", ["gated", "licence", "model's page", "hf auth login"]),
        ("owner/none", ["'owner/none'", "neither a directory", "spelling", "hf auth login"]),
        ("owner/good@nope", ["owner/good has no revision 'nope'", "main"]),
        ("owner/token", ["access token", "again with `hf auth login`"]),
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


def test_a_copy_serves_when_the_hub_does_not_answer(seen):
    """It is said, because the copy may be old; what is not there is refused with the reason."""
    files, said, _ = seen["gone"]
    assert files["owner/good"] == sorted(READ)
    assert "does not answer" in said
    for words in ("cannot be reached", "Check the network", "smollm2-135m", "'owner/gpt2'"):
        assert words in files["owner/gpt2"]


def test_offline_mode_uses_the_copy_without_a_word(seen):
    """Who sets HF_HUB_OFFLINE knows it, unless the model is not there."""
    files, said, _ = seen["offline"]
    assert files["owner/good"] == sorted(READ)
    assert said == ""
    assert "HF_HUB_OFFLINE is set" in files["owner/gpt2"]


# -- with a stand-in ------------------------------------------------------------------------------


class Library:
    """`huggingface_hub` with one repository; each call must suit the real function."""

    constants, errors = constants, errors

    def __init__(self, folder, files=GOOD, fail=None):
        self.folder, self.files, self.fail = folder, files, fail or {}
        self.constants = SimpleNamespace(HF_HUB_CACHE=str(folder / "deep" / "cache"))
        self.calls = []

    def HfApi(self):
        return self

    def note(self, name, owner, *args, **kwargs):
        function = getattr(owner, name)
        skipped = (None,) if owner is huggingface_hub.HfApi else ()
        inspect.signature(function).bind(*skipped, *args, **kwargs)
        self.calls.append((name, kwargs))
        if name in self.fail:
            raise self.fail[name]

    def model_info(self, *args, **kwargs):
        self.note("model_info", huggingface_hub.HfApi, *args, **kwargs)
        files = [SimpleNamespace(rfilename=n, size=len(c)) for n, c in self.files.items()]
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def hf_hub_download(self, *args, **kwargs):
        self.note("hf_hub_download", huggingface_hub, *args, **kwargs)
        (self.folder / "config.json").write_bytes(self.files["config.json"])
        return str(self.folder / "config.json")

    def try_to_load_from_cache(self, *args, **kwargs):
        inspect.signature(huggingface_hub.try_to_load_from_cache).bind(*args, **kwargs)

    def snapshot_download(self, *args, **kwargs):
        self.note("snapshot_download", huggingface_hub, *args, **kwargs)
        return str(self.folder)


def http_error(kind, status):
    """An error of the library, with an answer of the Hub."""
    answer = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("what the library says\nin several lines", response=answer)


def test_a_revision_is_asked_for_everywhere(tmp_path):
    """The list for the revision, config.json for the commit behind it, then the revision."""
    library = Library(tmp_path)
    assert fetch_repository(HubName("owner/good", "v1.0"), library) == tmp_path
    revisions = [(name, options["revision"]) for name, options in library.calls]
    assert revisions == [
        ("model_info", "v1.0"),
        ("hf_hub_download", COMMIT),
        ("snapshot_download", "v1.0"),
    ]


def test_a_full_disk_is_noticed_before_the_download(tmp_path, monkeypatch):
    """With both numbers, of what is wanted alone, and the way out."""
    needed = sum(len(content) for content in READ.values())
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(hf_hub.shutil, "disk_usage", lambda path: free)
    library = Library(tmp_path)
    with pytest.raises(ValueError, match="owner/good needs 0 MB more, .*cache has 0 MB.*HF_HOME"):
        fetch_repository(HubName("owner/good"), library)
    assert [name for name, _ in library.calls] == ["model_info", "hf_hub_download"]
    free.free = needed
    assert fetch_repository(HubName("owner/good"), library) == tmp_path


@pytest.mark.parametrize("step", ["hf_hub_download", "snapshot_download"])
def test_a_network_that_breaks_off_says_what_is_kept(tmp_path, step):
    """An exception of any class: the HTTP library below has changed several times."""
    library = Library(tmp_path, fail={step: RuntimeError("connection reset\nby peer")})
    with pytest.raises(ValueError) as caught:
        fetch_repository(HubName("owner/good"), library)
    for words in ("RuntimeError: connection reset)", "try again: what has arrived is kept"):
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_ctrl_c_is_not_swallowed(tmp_path):
    """A long download is broken off by hand."""
    library = Library(tmp_path, fail={"snapshot_download": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        fetch_repository(HubName("owner/good"), library)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError, 403), "only those who have accepted its licence"),
        (http_error(errors.RepositoryNotFoundError, 404), "neither a directory here nor a model"),
        (http_error(errors.RevisionNotFoundError, 404), "has no revision 'v1'"),
        (http_error(errors.DisabledRepoError, 403), "your access token may not read it"),
        (http_error(errors.HfHubHTTPError, 401), "the Hub does not know your access token"),
        (http_error(errors.HfHubHTTPError, 429), "too many requests"),
        (http_error(errors.HfHubHTTPError, 503), "status 503; try again later"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (errors.LocalEntryNotFoundError("not here"), "LocalEntryNotFoundError: not here"),
        (OSError(errno.ENOSPC, "No space left"), "cache cannot take owner/good@v1: .*HF_HOME"),
        (PermissionError(errno.EACCES, "denied"), "cache cannot take owner/good@v1: .*HF_HOME"),
        (ConnectionError(), "ConnectionError: no message"),
    ],
)
def test_each_error_of_the_library_has_its_explanation(tmp_path, error, words):
    """In one line, without the library's own text of several lines."""
    message = explain(HubName("owner/good", "v1"), error, Library(tmp_path))
    with pytest.raises(ValueError, match=words):
        raise ValueError(message)
    assert "owner/good" in message
    assert "in several lines" not in message


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_copy_does_not_stand_in_for_a_refusal(tmp_path, status):
    """Who may not read the model is told so, even if a copy lies in the cache."""
    error = http_error(errors.HfHubHTTPError, status)
    library = Library(tmp_path, fail={"model_info": error})
    with pytest.raises(ValueError, match="cannot be fetched"):
        fetch_repository(HubName("owner/good"), library)
    assert [name for name, _ in library.calls] == ["model_info"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_copy_stands_in_for_a_busy_hub(tmp_path, status, capsys):
    """It may be better in an hour; the copy is here now."""
    error = http_error(errors.HfHubHTTPError, status)
    library = Library(tmp_path, fail={"model_info": error})
    assert fetch_repository(HubName("owner/good"), library) == tmp_path
    assert library.calls[-1][1]["local_files_only"] is True
    assert "read from its cache" in capsys.readouterr().err


def test_a_missing_library_is_one_line_with_the_remedy(monkeypatch):
    """`None` in sys.modules is how Python is told that a package does not exist."""
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub.*smollm2-135m"):
        fetch_repository(HubName("owner/good"))


# -- names and files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("01-ai/Yi_1.5@v1.0", "01-ai/Yi_1.5", "v1.0"),
        ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
    ],
)
def test_names_of_the_hub(name, repo, revision):
    """Owner, name, and behind an @ a branch, tag or commit."""
    assert parse_name(name) == HubName(repo, revision)
    assert str(parse_name(name)) == name


@pytest.mark.parametrize(
    "name",
    ["smollm2", "./owner/name", "../name", "/owner/name", "~/name", "a/b/c", "a/", "a/b@", "a b/c"],
)
def test_other_names_are_not_asked_for_at_the_hub(name):
    """Paths, and names without an owner."""
    assert parse_name(name) is None


def test_files_of_other_programs_do_not_make_a_checkpoint():
    """Weights in a folder, or under the name of another format, are not what the engine reads."""
    small = ["config.json", "tokenizer.json"]
    check_files("here", [*small, "model.safetensors"], "")
    for other in ("onnx/model.safetensors", "consolidated.safetensors", "model.gguf"):
        with pytest.raises(ValueError, match=r"here is no .* no \*.safetensors. Go elsewhere"):
            check_files("here", [*small, other], "Go elsewhere")
    with pytest.raises(ValueError, match=r"pickle \(old/model.pt\)"):
        check_files("here", [*small, "old/model.pt", "onnx/model.safetensors"], "")


def test_nothing_heavy_is_imported():
    """Not even the library, until a name of the Hub is asked for."""
    code = "import sys, minivllm.checkpoint.hf_hub;"
    code += "print(*{'torch', 'huggingface_hub'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(hf_hub.__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == ""
