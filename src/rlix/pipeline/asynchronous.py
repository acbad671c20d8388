"""Off-policy training under a bound: the next steps' trajectories are generated while a step trains."""

from collections.abc import Sequence
from concurrent.futures import Future

from rlix.pipeline.agentic import AgenticPipeline
from rlix.pipeline.ahead import AheadPipeline
from rlix.pipeline.policy import PolicyBatch
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import Samples
from rlix.pipeline.sources.environments.episode import Episode
from rlix.pipeline.sources.tasks import Prompt


class AsynchronousPipeline(AheadPipeline):
    """One answer to each prompt."""

    def begin(self, step: int) -> "Future[list[Trajectory]]":
        return self.rollouts.submit_all(step, self.trajectories(self._prompts(step)))

    def finished(self, generating: "Future[list[Trajectory]]") -> list[Trajectory]:
        return self.rollouts.wait(generating, self.rollout_timeout_s, self.stop_requested)

    def sample(self, step: int) -> Samples:
        done, seconds, waited = self.collect(step)
        self.note_rollout(done, seconds)
        self.rollout_metrics["rollout_wait_s"] = waited
        return self.judge(self._prompts(step), done)

    def collate(self, trajectories: Sequence[Trajectory]) -> PolicyBatch:
        batch = super().collate(trajectories)
        return self.keep_origin(batch, [t.versions for t in trajectories], [t.logprobs for t in trajectories])

    def _prompts(self, step: int) -> Sequence[Prompt]:
        return self.task.prompts(self.spec.seed, step, self.spec.rollout.prompts_per_step)


class AsynchronousAgenticPipeline(AgenticPipeline, AheadPipeline):
    """The next steps' episodes are played while a step trains; an episode's turns may come from several versions."""

    def play(self, step: int) -> list[Episode]:
        episodes: list[Episode]
        episodes, seconds, waited = self.collect(step)
        self.note_episodes(episodes, seconds)
        self.rollout_metrics["rollout_wait_s"] = waited
        return episodes

    def collate_episodes(self, episodes: Sequence[Episode], counts: Sequence[bool]) -> PolicyBatch:
        batch = super().collate_episodes(episodes, counts)
        kept = [episode.turns if count else () for episode, count in zip(episodes, counts, strict=True)]
        return self.keep_origin(
            batch,
            [[version for turn in turns for version in turn.answer.versions] for turns in kept],
            [[logprob for turn in turns for logprob in turn.answer.logprobs] for turns in kept],
        )
