"""The short form of `python -m evaluation pytorch`: a device-generic test file of our own, over a server."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from evaluation.pytorch import run_pytorch_tests
from evaluation.pytorch.results import FileResults, as_values, markdown

SAMPLE = Path(__file__).parent / "sample" / "test" / "device_generic.py"


def options(families: bool) -> argparse.Namespace:
    """Options of a run. Only the test that hangs waits for its limit; on a busy machine, the others must not come near it."""
    return argparse.Namespace(
        families=families,
        only="",
        stride=1,
        first=0,
        failed=False,
        test_seconds=10.0,
        patience=2.0,
        file_seconds=600.0,
    )


@pytest.fixture(scope="module")
def results(python):
    results = FileResults("device_generic")
    run_pytorch_tests.run_file(SAMPLE, results, options(families=False), python.start)
    return results


def test_outcomes_are_classified(results):
    assert {name: outcome.outcome for name, outcome in results.remote.items()} == {
        "TestSampleCPU.test_adds_cpu_float32": "passed",
        "TestSampleCPU.test_adds_cpu_int64": "passed",
        "TestSampleCPU.test_fails_on_the_device_cpu": "failed",
        "TestSampleCPU.test_hangs_on_the_device_cpu": "hangs",
        "TestSampleCPU.test_is_for_the_cpu_cpu": "skipped",
        "TestSampleCPU.test_is_made_for_the_cpu_cpu_float16": "skipped",
        "TestSampleCPU.test_is_made_for_the_cpu_cpu_float32": "passed",
        "TestSampleCPU.test_loses_its_session_on_the_device_cpu": "lost session",
        "TestSampleCPU.test_multiplies_after_that_cpu": "passed",
    }


def test_only_tests_passing_on_cpu_count(results):
    row = results.row()
    counts = ("tests", "pass on the CPU", "for the CPU only", "compared", "pass here")
    assert [row[name] for name in counts] == ["10", "9", "2", "7", "4"]
    assert as_values([results])["totals"].startswith("4 of 7 tests")


def test_results_are_saved_and_loaded(results, tmp_path):
    results.write(tmp_path)
    assert FileResults.read(tmp_path, "device_generic") == results
    assert FileResults.read(tmp_path, "test_nn").cpu == {}


def test_exceptions_are_named_with_reason(results):
    assert as_values([results])["exceptions"] == {
        "hangs": {"device_generic": ["`TestSampleCPU.test_hangs_on_the_device`"]},
        "lost session": {"device_generic": ["`TestSampleCPU.test_loses_its_session_on_the_device`"]},
        "not done": {"device_generic": ["`TestSampleCPU.test_fails_on_the_device`"]},
    }
    assert "- device_generic: `TestSampleCPU.test_fails_on_the_device`" in markdown([results])


def test_plain_test_cases_run_on_configured_device(python):
    results = FileResults("plain")
    run_pytorch_tests.run_file(SAMPLE.with_name("plain.py"), results, options(families=True), python.start)
    assert {name: outcome.outcome for name, outcome in results.cpu.items()} == {
        "PlainTest.test_adds": "passed",
        "PlainTest.test_fails_on_the_device": "passed",
    }
    assert {name: outcome.outcome for name, outcome in results.remote.items()} == {
        "PlainTest.test_adds": "passed",
        "PlainTest.test_fails_on_the_device": "failed",
    }
