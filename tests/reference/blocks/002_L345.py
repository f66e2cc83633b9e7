from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

class MyEnvironment(EnvironmentInterface):
    def step(self, message_log_batch, metadata):
        # Compute rewards
        rewards = self._compute_rewards(message_log_batch)

        return EnvironmentReturn(
            observations=[],
            metadata=[None] * len(message_log_batch),
            next_stop_strings=[None] * len(message_log_batch),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(message_log_batch), dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"mean_reward": batch["rewards"].mean().item()}
