"""Packages of isolated workers: what is refused, what is in the key, what is installed."""

import os
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core import GRPOTrainer
from nemo_rl_core.config.isolation import IsolatedPackages, IsolationConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.distributed.isolation import isolated_path, with_packages
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.custom import CustomParts
from tasks.plan_tasks.grpo import plan_grpo
from tasks.recipes.common import EvaluationTaskConfig, RecipeError, SFTTaskConfig
from tasks.recipes.grpo import GRPORecipe
from tests.isolated_packages import write_package, write_wheel


def packages(section: dict[str, Any]) -> list[str]:
    filled = with_packages(IsolationConfig(generation=IsolatedPackages.model_validate(section)))
    assert filled.generation is not None
    return filled.generation.packages


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (f"x==1 --hash=sha256:{'a' * 64} --config-settings=x=y\n", "got: x==1 --hash"),
        ("x==1 --hash=sha256:aa --extra-index-url http://e\n", "got: x==1 --hash"),
        ("tabulate\n", "got: tabulate"),
        ("tabulate>=0.8\n", "got: tabulate>=0.8"),
        ("tabulate==0.8.*\n", r"got: tabulate==0.8.\*"),
        ("tabulate==0.8.9,!=0.9\n", "got: tabulate==0.8.9,!=0.9"),
        ("tabulate @ https://pypi.org/tabulate.whl\n", "got: tabulate @ https"),
        ("six==1.17.0\n-r other.txt\n", "got: -r other.txt"),
        ("--index-url https://pypi.org/simple\n", "got: --index-url"),
        ("ray==2.1\n", r"expected: ray==2.*\n  got: ray==2.1\n  fix: remove ray"),
        ("# nothing\n\n", "names no packages"),
    ],
)
def test_a_file_that_does_not_pin_its_packages_is_refused(
    tmp_path: Path, text: str, got: str
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)isolation.generation.*{got}"):
        packages({"requirements": str(file)})


