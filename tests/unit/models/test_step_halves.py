"""Backends whose steps a policy may split in two, and whose checkpoints it may save as shards."""

from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.models.policy.lm_policy import saves_shards, splits_steps


class WithMore(DTensorBackend):
    def train_step(self, *args):
        return {**super().train_step(*args), "more": 1.0}


class WithHalf(WithMore):
    def forward_backward(self, *args, **options):
        return super().forward_backward(*args, **options)


class Whole:
    def train_step(self, *args):
        return {}


def test_a_step_that_a_backend_overrides_is_not_split():
    by_backend = {kind: splits_steps(kind) for kind in (DTensorBackend, WithMore, WithHalf, Whole)}
    assert by_backend == {DTensorBackend: True, WithMore: False, WithHalf: True, Whole: False}


class SavesMore(DTensorBackend):
    def load_checkpoint(self, path):
        super().load_checkpoint(path)


class SavesShardsToo(SavesMore):
    def start_sharded_checkpoint(self, path):
        super().start_sharded_checkpoint(path)


def test_a_save_that_a_backend_overrides_is_not_sharded():
    by_backend = {kind: saves_shards(kind) for kind in (WithMore, SavesMore, SavesShardsToo, Whole)}
    assert by_backend == {WithMore: True, SavesMore: False, SavesShardsToo: True, Whole: False}
