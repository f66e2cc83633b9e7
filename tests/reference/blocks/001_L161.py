# Same interface, different backends (via configuration in Policy)
# See nemo_rl.models.policy.lm_policy.Policy and example configs in examples/configs/
