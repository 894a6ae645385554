"""Messages of the commands that prepare data; they are no part of a run."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="Preparing data", level=Level.MANUAL, action=Action.STOP)

RULES = (
    _rule(
        name="no-file-matches",
        sees=("no file matches",),
        cause="the path or glob is wrong; hidden files do not count",
        remedy="check the path",
    ),
    _rule(
        name="not-utf-8",
        sees=("is not UTF-8",),
        cause="the file has another encoding or broken bytes",
        remedy="convert it, or `--on-error replace`",
    ),
    _rule(
        name="json-array",
        sees=("is a JSON array, not one object per line",),
        cause="the file is JSON, not jsonl",
        remedy="`jq -c '.[]'`",
    ),
    _rule(
        name="no-documents",
        sees=("no documents remain",),
        cause="all documents were dropped",
        remedy="read the counts; check `--text-key` and the filters",
    ),
    _rule(
        name="end-token-unknown",
        sees=("does not state which token ends a document",),
        cause="the tokenizer's files do not name it",
        remedy="`--end-of-document TOKEN`",
    ),
    _rule(
        name="unfinished-build",
        sees=("contains an unfinished build with other ...",),
        cause="the command differs from the one that was interrupted",
        remedy="repeat that command, or delete the work folder",
    ),
    _rule(
        name="build-worker-died",
        sees=("a worker process died, possibly out of memory",),
        cause="too many workers for the memory",
        remedy="run again with fewer `--workers`; finished work is kept",
    ),
)
"""The documentation keeps this order."""
