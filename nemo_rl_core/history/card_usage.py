"""Usage section of a model card: chat, transformers and vLLM."""

import json
from pathlib import Path

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


def model_usage(model_folder: Path) -> str:
    """Returns the section for a language model; empty for other kinds of models.

    Prompts use the chat template that the model was trained with, if there is one. All three then
    give the same greedy answer.

    Args:
        model_folder: Folder with `config.json` and the tokenizer.
    """
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
        "In this folder, by transformers:\n",
        _TRANSFORMERS.replace("{inputs}", inputs),
        "By vLLM, with the same greedy answer:\n",
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
