"""One rollout's way through trajectories that call tools between turns of decoding, event by event.

A trajectory waits for its sandbox, then decodes a turn on one bundle, waits for its call, and so on; while it waits it
takes no room. A bundle decodes in whole steps: who comes is in the batch from the next one on, which also computes the
context of those who came; how long a step takes depends on how many are in it. Turns go to the bundle with fewest, as
`rlix.pipeline.rollout.router` has it, or back to the one that has the context cached. A bundle that leaves ends its
step, and what it decoded is kept. Steps that are alike are taken together, so events are as many as turns.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

import numpy as np

from rlix.sim.decoder import Decoder, Floats
from rlix.sim.work import MOMENT_S, Done, Outlook

_SAME_S = 1e-9  # moments so close are one


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Arrays of shape [turns]: the seconds it waits before each turn, and the tokens it then decodes, at least one.

    Turn `again` begins with the prompt alone once more, after a failure; 0: there was none.
    """

    waits_s: Floats
    tokens: Floats
    again: int = 0


class MultiTurn:
    """One step's trajectories. `result_tokens`: what each call adds to the context."""

    def __init__(
        self, trajectories: Sequence[Trajectory], decoder: Decoder, prompt_tokens: int = 0, result_tokens: int = 0
    ) -> None:
        self.decoder = decoder
        self.trajectories = tuple(trajectories)
        self.step_s: list[float] = decoder.token_s(np.arange(decoder.max_batch + 1, dtype=np.float64)).tolist()
        self._prompt, self._result = prompt_tokens, result_tokens
        self._lengths = np.array([t.tokens.sum() for t in trajectories])
        self._least_context = float(sum(self.contexts(t)[1].sum() for t in trajectories))
        self._longest_s = max(float(self.rest_s(t)[0] + t.waits_s[0]) for t in trajectories)
        self.total = self.done(float(self._lengths.sum()), float(self._lengths.max()), self._least_context)

    def contexts(self, trajectory: Trajectory) -> tuple[Floats, Floats]:
        """Tokens before each turn, and how many of them have to be computed then, even where nothing was lost."""
        before = np.cumsum(trajectory.tokens) - trajectory.tokens
        context = self._prompt + before + self._result * np.arange(len(before))
        context[trajectory.again :] -= context[trajectory.again] - self._prompt
        if not self.decoder.caches:
            return context, context
        new = np.full(len(context), float(self._result))
        new[[0, trajectory.again]] = self._prompt
        return context, new

    def rest_s(self, trajectory: Trajectory) -> Floats:
        """From the beginning of each turn to the end of all, in no company and with nothing lost."""
        busy_s = trajectory.tokens * self.step_s[1] + self.contexts(trajectory)[1] * self.decoder.prefill_s
        rest: Floats = np.cumsum((busy_s + np.append(trajectory.waits_s[1:], 0.0))[::-1])[::-1]
        return rest

    def done(self, tokens: float, longest: float, context: float) -> Done:
        """`longest`: tokens of the longest trajectory, whose weights are streamed however well others fill the batch.
        `context`: tokens of it that had to be computed."""
        decoder = self.decoder
        work_s = max(
            longest * decoder.weights_s + tokens * decoder.kv_s, tokens * decoder.reference_gpu_s / decoder.gpus
        )
        return Done(tokens, (work_s + context * decoder.prefill_s) * decoder.gpus)

    def shortest_s(self, bundles: int) -> float:
        """The longest in no company, or all tokens at the best batch."""
        decoder = self.decoder
        work_s = self.total.tokens * decoder.reference_gpu_s / decoder.gpus + self._least_context * decoder.prefill_s
        return max(self._longest_s, work_s / bundles)

    def outlook(self, alive: int, depth: float) -> Outlook:
        """Its end depends on more than decoding, so nothing is said of it."""
        like = self._lengths[self._lengths > depth]
        return Outlook(alive * (float(like.mean()) - depth if len(like) else 0.1 * depth))

    def begin(self) -> "MultiTurnRollout":
        return MultiTurnRollout(self)


class _Playing:
    """A trajectory in flight."""

    __slots__ = (
        *("tokens", "waits_s", "contexts", "least", "rest_s", "after_s"),
        *("turn", "drawn", "finished", "ready_s", "cached_on"),
    )

    def __init__(self, work: MultiTurn, trajectory: Trajectory) -> None:
        context, least = work.contexts(trajectory)
        self.tokens: list[int] = trajectory.tokens.astype(int).tolist()
        self.waits_s: list[float] = trajectory.waits_s.tolist()
        self.contexts: list[float] = context.tolist()
        self.least: list[float] = least.tolist()  # of a turn's context, what has to be computed; 0 from when it was
        rest_s = work.rest_s(trajectory)
        self.rest_s: list[float] = rest_s.tolist()
        self.after_s: list[float] = [*(trajectory.waits_s[1:] + rest_s[1:]).tolist(), 0.0]
        self.turn = 0
        self.drawn = 0  # tokens of this turn, when somebody last counted
        self.finished = 0  # tokens of earlier turns
        self.ready_s = self.waits_s[0]
        self.cached_on: _Bundle | None = None

    @property
    def left(self) -> int:
        """Tokens of this turn."""
        return self.tokens[self.turn] - self.drawn


