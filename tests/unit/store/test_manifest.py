import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.ancestry import ancestry, ancestry_of, recorded_ancestors, write_ancestors
from nemo_rl_core.store.git import GitState, git_state
from nemo_rl_core.store.machine import Machine, read_cpuinfo
from nemo_rl_core.store.manifest import Cost, Manifest, ParentRef, config_hash, package_versions


def _manifest(stage: str, parents: tuple[ParentRef, ...] = ()) -> Manifest:
    return Manifest(
        kind="model", format="hf", stage=stage, content_hash=f"hash-{stage}", parents=parents
    )


def _write(folder: Path, stage: str, *parents: ParentRef) -> ParentRef:
    manifest = _manifest(stage, parents)
    manifest.write(folder)
    return manifest.ref(folder)


def test_manifest_round_trip_and_no_host_name(tmp_path: Path) -> None:
    manifest = Manifest(
        kind="checkpoint",
        format="hf",
        stage="train_sft",
        content_hash="c" * 64,
        weights_hash="w" * 64,
        step=7,
        config_hash=config_hash({"a": 1}),
        config={"a": [1, {"b": None}]},
        seed=3,
        git_commit="f" * 40,
        git_dirty=True,
        packages=package_versions(),
        parents=(_manifest("prepare_data").ref(tmp_path),),
        cost=Cost(wall_seconds=1.5, tokens=10, peak_memory_gib=0.5, gpu_seconds=0, flops=1e12),
        figures={"greedy_accuracy": 0.1},
    )
    path = manifest.write(tmp_path / "artifact")
    assert path == tmp_path / "artifact" / "manifest.json"
    assert Manifest.read(path.parent) == manifest
    assert manifest.created_at.endswith("+00:00")
    assert os.uname().nodename not in (manifest.machine.cpu_model, str(manifest.machine.cores))
    assert set(json.loads(path.read_text())["machine"]) == {
        "cpu_model", "cores", "instruction_set", "threads", "driver", "variables", "processes",
            "process_variables",
    }  # fmt: skip


def test_values_chosen_for_auto_are_recorded_without_changing_the_artifact(tmp_path: Path) -> None:
    """Another kind of GPU may use another kernel; like the machine, it is not in the lineage."""
    on_gpu = _fields().model_copy(update={"choices": {"training.attention": "varlen"}})
    assert Manifest.read(on_gpu.write(tmp_path).parent).choices == {"training.attention": "varlen"}
    assert on_gpu.lasting_hash == _fields().lasting_hash


def test_a_manifest_older_than_figures_is_read(tmp_path: Path) -> None:
    path = _manifest("evaluate").write(tmp_path / "artifact")
    older = json.loads(path.read_text())
    del older["figures"], older["checksum"]
    path.write_text(json.dumps(older))
    assert Manifest.read(path.parent).figures == {}


def _fields() -> Manifest:
    return Manifest(
        kind="checkpoint",
        format="hf",
        stage="train_sft",
        name="train_sft-0123456789abcdef",
        content_hash="c" * 64,
        weights_hash="w" * 64,
        step=6,
        config_hash=config_hash({"num_steps": 6}),
        config={"num_steps": 6, "name": "modèle"},
        seed=3,
        source_digest="5e",
        parents=(_manifest("prepare_data").ref(Path("data"), "train"),),
        cost=Cost(wall_seconds=1.25, flops=1e12),
        figures={"greedy_accuracy": 0.1},
    )


def test_any_change_of_a_manifest_is_refused(tmp_path: Path) -> None:
    path = _fields().write(tmp_path)
    text = path.read_text()
    for before, after in (
        ('"num_steps": 6', '"num_steps": 999'),
        ('"wall_seconds": 1.25', '"wall_seconds": 1.5'),
        ('"greedy_accuracy": 0.1', '"greedy_accuracy": 0.9'),
        ('"role": "train"', '"role": "start"'),
        ("modèle", "modele"),
        ('"created_at": "2', '"created_at": "1'),
    ):
        assert before in text
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(StoreError, match="checksum mismatch"):
            Manifest.read(tmp_path)
    path.write_text(json.dumps(json.loads(text), indent=4))  # another layout, the same content
    assert Manifest.read(tmp_path) == _fields().model_copy(
        update={"created_at": Manifest.read(tmp_path).created_at}
    )


