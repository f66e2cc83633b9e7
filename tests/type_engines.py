"""Compares tiny models of the causal types of transformers in vLLM with their trainer.

`python -m tests.type_engines [TYPE ...]` prints the lists of docs/model-types.md, by default
of all types.
Each type has two processes, like a run: the trainer sends its weights to the engine over a link.
"""

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.models.columns import as_training_batch
from nemo_rl_core.models.generation.engine_environment import engine_environment
from nemo_rl_core.models.validation.proof import check_proof, proof_bounds, proof_prompts
from tests.model_types import make_backend, make_batch, save_tokenizer, tiny_model

LEARNING_RATE = 1e-2
"""So large that an engine with old weights differs by far more than the proof allows."""
NUM_UPDATES = 2
_CONFIG = VllmGenerationConfig(max_new_tokens=4, max_num_seqs=16)
_MAX_MODEL_LEN = 64
_GENERIC = "TransformersForCausalLM"
_MOST_SECONDS = 300.0


@dataclass(frozen=True)
class Agreement:
    """Result of comparing vLLM with the trainer for a type.

    Attributes:
        kind: The `model_type`.
        errors: The largest difference of logprobs, in nats, with the folder's weights and after
            each update.
        engine: Name of vLLM's class.
        refused: Error of either side, or empty.
        is_named: Whether the error has one of the project's types.
    """

    kind: str
    errors: tuple[float, ...] = ()
    engine: str = ""
    refused: str = ""
    is_named: bool = False

    @property
    def error(self) -> float:
        """Returns the largest of all differences; infinity for a refused type."""
        return max(self.errors) if not self.refused else float("inf")


def agreements(kinds: list[str]) -> list[Agreement | str]:
    """Compares vLLM and the trainer for each type; returns types without a tiny model as names."""
    results: list[Agreement | str]
    (results,) = run_ranks(lambda: list(_agreements(kinds)), world_size=1)
    return results


def _agreements(kinds: list[str]) -> Iterator[Agreement | str]:
    """Runs in a separate process, since it imports vLLM once for all."""
    warnings.filterwarnings("ignore")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    os.environ |= engine_environment(_CONFIG) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    from nemo_rl_core.backends.generation.vllm_libraries import load_libnuma

    load_libnuma()
    import vllm  # noqa: F401

    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                tiny_model(kind, is_wide=True).save_pretrained(Path(folder) / "start")
            except Exception:  # noqa: BLE001  (whatever its config refuses)
                result: Agreement | str = kind
            else:
                save_tokenizer(Path(folder))
                result = _agreement(kind, Path(folder) / "start")
        yield result


def _agreement(kind: str, folder: Path) -> Agreement:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = LinkSpec("127.0.0.1", store.port, 1, "shared_memory", 60, "secret")
    context = multiprocessing.get_context("fork")
    ends, results = context.Pipe(), context.Pipe(duplex=False)
    processes = [
        context.Process(target=_report, args=(partial(side, folder, link, pipe), results[1], other))
        for side, pipe, other in zip((_train, _generate), ends, reversed(ends), strict=True)
    ]
    for process in processes:
        process.start()
    for each in (*ends, results[1]):
        each.close()
    answers: list[dict[str, Any]] = []
    with suppress(EOFError):  # both sides have ended
        while results[0].poll(_MOST_SECONDS):
            answers.append(results[0].recv())
    for process in processes:
        process.kill()
        process.join()
    # A side that fails interrupts the other one's transfer.
    answers.sort(key=lambda each: not each.get("refused", "Transfer").startswith("Transfer"))
    fields = {name: value for each in answers for name, value in each.items()}
    if not fields:
        fields = {"refused": f"a process died, or took more than {_MOST_SECONDS} s"}
    return Agreement(kind, **fields)


def _report(side: Callable[[], dict[str, Any]], results: Connection, other: Connection) -> None:
    other.close()
    try:
        fields = side()
    except EOFError:  # the other side has ended and reports why
        return
    except BaseException as error:  # noqa: BLE001  (of any type: whatever ends it)
        text = (
            error.in_one_line if isinstance(error, NemoRLError) else f"{error}".partition("\n")[0]
        )
        fields = {
            "refused": f"{type(error).__name__}: {text}",
            "is_named": isinstance(error, NemoRLError),
        }
    results.send(fields)


def _train(folder: Path, link: LinkSpec, engine: Connection) -> dict[str, Any]:
    backend = make_backend(folder, LEARNING_RATE)
    for update in range(NUM_UPDATES + 1):
        if update:
            backend.train_step(make_batch(), NLLLoss())
            backend.send_weights(link, [link])
        engine.send(backend.get_logprobs(engine.recv()).numpy())  # not its memory, which is freed
    return {}


def _generate(folder: Path, link: LinkSpec, trainer: Connection) -> dict[str, Any]:
    from nemo_rl_core.backends.generation.vllm import VllmBackend

    backend = VllmBackend()
    backend.setup(GenerationSetup(folder, _CONFIG, _MAX_MODEL_LEN, stop_token_ids=(2,)))
    errors = []
    bounds = proof_bounds(GateConfig(), dtype="float32", is_quantized=False, has_gpu=False)
    for update in range(NUM_UPDATES + 1):
        if update:
            backend.receive_weights(link, 0)
        output = backend.generate(proof_prompts(folder, max_model_len=_MAX_MODEL_LEN), greedy=False)
        batch = as_training_batch(output)
        trainer.send(batch)
        batch["generation_logprobs"] = output["logprobs"][:, 1:]
        batch["prev_logprobs"] = torch.from_numpy(trainer.recv())
        differences = batch["generation_logprobs"] - batch["prev_logprobs"]
        errors.append(float((differences * batch["token_mask"]).abs().max()))
        check_proof(batch, bounds, reference="the trainer")
    return {"errors": tuple(errors), "engine": type(backend._model()).__name__}


def main() -> None:
    """Prints the lists."""
    results = agreements(sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    tried = [each for each in results if isinstance(each, Agreement)]
    agreeing = [each for each in tried if not each.refused]
    generic = [each.kind for each in agreeing if each.engine == _GENERIC]
    dedicated = [each.kind for each in agreeing if each.engine != _GENERIC]
    unbuilt = [each for each in results if isinstance(each, str)]
    write, worst = sys.stdout.write, max(agreeing, key=lambda each: each.error, default=None)
    write(f"{len(agreeing)} of {len(tried)} types agree by the proof; the worst is {worst}\n")
    write(f"\nDedicated classes of vLLM ({len(dedicated)}): {', '.join(dedicated)}.\n")
    write(f"\nIts generic class ({len(generic)}): {', '.join(generic)}.\n")
    write(f"\nRefused ({len(tried) - len(agreeing)}):\n")
    for each in tried:
        if each.refused:
            write(f"- {each.kind}: {each.refused}\n")
    write(f"\nNot tried ({len(unbuilt)}): {', '.join(unbuilt)}.\n")


if __name__ == "__main__":
    main()
