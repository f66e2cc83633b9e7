"""The Megatron worker's packed rows and checkpoints (`test_parity.py` compares its results)."""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks

# With Adam's usual epsilon, a gradient that is zero except for rounding moves a weight by the full
# learning rate, in a direction that rounding decides, so results could not be compared.
EPSILON = 1e-3
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, num_warmup_steps=2, adam_epsilon=EPSILON
)
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]
MAX_TOKENS = 24
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def layout(tensor: int = 1, pipeline: int = 1, **more: Any) -> MegatronTraining:
    return MegatronTraining(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **more)


@pytest.fixture(scope="module")
def dense(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a model with a tokenizer of 19 tokens, which two ranks do not divide."""
    tokenizer = load_tokenizer(tiny_model)
    folder = tmp_path_factory.mktemp("megatron")
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(0, 16, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    masks = [[index >= length // 2 for index in range(length)] for length in LENGTHS]
    return collate(sequences, masks)


def make_backend(folder: Path, training: MegatronTraining, **changes: Any) -> Any:
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend

    backend = MegatronBackend()
    options = {"optimizer": OPTIMIZER, "max_tokens_per_microbatch": MAX_TOKENS, **changes}
    backend.setup(TrainingSetup(model_folder=folder, training=training, **options))
    return backend


def rows_of_this_rank(batch: BatchedDataDict) -> list[int]:
    """Returns six of the eight rows for the first data-parallel rank, for more micro-batches."""
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_world_size() == 1:
        return list(range(batch.size))
    return [[0, 1, 2, 3, 4, 5], [6, 7]][parallel_state.get_data_parallel_rank()]


def plain_logprobs(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    """Computes each sequence separately, through the model's logits."""
    result = torch.zeros(batch["token_mask"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
        result[row, : length - 1] = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return result * batch["token_mask"]


def changed_neighbor(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    backend = make_backend(folder, layout(), max_tokens_per_microbatch=1000)
    batch = make_batch()
    before = backend.get_logprobs(batch)
    batch["input_ids"][1, :4] = (batch["input_ids"][1, :4] + 5) % 16
    return before, backend.get_logprobs(batch)


@pytest.mark.thorough
def test_changed_sequence_does_not_change_its_neighbors(
    dense: Path,
) -> None:
    ((before, after),) = run_ranks(changed_neighbor, dense, world_size=1)
    others = [row for row in range(len(LENGTHS)) if row != 1]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1], after[1])


def saved_and_resumed(folder: Path, path: Path) -> dict[str, list[float]]:
    """Returns losses of two steps at TP 2 after a save, and of resumed runs at other layouts."""
    from nemo_rl_core.algorithms.sft.loss import NLLLoss

    def two_steps(backend: Any) -> list[float]:
        batch = make_batch().select_indices(rows_of_this_rank(make_batch()))
        return [backend.train_step(batch, NLLLoss())["loss"] for _ in range(2)]

    first = make_backend(folder, layout(2), reference_folder=folder)
    start = first.get_logprobs(make_batch())
    two_steps(first)
    first.save_checkpoint(path)
    losses = {"straight": two_steps(first)}
    moved = first.get_logprobs(make_batch())
    assert torch.equal(first.get_reference_logprobs(make_batch()), start)
    ids, logprobs = first.get_reference_topk_logprobs(make_batch(), 19)
    actual = (ids[:, :, :] == make_batch()["input_ids"][:, 1:, None]) & (logprobs != 0)
    torch.testing.assert_close((logprobs * actual).sum(-1), start, rtol=1e-5, atol=1e-5)
    assert torch.equal(first.get_logprobs(make_batch()), moved)  # the trained weights are restored
    others = {"2x1": layout(2), "1x2": layout(1, 2), "data 2": layout()}
    for name, training in others.items():
        backend = make_backend(folder, training)
        backend.load_checkpoint(path)
        losses[name] = two_steps(backend)
    return losses


@pytest.mark.thorough
def test_checkpoint_resumes_at_another_layout(dense: Path, tmp_path: Path) -> None:
    losses = run_ranks(saved_and_resumed, dense, tmp_path, world_size=2)[0]
    assert losses["2x1"] == losses["straight"]  # the same layout is bitwise identical
    assert losses["1x2"] == pytest.approx(losses["straight"], rel=1e-5)
    assert losses["data 2"] == pytest.approx(losses["straight"], rel=1e-5)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    loss = -plain_logprobs(model.eval(), make_batch()).sum() / make_batch()["token_mask"].sum()
    assert loss.item() == pytest.approx(losses["straight"][0], rel=1e-5)
    assert json.loads((tmp_path / "trainer" / "state.json").read_text()) == {
        "backend": "megatron",
        "num_updates": 2,
    }


def saved_twice(folder: Path, path: Path) -> None:
    """Saves a state before continuing, during two more steps, and after loading it."""
    from nemo_rl_core.algorithms.sft.loss import NLLLoss

    backend = make_backend(folder, layout(2))
    backend.train_step(make_batch(), NLLLoss())
    backend.save_checkpoint(path / "waited")
    backend.start_checkpoint(path / "meanwhile")
    for _ in range(2):
        backend.train_step(make_batch(), NLLLoss())
    backend.shutdown()  # waits for the save
    resumed = make_backend(folder, layout(2))
    resumed.load_checkpoint(path / "waited")
    resumed.save_checkpoint(path / "resumed")
    resumed.shutdown()
    assert not (path / "meanwhile" / "trainer" / ".metadata.tmp").exists()


@pytest.mark.thorough
def test_equal_states_are_saved_as_equal_bytes(dense: Path, tmp_path: Path) -> None:
    results = []
    for run in ("first", "rerun"):
        run_ranks(saved_twice, dense, tmp_path / run, world_size=2)
        for name in ("waited", "meanwhile", "resumed"):
            folder = tmp_path / run / name
            files = {
                str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            }
            results.append(files)
    assert {"trainer/.metadata", "trainer/common.pt", "trainer/__1_0.distcp"} < results[0].keys()
    for other in results[1:]:
        assert other == results[0]


class Foreign:
    """A malicious checkpoint entry: unpickling calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


def test_checkpoint_that_names_foreign_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo_rl_core.backends.training.megatron.checkpoint import load_trainer
    from nemo_rl_core.errors import StoreError

    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state": Foreign()}))
    with pytest.raises(StoreError, match=r"names builtins\.print"):
        load_trainer(tmp_path, [], None)
    assert "unpickled" not in capsys.readouterr().out
