"""TRL's sides: its trainers with the same model, rows, optimizer and precision, on CPUs."""

import os
from pathlib import Path
from typing import Any

from tests.benchmarks.comparison.inputs import ADAMW, LEARNING_RATE
from tests.benchmarks.comparison.turns import Baton

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def options(work: Path, *, num_steps: int, batch: int) -> dict[str, Any]:
    """Returns the options of every TRL trainer: no logging or saving during training."""
    beta1, beta2 = ADAMW["betas"]
    return {
        "output_dir": str(work),
        "max_steps": num_steps,
        "per_device_train_batch_size": batch,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "weight_decay": ADAMW["weight_decay"],
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_first_step": True,
        "logging_steps": num_steps + 1,
        "disable_tqdm": True,
    }


def turns(baton: Baton, steps: int) -> Any:
    """Returns a transformers callback that ends a turn after every `steps` steps.

    Its attribute `tokens` counts the completion tokens of a turn, `tokens_a_step` those of one step
    if all steps have the same number.
    """
    from transformers import TrainerCallback

    class TurnsOfSteps(TrainerCallback):  # type: ignore[misc]
        first_loss = float("nan")
        tokens, tokens_a_step = 0.0, 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            baton.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.global_step == 1 and logs and "loss" in logs:
                self.first_loss = float(logs["loss"])

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tokens += self.tokens_a_step
            if state.global_step % steps == 0:
                baton.done(loss=self.first_loss, tokens=self.tokens)
                self.tokens = 0.0

    return TurnsOfSteps()


def conversation(row: dict[str, str]) -> dict[str, Any]:
    """Returns a row in the conversation format, to which TRL applies the model's template."""
    roles = {"prompt": "user"}
    return {
        name: [{"role": roles.get(name, "assistant"), "content": value}]
        for name, value in row.items()
    }


def sft(baton: Baton, *, model: Path, rows: list[dict[str, str]], work: Path, steps: int) -> None:
    """Runs SFT padding-free, the fastest mode of TRL."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = options(work, num_steps=steps * baton.num_turns, batch=len(rows))
    trainer = SFTTrainer(
        str(model),
        args=SFTConfig(
            **arguments, padding_free=True, max_length=None, model_init_kwargs=_float32()
        ),
        train_dataset=Dataset.from_list([conversation(row) for row in rows]),
        callbacks=[turns(baton, steps)],
    )
    trainer.train()


def dpo(baton: Baton, *, model: Path, rows: list[dict[str, str]], work: Path, steps: int) -> None:
    """Runs DPO with precomputed reference logprobs."""
    trainer = dpo_trainer(
        model, rows, work, num_steps=steps * baton.num_turns, batch=len(rows), rate=LEARNING_RATE
    )
    callback = turns(baton, steps)
    tokenized = trainer.train_dataset
    completions = [*tokenized["chosen_ids"], *tokenized["rejected_ids"]]
    callback.tokens_a_step = sum(len(ids) for ids in completions)
    trainer.add_callback(callback)
    trainer.train()


def dpo_trainer(
    model: Path, rows: list[dict[str, str]], work: Path, *, num_steps: int, batch: int, rate: float
) -> Any:
    """Returns a trainer that has computed the reference logprobs of all pairs."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = options(work, num_steps=num_steps, batch=batch) | {"learning_rate": rate}
    return DPOTrainer(
        str(model),
        args=DPOConfig(
            **arguments,
            beta=0.1,
            max_length=None,
            precompute_ref_log_probs=True,
            model_init_kwargs=_float32(),
        ),
        train_dataset=Dataset.from_list([conversation(row) for row in rows]),
    )


def grpo(
    baton: Baton,
    *,
    model: Path,
    rows: list[dict[str, str]],
    work: Path,
    group: int,
    max_new_tokens: int,
    replay: Path | None = None,
) -> None:
    """Runs GRPO without KL; completions come from transformers' `generate` or from a recording."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    callback = turns(baton, 1)
    recorded = _Recorded(replay) if replay else None

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        callback.tokens += sum(len(ids) for ids in completion_ids)
        return recorded.rewards if recorded else [reward_of(ids) for ids in completion_ids]

    arguments = options(work, num_steps=baton.num_turns, batch=len(rows) * group)
    trainer = GRPOTrainer(
        str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            **arguments,
            beta=0.0,
            num_generations=group,
            max_completion_length=max_new_tokens,
            steps_per_generation=1,
            temperature=1.0,
            model_init_kwargs=_float32(),
        ),
        train_dataset=Dataset.from_list([{"prompt": conversation(r)["prompt"]} for r in rows]),
        rollout_func=recorded,
        callbacks=[callback],
    )
    trainer.train()


def reward_of(token_ids: list[int]) -> float:
    """Returns a value that differs within a group and that both sides can compute from tokens."""
    return float(sum(token_ids) % 7)


class _Recorded:
    """A `rollout_func` of TRL that returns recorded completions, step by step."""

    def __init__(self, folder: Path) -> None:
        from nemo_rl_core.rollouts.records import RolloutRecords

        self._records, self._step, self.rewards = RolloutRecords(folder), 0, [0.0]

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self._step += 1
        rollouts = self._records.load(self._step)
        assert len(rollouts) == len(prompts), (len(rollouts), len(prompts))
        self.rewards = [float(each.reward or 0.0) for each in rollouts]
        return {
            "prompt_ids": [[*each.prompt.token_ids] for each in rollouts],
            "completion_ids": [[*each.completion.token_ids] for each in rollouts],
            "logprobs": [[*each.completion.logprobs] for each in rollouts],
        }


def _float32() -> dict[str, Any]:
    return {"dtype": "float32"}