@dataclass(slots=True, eq=False)
class _Bundle:
    """Since `began_s`, with `steps` behind it, it has taken equal steps, the first of them longer by some prefill."""

    began_s: float = 0.0
    first_s: float = 0.0
    step_s: float = 1.0
    steps: int = 0
    ends: list[tuple[int, int, _Playing]] = field(default_factory=list)  # a heap by the step that ends the turn
    joining: list[_Playing] = field(default_factory=list)  # in the batch from the next step on
    leaving: bool = False
    due: tuple[float, int] = (0.0, 0)  # when it next changes, and how many steps after `began_s` that is
    version: int = 0  # of `due`
    load: int = 0  # trajectories, of both kinds

    def steps_until(self, now: float) -> int:
        """Whole steps since `began_s`."""
        return 0 if now < self.began_s + self.first_s else 1 + int((now - self.began_s - self.first_s) / self.step_s)

    def next_due(self, now: float) -> tuple[float, int]:
        if not self.ends:
            return now, 0
        if self.joining or self.leaving:
            past = (now - _SAME_S - self.began_s - self.first_s) / self.step_s
            count = max(1, 1 + math.ceil(past))
        else:
            count = self.ends[0][0] - self.steps
        return self.began_s + self.first_s + (count - 1) * self.step_s, count


_LOAD = attrgetter("load")


