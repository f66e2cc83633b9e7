"""`gc` on real folders: what is removed and kept, with concurrent processes and after kills."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.labels import PINNED
from nemo_rl_core.maintenance.collect import Removed, make_plan, remove
from nemo_rl_core.maintenance.disk import Snapshot, allocated
from nemo_rl_core.maintenance.retention import RetentionPolicy
from nemo_rl_core.maintenance.survey import survey
from nemo_rl_core.store.store import Store

DAY = 86400.0
REPOSITORY = Path(__file__).resolve().parents[3]
Small = Any


def _collect(store: Store, policy: RetentionPolicy) -> Removed:
    return remove(store, policy, make_plan(store, policy))


def test_gc_removes_nothing_while_every_run_is_kept(small: Small, lineage: dict[str, str]) -> None:
    assert make_plan(small.store, RetentionPolicy()).is_empty


def test_gc_removes_artifacts_that_no_kept_run_needs(small: Small, lineage: dict[str, str]) -> None:
    plan = make_plan(small.store, RetentionPolicy(keep_runs=2))
    assert (plan.runs, plan.artifacts) == (("run1",), (lineage["first"],))
    before = small.artifacts()
    done = remove(small.store, RetentionPolicy(keep_runs=2), plan)
    assert before - small.artifacts() == {lineage["first"]}
    assert small.runs() == {"run2", "run3"}
    assert done.in_use == ()
    # Only the third run needs the checkpoint that it continued, which needs its data.
    _collect(small.store, RetentionPolicy(keep_runs=1))
    assert small.artifacts() == {lineage[name] for name in ("data", "second", "third")}
    assert small.runs() == {"run3"}
    assert make_plan(small.store, RetentionPolicy()).is_empty, (
        "the history remembers runs that went"
    )
    _collect(small.store, RetentionPolicy(keep_runs=0))
    assert (small.artifacts(), small.runs()) == (set(), set())


def test_freed_bytes_equal_the_difference_of_du(small: Small, lineage: dict[str, str]) -> None:
    def du() -> int:
        listed = subprocess.run(
            ["du", "-s", "-B1", small.store.root], capture_output=True, text=True, check=True
        )
        return int(listed.stdout.split()[0])

    artifacts = small.store.artifacts
    # A file with two names is freed only with the last of them.
    os.link(artifacts / lineage["first"] / "rows", artifacts / lineage["second"] / "again")
    plan = make_plan(small.store, RetentionPolicy(keep_runs=2))
    before = du()  # reading the history leaves its shared-memory file
    assert plan.num_bytes == before
    files = [artifacts / lineage["first"], small.store.runs / "run1"]
    linked = allocated(artifacts / lineage["first"] / "rows")
    assert plan.freed_bytes == sum(map(allocated, files)) - linked
    # Records and locks in work/ are removed, too; each is empty or one block.
    done = remove(small.store, RetentionPolicy(keep_runs=2), plan).plan
    assert 0 <= before - du() - done.freed_bytes <= 8192
    assert Snapshot(small.store.root).num_bytes == du()


def test_a_pinned_run_stays(small: Small, lineage: dict[str, str]) -> None:
    (small.store.runs / "run1" / PINNED).touch()
    _collect(small.store, RetentionPolicy(keep_runs=0))
    assert small.runs() == {"run1"}
    assert small.artifacts() == {lineage["data"], lineage["first"]}


def test_max_size_drops_the_oldest_first(small: Small, lineage: dict[str, str]) -> None:
    total_bytes = make_plan(small.store, RetentionPolicy()).num_bytes
    assert make_plan(small.store, RetentionPolicy(max_bytes=total_bytes)).is_empty
    plan = make_plan(small.store, RetentionPolicy(max_bytes=total_bytes - 1))
    assert (plan.runs, plan.artifacts) == (("run1",), (lineage["first"],))
    plan = make_plan(small.store, RetentionPolicy(max_bytes=total_bytes - 150 * 1024))
    assert plan.runs == ("run1", "run2", "run3")
    # Children are removed before their parents.
    order = [plan.artifacts.index(lineage[name]) for name in ("third", "second", "data")]
    assert order == sorted(order)


def test_folders_in_configs_and_inputs_of_runs_are_kept(small: Small) -> None:
    named = small.artifact("export", days_old=50)
    reward_model = small.artifact("export", days_old=50)
    model = {"name": str(small.store.artifacts / named / "model")}
    small.run("older", named, reward_model, days_old=50)
    made = small.artifact("train_sft", days_old=1, model=model)
    small.run(
        "newer",
        made,
        days_old=1,
        config={"reward_model": str(small.store.artifacts / reward_model)},
    )
    small.store.release()
    assert make_plan(small.store, RetentionPolicy(keep_runs=1)).artifacts == ()


def test_needed_artifacts_are_kept_in_a_moved_store(small: Small, tmp_path: Path) -> None:
    named = small.artifact("export", days_old=50)
    data = small.artifact("prepare_data", days_old=50)
    small.run("older", named, data, days_old=50)
    model = {"name": str(small.store.artifacts / named / "model")}
    made = small.artifact("train_sft", data, days_old=1, model=model)
    small.run("newer", made, days_old=1)
    small.store.release()
    moved = Store(small.store.root.rename(tmp_path / "elsewhere"))
    plan = make_plan(moved, RetentionPolicy(keep_runs=1))
    assert (plan.runs, plan.artifacts) == (("older",), ())


def test_a_removed_artifact_is_rebuilt(small: Small) -> None:
    small.artifact("train_sft", days_old=1)
    small.store.release()
    key = f"{0:032x}"
    assert small.store.published("train_sft", key)
    small.store.release()
    _collect(small.store, RetentionPolicy(keep_runs=0))
    assert small.store.published("train_sft", key) is None
    assert list(small.store.work.iterdir()) == [], "its record and its lock went, too"


def test_artifacts_in_use_by_this_process_are_kept(small: Small, lineage: dict[str, str]) -> None:
    assert small.store.hold(small.store.artifacts / lineage["second"])
    _collect(small.store, RetentionPolicy(keep_runs=0))
    assert small.artifacts() == {lineage["second"], lineage["data"]}


def test_artifacts_locked_after_planning_are_kept_with_their_ancestors(
    small: Small, lineage: dict[str, str]
) -> None:
    plan = make_plan(small.store, RetentionPolicy(keep_runs=0))
    assert lineage["third"] in plan.artifacts
    small.store.hold(small.store.artifacts / lineage["third"])
    remove(small.store, RetentionPolicy(keep_runs=0), plan)
    assert small.artifacts() == {lineage[name] for name in ("data", "second", "third")}


def test_a_running_run_is_kept(small: Small, lineage: dict[str, str], spawn: Any) -> None:
    script = """
