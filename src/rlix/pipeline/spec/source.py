"""Where a job's samples come from: a task, data with rewards, an environment, or a source of the user's."""

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from rlix.pipeline.spec.named import Named
from rlix.pipeline.spec.section import Count, NonNegative, Positive, Seconds, Section, apart, one_or_many

TASKS = {
    "sort_digits": "rlix.pipeline.sources.tasks.digits:sort_digits",
    "copy_digits": "rlix.pipeline.sources.tasks.digits:copy_digits",
}
REWARDS = {
    "exact_match": "rlix.pipeline.sources.rewards:exact_match",
    "math_verify": "rlix.pipeline.sources.math_reward:math_verify",
    "number_match": "rlix.pipeline.sources.rewards:number_match",
    "token_match": "rlix.pipeline.sources.rewards:token_match",
}
ENVIRONMENTS = {
    "digit_lookup": "rlix.pipeline.sources.environments.lookup:DigitLookup",
    "gym": "rlix.pipeline.sources.environments.gym:GymnasiumEnvironment",
    "reasoning_gym": "rlix.pipeline.sources.environments.reasoning:ReasoningEnvironment",
}
EXTERNAL, VERIFIERS = "external", "verifiers"
AGENTS = {
    EXTERNAL: EXTERNAL,
    VERIFIERS: "rlix.integrations.openai.verifiers_agent:VerifiersAgent",
}
AGENT_GIVEN = ENVIRONMENT_GIVEN = TASK_GIVEN = 1  # a `Call`; an `Instance`; a tokenizer
REWARD_GIVEN = 3  # prompt, completion, answer


class TaskSpec(Named):
    """Prompts that bring their own reward. `sort_digits` and `copy_digits` have an option `digits` (4)."""

    name: str
    """`sort_digits`, `copy_digits`, or your own: `file.py:Class`, called with the tokenizer and the options."""

    @property
    def target(self) -> str:
        return TASKS.get(self.name, self.name)


class TableSpec(Section):
    path: str = ""
    """A file (.jsonl, .json, .parquet, .csv), a folder of such files or one saved by `datasets`
    (`Dataset.save_to_disk`), relative to the job's file; or a name on the Hugging Face hub."""
    config: str | None = None
    """Which of the configurations of a data set on the hub, or of a folder."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer: str | None = "answer"
    """Column with the right answer; null when the rewards need none."""
    split: str = "train"
    """Which split, when there are several."""
    streaming: bool = False
    """Read rows as they are needed, in an order that is shuffled 10,000 at a time, for what does not fit on the disk.
    Rows that cannot be used are then found while the job runs: they are left out, and said in the log."""


class MixedTableSpec(TableSpec):
    """One table of several."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=48)] | None = None
    """Of its curves, `data/<name>/reward` and `exact`; left out: the last part of its path."""
    weight: Positive = 1.0
    """Prompts are drawn from each table in proportion to its weight, whatever its size: exactly so in every 1,000 in a
    row. A table that is at its end begins anew."""


class DataSpec(TableSpec):
    """Prompts from a table, or from several in a `mix`."""

    mix: Annotated[tuple[MixedTableSpec, ...], Field(strict=False)] = ()
    """Several tables instead of one; each with `path`, `prompt`, `answer` and so on."""
    max_prompt_tokens: Count | None = None
    """Rows with a longer prompt are left out before the start; null: with one that leaves no room for
    `rollout.max_new_tokens` in the model's context."""

    @property
    def tables(self) -> "tuple[TableSpec, ...]":
        return self.mix or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(table.weight for table in self.mix) or (1.0,)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tables of a mix, all different; one alone needs none."""
        return tuple(apart([table.name or PurePath(table.path).stem for table in self.mix])) or ("",)


class RewardSpec(Named):
    """One of the rewards that judge the completions of prompts from `data`."""

    name: str
    """`exact_match`, `number_match`, `token_match`, `math_verify` (mathematical equality, by the package of that name),
    or your own: `file.py:function`, called with (prompt, completion, answer), the options, and those of the row's other
    columns that it has parameters for; returns a number."""
    weight: float = 1.0
    """The rewards of a completion are added up by weight."""
    timeout_s: Seconds = 30.0
    """Longest one call of your own may take."""
    concurrency: Count | None = None
    """How many calls of your own run at a time, beside the generation of what is not judged yet; left out: 64 of an
    `async def`, all in one process, and 4 of another function, each in a process of its own. One that waits for a
    server is slow as such: 1,000 answers of 2 s take 500 s, which the log says."""
    per: Literal["sample", "group"] = "sample"
    """`group`: one call for all completions of a prompt, when the last is there; `completion` is then a list of texts,
    and a list of numbers comes back."""

    @property
    def target(self) -> str:
        return REWARDS.get(self.name, self.name)


class EnvironmentSpec(Named):
    """What an agent acts in, turn by turn, and what its failures cost."""

    name: str
    """`digit_lookup`, `gym` (any Gymnasium environment), `reasoning_gym` (a data set of that package), or your own:
    `file.py:Class`, called with an `Instance` and the options."""
    runner: Literal["in_process", "subprocess"] = "in_process"
    """In the pipeline's event loop, or each in a process that is killed when it hangs."""
    max_processes: Count = 8
    """With `runner: subprocess`: how many environments run at a time."""
    max_turns: Count = 8
    max_tokens: Count | None = None
    """Longest trajectory in tokens, observations included; null for the model's context."""
    reset_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 30.0
    attempts: Count = 2
    """How often an environment is started for a trajectory before it counts as failed."""
    backoff_s: NonNegative = 0.1
    """Wait before the second attempt; it doubles with each further one."""
    failure_reward: float | None = None
    """Reward of a trajectory whose environment failed; null leaves it out of the update."""

    @property
    def target(self) -> str:
        return ENVIRONMENTS.get(self.name, self.name)


