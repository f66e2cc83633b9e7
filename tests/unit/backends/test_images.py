"""Vision-language models: image inputs of the batch reach the model, row by row."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLConfig
from transformers import Qwen2VLForConditionalGeneration as Qwen2VL
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.pretrained import copy_description, copy_processors
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import ModelError

EPSILON = 1e-3  # see test_dtensor.py: a gradient of rounding must not move a weight
IMAGE, VISION_START = 20, 21
PROCESSORS = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.json",
)
LENGTHS = [11, 8, 9, 7]
PATCHES_PER_IMAGE, PATCH_VALUES = 16, 3 * 2 * 4 * 4  # 4 x 4 patches, merged into 4 tokens


def make_batch(seed: int = 1) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        [1, VISION_START, *[IMAGE] * 4, *torch.randint(4, 19, (n - 6,), generator=generator)]
        for n in LENGTHS
    ]
    batch = collate(sequences, [[index >= 6 for index in range(n)] for n in LENGTHS])
    batch["pixel_values"] = list(
        torch.randn(len(LENGTHS), PATCHES_PER_IMAGE, PATCH_VALUES, generator=generator)
    )
    batch["image_grid_thw"] = [torch.tensor([[1, 4, 4]])] * len(LENGTHS)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


def make_backend(folder: Path, max_tokens: int = 24, **options: Any) -> DTensorBackend:
    backend = DTensorBackend()
    optimizer = OptimizerConfig(learning_rate=1e-2, adam_epsilon=EPSILON, **options)
    backend.setup(
        TrainingSetup(
            model_folder=folder, optimizer=optimizer, max_tokens_per_microbatch=max_tokens
        )
    )
    return backend


@pytest.fixture(scope="module")
def vision_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a Qwen2-VL with one layer each from its config."""
    folder = tmp_path_factory.mktemp("vision") / "model"
    text = {
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "initializer_range": 0.5,
    }
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=22,
        vision_start_token_id=VISION_START,
        vision_end_token_id=23,
    )
    Qwen2VL(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    for name in PROCESSORS:
        (folder / name).write_text(json.dumps({"of": name}))
    return folder


def plain_logprobs(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Computes each sequence with its image separately, through the model's logits."""
    result = torch.zeros(batch["token_mask"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        single = batch.select_indices([row])
        for column in {"input_ids", "mm_token_type_ids"} & single.keys():
            single[column] = single[column][:, :length]
        logits = model(input_ids=single["input_ids"], **single.get_multimodal_dict()).logits[0, :-1]
        logprobs = torch.log_softmax(logits, dim=-1)
        result[row, : length - 1] = logprobs.gather(-1, single["input_ids"][0, 1:, None])[:, 0]
    return result * batch["token_mask"]


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [11, 24, 1000])
def test_logprobs_equal_those_of_separate_images_and_texts(
    vision_model: Path, max_tokens: int
) -> None:
    batch = make_batch()
    actual = make_backend(vision_model, max_tokens).get_logprobs(batch)
    model = AutoModelForImageTextToText.from_pretrained(vision_model).eval()
    torch.testing.assert_close(actual, plain_logprobs(model, batch), rtol=1e-4, atol=1e-5)


def test_image_only_changes_its_row(vision_model: Path) -> None:
    batch, changed = make_batch(), make_batch()
    changed["pixel_values"][1] = -changed["pixel_values"][1]
    backend = make_backend(vision_model, 1000)
    before, after = backend.get_logprobs(batch), backend.get_logprobs(changed)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert (before[1] - after[1]).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [11, 1000])
def test_steps_train_the_vision_encoder_like_the_plain_loop(
    vision_model: Path, max_tokens: int
) -> None:
    batch = make_batch()
    backend = make_backend(vision_model, max_tokens)
    model = AutoModelForImageTextToText.from_pretrained(vision_model).eval()
    start = model.model.visual.patch_embed.proj.weight.detach().clone()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = -plain_logprobs(model, batch).sum() / batch["token_mask"].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert backend.train_step(batch, NLLLoss())["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert not torch.equal(model.model.visual.patch_embed.proj.weight, start)
    # Weights have the names of the published checkpoint.
    expected = revert_weight_conversion(model, dict(model.named_parameters()))
    for name, weight in backend.named_weights():
        torch.testing.assert_close(weight.cpu(), expected[name].detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("write", ["save", "materialize", "describe"])
def test_processors_stay_with_the_model(
    vision_model: Path, tiny_model: Path, tmp_path: Path, write: str
) -> None:
    target = tmp_path / "model"
    if write == "save":
        make_backend(vision_model).save_checkpoint(tmp_path)
    elif write == "materialize":
        shutil.copytree(tiny_model, source := tmp_path / "source")
        copy_processors(vision_model, source)
        materialize(PretrainedModel(name=str(source)), target, seed=0)
    else:
        target.mkdir()
        copy_description(vision_model, target)
    for name in PROCESSORS:
        assert json.loads((target / name).read_text()) == {"of": name}


def test_text_model_refuses_images(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="has images, but Qwen2ForCausalLM reads text") as caught:
        make_backend(tiny_model).get_logprobs(make_batch())
    assert "pixel_values" in str(caught.value.got)


def test_text_rows_have_the_logprobs_of_separate_texts(vision_model: Path) -> None:
    batch, backend = text_batch(), make_backend(vision_model)
    model = AutoModelForImageTextToText.from_pretrained(vision_model).eval()
    for row, length in enumerate([4, 3]):
        ids = batch["input_ids"][row : row + 1, :length]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
        expected = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(
            backend.get_logprobs(batch)[row, : length - 1], expected, rtol=1e-4, atol=1e-5
        )


def text_batch() -> BatchedDataDict:
    return collate([[1, 5, 6, 7], [1, 8, 9]], [[True] * 4, [True] * 3])


def steps_with_images_on_rank_0(
    folder: Path,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Returns metrics of a step with images on rank 0 and of one without, and the weights."""
    backend = make_backend(folder, 11, weight_decay=0.5)
    shards = [make_batch() if rank() == 0 else text_batch(), text_batch()]
    metrics = [backend.train_step(shard, NLLLoss()) for shard in shards]
    return metrics, {name: weight.clone() for name, weight in backend.named_weights()}


@pytest.mark.slow
def test_ranks_train_the_vision_encoder_if_only_one_has_images(vision_model: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(vision_model).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.5
    )
    losses = []
    for batches in ([make_batch(), text_batch()], [text_batch(), text_batch()]):
        optimizer.zero_grad()
        num_tokens = sum(int(batch["token_mask"].sum()) for batch in batches)
        loss = -sum(plain_logprobs(model, batch).sum() for batch in batches) / num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # does not change the vision encoder if there were no images
        losses.append(loss.item())
    expected = revert_weight_conversion(model, dict(model.named_parameters()))
    for metrics, weights in run_ranks(steps_with_images_on_rank_0, vision_model, world_size=2):
        assert [each["loss"] for each in metrics] == pytest.approx(losses, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-3, atol=1e-4)
