"""The doctor on software: what is missing, too old or broken, and the command that repairs it."""

import re
from pathlib import Path

import pytest
from machines import GOOD, LAPTOP, ROOT, differs, with_version, without

from minivllm.cli.doctor_packages import (
    COSTS,
    OPTIONAL,
    check_course,
    check_course_packages,
    check_installation,
    check_optional_packages,
    check_packages,
    check_python,
)

EDITABLE = f'pip install -e "{ROOT}[course]"'


def only(findings):
    """The one finding that is not ok."""
    (finding,) = [finding for finding in findings if finding.state != "ok"]
    return finding


@pytest.mark.parametrize("python", [(3, 10, 0), (3, 10, 14), (3, 13, 0), (4, 0, 0)])
def test_python_is_new_enough(python):
    """From the bound itself on, and 3.10 is newer than 3.9."""
    (finding,) = check_python(differs(python=python))
    assert (finding.state, finding.required) == ("ok", True)
    assert finding.found == ".".join(map(str, python))


def test_an_old_python_is_required_to_be_replaced():
    """With the version that it takes."""
    finding = only(check_python(differs(python=(3, 9, 18))))
    assert finding.required
    assert finding.found == "3.9.18, which is older than 3.10"
    assert "Python 3.10 or newer" in finding.remedy


def test_python_without_a_known_bound_is_reported_as_it_is():
    """When minivllm is not installed, nobody says what it needs."""
    assert check_python(differs(python=(3, 9, 0), python_minimum=None))[0].state == "ok"


def test_a_package_that_is_not_installed_costs_the_command():
    """And the comparison of versions, whose bounds are in its metadata."""
    finding = only(check_installation(differs(requirements=None, installed_root=None)))
    assert finding.state == "missing"
    assert "not installed" in finding.found
    assert finding.remedy == EDITABLE


def test_an_install_that_points_elsewhere_is_named_with_both_places():
    """An old clone answers instead of this one."""
    finding = only(check_installation(differs(installed_root=Path("/old/clone"))))
    assert finding.state == "problem"
    assert str(ROOT) in finding.found
    assert "/old/clone" in finding.found
    assert finding.remedy == EDITABLE
    assert check_installation(GOOD)[0].state == "ok"


def test_a_missing_course_folder_is_told():
    """A wheel has the package alone."""
    finding = only(check_course(differs(has_course=False)))
    assert finding.state == "missing"
    assert "clone the repository" in finding.remedy
    assert not finding.required


def test_good_packages_share_one_line():
    """With their versions; those of other extras and Triton are not among them."""
    (finding,) = check_packages(GOOD)
    assert finding.state == "ok"
    assert finding.found == "torch 2.8.0+cu128, numpy 1.26.0, huggingface_hub 0.34.4"
    (finding,) = check_course_packages(GOOD)
    assert finding.found == "nbval 0.11, transformers 5.0.0"


def test_a_missing_package_is_required_and_has_its_command():
    """With the bound that it must meet."""
    finding = only(check_packages(without("numpy")))
    assert (finding.name, finding.state, finding.required) == ("numpy", "missing", True)
    assert finding.remedy == 'pip install "numpy>=1.26"'
    finding = only(check_packages(without("huggingface_hub")))
    assert finding.cost == COSTS["huggingface-hub"]


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("1.25.9", "problem"),
        ("1.9.0", "problem"),
        ("1.26", "ok"),
        ("1.26.0rc1", "ok"),
        ("1.26.4", "ok"),
        ("2.0.0", "ok"),
        ("10.0", "ok"),
    ],
)
def test_versions_are_compared_number_by_number(version, state):
    """Against 1.26: 1.9 is older and 10 is newer, whatever the alphabet says."""
    findings = check_packages(with_version("numpy", version))
    assert {"problem", "ok"} >= {f.state for f in findings}
    assert ("numpy" in [f.name for f in findings]) == (state == "problem")


