"""The source that a stage runs is part of its cache key: all of it, and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.caching import reachable_modules, source_digest

REPOSITORY = Path(__file__).resolve().parents[3]
LOSS = "nemo_rl_core/algorithms/grpo/loss.py"
ENGINE = "nemo_rl_core/backends/generation/vllm.py"


@pytest.mark.parametrize(
    ("stage", "reached", "not_reached"),
    [
        (
            "tasks.grpo_iteration",
            [
                "nemo_rl_core.algorithms.grpo.loss",
                "nemo_rl_core.algorithms.grpo.trainer",
                # Named by strings in registries, not imported:
                "nemo_rl_core.backends.generation.vllm",
                "nemo_rl_core.backends.training.dtensor.backend",
                "nemo_rl_core.functional.kl",
                "tasks.stage",
            ],
            [
                "nemo_rl_core.algorithms.sft.loss",
                "nemo_rl_core.converters.export",
                "workflows.grpo",
            ],
        ),
        (
            "tasks.train_sft",
            ["nemo_rl_core.algorithms.sft.loss", "nemo_rl_core.backends.training.dtensor.backend"],
            ["nemo_rl_core.algorithms.grpo.loss", "nemo_rl_core.algorithms.grpo.trainer"],
        ),
        (
            "tasks.dpo_iteration",
            ["nemo_rl_core.algorithms.dpo.loss", "nemo_rl_core.trainers.loop"],
            [
                "nemo_rl_core.algorithms.grpo.loss",
                "nemo_rl_core.algorithms.ppo.loss",
                "nemo_rl_core.api.functional",
                "nemo_rl_core.trainers.fitting",
                "nemo_rl_core.data.datasets.hub",
            ],
        ),
        (
            "tasks.evaluate",
            ["nemo_rl_core.evals.evaluate", "nemo_rl_core.backends.generation.vllm"],
            ["nemo_rl_core.algorithms.grpo.loss", "nemo_rl_core.algorithms.sft.loss"],
        ),
        (
            "tasks.prepare_data",
            ["nemo_rl_core.data.datasets.arithmetic", "nemo_rl_core.data.schemas"],
            ["nemo_rl_core.algorithms.grpo.loss", "nemo_rl_core.trainers.loop"],
        ),
    ],
)
def test_a_stage_reaches_what_it_runs(
    stage: str, reached: list[str], not_reached: list[str]
) -> None:
    found = reachable_modules(stage)
    assert set(reached) <= found
    assert not set(not_reached) & found
    assert all(name.split(".")[0] in {"nemo_rl_core", "tasks"} for name in found)


def test_packages_on_the_way_count_too() -> None:
    assert {"nemo_rl_core", "nemo_rl_core.backends.generation"} <= reachable_modules(
        "tasks.evaluate"
    )


@pytest.fixture(scope="module")
def digest_after(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of a stage in a copy of this tree in which one file has been changed."""
    copies = iter(range(100))

    def digest(stage: str, path: str, change: Callable[[str], str]) -> str:
        import subprocess
        import sys

        root = tmp_path_factory.mktemp(f"tree{next(copies)}")
        for package in ("nemo_rl_core", "tasks", "workflows"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / package, root / package, ignore=ignored)
        source = (root / path).read_text()
        assert change(source) != source or change is _same
        (root / path).write_text(change(source))
        # `tasks.caching` alone, without the package's flytekit; it reads sources, not modules.
        script = (
            "import sys, types; sys.path.insert(0, sys.argv[1]);"
            "package = types.ModuleType('tasks'); package.__path__ = [sys.argv[1] + '/tasks'];"
            "sys.modules['tasks'] = package;"
            "from tasks.caching import source_digest; print(source_digest(sys.argv[2]))"
        )
        command = [sys.executable, "-P", "-c", script, str(root), stage]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return digest


def _same(source: str) -> str:
    return source


def _commented(source: str) -> str:
    return source.replace("\n\n\n", "\n\n\n# A remark about nothing.\n\n\n", 1) + "\n# The end.\n"


def _documented(source: str) -> str:
    return source.replace('"""', '"""Said in other words. ', 1)


def _laid_out(source: str) -> str:
    return source.replace(" + ", "  +  ")


def _coded(source: str) -> str:
    return source + "\nANOTHER_CONSTANT = 1\n"


def test_where_the_tree_lies_does_not_count(digest_after: Callable[..., str]) -> None:
    here = source_digest("tasks.grpo_iteration")
    assert digest_after("tasks.grpo_iteration", LOSS, _same) == here


@pytest.mark.parametrize(
    ("change", "path"),
    [(_commented, LOSS), (_documented, LOSS), (_laid_out, "nemo_rl_core/functional/advantages.py")],
)
def test_words_and_layout_keep_the_digest(
    digest_after: Callable[..., str], change: Callable[[str], str], path: str
) -> None:
    stage = "tasks.grpo_iteration"
    assert digest_after(stage, path, change) == source_digest(stage)


@pytest.mark.parametrize(
    ("stage", "path", "counts"),
    [
        ("tasks.grpo_iteration", LOSS, True),
        ("tasks.train_sft", LOSS, False),
        ("tasks.grpo_iteration", ENGINE, True),
        ("tasks.evaluate", ENGINE, True),
        ("tasks.prepare_data", ENGINE, False),
        ("tasks.grpo_iteration", "nemo_rl_core/algorithms/sft/loss.py", False),
        ("tasks.grpo_iteration", "workflows/grpo.py", False),
        ("tasks.grpo_iteration", "tasks/grpo_iteration.py", True),
        ("tasks.grpo_iteration", "nemo_rl_core/functional/__init__.py", True),
    ],
)
def test_code_counts_where_it_is_run(
    digest_after: Callable[..., str], stage: str, path: str, counts: bool
) -> None:
    assert (digest_after(stage, path, _coded) != source_digest(stage)) == counts


def test_a_changed_constant_counts(digest_after: Callable[..., str]) -> None:
    def change(source: str) -> str:
        return source.replace("1e-6", "1e-5")

    path = "nemo_rl_core/functional/advantages.py"
    changed = digest_after("tasks.grpo_iteration", path, change)
    assert changed != source_digest("tasks.grpo_iteration")


def test_versions_of_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import caching

    versions = caching.package_versions()
    before = source_digest("tasks.export")
    monkeypatch.setattr(caching, "package_versions", lambda: {**versions, "torch": "0.0.1"})
    assert source_digest("tasks.export") != before
    # The version of this project says nothing that its source does not.
    monkeypatch.setattr(caching, "package_versions", lambda: {**versions, "nemo-rl-flow": "9"})
    assert source_digest("tasks.export") == before
