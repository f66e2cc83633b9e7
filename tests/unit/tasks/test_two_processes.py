"""Two real commands run stages without Ray on one store during garbage collection."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_core.maintenance.collect import make_plan, remove
from nemo_rl_core.maintenance.retention import RetentionPolicy
from nemo_rl_core.maintenance.verify import verify
from nemo_rl_core.store.store import Store

REPOSITORY = Path(__file__).resolve().parents[3]
WORKFLOW = """
import workflows
from flytekit import workflow
from tasks.artifacts import Dataset
from tasks.recipes.sft import SFTRecipe
from tasks.plan_tasks.sft import plan_sft
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model

@workflow
def prepare(config: SFTRecipe) -> Dataset:
    stages = plan_sft(config=config)
    model = prepare_model(config=stages.model)
    return prepare_data(config=stages.data, tokenizer=model.tokenizer).train
"""


@pytest.mark.thorough
def test_two_commands_make_each_artifact_once_and_lose_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "prepare.py").write_text(WORKFLOW)
    data = {"kind": "arithmetic", "num_train": 64, "num_validation": 16, "max_operand": 9}
    model, sft = {"kind": "from_config"}, {"global_batch_size": 64}
    config = json.dumps({"model": model, "data": data, "sft": sft})
    pyflyte = Path(sys.executable).with_name("pyflyte")
    running = [
        subprocess.Popen(
            [pyflyte, "run", tmp_path / "prepare.py", "prepare", "--config", config],
            cwd=tmp_path,
            env={**os.environ, "NEMO_RL_HOME": str(store.root), "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    garbage, removed = 0, []
    while all(process.poll() is None for process in running):
        (store.artifacts / f"garbage-{garbage:016x}").mkdir(parents=True)
        garbage += 1
        # Everything that no process has locked; the runs themselves continue.
        plan = make_plan(store, RetentionPolicy(keep_runs=0))
        removed += remove(store, RetentionPolicy(keep_runs=0), plan).plan.artifacts
        time.sleep(0.5)
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert garbage > 3
    assert sorted(removed) == [f"garbage-{number:016x}" for number in range(garbage)]
    stages = sorted(path.name.rpartition("-")[0] for path in store.artifacts.iterdir())
    assert stages == ["prepare_data", "prepare_data", "prepare_model", "tokenizer"]
    assert len(list(store.runs.iterdir())) == 2
    assert verify(store).findings == ()
