"""Pytest hooks (`-p tests.skips`): a test that does not run says nothing, so one that skips what it could run fails."""

from collections.abc import Generator

import pytest

MAY_SKIP = {"gpu", "root", "browser"}
"""Markers of what a machine may lack. Everything else that the suite needs is installed with it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not MAY_SKIP & {mark.name for mark in item.iter_markers()}:
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{report.longreprtext}: only {sorted(MAY_SKIP)} may be missing"
