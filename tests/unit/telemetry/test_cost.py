"""Costs computed by hand."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_core import produce
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.produce import StageInputs, cost_html
from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.cost import Prices, model_flops_utilization, peak_flops
from nemo_rl_core.telemetry.model_flops import ModelFlops, model_shape

SHAPE = ModelFlops(num_multiplied=1000, num_layers=2, attention_width=8)


def test_flops_of_sequences_by_hand() -> None:
    # Tokens: 2 · 1000 each. Attention: 4 · 2 layers · 8 wide · (1 + 2 + 3 contexts) = 384.
    assert SHAPE.flops("scoring", [3]) == 6000 + 384
    assert SHAPE.flops("generation", [3, 1]) == 6384 + 2064
    # A backward pass costs two forward passes: 6 N per token.
    assert SHAPE.flops("training", [3]) == 3 * 6384


def test_a_large_model_takes_about_six_flops_per_weight_and_token() -> None:
    shape = ModelFlops(num_multiplied=7e9, num_layers=32, attention_width=4096)
    assert shape.flops("training", [2048]) / 2048 == pytest.approx(6 * 7e9, rel=0.05)


def _model(folder: Path, tied: bool, **config: int) -> Path:
    folder.mkdir()
    tensors = {
        "gpt_neox.embed_in.weight": torch.zeros(10, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(6, 4),
        "model.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(6, 4),
    }
    if not tied:
        tensors["embed_out.weight"] = torch.zeros(10, 4)
    save_file(tensors, folder / "model.safetensors")
    words = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 10}
    (folder / "config.json").write_text(json.dumps(words | {"tie_word_embeddings": tied} | config))
    return folder


def test_embedding_tables_and_inactive_experts_do_not_count(tmp_path: Path) -> None:
    # The only table is also the head, which multiplies every token.
    assert model_shape(_model(tmp_path / "tied", True)) == ModelFlops(40 + 16 + 48, 1, 4)
    # The table is only looked up; the head is multiplied.
    assert model_shape(_model(tmp_path / "untied", False)).num_multiplied == 40 + 16 + 48
    # Each token uses one of two experts.
    mixture = _model(tmp_path / "mixture", True, num_experts=2, num_experts_per_tok=1, head_dim=3)
    assert model_shape(mixture) == ModelFlops(40 + 16 + 24, 1, 6)


def test_peak_flops_and_utilization() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("Some other device", "bfloat16") is None
    share = model_flops_utilization(989e12, gpu_seconds=4, device="NVIDIA H200", dtype="bfloat16")
    assert share == pytest.approx(0.25)
    assert model_flops_utilization(1e12, gpu_seconds=0, device="", dtype="float32") is None


def test_money_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_RL_PRICES", raising=False)
    assert Prices.from_environment() is None
    table = tmp_path / "prices.yaml"
    table.write_text("{currency: EUR, cpu_core_hour: 0.04, gpu_hour: {H100: 2.5}}")
    monkeypatch.setenv("NEMO_RL_PRICES", str(table))
    prices = Prices.from_environment()
    assert prices is not None
    # Half an hour of one core, two hours of a GPU.
    usage_of_stage = {"cpu_seconds": 1800.0, "gpu_seconds": 7200.0}
    assert prices.total(**usage_of_stage, device="NVIDIA H100 PCIe") == pytest.approx(0.02 + 5.0)
    assert prices.total(cpu_seconds=1800.0, gpu_seconds=0.0, device="") == pytest.approx(0.02)
    assert prices.total(**usage_of_stage, device="NVIDIA L4") is None
    table.write_text("{cpu_hour: 1}")
    with pytest.raises(ConfigError, match="unknown key 'cpu_hour'"):
        Prices.from_environment()


def test_the_example_price_table_can_be_read_and_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).parents[3] / "deployment" / "prices.yaml"
    monkeypatch.setenv("NEMO_RL_PRICES", str(example))
    assert Prices.from_environment() == Prices()
    # The lines after the prose, with values filled in.
    _, table = example.read_text().split("#\n")
    filled = tmp_path / "prices.yaml"
    filled.write_text(table.replace("\n# ", "\n").removeprefix("# ").replace("...", "2.5"))
    monkeypatch.setenv("NEMO_RL_PRICES", str(filled))
    gpus = {"H100 PCIe": 2.5, "H100": 2.5}
    assert Prices.from_environment() == Prices(currency="EUR", cpu_core_hour=2.5, gpu_hour=gpus)


class Workers:
    """Two processes elsewhere."""

    def __init__(self) -> None:
        self.seconds = {"a": 5.0, "b": 1.0}

    def cpu_seconds(self, timeout_seconds: float) -> dict[str, float]:
        return self.seconds


def test_usage_of_workers_is_measured() -> None:
    workers = Workers()
    usage.watch(workers)
    usage.count("training", SHAPE, [9])
    with usage.measured() as spent:
        usage.count("generation", SHAPE, [3], num_generated=2)
        usage.count("training", SHAPE, [3])
        workers.seconds = {"a": 8.0, "b": 1.5, "begun just now": 2.0}
        usage.unwatch(workers)
        workers.seconds = {"a": 100.0}  # not watched any more
    # 3 s, half a second, and all of the worker started inside; this process hardly counts.
    assert spent.cpu_seconds == pytest.approx(5.5, abs=0.4)
    assert (spent.generated_tokens, spent.trained_tokens) == (2, 3)
    assert spent.flops == 4 * 6384


def test_old_costs_can_be_read() -> None:
    old = {"wall_seconds": 1.5, "tokens": 10, "peak_memory_gib": 0.5, "gpu_seconds": 0, "flops": 0}
    assert Cost.model_validate(old).cpu_seconds == 0


def test_the_table_shows_only_columns_with_values() -> None:
    from io import StringIO

    from rich.console import Console

    from nemo_rl_core.telemetry.display_lines import summary_table
    from nemo_rl_core.telemetry.events import StageRecord

    def shown(*costs: Cost) -> str:
        records = [StageRecord("train_sft", "ran", 2.0, cost=cost) for cost in costs]
        console = Console(file=StringIO(), width=200)
        console.print(summary_table(records))
        return str(console.file.getvalue())

    assert "CPU s" not in shown(Cost())
    bare = shown(Cost(cpu_seconds=1.25, flops=3e12 - 1.59e8), Cost(cpu_seconds=2.5, flops=1.59e8))
    assert all(word in bare for word in ("CPU s", "1.2", "2.5", "3.8", " FLOPs", " 3 T "))
    assert " 159 M " in bare
    assert " 1 T " in shown(Cost(flops=999.9e9))
    assert "money" not in bare and "MFU" not in bare
    priced = shown(Cost(money=0.5, currency="EUR", mfu=0.25), Cost(money=0.25, currency="EUR"))
    assert all(word in priced for word in ("0.5000 EUR", "0.7500 EUR", "25.0 %"))


def test_a_decks_table_has_a_column_for_each_known_value() -> None:
    def columns(cost: Cost) -> dict[str, str]:
        names, values = (
            re.findall(rf"<{cell} [^>]*>(.*?)</{cell}>", cost_html(cost)) for cell in ("th", "td")
        )
        return dict(zip(names, values, strict=True))

    assert columns(Cost(wall_seconds=0.04, cpu_seconds=0.01)) == {}
    cost = Cost(
        wall_seconds=61.25,
        cpu_seconds=0.06,
        gpu_seconds=122.5,
        tokens=7,
        generated_tokens=1234,
        trained_tokens=5678,
        flops=2.5e15,
        mfu=0.375,
        peak_memory_gib=1.5,
        money=0.5,
        currency="EUR",
    )
    assert columns(cost) == {
        "wall seconds": "61.2",
        "CPU seconds": "0.1",
        "GPU seconds": "122.5",
        "generated tokens": "1,234",
        "trained tokens": "5,678",
        "TFLOPs": "2.5e+03",
        "MFU": "37.5 %",
        "peak GiB": "1.50",
        "money": "0.5000 EUR",
    }


def test_gpus_of_engines_and_scorers_are_counted() -> None:
    settings = RolloutSettings.model_validate(
        {
            "cluster": {"shape": "cluster", "num_workers": 4},
            "generation": {"placement": {"own": 2}},
            "environment": {"kind": "reward_model", "model": "folder", "placement": {"own": 3}},
        }
    )
    dumped = settings.model_dump(mode="json")
    assert produce._num_gpus(StageInputs("train", dumped)) == 4 + 2 + 3
    assert produce._num_gpus(StageInputs("train", {**dumped, "cluster": {}})) == 0
    assert produce._num_gpus(StageInputs("train", {"cluster": dumped["cluster"]})) == 4
    assert produce._num_gpus(StageInputs("train", {})) == 0