def test_a_file_counts_by_its_pinned_lines(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    digest = "eb1d" * 16
    hashed = f"tabulate==0.8.9 \\\n    --hash=sha256:{digest}  # via us\n"
    file.write_text(f'# ours\n{hashed}six==1.17.0 ; python_version > "3"\n')
    expected = ['six==1.17.0 ; python_version > "3"', f"tabulate==0.8.9 --hash=sha256:{digest}"]
    assert packages({"requirements": str(file)}) == expected
    file.write_text(f'six==1.17.0 ; python_version > "3"\n{hashed}')
    assert packages({"requirements": str(file)}) == expected


def test_packages_in_a_recipe_are_checked_as_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    for line in ("evil @ https://x/e.whl", "evil==1 --extra-index-url http://e", "a==1\nevil"):
        for source in ({}, {"requirements": str(file)}):
            with pytest.raises(ConfigError, match=r"isolation.generation.packages does not pin"):
                packages({**source, "packages": ["six==1.17.0", line]})
    pins = ["six==1.17.0", "tabulate==0.8.9"]
    assert packages({"requirements": str(file), "packages": pins}) == pins
    file.write_text("tabulate==0.8.9\nsix==1.17.0\n")
    assert packages({"requirements": str(file), "packages": pins[::-1]}) == pins
    file.write_text("tabulate==0.9\nsix==1.17.0\n")
    with pytest.raises(ConfigError, match=r"(?s)requirements: .* has changed.*got: tabulate==0.9"):
        packages({"requirements": str(file), "packages": pins})


def test_equal_pins_in_another_file_are_the_same_config(tmp_path: Path) -> None:
    sections = []
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("six==1.17.0\n")
        sections.append(IsolatedPackages(requirements=str(tmp_path / name)))
    first, second = (with_packages(IsolationConfig(training=each)) for each in sections)
    assert first == second == with_packages(first)


def test_a_folder_counts_by_versions_and_content(tmp_path: Path) -> None:
    section = {"folder": str(tmp_path)}
    write_package(tmp_path, "tabulate", "0.8.9", "a = 1")
    ((name, first),) = [each.split() for each in packages(section)]
    write_package(tmp_path, "tabulate", "0.8.9", "a = 2")
    ((_, second),) = [each.split() for each in packages(section)]
    assert name == "tabulate==0.8.9"
    assert first != second
    with pytest.raises(ConfigError, match=r"folder: .* has changed since"):
        isolated_path(IsolatedPackages(folder=str(tmp_path), packages=[f"{name} {first}"]))
    cached = tmp_path / "tabulate" / "__pycache__" / "x.pyc"
    cached.parent.mkdir()
    cached.write_text("x")
    assert packages(section) == [f"{name} {second}"]
    # Edited after the installation, which leaves RECORD as it was; a module of no package.
    (tmp_path / "tabulate" / "__init__.py").write_text("a = 3")
    edited = packages(section)
    assert edited != [f"{name} {second}"]
    (tmp_path / "numpy.py").write_text("")
    others, *rest = packages(section)
    assert (others[:12], rest) == ("other files ", edited)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    for name in ("empty", "older/lib/python3.8/site-packages"):
        (tmp_path / name).mkdir(parents=True)
    write_package(tmp_path / "with_ray", "ray", "1.0")
    write_package(tmp_path / "linked", "shade", "1.0")
    (tmp_path / "linked" / "shade-1.0.dist-info" / "direct_url.json").write_text(
        '{"url":"file:///shade","dir_info":{"editable":true}}'
    )
    for name, message in (
        ("none", r"isolation.generation.folder: no folder .*/none\n  fix: correct isolation"),
        ("empty", "there are no installed packages in .*/empty"),
        ("older", r"(?s)another Python.*expected: python3.1.*got: python3.8"),
        ("linked", "shade is an editable installation"),
        ("with_ray", r"(?s)another version of ray.*got: ray==1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            packages({"folder": str(tmp_path / name)})
    with pytest.raises(ConfigError, match=r"no file .*/none.txt\n  fix: correct isolation"):
        packages({"requirements": str(tmp_path / "none.txt")})


def test_packages_are_installed_once_and_without_a_network(
    tmp_path: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # pytest has pluggy 1 here, and nothing has a package `lamp`.
    write_wheel(
        tmp_path / "wheels", "tabulate", "0.1", "a = 1", ["pluggy>=1", "lamp; extra == 'x'"]
    )
    section = IsolatedPackages(packages=["tabulate==0.1"])
    first, *rest = isolated_path(section)["PYTHONPATH"].split(os.pathsep)
    assert Path(first).is_relative_to(own_store / "cache" / "packages")
    assert (Path(first) / "tabulate" / "__init__.py").read_text() == "a = 1"
    assert str(Path(__file__).parents[3]) in rest
    monkeypatch.setenv("PIP_FIND_LINKS", "gone")
    assert isolated_path(section)["PYTHONPATH"].split(os.pathsep)[0] == first
    with pytest.raises(ConfigError, match=r"(?s)cannot be installed.*tabulate==0.2.*PIP_FIND"):
        isolated_path(section.replace(packages=["tabulate==0.2"]))
    # A source distribution would run its setup.py in this process.
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "setup.py").write_text("raise SystemExit('it ran')")
    with tarfile.open(tmp_path / "wheels" / "lamp-1.0.tar.gz", "w:gz") as source:
        source.add(tmp_path / "source", "lamp-1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with pytest.raises(ConfigError, match=r"(?s)lamp==1.0.*build a wheel, set PIP_FIND_LINKS"):
        isolated_path(section.replace(packages=["lamp==1.0"]))
    names = {each.name for each in Path(first).parent.iterdir() if each.suffix != ".lock"}
    assert names == {Path(first).name}
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-riscv64")
    monkeypatch.setenv("PIP_FIND_LINKS", "gone")
    with pytest.raises(ConfigError, match="cannot be installed"):
        isolated_path(section)


def test_a_worker_on_a_machine_without_its_packages_does_not_start(tmp_path: Path) -> None:
    for folder, error in ((tmp_path, ""), (tmp_path / "none", f"expected: the folder {tmp_path}")):
        done = subprocess.run(
            [sys.executable, "-c", "import nemo_rl_core"],
            env={**os.environ, "NEMO_RL_ISOLATED_PACKAGES": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) is (error == "")
        assert error in done.stderr


@pytest.mark.slow
def test_packages_with_unmet_needs_are_refused(
    tmp_path: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    write_wheel(tmp_path, "shade", "1.0", requires=["lamp>=2", "pluggy<1", "bulb; extra == 'x'"])
    section = IsolatedPackages(packages=["shade[x]==1.0"])
    with pytest.raises(ConfigError) as refused:
        isolated_path(section)
    assert refused.value.problem == (
        "the pinned packages of isolation need versions that are not there"
    )
    assert refused.value.got == (
        f"shade needs lamp>=2 (missing); shade needs pluggy<1 ({metadata.version('pluggy')}); "
        'shade needs bulb; extra == "x" (missing)'
    )


def test_packages_are_in_the_key_of_the_stages_that_use_them(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"

    def stages(version: str, component: str) -> dict[str, str]:
        file.write_text(f"tabulate=={version}\n")
        recipe = GRPORecipe.model_validate(
            {
                "environment_workers": {},
                "isolation": {component: {"requirements": str(file)}},
                "sft": {},
            }
        )
        plan = plan_grpo(config=recipe)
        assert isinstance(plan.sft, SFTTaskConfig)
        assert isinstance(plan.evaluation, EvaluationTaskConfig)
        return {
            name: getattr(plan, name).model_dump_json()
            for name in ("model", "data", "sft", "grpo", "evaluation")
        }

    for component, users in (
        ("environment", {"grpo", "evaluation"}),
        ("generation", {"grpo", "evaluation"}),
        ("training", {"sft", "grpo"}),
    ):
        before, after = stages("0.8.9", component), stages("0.8.10", component)
        assert {name for name in before if before[name] != after[name]} == users
        assert all("tabulate==0.8.10" in after[name] for name in users)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"generaton": {"folder": "a"}}, "(?s)generaton.*generation"),
        ({"generation": {"python": "3.12"}}, "isolation.generation.python"),
        ({"generation": {}}, "name either a requirements file or a prepared folder"),
        ({"generation": {"folder": "a", "requirements": "b"}}, "name either"),
        ({"environment": {"folder": "a"}}, "(?s)separate processes.*environment_workers"),
    ],
)
def test_a_recipe_with_wrong_isolation_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, RecipeError), match=message):
        GRPORecipe.model_validate({"isolation": section})


def test_an_object_in_this_process_cannot_be_isolated() -> None:
    isolation = IsolationConfig(environment=IsolatedPackages(folder="a"))
    with pytest.raises(ConfigError, match=r"isolation.environment has no effect: len runs"):
        CustomParts().refuse_isolated(isolation, len)
    CustomParts().refuse_isolated(isolation, None)


def test_a_trainer_from_python_has_the_packages_in_its_settings(tmp_path: Path) -> None:
    write_package(tmp_path, "tabulate", "0.1")
    isolation = {"generation": {"folder": str(tmp_path)}}
    settings = GRPOTrainer.from_pretrained(ModelFromConfig(), isolation=isolation).settings
    assert settings.isolation.generation is not None
    assert settings.isolation.generation.packages[0].startswith("tabulate==0.1 ")
    with pytest.raises(ConfigError, match="no folder"):
        GRPOTrainer.from_pretrained(
            ModelFromConfig(), isolation={"training": {"folder": str(tmp_path / "none")}}
        )
