"""Runs GRPO whose scorer has a separate GPU; Ray only counts the GPUs.

    python -m tests.ray.dedicated_scorers_run [asynchronous_]reward_model|judge FOLDER

One Ray machine claims to have four GPUs, and every model computes on the CPU. The last printed line
has the values that `tests/ray/test_dedicated_scorers_run.py` checks for each run, as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.config.model import ModelFromConfig, TextModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.callbacks import Callback

NUM_GPUS = 4
NUM_STEPS = 2
ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
SETTINGS: dict[str, Any] = {
    "cluster": {"shape": "cluster", "num_gpus_per_node": NUM_GPUS, "num_threads": 1},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": NUM_STEPS,
    "learning_rate": 0.01,
}
OWN: dict[str, Any] = {"own": 1}


def policy(folder: Path) -> Path:
    """Creates the small model of sums, with heads that vLLM supports on a CPU."""
    config = ModelFromConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2)
    materialize(config, folder, seed=0)
    return folder


def reward_model(folder: Path, start: Path) -> Path:
    """Creates a scalar head on random weights."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    load_tokenizer(start).save_pretrained(folder)
    return folder


def judge(folder: Path) -> Path:
    """Creates a model that replies `Mark: D`, where digit D depends on the question's digits.

    Each token of the reply follows from the one before, starting at the `R` that ends a question.
    Attention without keys averages the codes of all digits; the head maps the mean to D.
    """
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    config = TextModelFromConfig(
        hidden_size=64, intermediate_size=64, max_position_embeddings=1024, **sizes
    )
    materialize(config, folder, seed=0)
    tokenizer = load_tokenizer(folder)
    described = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(described)
    weights = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] += 1
    (_, *reply), (_, *digits) = (tokenizer.encode(text) for text in ("RMark: ", "0123456789"))
    index_of = {token: index for index, token in enumerate([*reply, *digits])}
    random = torch.Generator().manual_seed(2)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    for token, index in index_of.items():
        embedding[token, index] = 1.0
    for before, after in pairwise(reply):
        head[after, index_of[before]] = 10.0
    codes, means = slice(20, 32), slice(32, 44)
    for digit in digits:
        embedding[digit, codes] = torch.randn(12, generator=random)
        head[digit, index_of[reply[-1]]] = 10.0
        head[digit, means] = 10 * torch.randn(12, generator=random)
        head[tokenizer.eos_token_id, index_of[digit]] = 10.0
    attention = "model.layers.0.self_attn"
    weights[f"{attention}.v_proj.weight"][means, codes] = torch.eye(12)
    weights[f"{attention}.o_proj.weight"][means, means] = torch.eye(12)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    return folder


def _where(worker: Any) -> tuple[str, str]:
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


class Locations(Callback):
    """Locations of all workers and actors of a run after its first step.

    Attributes:
        by_group: Machine and GPU of each worker, by group.
    """

    def __init__(self) -> None:
        self.by_group: dict[str, list[tuple[str, str]]] = {}

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        import ray

        for name, (_, group) in trainer.session._groups.items():
            self.by_group[name] = group.run_all_workers_single_data("__ray_call__", _where)
        pool = getattr(trainer.sampler._scorer, "_pool", None)  # of a reward model
        if pool is not None:
            actors = [*pool._idle, *(call.actor for call in pool._busy.values())]
            calls = [actor.__ray_call__.remote(_where) for actor in actors]
            self.by_group["reward model"] = ray.get(calls)
        self.session = trainer.session


def trained(
    kind: type[GRPOTrainer], start: Path, environment: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], ClusterSession]:
    """Runs a training; returns its results and its session."""
    locations = Locations()
    trainer = kind.from_pretrained(start, environment=environment, **SETTINGS, **settings)
    result = trainer.fit(ROWS, callbacks=[locations])
    records = RolloutRecords(result.folder / "rollouts")
    rollouts = [records.load(step) for step in range(1, NUM_STEPS + 1)]
    outcome = {
        "folder": str(result.folder),
        "locations": locations.by_group,
        "rewards": [[each.reward for each in of_step] for of_step in rollouts],
        "texts": [[each.text for each in of_step] for of_step in rollouts],
        "errors": [each.error for of_step in rollouts for each in of_step if each.error],
        "metrics": result.metrics,
        "bundles": sorted(locations.session._dedicated),
    }
    return outcome, locations.session


def synchronous(start: Path, environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Trains the same run with a scorer on a separate GPU, and with one on the trainer's."""
    generation = {"backend": "hf", "max_new_tokens": 6, "placement": OWN}
    outcomes = {}
    for name, environment in zip(("own", "colocated"), environments, strict=True):
        outcomes[name], session = trained(GRPOTrainer, start, environment, generation=generation)
    return outcomes | _freed(session)


def asynchronous(start: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """Trains with an asynchronous engine while a model on a separate GPU scores."""
    outcome, session = trained(
        AsyncGRPOTrainer,
        start,
        environment,
        generation={"max_new_tokens": 6, "max_num_seqs": 64, "kv_cache_gib": 1, "placement": OWN},
        asynchronous={"max_staleness": 1},
        loss={"importance": {"kind": "truncated"}},
    )
    return {"own": outcome} | _freed(session)


def _freed(session: ClusterSession) -> dict[str, Any]:
    """Returns Ray's resources after release: free GPUs and total GPUs."""
    import ray

    session.shutdown()
    groups = ray.util.placement_group_table().values()
    states = sorted({each["state"] for each in groups})
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU") != NUM_GPUS and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"free GPUs": ray.available_resources().get("GPU"), "groups": states}


def scorer(kind: str, folder: Path, start: Path) -> dict[str, Any]:
    """Returns the environment of a scoring model on the trainer's GPU."""
    if kind == "reward_model":
        return {"kind": "reward_model", "model": str(reward_model(folder / "scorer", start))}
    model = {"kind": "model", "model": str(judge(folder / "judge")), "max_model_len": 900}
    return {"kind": "llm_judge", "max_new_tokens": 16, "judge": {**model, "kv_cache_gib": 1}}


def on_separate_gpu(environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment with its model on a separate GPU."""
    if "judge" in environment:
        return environment | {"judge": environment["judge"] | {"placement": OWN}}
    return environment | {"placement": OWN}


def main(case: str, folder: Path) -> None:
    """Runs a case on a separate cluster."""
    import ray
    from ray.cluster_utils import Cluster

    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    machines.add_node(num_cpus=8, num_gpus=NUM_GPUS)
    machines.connect()
    start = policy(folder / "policy")
    kind = case.removeprefix("asynchronous_")
    environment = scorer(kind, folder, start)
    separate = on_separate_gpu(environment)
    outcomes = (
        synchronous(start, [separate, environment])
        if kind == case
        else asynchronous(start, separate)
    )
    sys.stdout.write("FOUND " + json.dumps(outcomes) + "\n")
    ray.shutdown()
    machines.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
