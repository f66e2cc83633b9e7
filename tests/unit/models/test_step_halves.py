"""Which backends' steps a policy may take in two halves."""

from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.models.policy.lm_policy import splits_steps


class WithMore(DTensorBackend):
    def train_step(self, *args):
        return {**super().train_step(*args), "more": 1.0}


class WithHalf(WithMore):
    def forward_backward(self, *args, **options):
        return super().forward_backward(*args, **options)


class Whole:
    def train_step(self, *args):
        return {}


def test_what_a_backend_adds_to_a_step_is_not_passed_over():
    found = {kind: splits_steps(kind) for kind in (DTensorBackend, WithMore, WithHalf, Whole)}
    assert found == {DTensorBackend: True, WithMore: False, WithHalf: True, Whole: False}
