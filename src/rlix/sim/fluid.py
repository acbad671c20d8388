"""One rollout's way through trajectories that are decoded in one go: all of them at one pace.

Trajectories are balanced over a rollout's bundles, and those that find no room wait until another has ended. A
rollout's state is one number: the depth, in tokens, that every trajectory still alive would have reached if all had
been decoded at one pace; with room for all of them, they are. Times at any depth and width come from a few vector
operations: on narrow rollouts, where some wait, from when as many tokens are there.
"""

from bisect import bisect_right

import numpy as np

from rlix.scheduler.queueing import ends_in_turn
from rlix.sim.decoder import Decoder, Floats
from rlix.sim.work import Done, Outlook


class Curve:
    """One step's trajectories, sorted by length: time, tokens and GPU-seconds as functions of depth and width."""

    def __init__(self, lengths: Floats, decoder: Decoder, prompt_tokens: int = 0) -> None:
        """`lengths`: tokens of each trajectory, shape [trajectories], in the order in which they are begun."""
        self.decoder = decoder
        self.prompt_tokens = prompt_tokens
        self.trajectories = len(lengths)
        self._lengths: list[float] = lengths.tolist()
        self.depth, self._alive = _ending(np.sort(lengths))
        span = np.diff(self.depth)
        self.tokens = _cumulative(span * self._alive)
        self._widths: dict[int, tuple[Floats, Floats]] = {}
        self.tight_gpu_s = self._least_s() * decoder.gpus
        self.alone_s = float(decoder.token_s(np.ones(1))[0])  # per token of one trajectory alone
        self._edges: list[float] = self.depth.tolist()

    def _least_s(self) -> Floats:
        """Bundle-seconds to reach each of `self.depth` that no order and no width can save."""
        decoder = self.decoder
        if not self._waits(1):
            return self.seconds(1)
        # The longest takes its steps, and their weights are streamed however well the others fill the batch.
        longest = self.depth * decoder.weights_s + self.tokens * decoder.kv_s
        return np.maximum(longest, self.tokens * decoder.reference_gpu_s / decoder.gpus)

    def _waits(self, bundles: int) -> bool:
        """Whether some have to wait until another has ended."""
        return self.trajectories > bundles * self.decoder.max_batch

    @property
    def total(self) -> Done:
        return Done(float(self.tokens[-1]), float(self.tight_gpu_s[-1]))

    def shortest_s(self, bundles: int) -> float:
        return float(self.seconds(bundles)[-1])

    def begin(self) -> "FluidRollout":
        return FluidRollout(self)

    def outlook(self, alive: int, depth: float) -> Outlook:
        like = self.alive(depth)
        if not like:  # longer than anything here: expect a tenth more
            return Outlook(0.1 * depth * alive, 0.0, 0.1 * depth * self.alone_s)
        tokens = (float(self.tokens[-1]) - self.at(depth, self.tokens)) * alive / like
        floor_s = (float(self.depth[-1]) - depth) * self.alone_s
        alone_s = float(self.seconds(1)[-1]) - self.at(depth, self.seconds(1))
        return Outlook(tokens, max(0.0, alone_s - floor_s) * alive / like, floor_s)

    def alive(self, depth: float) -> int:
        """Trajectories longer than `depth`."""
        segment = bisect_right(self._edges, depth) - 1
        return int(self._alive[segment]) if segment < len(self._alive) else 0

    def at(self, depth: float, values: Floats) -> float:
        """`values`, known at each of `self.depth`, between them."""
        segment = bisect_right(self._edges, depth) - 1
        if segment >= len(self._alive):
            return float(values[-1])
        low, start = float(values[segment]), self._edges[segment]
        return low + (float(values[segment + 1]) - low) * (depth - start) / (self._edges[segment + 1] - start)

    def seconds(self, bundles: int) -> Floats:
        """Time to reach each of `self.depth` from zero on `bundles` bundles."""
        return self._width(bundles)[0]

    def unused(self, bundles: int) -> Floats:
        """GPU-seconds of bundles with no trajectory left, up to each of `self.depth`."""
        return self._width(bundles)[1]

    def _width(self, bundles: int) -> tuple[Floats, Floats]:
        known = self._widths.get(bundles)
        if known is None:
            depth, alive = self.depth, self._alive
            if self._waits(bundles):
                slots = bundles * self.decoder.max_batch
                depth, alive = _ending(np.array(ends_in_turn(self._lengths, slots)))
                alive = np.minimum(alive, slots)
            span = np.diff(depth)
            seconds = span * self.decoder.token_s(alive / bundles)
            unused = seconds * np.maximum(bundles - alive, 0.0) * self.decoder.gpus
            tokens = _cumulative(span * alive)
            seconds, unused = (np.interp(self.tokens, tokens, _cumulative(values)) for values in (seconds, unused))
            known = self._widths[bundles] = (seconds, unused)
        return known


