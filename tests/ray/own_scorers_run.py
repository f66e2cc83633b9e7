"""GRPO on GPUs that are only counted, whose scorer has one of its own; a program of its own.

    python -m tests.ray.own_scorers_run [asynchronous_]reward_model|judge FOLDER

One machine of Ray says to have four GPUs, and every model computes on the CPU. The last line that
is printed has what `tests/ray/test_own_scorers_run.py` holds of each run, as JSON.
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
    """The small model of sums, with heads that vLLM computes on a CPU."""
    config = ModelFromConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2)
    materialize(config, folder, seed=0)
    return folder


def reward_model(folder: Path, start: Path) -> Path:
    """A scalar head on random weights."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    load_tokenizer(start).save_pretrained(folder)
    return folder


def judge(folder: Path) -> Path:
    """A model that replies `Mark: D`, where the digit depends on those of the question.

    Each token of the reply follows from the one before, from the `R` that a question ends with on.
    Attention without keys takes the mean of the codes of all digits, of which the head makes D.
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
    known = {token: place for place, token in enumerate([*reply, *digits])}
    random = torch.Generator().manual_seed(2)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    for token, place in known.items():
        embedding[token, place] = 1.0
    for before, after in pairwise(reply):
        head[after, known[before]] = 10.0
    codes, means = slice(20, 32), slice(32, 44)
    for digit in digits:
        embedding[digit, codes] = torch.randn(12, generator=random)
        head[digit, known[reply[-1]]] = 10.0
        head[digit, means] = 10 * torch.randn(12, generator=random)
        head[tokenizer.eos_token_id, known[digit]] = 10.0
    attention = "model.layers.0.self_attn"
    weights[f"{attention}.v_proj.weight"][means, codes] = torch.eye(12)
    weights[f"{attention}.o_proj.weight"][means, means] = torch.eye(12)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    return folder


def _where(worker: Any) -> tuple[str, str]:
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


class Places(Callback):
    """Where all workers and actors of a run are after its first step.

    Attributes:
        found: The machine and the GPU of each, by group.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[str, str]]] = {}

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        import ray

        for name, (_, group) in trainer.session._groups.items():
            self.found[name] = group.run_all_workers_single_data("__ray_call__", _where)
        pool = getattr(trainer.sampler._scorer, "_pool", None)  # of a reward model
        if pool is not None:
            actors = [*pool._idle, *(call.actor for call in pool._busy.values())]
            calls = [actor.__ray_call__.remote(_where) for actor in actors]
            self.found["reward model"] = ray.get(calls)
        self.session = trainer.session


def trained(
    kind: type[GRPOTrainer], start: Path, environment: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], ClusterSession]:
    """What a run has left, and its session."""
    places = Places()
    trainer = kind.from_pretrained(start, environment=environment, **SETTINGS, **settings)
    result = trainer.fit(ROWS, callbacks=[places])
    records = RolloutRecords(result.folder / "rollouts")
    rollouts = [records.load(step) for step in range(1, NUM_STEPS + 1)]
    found = {
        "folder": str(result.folder),
        "places": places.found,
        "rewards": [[each.reward for each in of_step] for of_step in rollouts],
        "texts": [[each.text for each in of_step] for of_step in rollouts],
        "errors": [each.error for of_step in rollouts for each in of_step if each.error],
        "metrics": result.metrics,
        "beside": sorted(places.session._beside),
    }
    return found, places.session


def synchronous(start: Path, environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same run with a scorer on a GPU of its own, and beside the trainer."""
    generation = {"backend": "hf", "max_new_tokens": 6, "placement": OWN}
    found = {}
    for name, environment in zip(("own", "colocated"), environments, strict=True):
        found[name], session = trained(GRPOTrainer, start, environment, generation=generation)
    return found | _freed(session)


def asynchronous(start: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """An engine that samples ahead while a model on a GPU of its own scores."""
    found, session = trained(
        AsyncGRPOTrainer,
        start,
        environment,
        generation={"max_new_tokens": 6, "max_num_seqs": 64, "kv_cache_gib": 1, "placement": OWN},
        asynchronous={"max_staleness": 1},
        loss={"importance": {"kind": "truncated"}},
    )
    return {"own": found} | _freed(session)


def _freed(session: ClusterSession) -> dict[str, Any]:
    """What Ray has when all is given back: the GPUs that nobody holds, of how many."""
    import ray

    session.shutdown()
    groups = ray.util.placement_group_table().values()
    states = sorted({each["state"] for each in groups})
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU") != NUM_GPUS and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"free GPUs": ray.available_resources().get("GPU"), "groups": states}


def scorer(kind: str, folder: Path, start: Path) -> dict[str, Any]:
    """The environment of a model that scores, on the trainer's GPU."""
    if kind == "reward_model":
        return {"kind": "reward_model", "model": str(reward_model(folder / "scorer", start))}
    asked = {"kind": "model", "model": str(judge(folder / "judge")), "max_model_len": 900}
    return {"kind": "llm_judge", "max_new_tokens": 16, "judge": {**asked, "kv_cache_gib": 1}}


def on_its_own(environment: dict[str, Any]) -> dict[str, Any]:
    """The same on a GPU of its own."""
    if "judge" in environment:
        return environment | {"judge": environment["judge"] | {"placement": OWN}}
    return environment | {"placement": OWN}


def main(case: str, folder: Path) -> None:
    """Runs a case on a cluster of its own."""
    import ray
    from ray.cluster_utils import Cluster

    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    machines.add_node(num_cpus=8, num_gpus=NUM_GPUS)
    machines.connect()
    start = policy(folder / "policy")
    kind = case.removeprefix("asynchronous_")
    environment = scorer(kind, folder, start)
    own = on_its_own(environment)
    found = synchronous(start, [own, environment]) if kind == case else asynchronous(start, own)
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")
    ray.shutdown()
    machines.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