def test_a_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    path = _manifest("train_sft").write(tmp_path)
    content, original = path.read_bytes(), Manifest.read(tmp_path)
    for bit in range(0, len(content) * 8, 7):  # covers all eight bits of a byte
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            # Only another form of the same number, such as 1E12 for 1e12, may pass.
            assert Manifest.read(tmp_path) == original
        except StoreError:
            continue


def test_a_rebuilt_artifact_has_the_same_lasting_hash(tmp_path: Path) -> None:
    once = _fields()
    (parent,) = once.parents
    again = {
        "created_at": "2030-01-01T00:00:00+00:00",
        "cost": Cost(wall_seconds=9.0),
        "machine": Machine(cpu_model="other", cores=99),
        "git_commit": "f" * 40,
        "packages": {"torch": "9"},
        "parents": (parent.model_copy(update={"path": "/elsewhere"}),),
    }
    assert once.model_copy(update=again).lasting_hash == once.lasting_hash
    for change in (
        {"config": {"num_steps": 999}},
        {"figures": {"greedy_accuracy": 0.9}},
        {"weights_hash": "x" * 64},
        {"step": 7},
        {"source_digest": "5f"},
        {"parents": ()},
        {"parents": (parent.model_copy(update={"manifest_hash": "0" * 64}),)},
    ):
        assert once.model_copy(update=change).lasting_hash != once.lasting_hash, change


def test_a_reference_identifies_the_manifest_that_was_read(tmp_path: Path) -> None:
    manifest = _fields()
    ref = manifest.ref(tmp_path)
    assert ref.is_of(manifest)
    other = manifest.model_copy(update={"config": {"num_steps": 999}})
    assert not ref.is_of(other)
    assert not ref.is_of(manifest.model_copy(update={"content_hash": "d" * 64}))
    assert ref.model_copy(update={"manifest_hash": ""}).is_of(other), "an older reference"


def test_a_rewritten_lineage_is_detected(tmp_path: Path) -> None:
    sft = _write(tmp_path / "sft", "sft")
    export = tmp_path / "export"
    _write(export, "export", sft)
    write_ancestors(export, [tmp_path / "sft"])
    forged = Manifest.read(tmp_path / "sft").model_copy(update={"step": 999})
    forged.write(tmp_path / "sft")
    assert [each.state for each in ancestry_of(export)] == ["changed"]
    write_ancestors(export, [tmp_path / "sft"])
    (tmp_path / "sft").rename(tmp_path / "gone")
    assert [each.state for each in ancestry_of(export)] == ["changed"], "nor one that travelled"


def test_manifest_is_frozen_and_closed() -> None:
    with pytest.raises(pydantic.ValidationError):
        _manifest("a").stage = "b"
    with pytest.raises(pydantic.ValidationError, match="extra"):
        Manifest(kind="m", format="f", stage="s", content_hash="c", sead=1)


@pytest.mark.parametrize("damage", [None, "", '{"kind": "model"', '{"kind": "model"}'])
def test_an_unreadable_manifest_is_a_store_error(tmp_path: Path, damage: str | None) -> None:
    if damage is not None:
        (tmp_path / "manifest.json").write_text(damage)
    with pytest.raises(StoreError, match="not an artifact of this project"):
        Manifest.read(tmp_path)


def test_ancestry_walks_nearest_first_and_each_once(tmp_path: Path) -> None:
    data = _write(tmp_path / "data", "data")
    sft = _write(tmp_path / "sft", "sft", data)
    child = _manifest("grpo", (sft, data))
    walked = [(found.depth, found.ref.stage, found.state) for found in ancestry(child)]
    assert walked == [(1, "sft", "found"), (1, "data", "found")]
    assert ancestry(_manifest("grpo", (sft,)))[1].depth == 2


def test_ancestry_reports_unreadable_ancestors(tmp_path: Path) -> None:
    gone = ParentRef(kind="model", stage="gone", content_hash="h", path=str(tmp_path / "gone"))
    damaged = _write(tmp_path / "damaged", "damaged", gone)
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    changed = _write(tmp_path / "changed", "changed", gone)
    _write(tmp_path / "changed", "another", gone)
    walked = ancestry(_manifest("child", (gone, damaged, changed)))
    assert [found.state for found in walked] == ["missing", "damaged", "changed"]
    assert all(found.manifest is None for found in walked)


