"""The reference documents' custom policies run as they are written, with a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.models.interfaces import PolicyInterface


def load_custom_model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


class CustomPolicy(PolicyInterface):
    """Custom policy implementation."""

    def __init__(self, model_path: str) -> None:
        self.model = load_custom_model(model_path)

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        input_ids = data["input_ids"]
        outputs = self.model.generate(
            input_ids,
            max_new_tokens=data.get("max_new_tokens", 100),
            do_sample=not greedy,
            temperature=data.get("temperature", 0.7),
        )
        lengths = [len(o) - len(i) for o, i in zip(outputs, input_ids, strict=True)]
        return BatchedDataDict(
            {
                "output_ids": outputs,
                "generation_lengths": torch.tensor(lengths),
                "unpadded_sequence_lengths": torch.tensor([len(o) for o in outputs]),
            }
        )

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        with torch.no_grad():
            outputs = self.model(data["input_ids"])
            logprobs = torch.log_softmax(outputs.logits, dim=-1)
        return BatchedDataDict({"logprobs": logprobs})

    def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, Any]:
        loss = loss_fn(self.model, data)
        return {"loss": loss.item()}


def test_a_custom_policy_generates_and_trains(tiny_model: Path) -> None:
    policy = CustomPolicy(str(tiny_model))
    batch = BatchedDataDict({"input_ids": torch.tensor([[1, 5, 6], [1, 7, 8]])})
    output = policy.generate(BatchedDataDict({**batch, "max_new_tokens": 4}), greedy=True)
    assert output.size == 2
    assert (output["generation_lengths"] <= 4).all()
    assert torch.equal(output["output_ids"][:, :3], batch["input_ids"])

    logprobs = policy.get_logprobs(batch)["logprobs"]
    assert logprobs.exp().sum(-1) == pytest.approx(torch.ones(2, 3), abs=1e-5)

    def likelihood(model: Any, data: BatchedDataDict) -> torch.Tensor:
        return model(data["input_ids"], labels=data["input_ids"]).loss

    picked = logprobs[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])
    loss = policy.train(batch, likelihood)["loss"]
    assert loss == pytest.approx(-picked.mean().item(), rel=1e-5)
    with pytest.raises(NotImplementedError, match="CustomPolicy has no get_reference_logprobs"):
        policy.get_reference_logprobs(batch)


def test_a_policy_needs_only_train() -> None:
    class OnlyTrains(PolicyInterface):
        def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
            return {"loss": 0.0}

    assert OnlyTrains().train(BatchedDataDict(), None) == {"loss": 0.0}
    with pytest.raises(NotImplementedError, match="OnlyTrains has no generate"):
        OnlyTrains().generate(BatchedDataDict(), greedy=True)

    class Nothing(PolicyInterface):
        """Does not even train."""

    with pytest.raises(TypeError, match="abstract method"):
        Nothing()
