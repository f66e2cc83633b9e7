"""Plain loops of torch, transformers and vLLM: the least work that the same results need.

Only the layout of packed rows comes from the project, so that both sides compute the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.base import allowed_sharing
from nemo_rl_core.backends.training.context_parallel import packed_causal_mask
from nemo_rl_core.backends.training.dtensor.microbatches import Microbatches, packed_tokens
from nemo_rl_core.backends.training.padded import next_tokens, target_positions
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from tests.benchmarks.comparison.inputs import ADAMW, LEARNING_RATE, NUM_THREADS
from tests.benchmarks.comparison.turns import Baton

MAX_TOKENS = 8192
CLIP = 0.2
WORKER = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**60),
}
"""Environment variables of the project's workers: both sides run under the same conditions."""
VLLM = {
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": str(NUM_THREADS),
}
"""Environment variables of vLLM on a CPU, the same as in the project's workers."""


@dataclass(frozen=True)
class Rows:
    """One packed micro-batch: model inputs, selected positions and their columns."""

    inputs: dict[str, Any]
    row: torch.Tensor
    column: torch.Tensor
    targets: torch.Tensor
    columns: dict[str, torch.Tensor]


def laid_out(batch: BatchedDataDict, model: Path, *, share: bool) -> list[Rows]:
    """Returns the packed rows that the project's backend would compute."""
    parts = Microbatches(MAX_TOKENS, None).split(
        batch,
        share_rows=True,
        device=torch.device("cpu"),
        sharing=allowed_sharing(model) if share else None,
        packed=lambda rows, plan: packed_tokens(rows, plan, target_positions(rows)),
    )
    layout = []
    for part in parts:
        packed, positions = part.packed, part.packed.selected
        mask = packed_causal_mask(packed.last, None) if packed.is_tree else None
        columns = {
            name: part.batch[name][positions]
            for name in ("advantages", "prev_logprobs", "reference_logprobs")
            if name in part.batch
        }
        layout.append(
            Rows(
                {
                    "input_ids": packed.input_ids,
                    "position_ids": packed.position_ids,
                    "attention_mask": mask,
                    "use_cache": False,
                },
                packed.row,
                packed.column,
                next_tokens(part.batch)[positions],
                columns,
            )
        )
    return layout