def test_ancestry_travels_with_an_artifact(tmp_path: Path) -> None:
    _write(tmp_path / "data", "data")
    data = Manifest.read(tmp_path / "data").ref(tmp_path / "data")
    sft = _write(tmp_path / "sft", "sft", data)
    write_ancestors(tmp_path / "sft", [tmp_path / "data"])
    export = tmp_path / "export"
    _write(export, "export", sft)
    write_ancestors(export, [tmp_path / "sft"])
    for folder in ("data", "sft"):
        (tmp_path / folder).rename(tmp_path / f"{folder}-gone")
    walked = ancestry(Manifest.read(export), recorded_ancestors(export))
    assert [(found.ref.stage, found.state) for found in walked] == [
        ("sft", "recorded"),
        ("data", "recorded"),
    ]
    assert [found.manifest and found.manifest.stage for found in walked] == ["sft", "data"]
    (export / "ancestors.json").write_text("[1")
    assert recorded_ancestors(export) == {}


def test_ancestry_ends_on_a_circle(tmp_path: Path) -> None:
    one = ParentRef(kind="model", stage="a", content_hash="hash-a", path=str(tmp_path / "a"))
    two = _write(tmp_path / "b", "b", one)
    _write(tmp_path / "a", "a", two)
    assert [found.ref.stage for found in ancestry(_manifest("c", (one,)))] == ["a", "b"]


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_of_a_real_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) == GitState(None, None)
    assert git_state(tmp_path / "none") == GitState(None, None)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _git(tmp_path / name, "init", "-q")
        (tmp_path / name / "a").write_text(name)
        _git(tmp_path / name, "add", "a")
        _git(tmp_path / name, "commit", "-q", "-m", name)
    commit = _git(tmp_path / "one", "rev-parse", "HEAD")
    # As set by a hook of the other repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "two" / ".git"))
    assert git_state(tmp_path / "one") == GitState(commit, dirty=False)
    (tmp_path / "one" / "new").write_text("")
    assert git_state(tmp_path / "one") == GitState(commit, dirty=True)

    # A container has the commit in a variable; an existing repository takes precedence.
    for name, value in GitState("5e1f", dirty=False).as_environment.items():
        monkeypatch.setenv(name, value)
    assert git_state(tmp_path) == GitState("5e1f", dirty=False)
    assert git_state(tmp_path / "one") == GitState(commit, dirty=True)
    assert GitState(None, None).as_environment == {}


def test_package_versions_lists_installed_packages() -> None:
    versions = package_versions()
    assert versions["pydantic"] == pydantic.VERSION
    assert versions["python"].startswith("3.")
    assert not {name for name, version in versions.items() if not version}


def test_machine_is_this_one() -> None:
    assert Machine.current().cores == os.cpu_count()
    assert Machine.current().cpu_model
    assert Machine.current(threads=7).threads == 7


def test_threads_are_the_default_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Machine.current().threads == 3
    for value in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert Machine.current().threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "model", "extensions"),
    [
        (
            "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu sse sse2 sse4_2 fma "
            "avx2 avx512f amx_bf16 sme xsaveerptr\n\nprocessor\t: 1\nmodel name\t: other\n",
            "Intel(R) Xeon(R)",
            "amx_bf16 avx2 avx512f fma sse4_2",
        ),
        ("processor\t: 0\nFeatures\t: fp asimd sve i8mm crc32\n", "", "asimd i8mm sve"),
        ("", "", ""),
    ],
)
def test_vector_extensions_of_a_processor(text: str, model: str, extensions: str) -> None:
    assert read_cpuinfo(text) == (model, extensions)


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: int
    names: frozenset[str] = frozenset()


def test_config_hash_by_hand() -> None:
    expected = hashlib.sha256(b'{"a":[1,2.5,null],"b":"x"}').hexdigest()
    assert config_hash({"b": Path("x"), "a": (1, 2.5, None)}) == expected


def test_config_hash_of_records() -> None:
    assert config_hash(ClusterConfig()) == config_hash(ClusterConfig().model_dump())
    assert config_hash(ClusterConfig()) != config_hash(ClusterConfig(num_threads=1))
    assert config_hash(Point(1, frozenset("ba"))) == config_hash({"x": 1, "names": ["a", "b"]})
    assert config_hash([Color.RED]) == config_hash(["red"])


@pytest.mark.parametrize("value", [object(), len, Point, {"a": b"x"}])
def test_config_hash_refuses_values_without_stable_json(value: object) -> None:
    with pytest.raises(TypeError, match="no stable JSON"):
        config_hash(value)


def test_config_hash_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        config_hash({"a": float("nan")})


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=5))
def test_config_hash_ignores_the_order_of_keys(config: dict[str, int | str]) -> None:
    assert config_hash(config) == config_hash(dict(reversed(config.items())))
