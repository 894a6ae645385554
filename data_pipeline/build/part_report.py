"""What reading a part of a file found, besides its documents: whether anything was usable, and what was not."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile
from data_pipeline.sources.records import NOT_JSON, NOT_OBJECT, NOT_TEXT, TOO_LONG, KeysSeen, ReadOptions, Record

_MISTAKES = (TOO_LONG, NOT_JSON, NOT_OBJECT, NOT_TEXT)
"""Problems that point to a wrong option if *all* records of a file have them. Null is not among them."""
_NAMED = 5
"""Long documents that a warning names."""


@dataclass
class PartReport:
    """Counts of one part of a file, or of all its parts together."""

    file: int
    records: int = 0
    usable: int = 0
    """Records with text."""
    problems: Counter[str] = field(default_factory=Counter[str])
    long: list[int] = field(default_factory=list[int])
    """Numbers of the first documents over the size limit."""
    keys: KeysSeen = field(default_factory=KeysSeen)

    def add(self, record: Record) -> None:
        """Counts a record."""
        if record.text is not None:
            self.usable += 1
        elif record.problem in _MISTAKES:
            self.problems[record.problem] += 1
            if record.problem == TOO_LONG and len(self.long) < _NAMED:
                self.long.append(self.records)
        self.records += 1

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        keys = [self.keys.with_text, sorted(self.keys.others)]
        return {**vars(self), "problems": dict(self.problems), "keys": keys}

    def check(self, file: InputFile, options: ReadOptions, allow_unusable: bool) -> None:
        """DataError if the whole file gave no document, for a reason that an option can change."""
        self.keys.check(file.address, options.for_file(file.address).text_key)
        if self.usable or not self.problems or allow_unusable:
            return
        reasons = ", ".join(f"{count:,} x {problem}" for problem, count in sorted(self.problems.items()))
        raise DataError(
            f"no document of {file.address} can be used ({reasons}); {_remedy(self.problems, options)}, or give "
            f"--allow-unusable to continue without the file"
        )


def _remedy(problems: Mapping[str, int], options: ReadOptions) -> str:
    if TOO_LONG in problems:
        return f"raise --max-document-mib ({options.max_document_bytes >> 20}) or cut the text with --separator"
    if NOT_TEXT in problems:
        return "--text-key must lead to a string (into lists and objects with dots: texts.0)"
    return "give its --format"


def merge_reports(reports: Iterable[Mapping[str, Any]]) -> dict[int, PartReport]:
    """File -> report of all its parts. `reports` are JSON values in the order of the parts."""
    merged: dict[int, PartReport] = {}
    for report in reports:
        into = merged.setdefault(report["file"], PartReport(report["file"]))
        into.long += [into.records + number for number in report["long"]]
        into.records += report["records"]
        into.usable += report["usable"]
        into.problems.update(report["problems"])
        into.keys.add(KeysSeen(report["keys"][0], set(report["keys"][1])))
    return merged


def long_documents(reports: Iterable[PartReport], files: Sequence[InputFile], limit_bytes: int) -> str | None:
    """A sentence that counts and names the documents that were dropped for their length; None if there are none."""
    reports = list(reports)
    total = sum(report.problems[TOO_LONG] for report in reports)
    if not total:
        return None
    named = [f"{files[report.file].address} record {number + 1}" for report in reports for number in report.long]
    more = ", ..." if total > _NAMED else ""
    return (
        f"dropped {total:,} longer than --max-document-mib ({limit_bytes >> 20}): {', '.join(named[:_NAMED])}{more}; "
        f"raise it to keep them"
    )
