"""Damage of every kind on real artifacts is detected and can be set aside."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import path_of
from nemo_rl_core.maintenance.verify import repair, verify
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.manifest import Manifest, config_hash
from nemo_rl_core.store.store import CARD, Store
from tasks.cli.store.verify import verify as command

Small = Any
Lineage = dict[str, str]


def _problems(store: Store, *names: str) -> list[tuple[str, str]]:
    return [(each.path, each.state) for each in verify(store, names).findings]


def test_a_sound_store(small: Small, lineage: Lineage) -> None:
    verdict = verify(small.store)
    assert (verdict.num_artifacts, verdict.findings, verdict.is_sound) == (4, (), True)
    folders = [path for path in small.store.artifacts.rglob("*") if path.is_file()]
    assert verdict.num_bytes == sum(path.stat().st_size for path in folders)


def test_a_model_with_its_card_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `export`: the card is in the folder of the weights, but not one of them."""
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))

    def work(folder: Path) -> StageResult:
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_text("weights")
        (folder / "model" / CARD).write_text("took 3 s")
        return StageResult("model", "hf")

    folder = produce(StageInputs("export", {}), work)
    assert _problems(Store(tmp_path)) == []
    (folder / "model" / "model.safetensors").write_text("other weights")
    (found,) = verify(Store(tmp_path)).findings
    problems = found.problem.split("; ")
    assert [each.split(" was ")[0] for each in problems] == [
        "the hash of its content",
        "the hash of its weights",
    ]


def _flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "rows").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rows").write_bytes(data)


def _lose_a_file(folder: Path) -> None:
    (folder / "model" / "weights").unlink()


def _add_a_file(folder: Path) -> None:
    (folder / "more").touch()


def _tear_the_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _other_weights_hash(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(fields | {"weights_hash": "0" * 64}))


@pytest.mark.parametrize(
    "damage",
    [
        _flip_a_bit, _lose_a_file, _add_a_file, _tear_the_manifest, _lose_the_manifest,
        _other_weights_hash,
    ],
)  # fmt: skip
def test_damage_is_found_and_set_aside(
    small: Small, lineage: Lineage, damage: Callable[[Path], None]
) -> None:
    name = lineage["third"]
    damage(small.store.artifacts / name)
    verdict = verify(small.store)
    assert [(each.path, each.state) for each in verdict.findings] == [(f"artifacts/{name}", "fail")]
    assert not verdict.is_sound
    done = repair(small.store, verdict)
    assert done.is_sound
    assert name not in small.artifacts()
    (aside,) = (small.store.root / "damaged").iterdir()
    assert aside.name.startswith(name)
    # Its stage runs again; only a record without an artifact remains.
    assert small.store.published("grpo_iteration", f"{3:032x}") is None
    assert {state for _, state in _problems(small.store)} == {"warn"}


def test_an_artifact_in_use_is_not_set_aside(small: Small, lineage: Lineage) -> None:
    _flip_a_bit(small.store.artifacts / lineage["third"])
    small.store.hold(small.store.artifacts / lineage["third"])
    done = repair(small.store, verify(small.store))
    assert not done.is_sound
    assert "a process uses it" in done.findings[0].fix
    assert lineage["third"] in small.artifacts()


def test_a_missing_or_changed_parent_is_a_warning(small: Small, lineage: Lineage) -> None:
    data, other = (small.store.artifacts / lineage[name] for name in ("data", "first"))
    shutil.rmtree(data)
    findings = verify(small.store, [lineage["second"]]).findings
    assert [(each.state, each.problem) for each in findings] == [
        ("warn", f"its parent {data.name} is gone")
    ]
    shutil.copytree(other, data)
    (finding,) = verify(small.store, [lineage["second"]]).findings
    assert (finding.state, finding.problem) == (
        "warn",
        f"its parent {data.name} has another content hash now",
    )


def test_settings_are_compared_with_their_hash(small: Small, lineage: Lineage) -> None:
    folder = small.store.artifacts / lineage["third"]
    # With a valid checksum, as if forged deliberately.
    Manifest.read(folder).model_copy(update={"config": {"num_steps": 999}}).write(folder)
    (found,) = verify(small.store).findings
    assert (found.path, found.state) == (f"artifacts/{folder.name}", "fail")
    assert found.problem.startswith("the hash of its settings was")


def test_a_rewritten_manifest_differs_from_the_one_that_children_recorded(
    small: Small, lineage: Lineage
) -> None:
    folder = small.store.artifacts / lineage["data"]
    config = {"num_steps": 999}
    forged = {"config": config, "config_hash": config_hash(config)}
    Manifest.read(folder).model_copy(update=forged).write(folder)
    verdict = verify(small.store)
    # Reported once, despite two children.
    assert [(each.path, each.state, each.problem) for each in verdict.findings] == [
        (
            f"artifacts/{folder.name}",
            "fail",
            "its manifest differs from the one that its children were made from",
        )
    ]
    assert repair(small.store, verdict).is_sound
    assert not folder.exists()


