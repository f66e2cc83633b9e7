"""Loading, sharding and checking of the models that the backend computes with."""

from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.base import (
    TrainingSetup,
    allowed_sharing,
    warn_of_balancing_loss,
)
from nemo_rl_core.backends.training.determinism import full_precision
from nemo_rl_core.backends.training.dtensor.attention import packed_attention
from nemo_rl_core.backends.training.dtensor.float8 import in_high_precision, refresh_scales
from nemo_rl_core.backends.training.dtensor.lora import Adapters
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.dtensor.model import LogprobModel, ScoreModel
from nemo_rl_core.backends.training.dtensor.packed import PackedModel
from nemo_rl_core.backends.training.dtensor.parallelize import parallelize, release
from nemo_rl_core.backends.training.dtensor.router_loss import refuse_router_loss
from nemo_rl_core.backends.training.dtensor.tensor_parallel import (
    check_tensor_parallel,
    refused_forward,
)
from nemo_rl_core.config.training import DTensorTraining, Head
from nemo_rl_core.data.pretrained import read_model_json
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import empty_model, finish_loading, load_model, name_in_errors
from nemo_rl_core.model_files.quantized import Precision
from nemo_rl_core.model_files.weights import fill_from_folder
from nemo_rl_core.planning.model_parts import refuse_untrainable


class ModelBuilder:
    """Builds the policy and the reference of one setup, and checks them on packed rows."""

    def __init__(
        self, setup: TrainingSetup, training: DTensorTraining, mesh: RankMesh | None
    ) -> None:
        self._setup, self._training, self._mesh = setup, training, mesh

    def policy(self) -> tuple[PackedModel, Adapters | None]:
        """Returns the model to train, and its adapters if there are any."""
        training, folder = self._training, self._setup.model_folder
        model = self._load(folder, self._setup.head, weights=training.weights)
        torch.manual_seed(self._setup.seed)  # transformers uses random numbers to load Nemotron-H
        lora = training.lora
        adapters = (
            Adapters(model, lora, base_folder=folder, weights=training.weights) if lora else None
        )
        model = self._shard(model, folder)
        if training.router_aux_loss_coef:
            refuse_router_loss(model, has_adapters=adapters is not None)
        else:
            warn_of_balancing_loss(model.config)
        policy = (
            ScoreModel(model, **self._packing_options(model, folder))
            if self._setup.head == "scalar"
            else self._language_model(model, folder)
        )
        self._check(policy)
        policy.keeps_router_logits = training.router_aux_loss_coef > 0
        return policy, adapters

    def reference(self, folder: Path) -> LogprobModel:
        """Returns the language model of a folder, without adapters."""
        model = self._shard(self._load(folder, "lm"), folder)
        reference = self._language_model(model, folder)
        self._check(reference)
        return reference

    def _load(self, folder: Path, head: Head, *, weights: Precision = "full") -> Any:
        """Returns the model, without its weights if each rank reads its shard later."""
        refuse_untrainable(read_model_json(folder), called=name_in_errors(folder))
        check_tensor_parallel(folder, self._training)
        if self._mesh is None or weights != "full":
            return load_model(folder, head, weights=weights)
        return empty_model(folder, head)

    def _shard(self, model: Any, folder: Path) -> Any:
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        model = parallelize(model, self._training, self._mesh, dtype=self._setup.dtype)
        if is_empty:
            model = finish_loading(model, fill_from_folder(model, folder), folder)
        refresh_scales(model)
        return model

    def _language_model(self, model: Any, folder: Path) -> LogprobModel:
        options = self._packing_options(model, folder)
        return LogprobModel(model, temperature=self._setup.temperature, **options)

    def _packing_options(self, model: Any, folder: Path) -> dict[str, Any]:
        dtype = self._setup.dtype
        attention = packed_attention(model, self._training, dtype=dtype, device=local_device())
        takes_trees = attention is None or attention.takes_trees
        is_shared = self._training.share_prefixes and takes_trees
        return {
            "dtype": dtype,
            "mesh": self._mesh,
            "attention": attention,
            "sharing": allowed_sharing(folder) if is_shared else None,
        }

    def _check(self, model: PackedModel) -> None:
        name, training = type(model.model).__name__.removeprefix("FSDP"), self._training
        with full_precision(), in_high_precision(model.model):
            try:
                model.choose_layout()
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise self._refused(name, error) from error
            except RuntimeError as error:
                # Shapes that do not match; subclasses are memory and communication errors.
                is_split = training.tensor_parallel_size * training.context_parallel_size > 1
                if not is_split or type(error) is not RuntimeError:
                    raise
                raise self._refused(name, error) from error
        release(model.model)

    def _refused(self, name: str, error: Exception) -> Exception:
        if self._training.tensor_parallel_size > 1:
            return refused_forward(name, error)
        fix = "choose another model"
        if self._training.context_parallel_size > 1:
            fix = "set context_parallel_size to 1"
        elif self._training.lora is not None:
            fix = "leave routers out of lora.target_modules, or choose another model"
        return ModelError(
            f"{name} does not compute on a batch of token ids",
            expected="a causal text model whose forward pass only needs input_ids",
            got=f"{type(error).__name__}: {error}",
            fix=fix,
        )