import sys, time
from pathlib import Path
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.store import Store
store = Store(Path(sys.argv[1]))
writer = HistoryWriter(store, "works")
inputs = {"model": sys.argv[2]}
log = store.runs / "works" / "run.log"
writer.begin(NewExecution("grpo", "", [], inputs, log))
print("begun", flush=True)
time.sleep(60)
"""
    child = spawn(script, small.store.root, small.store.artifacts / lineage["first"])
    assert child.stdout.readline() == "begun\n"
    # So that it is not kept because it is recent.
    (run,) = [run for run in survey(small.store).runs if run.name == "works"]
    assert run.running
    later = time.time() + 1000
    plan = make_plan(small.store, RetentionPolicy(keep_runs=0), now=later)
    assert "works" not in plan.runs
    assert lineage["first"] not in plan.artifacts
    assert lineage["data"] not in plan.artifacts
    child.kill()
    child.wait()


def test_with_an_unreadable_history_only_leftovers_are_removed(
    small: Small, lineage: dict[str, str]
) -> None:
    path_of(small.store).write_bytes(b"no database at all" * 100)
    (small.store.artifacts / ".x-1.abc.discarded~").mkdir()
    done = _collect(small.store, RetentionPolicy(keep_runs=0))
    assert "cannot be read" in done.plan.problem
    assert set(lineage.values()) == small.artifacts()


def test_old_unlocked_work_of_killed_runs_is_removed(small: Small, spawn: Any) -> None:
    for name in ("sft-young", "sft-old", "sft-locked"):
        (small.store.work / name).mkdir()
        (small.store.work / name / "checkpoint").write_text("x" * 5000)
        (small.store.work / f"{name}.lock").touch()
    long_ago = time.time() - 15 * DAY
    for name in ("sft-old", "sft-locked"):
        for path in (small.store.work / name / "checkpoint", small.store.work / name):
            os.utime(path, (long_ago, long_ago))
    script = """
