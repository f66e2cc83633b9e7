"""Trainer and engine that take turns on one GPU, and a full run on it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.config.training import DTensorTraining, Offload
from nemo_rl_core.distributed import session as sessions
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.gate import check_consistency
from nemo_rl_core.models.validation.logprobs import as_training_batch

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ROUNDS = 4
RECIPE = {
    "recipe": "grpo_arithmetic",
    "data": {"num_validation": 200},
    "cluster": {"shape": "one_gpu"},
    "model": {"dtype": "bfloat16"},
    "generation": {"enforce_eager": True},
    "grpo": {"num_iterations": 2, "num_steps_per_iteration": 5},
}


@pytest.fixture
def session() -> Iterator[ClusterSession]:
    yield connect(ClusterConfig(shape="one_gpu"))
    sessions.shutdown()


def used_mib() -> int:
    """Returns the memory that all processes use on the GPU, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_trainer_and_engine_agree_in_turns_and_memory_does_not_grow(
    offload: Offload, session: ClusterSession, model_1_5b: Path
) -> None:
    policy = Policy(
        session,
        TrainingSetup(
            model_folder=model_1_5b,
            optimizer=OptimizerConfig(learning_rate=1e-6),
            training=DTensorTraining(activation_checkpointing=True, offload_for_generation=offload),
            max_tokens_per_microbatch=16384,
            dtype="bfloat16",
        ),
    )
    setup = GenerationSetup(
        model_folder=model_1_5b,
        config=VllmGenerationConfig(max_new_tokens=256, max_num_seqs=256),
        max_model_len=1024,
        stop_token_ids=(2,),
        dtype="bfloat16",
    )
    engine = VllmGeneration(session, setup)
    ids = torch.randint(3, 151000, (128, 128), generator=torch.Generator().manual_seed(0))
    prompts = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((128,), 128)})
    asleep, awake = [], []
    for _ in range(NUM_ROUNDS):
        engine.update_weights(policy)
        policy.release_memory()  # a proof has moved the weights back
        engine.prepare_for_generation()
        output = engine.generate(prompts, greedy=False)
        awake.append(used_mib())
        engine.finish_generation(discards_weights=True)
        asleep.append(used_mib())
        batch = as_training_batch(output)
        batch["generation_logprobs"] = output["logprobs"][:, 1:]
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        check_consistency(batch, GateConfig())
        policy.train(batch, NLLLoss())
    sys.stderr.write(f"\n{offload}: MiB with the engine awake {awake}, asleep {asleep}\n")
    # 1.5 B weights in float32 are 5.8 GiB, and their moments twice that.
    stays = {"none": 17, "optimizer": 6, "all": 0}[offload] * 1024
    assert asleep[-1] < stays + 8 * 1024
    assert asleep[-1] - asleep[1] < 256  # once the optimizer has its moments


def test_full_run_and_a_second_one_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    command = [Path(sys.executable).with_name("pyflyte"), "run", "workflows/grpo.py", "grpo"]
    command += ["--config", tmp_path / "recipe.yaml"]
    environment = {**os.environ, "NEMO_RL_HOME": str(tmp_path / "store")}
    for state in ("ran", "CACHED"):
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert f"grpo_iteration 2  {state}" in done.stdout