class Trained:
    """A transformers model with AdamW."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(NUM_THREADS)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, fused=True, **ADAMW
        )

    def logprobs(self, rows: Rows) -> torch.Tensor:
        """Returns the logprobs of the selected tokens, `[N]`."""
        hidden = self.model.model(**rows.inputs).last_hidden_state[rows.row, rows.column]
        logits = self.model.lm_head(hidden)
        return logits.gather(-1, rows.targets)[:, 0] - torch.logsumexp(logits, -1)

    def step(self, layout: Sequence[Rows]) -> float:
        """Runs one optimizer step of the clipped loss, with a KL penalty given a reference."""
        count = sum(len(rows.targets) for rows in layout)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in layout:
            loss = _clipped(self.logprobs(rows), rows.columns) / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def _clipped(logprobs: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    # Without old logprobs, the current ones are used: one optimizer step per rollout.
    old, advantages = columns.get("prev_logprobs", logprobs.detach()), columns["advantages"]
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    if "reference_logprobs" in columns:
        difference = columns["reference_logprobs"] - logprobs
        loss = loss + 0.001 * (difference.exp() - difference - 1)
    return loss.sum()


def training(
    baton: Baton, *, model: Path, batches: Sequence[BatchedDataDict], steps: int, share: bool
) -> None:
    """Runs optimizer steps on rows that were laid out before."""
    trained = Trained(model)
    layouts = [laid_out(batch, model, share=share) for batch in batches]
    first = float("nan")
    baton.wait()
    for turn in range(baton.num_turns):
        for step in range(turn * steps, (turn + 1) * steps):
            loss = trained.step(layouts[step])
            first = loss if step == 0 else first
        baton.done(loss=first)


def padded_training(baton: Baton, *, model: Path, batches: Sequence[BatchedDataDict]) -> None:
    """Trains as usual with transformers: padded sequences and the logits of every position."""
    trained = Trained(model)
    losses: list[float] = []
    baton.wait()
    for batch in batches:
        ids, width = batch["input_ids"], batch["input_ids"].shape[1]
        mask = (torch.arange(width) < batch["input_lengths"][:, None]).long()
        trained.optimizer.zero_grad(set_to_none=True)
        logits = trained.model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        targets = target_positions(batch)
        names = ("advantages", "prev_logprobs")
        columns = {name: batch[name][targets] for name in names}
        loss = _clipped(logprobs[targets], columns) / targets.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
        trained.optimizer.step()
        losses.append(loss.item())
        baton.done(loss=losses[0])


class Engine:
    """`LLM.generate` with `n` completions per prompt and the options of the project's engine."""

    def __init__(self, model: Path, *, max_new_tokens: int, group: int, temperature: float) -> None:
        from nemo_rl_core.backends.generation.vllm_libraries import load_libnuma
        from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids

        load_libnuma()
        from vllm import LLM, SamplingParams

        tokenizer = load_tokenizer(model)
        self._encode = tokenizer
        self._llm = LLM(
            str(model),
            enforce_eager=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=512,
            enable_chunked_prefill=False,
            enable_prefix_caching=True,
            max_num_batched_tokens=MAX_TOKENS,
            disable_log_stats=True,
        )
        self._sampling = SamplingParams(
            n=group,
            temperature=temperature,
            max_tokens=max_new_tokens,
            logprobs=0,
            stop_token_ids=list(stop_token_ids(model, tokenizer)),
            ignore_eos=True,
            detokenize=False,
        )

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Returns the prompts' token ids with the model's template applied."""
        from nemo_rl_core.data.chat import prompt_token_ids

        return [prompt_token_ids(self._encode, prompt) for prompt in prompts]

    def generate(self, prompts: Sequence[Sequence[int]], seed: int) -> list[list[list[int]]]:
        """Returns `G` completions for each of the `P` prompts."""
        self._sampling.seed = seed
        outputs = self._llm.generate(
            [{"prompt_token_ids": [*ids]} for ids in prompts], self._sampling, use_tqdm=False
        )
        return [[[*each.token_ids] for each in output.outputs] for output in outputs]


def generation(
    baton: Baton,
    *,
    model: Path,
    prompts: Sequence[Sequence[str]],
    steps: int,
    sampling: dict[str, Any],
) -> None:
    """Completes the prompts of that many steps."""
    engine = Engine(model, **sampling)
    ids = [engine.prompt_ids(each) for each in prompts]
    baton.wait()
    for turn in range(baton.num_turns):
        tokens = 0
        for step in range(turn * steps, (turn + 1) * steps):
            completions = engine.generate(ids[step % len(ids)], seed=step)
            tokens += sum(len(each) for group in completions for each in group)
        baton.done(tokens=float(tokens))


def least_step(
    baton: Baton,
    *,
    model: Path,
    prompts: Sequence[Sequence[str]],
    steps: int,
    sampling: dict[str, Any],
) -> None:
    """Runs the minimum of a GRPO step: completions, reference logprobs and one optimizer step.

    Prefixes are shared; old logprobs are those of the training pass. Rewards are random.
    """
    engine = Engine(model, **sampling)
    ids = [engine.prompt_ids(each) for each in prompts]
    trained, reference = Trained(model), Trained(model)
    baton.wait()
    for turn in range(baton.num_turns):
        tokens, loss = 0.0, float("nan")
        for step in range(turn * steps, (turn + 1) * steps):
            batch_prompts = ids[step % len(ids)]
            completions = engine.generate(batch_prompts, seed=step)
            batch = _batch(batch_prompts, completions)
            layout = laid_out(batch, model, share=True)
            with torch.no_grad():
                for rows in layout:
                    rows.columns["reference_logprobs"] = reference.logprobs(rows)
            loss = trained.step(layout)
            tokens += float(batch["token_mask"].sum())
        baton.done(tokens=tokens, loss=loss)


def _batch(prompts: Sequence[Sequence[int]], completions: list[list[list[int]]]) -> BatchedDataDict:
    sequences, masks = [], []
    for prompt, group in zip(prompts, completions, strict=True):
        for completion in group:
            sequences.append([*prompt, *completion])
            masks.append([False] * len(prompt) + [True] * len(completion))
    batch = collate(sequences, masks)
    batch["advantages"] = torch.randn(len(sequences), 1) * batch["token_mask"]
    return batch
