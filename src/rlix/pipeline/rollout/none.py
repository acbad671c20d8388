"""What stands in for rollouts where the policy generates nothing."""


class NoRollouts:
    """There are never any devices, and nobody waits for them."""

    late_s = devices_s = 0.0

    def publish(self, weights: object) -> None: ...

    def slot_use(self) -> dict[str, float]:
        return {}

    def expect_gpu_s(self, left: float) -> None: ...

    def abandon(self, reason: Exception, purpose: str | None = "") -> None: ...

    def close(self) -> None: ...