def test_an_old_package_says_both_versions():
    """And how to renew it."""
    finding = only(check_packages(with_version("numpy", "1.24.0")))
    assert finding.found == "1.24.0 is older than 1.26"
    assert finding.remedy == 'pip install -U "numpy>=1.26"'
    assert finding.required


def test_a_bound_of_zeros_equals_a_shorter_version():
    """3.0 and 3 are one version, and a local label such as +cpu says nothing."""
    machine = with_version("torch", "2.5+cpu")
    assert [f.state for f in check_packages(machine)] == ["ok"]
    requirement = tuple(r.__class__("numpy", "2.0.0") for r in machine.requirements[:1])
    assert (
        check_packages(differs(with_version("numpy", "2"), requirements=requirement))[0].state
        == "ok"
    )


def test_torch_on_linux_without_a_gpu_comes_from_the_cpu_index():
    """Else pip brings gigabytes of CUDA; elsewhere there is nothing to warn of."""
    remedy = only(check_packages(without("torch", machine=LAPTOP))).remedy
    assert remedy.startswith('pip install "torch>=2.5"')
    assert "CPU wheel index, see pytorch.org/get-started" in remedy
    for other in (without("torch"), differs(without("torch", machine=LAPTOP), platform="darwin")):
        assert only(check_packages(other)).remedy == 'pip install "torch>=2.5"'


def test_a_package_that_does_not_load_says_what_it_said():
    """Installed, right version, and still of no use."""
    said = "ImportError: libcudart.so.12: cannot open shared object file"
    finding = only(check_packages(differs(broken={"numpy": said})))
    assert finding.state == "problem"
    assert finding.required
    assert finding.found == f"1.26.0 is installed but does not load: {said}"
    assert finding.remedy == "pip install --force-reinstall --no-cache-dir numpy"
    finding = only(check_packages(differs(broken={"torch": said})))
    assert "pytorch.org/get-started" in finding.remedy


def test_packages_of_the_course_are_not_required():
    """The engine runs without them; one command brings them all."""
    finding = only(check_course_packages(without("nbval")))
    assert (finding.name, finding.state, finding.required) == ("nbval", "missing", False)
    assert "pytest --nbval" in finding.cost
    assert finding.remedy == EDITABLE
    finding = only(check_course_packages(with_version("transformers", "4.40.0")))
    assert finding.remedy == 'pip install -U "transformers>=4.51"'


def test_packages_of_another_platform_are_not_missed():
    """What the metadata asks for on Linux alone is no fault on a Mac."""
    requirements = (*GOOD.requirements, GOOD.requirements[3].__class__("x", "1", None, "win32"))
    assert len(check_packages(differs(requirements=requirements))) == 1


def test_optional_packages_are_named_with_what_they_bring():
    """flash-attn only where there is a GPU for it."""
    assert check_optional_packages(GOOD)[0].found == "numba 0.60.0, flash-attn 2.8.3"
    bare = {"machine": without("flash-attn")}
    names = [f.name for f in check_optional_packages(without("numba", **bare)) if f.state != "ok"]
    assert names == ["numba", "flash-attn"]
    laptop = without("numba", "flash-attn", machine=LAPTOP)
    assert only(check_optional_packages(laptop)).name == "numba"
    assert not only(check_optional_packages(laptop)).required


def test_broken_packages_show_without_metadata_too():
    """minivllm runs from its folder, nothing tells what it needs, and numpy does not load."""
    machine = differs(requirements=None, broken={"numpy": "ImportError: no"})
    assert only(check_packages(machine)).name == "numpy"
    assert check_course_packages(machine) == []


def test_every_dependency_of_the_course_has_its_own_cost():
    """A generic sentence would not tell the learner what does not work."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    course = re.search(r"^course = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    names = re.findall(r'^\s*"([\w-]+)', course, re.MULTILINE)
    assert len(names) > 5
    assert set(names) | set(OPTIONAL) <= set(COSTS)
