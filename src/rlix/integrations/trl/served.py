"""`use_vllm=True` without a vLLM of TRL's: its generation is served by the job's elastic replicas."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlix.integrations.rollouts import Rollouts
from rlix.pipeline.rollout.router import Sampling
from rlix.protocol.errors import SpecError

Prompts = Sequence[Sequence[int]]
Start = Callable[[str, str], Rollouts]
"""Of a model's path and dtype."""

_LIKE_NONE = {"repetition_penalty": (None, 1.0), "min_p": (None, 0.0), "generation_kwargs": (None, {}),
              "structured_outputs_regex": (None,)}  # fmt: skip


class ServedGeneration:
    """Takes the place of `trl.generation.VLLMGeneration`; log-probs are those of the sampled tokens.

    Replicas generate with the weights of the last `publish`, which happens under the training's lease.
    """

    def __init__(self, start: Start, *, model: Any, processing_class: Any, **how: Any) -> None:
        """`start` starts replicas of a model, of its dtype.

        Raises:
            SpecError: TRL is asked for something that the replicas do not do.
        """
        self._refuse(model, how)
        ends = getattr(model.generation_config, "eos_token_id", None)
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self._sampling = Sampling(
            max_new_tokens=how["max_completion_length"],
            temperature=how["temperature"],
            top_p=how["top_p"],
            top_k=max(0, how["top_k"] or 0),
            stop_token_ids=tuple(dict.fromkeys([int(processing_class.eos_token_id), *map(int, listed)])),
        )
        self._model = model
        self._rollouts = start(model.config._name_or_path, str(model.dtype).removeprefix("torch."))
        self.version = -1
        self.seed = 0
        # Server mode asks which log-probs it gets: those of the model's own distribution.
        as_it_is = self._sampling == replace(self._sampling, temperature=1.0, top_p=1.0, top_k=0)
        info = {"model_config": {"logprobs_mode": "processed_logprobs" if as_it_is else "raw_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    def publish(self, version: int) -> None:
        """The model's weights must be readable."""
        if version != self.version:
            self._rollouts.publish(self._model, version)
            self.version = version

    def sync_weights(self) -> None:
        """TRL says that a step was made; its weights were published then."""

    def generate(
        self, prompts: Prompts, images: Any = None, num_generations: int = 1, profiler: Any = None, **_: Any
    ) -> tuple[Any, list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Prompts, completions, log-probs and whose they are; one answer for each prompt, which come repeated."""
        if images is not None and any(image is not None for image in images):
            raise SpecError("rlix.trl: use_vllm with images is not supported")
        done = self._rollouts.generate(prompts, self._sampling, seed=self.seed)
        tokens = [list(each.token_ids) for each in done]
        logprobs = [[[value] for value in each.logprobs] for each in done]
        return prompts, tokens, logprobs, [[[id] for id in ids] for ids in tokens]

    @staticmethod
    def _refuse(model: Any, how: dict[str, Any]) -> None:
        wrong = [name for name, fine in _LIKE_NONE.items() if how.get(name) not in fine]
        if wrong:
            raise SpecError(f"rlix.trl: use_vllm with {', '.join(wrong)} is not supported; leave it out")
        if how["accelerator"].num_processes > 1:
            raise SpecError("rlix.trl: use_vllm on several ranks is not supported yet")
        if hasattr(model, "peft_config"):
            raise SpecError("rlix.trl: use_vllm with an adapter is not supported yet")