class ChatSpec(Section):
    """How messages become tokens: prompts that are messages (or text, where the model has a chat template), and what
    environments say in messages."""

    system: str | None = None
    """Said before each prompt from `data` that is text; environments and agents say theirs."""
    template: str | None = None
    """A file with a chat template in place of the tokenizer's, relative to the job's file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking: false`."""
    history: Literal["refuse", "keep"] = "refuse"
    """What to do, in environments and with agents, with a template that drops what the model thought in earlier turns:
    refuse it, or keep every token that was generated, against the template."""


class AgentSpec(Named):
    """Agents that talk to the job's OpenAI-compatible endpoint, on 127.0.0.1 of the pipeline's node."""

    name: str
    """`external` (whoever has the job's key plays), `verifiers` (an environment of that package, whose name is the
    option `environment`), or your own: `file.py:function`, called with a `Call` and the options; returns the episode's
    reward."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: one that is free. Of `external`, `RLIX_HOME/endpoints/<job>.json` holds address and key."""
    concurrency: Count = 64
    """How many functions that are not async run at a time."""
    timeout_s: Seconds = 600.0
    """Longest an episode may take, from when your agent is called or somebody outside has taken it; then it failed."""
    failure_reward: float | None = None
    """Reward of an episode whose agent failed; null leaves it out of the update."""

    @property
    def target(self) -> str:
        return AGENTS.get(self.name, self.name)


class ConversationsSpec(Section):
    """A table of what is right, to learn from as it is: for `algorithm: sft` one conversation in a row, for `dpo`
    two."""

    path: str
    """As of `source.data`: a file, a folder, or a name on the Hugging Face hub."""
    config: str | None = None
    split: str = "train"
    messages: str = "messages"
    """Column with a list of chat messages; all that have the role `assistant` are learnt."""
    prompt: str = "prompt"
    """Column with what comes before an answer: text, or messages."""
    answer: str | None = None
    """Column with the answer to the prompt, in place of `messages`."""
    chosen: str = "chosen"
    """Column with the better answer to the prompt, for `dpo`: text, or messages (then there need be no prompt);"""
    rejected: str = "rejected"
    """and with the worse one."""

    @property
    def table(self) -> TableSpec:
        return TableSpec(path=self.path, config=self.config, split=self.split)

    def needed(self, *, pairs: bool) -> dict[str, str]:
        """The columns that there must be, by the field that names them, those with an answer first."""
        if pairs:
            return {"chosen": self.chosen, "rejected": self.rejected}
        return {"messages": self.messages} if self.answer is None else {"answer": self.answer, "prompt": self.prompt}


class SourceSpec(Section):
    """Where samples come from: `task`, `data` with `rewards`, `environment`, `openai`, `conversations`, or the `name`
    of your own."""

    bare = "name"

    task: TaskSpec | None = None
    data: DataSpec | None = None
    rewards: Annotated[tuple[RewardSpec, ...], one_or_many(RewardSpec), Field(strict=False)] = ()
    """What judges completions of prompts from `data`; one alone needs no list."""
    environment: EnvironmentSpec | None = None
    chat: ChatSpec = ChatSpec()
    openai: AgentSpec | None = None
    conversations: ConversationsSpec | None = None
    name: str | None = None
    """Your own source: `file.py:Class`, a `rlix.pipeline.sources.Source`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the source that `name` says."""

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that is used, where the job says it."""
        return None if self.data is None else self.data.max_prompt_tokens