def _ending(ends: Floats) -> tuple[Floats, Floats]:
    """Zero and the different ones of these sorted ends; and how many are alive before each of them."""
    different, first = np.unique(ends, return_index=True)
    return np.concatenate(([0.0], different)), (len(ends) - first).astype(np.float64)


def _cumulative(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


class FluidRollout:
    """A rollout in flight: its depth, the bundles that decode it, and the context it must rebuild.

    Time is told to it by `advance`; how far that took it along its curve is worked out when somebody asks.
    """

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.bundles = 0
        self.unused_gpu_s = 0.0  # of bundles without a trajectory, up to the last change of width
        self.prefill_gpu_s = 0.0
        self._depth = 0.0  # when somebody last asked
        self._start_s = 0.0  # where that is on the curve of the present width
        self._settled_s = 0.0  # where the last change of width was, on the same curve
        self._run_s = 0.0  # decoded since somebody last asked
        self._debt_s = 0.0  # prefill still to do, seconds on the present bundles
        self._cold = 0.0  # trajectories whose cache was lost and that no bundle has taken up

    @property
    def depth(self) -> float:
        """Tokens that every trajectory alive has reached."""
        if self._run_s:
            self._settle()
        return self._depth

    @property
    def alive(self) -> int:
        return self.curve.alive(self.depth)

    @property
    def done(self) -> Done:
        curve, depth = self.curve, self.depth
        return Done(curve.at(depth, curve.tokens), curve.at(depth, curve.tight_gpu_s))

    def advance(self, elapsed_s: float) -> None:
        if self.bundles:
            prefill = min(self._debt_s, elapsed_s)
            self._debt_s -= prefill
            self.prefill_gpu_s += prefill * self.bundles * self.curve.decoder.gpus
            self._run_s += elapsed_s - prefill

    def remaining_s(self) -> float:
        """Exactly; infinite with no bundle."""
        if not self.bundles:
            return float("inf")
        seconds = self.curve.seconds(self.bundles)
        return max(0.0, self._debt_s + float(seconds[-1]) - self._start_s - self._run_s)

    def finish(self) -> None:
        """All trajectories have ended."""
        self._run_s = float("inf")
        self._settle()
        self._note_unused()

    def resize(self, bundles: int) -> None:
        """Changes the width; trajectories that move rebuild their context on arrival."""
        if bundles == self.bundles:
            return
        alive, batch = self.alive, self.curve.decoder.max_batch
        self._note_unused()
        resident = min(float(alive), float(self.bundles * batch))
        cold = self._cold
        if bundles < self.bundles:
            cold = min(resident, cold + resident * (1 - bundles / self.bundles))
        elif self.bundles and alive > self.bundles:
            moved = min(alive / bundles, batch) * (bundles - self.bundles)
            cold += max(0.0, moved - (alive - resident))
        debt_bundle_s = self._debt_s * self.bundles
        self.bundles, self._cold, self._debt_s = bundles, 0.0, 0.0
        if bundles:
            rebuilt = min(cold, float(alive))
            context = self.curve.prompt_tokens + self._depth
            self._debt_s = (debt_bundle_s + rebuilt * context * self.curve.decoder.prefill_s) / bundles
            self._start_s = self._settled_s = self.curve.at(self._depth, self.curve.seconds(bundles))
        else:
            self._cold = cold

    def interruptible_s(self, bundle: int) -> float:
        """At any moment."""
        return 0.0

    def _settle(self) -> None:
        seconds = self.curve.seconds(self.bundles)
        self._start_s = min(self._start_s + self._run_s, float(seconds[-1]))
        self._depth = max(self._depth, float(np.interp(self._start_s, seconds, self.curve.depth)))
        self._run_s = 0.0

    def _note_unused(self) -> None:
        if self.bundles:
            span = (self._settled_s, self._start_s)
            before, after = np.interp(span, self.curve.seconds(self.bundles), self.curve.unused(self.bundles))
            self.unused_gpu_s += float(after - before)
            self._settled_s = self._start_s