class MultiTurnRollout:
    """A rollout in flight; see `rlix.sim.work.Rollout`."""

    def __init__(self, work: MultiTurn) -> None:
        self.work, self._decoder = work, work.decoder
        self.bundles = 0
        self.unused_gpu_s = 0.0
        self.prefill_gpu_s = 0.0
        self._least_context = 0.0  # computed so far, of what had to be
        self._playing = [_Playing(work, trajectory) for trajectory in work.trajectories]
        self._alive = len(self._playing)
        self._now = self._noted_s = 0.0
        self._queue: deque[_Playing] = deque()  # ready, and no bundle has room
        self._active: list[_Bundle] = []
        self._leaving: set[_Bundle] = set()
        self._number = 0
        self._events: list[tuple[float, int, _Bundle | _Playing, int]] = []
        for playing in self._playing:
            self._push(playing.ready_s, playing)

    @property
    def alive(self) -> int:
        return self._alive

    @property
    def depth(self) -> float:
        self._count_tokens()
        return sum(p.finished + p.drawn for p in self._open()) / max(self._alive, 1)

    @property
    def done(self) -> Done:
        self._count_tokens()
        tokens = [playing.finished + playing.drawn for playing in self._playing]
        return self.work.done(float(sum(tokens)), float(max(tokens)), self._least_context)

    def advance(self, elapsed_s: float) -> None:
        self._now += elapsed_s
        while self._events and self._events[0][0] <= self._now + _SAME_S:
            at, _, who, version = heappop(self._events)
            if isinstance(who, _Playing):
                self._queue.append(who)
                self._dispatch(at)
            elif who.version == version:
                self._change(who, at)
        self._note_unused(self._now)

    def remaining_s(self) -> float:
        """At least so many: until the longest would end in no company, or something happens."""
        if not self._alive:
            return 0.0
        if not self._active and not self._leaving:
            return math.inf
        while (who := self._events[0][2]) and isinstance(who, _Bundle) and who.version != self._events[0][3]:
            heappop(self._events)
        bound = self._events[0][0]
        if self._active:
            self._count_tokens()
            one_s = self.work.step_s[1]
            for p in self._open():
                if p.ready_s > self._now:
                    bound = max(bound, p.ready_s + p.rest_s[p.turn])
                else:  # a step of it may be under way
                    bound = max(bound, self._now + (p.left - 1) * one_s + p.after_s[p.turn])
        return max(bound - self._now, 2 * MOMENT_S)

    def finish(self) -> None:
        """Nothing is left to do."""

    def resize(self, bundles: int) -> None:
        if bundles == self.bundles:
            return
        self._note_unused(self._now)
        self.bundles = bundles
        while len(self._active) > bundles:
            bundle = self._active.pop()
            bundle.leaving = True
            if bundle.load:
                self._leaving.add(bundle)
                self._plan(bundle, self._now)
        self._active += [_Bundle() for _ in range(bundles - len(self._active))]
        self._dispatch(self._now)

    def interruptible_s(self, bundle: int) -> float:
        """When its step ends."""
        if bundle >= len(self._active) or not self._active[bundle].ends:
            return 0.0
        one = self._active[bundle]
        return one.began_s + one.first_s + one.steps_until(self._now) * one.step_s - self._now

    # -- events ------------------------------------------------------------------------------------------------------

    def _push(self, when: float, who: _Bundle | _Playing, version: int = 0) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, who, version))

    def _plan(self, bundle: _Bundle, now: float) -> None:
        bundle.due = bundle.next_due(now)
        bundle.version += 1
        self._push(bundle.due[0], bundle, bundle.version)

    def _dispatch(self, now: float, at_its_step: _Bundle | None = None) -> None:
        """Gives what is queued to whoever has room."""
        while self._queue and (bundle := self._choose(self._queue[0])) is not None:
            news = not bundle.joining
            bundle.joining.append(self._queue.popleft())
            bundle.load += 1
            if news and bundle is not at_its_step:
                self._plan(bundle, now)

    def _choose(self, playing: _Playing) -> _Bundle | None:
        if not self._active:
            return None
        least = min(self._active, key=_LOAD)
        if least.load >= self._decoder.max_batch:
            return None
        mine = playing.cached_on
        if not self._decoder.caches or mine is None or mine.leaving or mine.load >= self._decoder.max_batch:
            return least
        held = playing.contexts[playing.turn] + playing.drawn
        return mine if playing.left * (mine.load - least.load) <= held else least

    def _change(self, bundle: _Bundle, now: float) -> None:
        """Between two of its steps: turns end, and others begin."""
        bundle.steps += bundle.due[1]
        bundle.began_s, bundle.first_s = now, bundle.step_s
        while bundle.ends and bundle.ends[0][0] <= bundle.steps:
            bundle.load -= 1
            self._end_turn(heappop(bundle.ends)[2], now)
        if bundle.leaving:
            self._leave(bundle)
            self._dispatch(now)
            return
        self._dispatch(now, at_its_step=bundle)
        computed = sum(self._join(bundle, playing) for playing in bundle.joining)
        bundle.joining.clear()
        if bundle.ends:
            bundle.step_s = self.work.step_s[len(bundle.ends)]
            bundle.first_s = bundle.step_s + computed * self._decoder.prefill_s
            self._plan(bundle, now)

    def _join(self, bundle: _Bundle, playing: _Playing) -> float:
        """The tokens of context that are computed for it."""
        least = playing.least[playing.turn]
        cached = self._decoder.caches and playing.cached_on is bundle
        computed = least if cached else playing.contexts[playing.turn] + playing.drawn
        playing.least[playing.turn] = 0.0
        self._least_context += least
        self.prefill_gpu_s += (computed - least) * self._decoder.prefill_s * self._decoder.gpus
        playing.cached_on = bundle
        self._number += 1
        heappush(bundle.ends, (bundle.steps + playing.left, self._number, playing))
        return computed

    def _end_turn(self, playing: _Playing, now: float) -> None:
        playing.finished += playing.tokens[playing.turn]
        playing.drawn = 0
        playing.turn += 1
        if playing.turn < len(playing.tokens):
            playing.ready_s = now + playing.waits_s[playing.turn]
            self._push(playing.ready_s, playing)
        else:
            self._note_unused(now)
            self._alive -= 1

    def _leave(self, bundle: _Bundle) -> None:
        """What it had goes on elsewhere, before all others."""
        left = [playing for _, _, playing in sorted(bundle.ends, key=lambda end: end[1])]
        for end, _, playing in bundle.ends:
            playing.drawn = playing.tokens[playing.turn] - (end - bundle.steps)
        self._queue.extendleft(reversed([*left, *bundle.joining]))
        bundle.ends.clear()
        bundle.joining.clear()
        self._leaving.discard(bundle)

    # -- counting ----------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[_Playing]:
        return (playing for playing in self._playing if playing.turn < len(playing.tokens))

    def _count_tokens(self) -> None:
        for bundle in (*self._active, *self._leaving):
            steps = bundle.steps + bundle.steps_until(self._now)
            for end, _, playing in bundle.ends:
                playing.drawn = max(0, playing.tokens[playing.turn] - max(0, end - steps))

    def _note_unused(self, now: float) -> None:
        idle = max(0, self.bundles - self._alive)
        self.unused_gpu_s += idle * max(0.0, now - self._noted_s) * self._decoder.gpus
        self._noted_s = max(now, self._noted_s)
