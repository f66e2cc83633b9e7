"""Rows for scaling, memory, transfer and start: the project against the machine."""

import statistics
import sys
from pathlib import Path

import psutil

from nemo_rl_core.config.model import TextModelFromConfig
from tests.benchmarks import weight_sync
from tests.benchmarks.comparison import machine_sides
from tests.benchmarks.comparison.command import REPOSITORY, Spent, spent_by
from tests.benchmarks.comparison.inputs import model_folder, prompts, saved
from tests.benchmarks.comparison.measured import Bench, Figure, Measured, Row, median, ratio
from tests.benchmarks.comparison.turns import Side, Turn, take_turns

VOCAB_SIZE, MEMORY_TOKENS = 151_936, 4096
LONG = TextModelFromConfig(
    kind="text_from_config", num_layers=1, hidden_size=64, max_position_embeddings=8192
)
WIDE = TextModelFromConfig(
    kind="text_from_config",
    num_layers=1,
    hidden_size=64,
    intermediate_size=128,
    max_position_embeddings=1024,
)
GROUP = 16
SIZES = [(256, 256), (1024, 256), (4096, 256), (1024, 4096), (4096, 4096), (32_768, 4096)]
"""Sequences of a step and the most tokens per sequence, prompt included; the last is the goal."""
MAX_CPU_SECONDS = 120.0


def controller(bench: Bench) -> Measured:
    """Measures CPU time of the controller, with an engine and a policy that compute nothing.

    Steps grow until the next would take too long, or more than half of the free memory.
    """
    medians: dict[str, str] = {}
    each: list[list[float]] = []
    size, ran, gib_a_token = 0, "", 0.0
    for sequences, length in SIZES:
        tokens = sequences * length
        expected = statistics.median(each[-1]) * tokens if each else 0.0
        free = psutil.virtual_memory().available / 2**30
        if expected > MAX_CPU_SECONDS or gib_a_token * tokens > free / 2:
            break
        turns = _controller_turns(bench, sequences, length)
        each.append([turn.cpu / turn.figures["tokens"] for turn in turns])
        size, ran = tokens, f"{sequences:,} x {length:,}"
        gib_a_token = max(turn.figures["gib"] for turn in turns) / tokens
        medians[ran] = f"{1e6 * statistics.median(each[-1]):.3g} µs a token"
    figures = {
        "CPU": median([1e6 * value for value in each[min(1, len(each) - 1)]], "µs a token"),
        "growth": ratio(each[-1], each[0]),
    }
    note = f"up to {ran} tokens of the {SIZES[-1][0]:,} x {SIZES[-1][1]:,}, {size:,} in all"
    return Measured(figures, len(each[0]), medians, note)


def _controller_turns(bench: Bench, sequences: int, length: int) -> list[Turn]:
    base = model_folder(bench.scratch, LONG)
    prompt = length // 2
    rows = prompts(sequences // GROUP, prompt - 1)
    arguments = {
        "model": base,
        "train": saved(rows, base, bench.folder("prompts")),
        "work": bench.folder("run"),
        "group": GROUP,
        "prompts": len(rows),
        "max_prompt_tokens": prompt,
        "max_new_tokens": length - prompt,
    }
    side = {"controller": Side(machine_sides.controller, arguments)}
    # One step in several has a full garbage collection, which a median of these leaves out.
    return take_turns(side, num_turns=7, logs=bench.logs)["controller"]


def controller_microseconds(scratch: Path, size: tuple[int, int]) -> float:
    """Returns the controller's CPU time per token for a step of `size` (sequences, tokens each)."""
    turns = _controller_turns(Bench(scratch, scratch / "logs", 2), *size)
    return 1e6 * statistics.median(turn.cpu / turn.figures["tokens"] for turn in turns)


def loss_memory(bench: Bench) -> Measured:
    """Measures peak memory of a step and of logprobs only, above the memory in use before."""
    folder = model_folder(bench.scratch, WIDE, vocab_size=VOCAB_SIZE)
    figures, medians = {}, {}
    for what, trains in (("a step", True), ("logprobs", False)):
        turns = {}
        for name, run in (("ours", machine_sides.memory), ("full", machine_sides.full_logits)):
            arguments = {"model": folder, "tokens": MEMORY_TOKENS, "trains": trains}
            side = {name: Side(run, arguments)}
            turns[name] = take_turns(side, num_turns=1, num_warm=0, logs=bench.logs)[name][0]
        ours, full = (turns[name].figures["gib"] for name in ("ours", "full"))
        figures[f"memory of {what}"] = _one(full / ours)
        figures[f"CPU of {what}"] = _one(turns["full"].cpu / turns["ours"].cpu)
        medians[what] = f"{ours:.2f} of {full:.2f} GiB"
    return Measured(figures, 1, medians, f"{MEMORY_TOKENS:,} tokens")


def _one(value: float) -> Figure:
    return Figure(value, value, value)


def transfer(bench: Bench) -> Measured:
    """Compares a transfer of 135 M weights with a plain copy between two processes."""
    seconds = weight_sync.transfer_seconds()
    medians = {name: f"{statistics.median(each):.3f} s" for name, each in seconds.items()}
    figures = {
        "wall": ratio(seconds["sync by shared_memory"], seconds[weight_sync.PLAIN]),
    }
    return Measured(figures, weight_sync.NUM_REPETITIONS, medians)


def start(bench: Bench) -> Measured:
    """Measures from the command to the first training step, with a new store and warm files."""
    command = [str(Path(sys.executable).with_name("pyflyte")), "run", "workflows/grpo.py", "grpo"]
    recipe = REPOSITORY / "workflows" / "recipes" / "grpo_ci.yaml"

    def once() -> Spent:
        store = bench.folder("store")

        def has_trained() -> bool:
            files = store.glob("work/train_sft-*/metrics.jsonl")
            return any(file.stat().st_size for file in files)

        environment = {"NEMO_RL_HOME": str(store)}
        return spent_by(
            [*command, "--config", str(recipe)], environment, bench.logs, until=has_trained
        )

    once()
    runs = [once() for _ in range(max(2, bench.n // 3))]
    figures = {
        "wall": median([run.wall for run in runs], "s"),
        "CPU": median([run.cpu for run in runs], "CPU-s"),
    }
    return Measured(figures, len(runs))


ROWS = [
    Row("controller", "controller, CPU time a token", "≤ 0.2 µs, linear", controller),
    Row(
        "loss_memory",
        f"memory of loss and logprobs at V = {VOCAB_SIZE:,} against full logits",
        "≥ 16 times less",
        loss_memory,
    ),
    Row(
        "transfer",
        "weights to the engine against a copy between processes",
        "≤ 1.5 times",
        transfer,
    ),
    Row("start", "from command to first training step, warm", "≤ 25 s", start),
]
