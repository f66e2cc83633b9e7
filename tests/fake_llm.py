"""A fake of `vllm.LLM` with the memory of the real one.

Sleeping memory cannot be read or written, and discarded memory is gone. Calls are recorded.
"""

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

ALL = {"weights", "kv_cache"}


class FakeLLM:
    """`vllm.LLM` that records each call."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    events: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls, self.events = [("__init__", args, kwargs)], []
        self.asleep: set[str] = set()
        self.loaded: set[str] = set()
        self.model = AutoModelForCausalLM.from_pretrained(args[0])
        worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: self.model))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        config = SimpleNamespace(enable_sleep_mode=kwargs["enable_sleep_mode"])
        self.llm_engine = SimpleNamespace(
            model_config=config, model_executor=executor, abort_request=lambda request_ids: None
        )

    def _record(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))
        self.events.append(" ".join([name, *map(str, kwargs.values())]))

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self._record("sleep", *args, **kwargs)
        assert not self.asleep, "vLLM would only warn"
        self.asleep = set(ALL)
        if kwargs["level"] == 2:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        self._record("wake_up", *args, **kwargs)
        assert self.asleep >= set(kwargs["tags"]), "vLLM would only warn"
        self.asleep -= set(kwargs["tags"])

    def collective_rpc(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("collective_rpc", args, kwargs))
        assert args == ("reload_weights",)
        assert "weights" not in self.asleep, "there is no memory to write to"
        parameters = dict(self.model.named_parameters())
        self.arrived: list[str] = []
        self.most_alive, alive = 0, weakref.WeakSet[torch.UntypedStorage]()
        with torch.no_grad():
            for name, tensor in kwargs["kwargs"]["weights_iterator"]:
                self.arrived.append(name)
                alive.add(tensor.untyped_storage())
                self.most_alive = max(self.most_alive, len(alive))
                if name in parameters:  # a tied head is not a separate parameter
                    parameters[name].copy_(tensor)
        self.events.append("reload_weights")

    def reset_prefix_cache(self) -> bool:
        self._record("reset_prefix_cache")
        return True

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls.append(("generate", args, kwargs))
        self.events.append("generate")
        assert not self.asleep, "vLLM would read memory that is not allocated"
        assert all(parameter.isfinite().all() for parameter in self.model.parameters())
        logprobs = SimpleNamespace(token_ids=[5])
        completion = SimpleNamespace(token_ids=[5], logprobs=logprobs, finish_reason="length")
        logprobs.logprobs = [-1.0]
        return [SimpleNamespace(outputs=[completion]) for _ in args[0]]


class Gpu:
    """The memory of one GPU and its users.

    Attributes:
        used_gib: GiB by user.
        events: Allocations, releases and computations, in order.
    """

    def __init__(self, gib: float) -> None:
        self.gib, self.used_gib = gib, dict[str, float]()
        self.events: list[str] = []

    @property
    def free(self) -> float:
        """Returns free GiB."""
        return self.gib - sum(self.used_gib.values())

    def hold(self, name: str, gib: float, event: str) -> None:
        """Sets the memory of a user.

        Raises:
            RuntimeError: If it does not fit, like CUDA.
        """
        if gib - self.used_gib.get(name, 0.0) > self.free:
            raise RuntimeError(f"CUDA out of memory: {name} wants {gib}, others {self.used_gib}")
        self.used_gib[name] = gib
        self.events.append(f"{name} {event}")


class LLMOnGpu(FakeLLM):
    """Also uses memory of a GPU, and completes with scripted tokens and their true logprobs.

    Attributes:
        gpu: GPU of all instances.
        scripts: Tokens of every completion, by name of the model folder.
    """

    gpu: ClassVar[Gpu]
    scripts: ClassVar[dict[str, list[int]]]
    context_gib: ClassVar[float] = 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.eval()
        self.name = Path(args[0]).name
        share = kwargs["gpu_memory_utilization"]
        # The same as `request_memory` in `vllm/v1/worker/utils.py`.
        self.requested_gib = math.ceil(share * self.gpu.gib)
        if self.gpu.free < self.requested_gib:
            raise ValueError(
                f"Free memory on device cuda:0 ({self.gpu.free}/{self.gpu.gib} GiB) on startup is "
                f"less than desired GPU memory utilization ({share}, {self.requested_gib} GiB)"
            )
        self.gpu.hold(self.name, self.requested_gib, "starts")

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        super().sleep(*args, **kwargs)
        self.gpu.hold(self.name, self.context_gib, f"sleeps {kwargs['level']}")

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        super().wake_up(*args, **kwargs)
        self.gpu.hold(self.name, self.requested_gib, "wakes")

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        prompts, parameters = args
        assert not self.asleep, "vLLM would read memory that is not allocated"
        self.gpu.events.append(f"{self.name} generates")
        return [
            SimpleNamespace(outputs=[self._completion(prompt["prompt_token_ids"], asked)] * asked.n)
            for prompt, asked in zip(prompts, parameters, strict=True)
        ]

    def _completion(self, prompt: list[int], asked: Any) -> Any:
        tokens = self.scripts[self.name][: asked.max_tokens]
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logprobs = self.model(input_ids=ids).logits[0].float().log_softmax(-1)
        positions = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        pairs = zip(positions, tokens, strict=True)
        values = [float(logprobs[position, token]) for position, token in pairs]
        flat = SimpleNamespace(token_ids=tokens, logprobs=values)
        return SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason="stop")
