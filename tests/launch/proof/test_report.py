"""The report of a proof."""

import json

from launch.proof.report import Check, Report


def test_a_report_passes_only_if_every_check_does() -> None:
    report = Report({"recipe": "laptop.yaml"}, [{"fault": "kill", "rank": 1, "step": 7, "phase": "forward"}])
    report.checks.append(Check("losses are equal", True, "12 steps, bit for bit"))
    assert report.passed
    assert report.as_text().endswith("PASSED\n")
    report.checks.append(Check("weights are equal", False, "model.embed: 3 of 9 elements differ"))
    assert not report.passed
    assert json.loads(json.dumps(report.as_json()))["passed"] is False
    text = report.as_text()
    assert text.endswith("FAILED\n")
    assert "kill on rank 1 after step 7, in forward" in text
    assert "[FAILED] weights are equal" in text
    assert len(text.splitlines()) < 60, "one page"