def test_a_rebuilt_parent_is_sound(small: Small, lineage: Lineage) -> None:
    folder = small.store.artifacts / lineage["data"]
    later = {"created_at": "2030-01-01T00:00:00+00:00", "git_commit": "f" * 40}
    Manifest.read(folder).model_copy(update=later).write(folder)
    assert verify(small.store).findings == ()


def test_a_damaged_stage_cache(small: Small, lineage: Lineage) -> None:
    path = small.store.cache / "flyte" / "cache.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE results (key, value)")
        database.executemany("INSERT INTO results VALUES (?, ?)", [("key", "x" * 3000)] * 9)
        database.commit()
    assert verify(small.store).findings == ()
    content = bytearray(path.read_bytes())
    for damage in (content[:4096] + b"\0" * (len(content) - 4096), b"no database" * 100):
        path.write_bytes(damage)
        (found,) = verify(small.store).findings
        assert (found.path, found.state) == ("cache/flyte/cache.db", "fail")
        assert str(path.parent) in found.fix
        assert not repair(small.store, verify(small.store)).is_sound, "runs may be using it"


def test_a_moved_store_is_sound(small: Small, lineage: Lineage) -> None:
    small.store.release()
    moved = Store(small.store.root.rename(small.store.root.with_name("moved")))
    assert verify(moved).findings == ()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"artifact": "train_sft-1"}', '{"artifact": "x-0123", "content_hash": "4567"}'],
)
def test_a_damaged_record_of_work(small: Small, lineage: Lineage, text: str) -> None:
    record = small.store.work / f"train_sft-{1:032x}.done"
    record.write_text(text)
    verdict = verify(small.store)
    assert [(each.path, each.state) for each in verdict.findings] == [
        (f"work/{record.name}", "fail")
    ]
    assert repair(small.store, verdict).is_sound
    assert not record.exists()


def test_a_damaged_history(small: Small, lineage: Lineage) -> None:
    path = path_of(small.store)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("UPDATE artifacts SET content_hash = 'other' WHERE id LIKE 'prepare%'")
        database.execute("DELETE FROM executions WHERE id = 'run1'")
        database.commit()
    findings = verify(small.store).findings
    assert {(each.path, each.state) for each in findings} == {("history.db", "fail")}
    assert "refer to missing rows" in findings[0].problem
    assert findings[1].problem == f"it records {lineage['data']} with another content hash"
    assert not repair(small.store, verify(small.store)).is_sound, "runs may be writing it"
    path.write_bytes(b"no database" * 100)
    (finding,) = verify(small.store).findings
    assert "history.db* away" in finding.fix


def test_names_choose_artifacts(small: Small, lineage: Lineage) -> None:
    third = small.store.artifacts / lineage["third"]
    _flip_a_bit(third)
    assert _problems(small.store, lineage["data"]) == []
    for name in (lineage["third"], "grpo_iter", str(third), str(third / "model" / "weights")):
        assert _problems(small.store, name) == [(f"artifacts/{third.name}", "fail")]
    with pytest.raises(StoreError, match="no artifact that begins with 'dpo'"):
        verify(small.store, ["dpo"])
    with pytest.raises(StoreError, match="several artifacts begin with 'train_sft'"):
        verify(small.store, ["train_sft"])


def test_the_command_exits_with_1_and_prints_the_fix(small: Small, lineage: Lineage) -> None:
    runner = CliRunner()
    assert "nothing damaged" in runner.invoke(command).output
    weights = small.store.artifacts / lineage["third"] / "model" / "weights"
    weights.write_bytes(weights.read_bytes() + b"\0")  # part of the content and of the model
    result = runner.invoke(command)
    assert result.exit_code == 1
    assert f"fail      artifacts/{lineage['third']}\n" in result.output
    assert "fix: `nemo-rl verify --repair`" in result.output
    assert "4 artifacts" in result.output and "1 damaged" in result.output
    result = runner.invoke(command, ["--json"])
    assert json.loads(result.output)["is_sound"] is False
    result = runner.invoke(command, ["--repair"])
    assert (result.exit_code, "repaired  artifacts/" in result.output) == (0, True)


def test_volatile_files_may_change(small: Small) -> None:
    """Files with times may change, since they are not part of an artifact's content."""
    name = small.artifact("train_sft")
    (small.store.artifacts / name / "metrics.jsonl").write_text("{}\n")
    assert verify(small.store).is_sound
    assert Manifest.read(small.store.artifacts / name).stage == "train_sft"
