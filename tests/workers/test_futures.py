"""Which of several answers failed first."""

from concurrent.futures import Future

from rlix.workers.futures import failures


def test_failures_are_known_in_the_order_in_which_they_came() -> None:
    answers: list[Future[int]] = [Future() for _ in range(4)]
    answers[3].set_exception(LookupError())
    failed = failures(answers)
    answers[2].set_exception(LookupError())
    answers[0].set_result(1)
    answers[1].cancel()
    assert failed == [3, 2]
