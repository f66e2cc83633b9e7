"""Supervised fine-tuning: batch, train, log, save."""

from pathlib import Path

from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.algorithms.sft.data import load_examples, sft_batch
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.infra.timer import Timer
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.trainers.base import FitResult, StepLoop, StepRange


class SFTTrainer:
    """Trains on the completions of a data set.

    Args:
        config: Steps, batch and optimizer.
        session: Where the workers run.
        training: Which backend.
        dtype: Type of the matrix products.
        seed: Of the order of the rows.
    """

    def __init__(
        self,
        config: SFTConfig,
        session: ClusterSession,
        *,
        training: TrainingConfig,
        dtype: DType,
        seed: int,
    ) -> None:
        self._config = config
        self._session = session
        self._training = training
        self._dtype = dtype
        self._seed = seed

    def fit(self, data: Path, *, start: Path, work: Path) -> FitResult:
        """Trains from the weights in `start`.

        Args:
            data: Folder of a data set with prompts and completions.
            start: A transformers folder.
            work: Folder of this stage; an interrupted attempt in it is continued.
        """
        config = self._config
        loop = StepLoop(
            work,
            stage="train_sft",
            steps=StepRange(1, config.num_steps),
            save_every_num_steps=config.save_every_num_steps,
        )
        if loop.is_finished:
            return loop.finish()
        examples = load_examples(data, load_tokenizer(start))
        batches = PromptLoader(examples, batch_size=config.global_batch_size, seed=self._seed)
        policy = Policy(self._session, self._training, self._setup(start))
        loss = NLLLoss()
        for step in loop.steps(policy):
            timer = Timer()
            with timer.phase("train"):
                metrics = policy.train(sft_batch(batches.batch(step - 1)), loss)
            loop.report(step, metrics, timer.take())
        return loop.finish(peak_memory_gib=policy.peak_memory_gib())

    def _setup(self, start: Path) -> TrainingSetup:
        return TrainingSetup(
            model_folder=start,
            optimizer=self._config,
            max_tokens_per_microbatch=self._config.max_tokens_per_microbatch,
            dtype=self._dtype,
            seed=self._seed,
        )
