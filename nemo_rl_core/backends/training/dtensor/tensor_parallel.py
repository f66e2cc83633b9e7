"""Tensor parallelism of a transformers decoder: the split of each module.

Every parameter becomes a DTensor over the tensor axis, split or replicated, so that all have one
mesh, as sharding, gradient norms and fused optimizers require.
"""

from fnmatch import fnmatch
from inspect import getsource
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from nemo_rl_core.checkpoints.model_code import described_config
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.model_files.loading import SCALAR_HEAD

Direction = Literal["colwise", "rowwise"]

_LINEAR_LAYERS: dict[str, Direction] = {
    "*.self_attn.q_proj": "colwise",
    "*.self_attn.k_proj": "colwise",
    "*.self_attn.v_proj": "colwise",
    "*.self_attn.o_proj": "rowwise",
    "*.mlp.gate_proj": "colwise",
    "*.mlp.up_proj": "colwise",
    "*.mlp.down_proj": "rowwise",
}
"""Linear layers of the Llama, Mistral, Qwen2, Qwen3 and Gemma types, which share these names."""
_TOKENS, _HEADS = Shard(1), Shard(2)


class _ReplicatedWeights(ParallelStyle):
    """A module with replicated weights, whose first input has the placement `layout`."""

    def __init__(self, layout: Placement, output: Placement | None = None) -> None:
        self._layout, self._output = layout, output or layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module, device_mesh, _replicate, self._distributed_inputs, self._local_output
        )

    def _distributed_inputs(self, _: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        first, *others = inputs
        return DTensor.from_local(first, mesh, [self._layout], run_check=False), *others

    def _local_output(self, _: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(mesh, [self._output]).to_local()


def check_tensor_parallel(folder: Path, training: DTensorTraining) -> None:
    """Raises if the ranks cannot divide the model's heads evenly; reads no weights."""
    size = training.tensor_parallel_size
    if size == 1:
        return
    if training.lora is not None:
        raise ConfigError(
            "adapters cannot be split by tensor parallelism",
            expected="lora with tensor_parallel_size: 1",
            got=f"tensor_parallel_size: {size}",
            fix="set tensor_parallel_size to 1; frozen weights are sharded over data ranks as well",
        )
    config = described_config(folder).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None) or size
        if isinstance(number, int) and number % size:  # some types have a list, one per layer
            raise ConfigError(
                f"tensor parallelism cannot divide {name} of {folder.name!r}",
                expected=f"a multiple of tensor_parallel_size = {size}",
                got=f"{name} = {number}",
                fix="choose a tensor_parallel_size that divides it, and use more data ranks",
            )


def apply_tensor_parallel(model: Any, training: DTensorTraining, mesh: DeviceMesh) -> None:
    """Splits a transformers model over the ranks of one axis, in place."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    plan = tensor_parallel_plan(model, training)
    # Every rank has read the same weights, so no broadcast is needed.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if tied:
        head.weight = embedding.weight
    if training.sequence_parallel:
        first = model.get_decoder().layers[0]
        first.register_forward_pre_hook(lambda _, inputs: (_split(inputs[0], mesh), *inputs[1:]))


def tensor_parallel_plan(model: Any, training: DTensorTraining) -> dict[str, ParallelStyle]:
    """Returns the style of each module that has weights or splits its inputs, by name."""
    residual: Placement = _TOKENS if training.sequence_parallel else Replicate()
    linear = training.tensor_parallel_plan or _LINEAR_LAYERS
    special = _outside_layers(model, residual)
    plan: dict[str, ParallelStyle] = {}
    unknown: list[str] = []
    for name, module in model.named_modules():
        direction = next((style for pattern, style in linear.items() if fnmatch(name, pattern)), "")
        if module in special:
            plan[name] = special[module]
        elif direction == "colwise":
            plan[name] = ColwiseParallel()
        elif direction == "rowwise":
            plan[name] = RowwiseParallel(output_layouts=residual)
        elif (style := _inside_layer(name, module, residual)) is not None:
            plan[name] = style
        if isinstance(plan.get(name), PrepareModuleInput | None):  # neither splits weights
            unknown += [f"{name}.{weight}" for weight, _ in module.named_parameters(recurse=False)]
        if name.endswith(".self_attn") and "self.num_heads" in getsource(type(module).forward):
            unknown.append(f"{name}, which computes with the heads of all ranks")  # StableLM
    if unknown:
        raise ConfigError(
            f"tensor parallelism has no plan to split {type(model).__name__}",
            expected="attention and MLP of the Llama, Qwen2, Qwen3 or Gemma type",
            got=f"{len(unknown)} others, such as {', '.join(unknown[:3])}",
            fix="name a style for each linear layer in tensor_parallel_plan, such as "
            '{"*.fc1": colwise, "*.fc2": rowwise}, or set tensor_parallel_size to 1',
        )
    return plan


def _outside_layers(model: Any, residual: Placement) -> dict[nn.Module | None, ParallelStyle]:
    """Returns the styles of modules outside the layers; the head's input is replicated."""
    full = Replicate()
    return {
        model.get_output_embeddings(): ColwiseParallel(output_layouts=full),
        getattr(model, SCALAR_HEAD, None): _ReplicatedWeights(full),
        model.get_input_embeddings(): RowwiseParallel(input_layouts=full, output_layouts=full),
        getattr(model.get_decoder(), "norm", None): _ReplicatedWeights(residual, output=full),
    }


def _inside_layer(name: str, module: nn.Module, residual: Placement) -> ParallelStyle | None:
    """Returns the style of a module that is not a linear layer, or None if it is not known."""
    match name.rpartition(".")[2]:
        case "self_attn":
            return PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": residual},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        case "mlp":
            return PrepareModuleInput(input_layouts=residual, desired_input_layouts=Replicate())
        case "q_norm" | "k_norm":
            return _ReplicatedWeights(_HEADS)
        case _:
            return _ReplicatedWeights(residual) if _is_layer_norm(name, module) else None


def _is_layer_norm(name: str, module: nn.Module) -> bool:
    """Whether a module is a direct child of a decoder layer and only has 1-D weights."""
    parameters = list(module.parameters(recurse=False))
    in_layer = name.split(".")[-3:-2] == ["layers"]
    return in_layer and bool(parameters) and all(weight.dim() == 1 for weight in parameters)


def refused_forward(model: str, error: Exception) -> ConfigError:
    """Returns the error for a model whose forward pass fails after its weights were split."""
    return ConfigError(
        f"tensor parallelism has no plan that fits {model}",
        expected="attention and MLP that compute with the heads and columns of one rank",
        got=f"{type(error).__name__}: {error}",
        fix="set tensor_parallel_size to 1, and use more data ranks",
    )


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, weight in list(module.named_parameters(recurse=False)):
        replicated = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
        parameter = nn.Parameter(replicated, requires_grad=weight.requires_grad)
        module.register_parameter(name, parameter)


def _split(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Splits a replicated `[R, L, D]` into each rank's `[R, L / ranks, D]`."""
    replicated = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    local: Tensor = replicated.redistribute(mesh, [_TOKENS]).to_local()
    return local
