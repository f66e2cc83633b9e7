"""Adapters in the training worker compared with peft's model in a plain loop."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.checkpoints.tensors import load_tensors
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.data.pretrained import base_names
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError, ResourceError

# See test_dtensor.py.
EPSILON = 1e-3
LORA = DTensorTraining(lora=LoRAConfig(rank=4, alpha=6.0))


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    lengths = [11, 4, 7, 2, 9]
    rows = [torch.randint(0, 16, (length,), generator=generator).tolist() for length in lengths]
    return collate(rows, [[index > 0 for index in range(length)] for length in lengths])


def make_backend(folder: Path, training: DTensorTraining = LORA, **changes: Any) -> DTensorBackend:
    backend = DTensorBackend()
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, adam_epsilon=EPSILON)
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=optimizer,
            max_tokens_per_microbatch=1000,
            training=training,
            **changes,
        )
    )
    return backend


def weights(backend: DTensorBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}


def plain_loss(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    total = torch.zeros(())
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
        total = total - logprobs.gather(-1, ids[0, 1:, None]).sum()
    return total / batch["token_mask"].sum()


def test_new_adapters_leave_logprobs_bitwise_identical(tiny_model: Path) -> None:
    batch = make_batch()
    plain, adapted = make_backend(tiny_model, DTensorTraining()), make_backend(tiny_model)
    assert torch.equal(plain.get_logprobs(batch), adapted.get_logprobs(batch))
    expected, actual = weights(plain), weights(adapted)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.slow
def test_steps_and_merging_match_peft(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    batch, backend = make_batch(), make_backend(tiny_model, seed=3)
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    torch.manual_seed(3)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(p.numel() for p in trained) == sum(
        group.numel() for group in backend._optimizer.param_groups[0]["params"]
    )
    optimizer = torch.optim.AdamW(
        trained, lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        assert backend.train_step(batch, NLLLoss())["loss"] == pytest.approx(loss.item(), rel=1e-5)
    backend.save_checkpoint(tmp_path)
    # The files that peft reads from the adapter's folder match the worker.
    again = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    again = PeftModel.from_pretrained(again, tmp_path / "trainer" / "adapter").merge_and_unload()
    saved = load_tensors(tmp_path / "model" / "model.safetensors")
    merged = model.merge_and_unload().state_dict()
    final = weights(backend)
    assert saved.keys() == final.keys()
    for name, weight in final.items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(weight, saved[name]), name
        assert torch.equal(weight, again.state_dict()[name]), name


def test_reference_is_the_base_model(tiny_model: Path) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model, reference_folder=tiny_model)
    start = backend.get_logprobs(batch)
    ids, topk = backend.get_reference_topk_logprobs(batch, 3)
    backend.train_step(batch, NLLLoss())
    assert not torch.equal(backend.get_logprobs(batch), start)
    assert torch.equal(backend.get_reference_logprobs(batch), start)
    ids_after, topk_after = backend.get_reference_topk_logprobs(batch, 3)
    assert torch.equal(ids, ids_after)
    assert torch.equal(topk, topk_after)
    assert backend._reference is None
    before = weights(backend)
    backend.train_step(batch, NLLLoss())  # adapters take gradients again
    after = weights(backend)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("start_saving", ["start_checkpoint", "start_sharded_checkpoint"])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_resumed_training_is_bitwise_identical(
    tiny_model: Path, tmp_path: Path, head: str, start_saving: str
) -> None:
    """It also resumes if the worker is set up on the merged weights, like a later iteration's."""
    batch = make_batch()

    def loss(outputs, part, *, global_valid_seqs, global_valid_tokens):
        return (outputs - 0.3).square().sum() / global_valid_tokens, {}

    straight = make_backend(tiny_model, head=head)
    straight.train_step(batch, loss)
    getattr(straight, start_saving)(tmp_path)
    straight.finish_checkpoint()
    assert (tmp_path / "trainer" / "base").is_dir()
    straight.train_step(batch, loss)
    expected = weights(straight)
    for start in filter(Path.is_dir, (tiny_model, tmp_path / "model")):
        resumed = make_backend(start, head=head, seed=8)
        resumed.load_checkpoint(tmp_path)
        resumed.train_step(batch, loss)
        actual = weights(resumed)
        assert expected.keys() == actual.keys()
        for name, weight in expected.items():
            assert torch.equal(weight, actual[name]), name


@pytest.mark.parametrize(
    ("layout", "named"),
    [("model", (None, None)), ("models--org--small/snapshots/c0ffee", ("org/small", "c0ffee"))],
)
def test_saved_adapter_names_its_base(
    tiny_model: Path, tmp_path: Path, layout: str, named: tuple[str | None, str | None]
) -> None:
    """The base is named by its hub name, also after a resume; a path would change the hash."""
    from peft import PeftConfig

    folder, saved = tmp_path / layout, tmp_path / "saved"
    shutil.copytree(tiny_model, folder)
    saved.mkdir()
    adapters = make_backend(folder)._adapters
    adapters.save(saved)
    adapters.save_base(saved)
    config = PeftConfig.from_pretrained(saved / "adapter")
    assert (config.base_model_name_or_path, config.revision) == named
    assert tuple(base_names(saved / "base").values()) == named
    assert str(tmp_path) not in (saved / "adapter" / "adapter_config.json").read_text()


def test_unknown_targets_are_refused(tiny_model: Path) -> None:
    training = DTensorTraining(lora=LoRAConfig(target_modules=["q_project"]))
    with pytest.raises(ConfigError, match="layers that the model does not have"):
        make_backend(tiny_model, training)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("precision", ["8bit", "4bit"])
def test_quantized_weights_need_bitsandbytes_and_a_gpu(tmp_path: Path, precision: str) -> None:
    """It is refused before anything is read: the folder has no weights."""
    (tmp_path / "config.json").write_text("{}")
    training = DTensorTraining.model_validate({"weights": precision, "lora": {}})
    with pytest.raises(ResourceError, match=f"weights: {precision}.*cannot be used here"):
        make_backend(tmp_path, training)


def sharded_steps(folder: Path, saved: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Runs one step on two FSDP ranks, each with its rows; saves; runs another step."""
    from nemo_rl_core.distributed.process_group import rank, world_size

    backend = make_backend(folder, seed=3)
    batch = make_batch()
    rows = range(batch["input_ids"].shape[0])
    part = batch.select_indices([row for row in rows if row % world_size() == rank()])
    metrics = backend.train_step(part, NLLLoss())
    backend.save_checkpoint(saved)
    return weights(backend), metrics


@pytest.mark.thorough
def test_sharded_adapters_match_unsharded_ones_and_resume_on_one_rank(
    tiny_model: Path, tmp_path: Path
) -> None:
    single = make_backend(tiny_model, seed=3)
    expected = single.train_step(make_batch(), NLLLoss())
    for sharded, metrics in run_ranks(sharded_steps, tiny_model, tmp_path, world_size=2):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, weight in weights(single).items():
            torch.testing.assert_close(sharded[name], weight, rtol=1e-5, atol=1e-6)
    resumed = make_backend(tiny_model, seed=8)
    resumed.load_checkpoint(tmp_path)
    for name, weight in weights(resumed).items():
        assert torch.equal(weight, sharded[name]), name
    single.train_step(make_batch(), NLLLoss())
    resumed.train_step(make_batch(), NLLLoss())
    for name, weight in weights(single).items():
        torch.testing.assert_close(weights(resumed)[name], weight, rtol=1e-4, atol=1e-5)