import sys, time
from pathlib import Path
from nemo_rl_core.store.store import Store
with Store(Path(sys.argv[1])).work_folder("sft", "locked"):
    print("locked", flush=True)
    time.sleep(60)
"""
    holder = spawn(script, small.store.root)
    assert holder.stdout.readline() == "locked\n"
    done = _collect(small.store, RetentionPolicy())
    assert done.plan.work == ("sft-old",)
    left = sorted(path.name for path in small.store.work.iterdir())
    assert left == ["sft-locked", "sft-locked.lock", "sft-young", "sft-young.lock"]


def test_leftovers_are_removed_but_not_files_being_written(small: Small) -> None:
    half = small.store.artifacts / ".sft-1.0a.discarded~"
    half.mkdir()
    (half / "weights").write_text("x")
    written = small.store.root / ".recipe.0a.aside~"
    written.write_text("")
    torn = small.store.root / ".recipe.0b.aside~"
    torn.write_text("")
    os.utime(torn, (time.time() - 7200,) * 2)
    scratch = small.store.cache / "sandbox" / "local_flytekit" / "abc"
    scratch.mkdir(parents=True)
    os.utime(scratch, (time.time() - 15 * DAY,) * 2)
    install = small.store.cache / "packages" / ".0c.1d.aside~"
    install.mkdir(parents=True)
    os.utime(install, (time.time() - 7200,) * 2)
    small.store.verified.mkdir()
    made = small.artifact("train_sft")
    kept, stale = (small.store.verified / f"{name}.json" for name in (made, "train_sft-gone"))
    for memory in (kept, stale):
        memory.write_text("{}")
    small.store.hold(small.store.artifacts / made)
    done = _collect(small.store, RetentionPolicy())
    assert set(done.plan.leftovers) == {half, torn, scratch, install, stale}
    assert not any(path.exists() for path in (half, torn, scratch, install, stale))
    assert written.exists() and kept.exists()


def test_a_process_waiting_for_a_removed_lock_creates_a_new_one(small: Small, spawn: Any) -> None:
    """Otherwise two processes would work in one folder, one with the removed lock."""
    script = """
import sys, time
from pathlib import Path
from nemo_rl_core.store import locks
with locks.locked(Path(sys.argv[1]), "sft"):
    print(Path(sys.argv[1]).read_text(), flush=True)
    time.sleep(60)
"""
    from nemo_rl_core.store import locks

    lock = small.store.work / "sft-1.lock"
    with locks.locked(lock, "sft"):
        waiter = spawn(script, lock)
        assert "waiting for process" in waiter.stderr.readline()
        lock.unlink()
    assert int(waiter.stdout.readline()) == waiter.pid
    with locks.locked_if_free(lock) as free:
        assert not free


COLLECT = """
import sys
from pathlib import Path
from nemo_rl_core.store.store import Store
from nemo_rl_core.maintenance.collect import make_plan, remove
from nemo_rl_core.maintenance.retention import RetentionPolicy
store = Store(Path(sys.argv[1]))
policy = RetentionPolicy(keep_runs=1)
"""


KILLED = """
sys.dont_write_bytecode = True
from nemo_rl_core.maintenance.collect import make_plan, remove
from nemo_rl_core.maintenance.retention import RetentionPolicy
policy = RetentionPolicy(keep_runs=1)
remove(Store(root), policy, make_plan(Store(root), policy))
"""


@pytest.mark.slow
def test_after_a_kill_at_any_moment_every_artifact_is_complete_or_gone(
    small: Small, lineage: dict[str, str], run_killed_at: Callable[[str, int, Path], bool]
) -> None:
    """Each kill is a further call on the same store; the last call completes the removal."""
    needed = {lineage[name] for name in ("data", "second", "third")}
    moment, killed = 0, True
    while killed:
        moment += 1
        killed = run_killed_at(KILLED, moment, small.store.root)
        visible = {name for name in small.artifacts() if name[0] != "."}
        assert needed <= visible
        for name in visible:
            files = {path.name for path in (small.store.artifacts / name).iterdir()}
            assert files == {"rows", "model", "summary.txt", "manifest.json"}
        assert moment < 60
    assert moment > 3
    assert small.artifacts() == needed
    assert small.runs() == {"run3"}


@pytest.mark.slow
def test_gc_with_concurrent_users_and_makers_of_the_same_artifacts(
    small: Small, spawn: Any
) -> None:
    """No process loses an artifact that it uses while everything is collected in a loop."""
    user = """
import sys, time
from pathlib import Path
from nemo_rl_core.store import files
from nemo_rl_core.store.store import Store
store = Store(Path(sys.argv[1]))
end = time.monotonic() + 4
made = uses = 0
while time.monotonic() < end:
    for key in ("a", "b", "c"):
        with store.work_folder("sft", key) as folder:
            path = store.published("sft", key)
            if path is None:
                for part in range(20):
                    (folder / str(part)).write_text(key * 100)
                path = store.publish(folder, stage="sft", content_hash=key.encode().hex() * 8)
                made += 1
        for part in range(20):
            assert (path / str(part)).read_text() == key * 100
        uses += 1
    store.release()
print(made, uses)
"""
    users = [spawn(user, small.store.root) for _ in range(2)]
    removed = 0
    while any(child.poll() is None for child in users):
        removed += len(_collect(small.store, RetentionPolicy(keep_runs=0)).plan.artifacts)
    outcomes = [child.communicate() for child in users]
    assert [error for _, error in outcomes if "Traceback" in error] == []
    made = sum(int(output.split()[0]) for output, _ in outcomes)
    assert removed > 3, "the loop did remove what others made"
    assert made >= removed
    _collect(small.store, RetentionPolicy(keep_runs=0))
    assert list(small.store.artifacts.iterdir()) == []


def test_two_collections_at_once(small: Small, lineage: dict[str, str], spawn: Any) -> None:
    script = COLLECT + "print(len(remove(store, policy, make_plan(store, policy)).plan.runs))"
    children = [spawn(script, small.store.root) for _ in range(3)]
    outcomes = [child.communicate(timeout=500) for child in children]
    assert [error for _, error in outcomes if error] == []
    assert small.runs() == {"run3"}


def test_the_plan_is_json(small: Small, lineage: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from workflows.cli import main; main()", "gc", "--json"]
    command += ["--keep-runs", "2", "--yes"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=True
    )
    output = json.loads(done.stdout)
    assert output["runs"] == ["run1"]
    assert output["artifacts"] == [lineage["first"]]
    assert output["left_bytes"] == output["num_bytes"] - output["freed_bytes"] > 0
    assert small.runs() == {"run2", "run3"}


def test_gc_works_on_a_full_disk(small_disk: Path) -> None:
    store = Store(small_disk)
    for key in ("a", "b"):
        with store.work_folder("sft", key) as folder:
            (folder / "weights").write_bytes(b"x" * 300_000)
            store.publish(folder, stage="sft", content_hash=key.encode().hex() * 8)
    store.release()
    filler = small_disk / "models.fill"
    with suppress(OSError):
        filler.write_bytes(b"x" * 2**20)
    assert shutil.disk_usage(small_disk).free == 0
    done = _collect(store, RetentionPolicy(keep_runs=0))
    assert len(done.plan.artifacts) == 2
    assert shutil.disk_usage(small_disk).free >= 600_000
