"""Puts the log of `make demo` into docs/demo.md, and twelve of its lines into README.md.

    make demo | tee demo.log
    python -m bench.demo_log demo.log

The date is taken out of the folder's name, so that logs of two days differ only in what was measured.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXCERPT = (
    r"\$ keepstep run .* name=killed",
    r"\d\d:\d\d:\d\d step 1/",
    r"\d\d:\d\d:\d\d step 40/",
    r">>> killed rank",
    r"keepstep: rank \d",
    r"\d\d:\d\d:\d\d resumed from step",
    r"\d\d:\d\d:\d\d step 120/",
    r"\d\d:\d\d:\d\d step 120 .*validation",
    r"losses of \d+ steps",
    r"\$ keepstep checkpoint diff",
    r".*same.* bit",
    r"reloaded with AutoModelForCausalLM",
)
"""How the lines of the excerpt begin, in the order of the log."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what `make demo` printed")
    log = clean(parser.parse_args().log.read_text())
    for page, name, words in (("docs/demo.md", "log", log), ("README.md", "excerpt", excerpt(log))):
        path = ROOT / page
        path.write_text(put(path.read_text(), name, words))


def clean(log: str) -> str:
    """The log without the date in the folder's name and without make's own first lines."""
    log = log[log.index("== 1.") :]
    return re.sub(r"runs/demo-\d{8}-\d{6}", "runs/demo", log).rstrip("\n") + "\n"


def excerpt(log: str) -> str:
    """The first line for each pattern of EXCERPT, after the line before it. ValueError if one is missing."""
    lines = log.splitlines()
    found: list[str] = []
    start = 0
    for pattern in EXCERPT:
        matches = (index for index in range(start, len(lines)) if re.match(pattern, lines[index]))
        if (index := next(matches, None)) is None:
            raise ValueError(f"the log has no line that begins with {pattern!r} after {found[-1:]}; change EXCERPT")
        found.append(lines[index])
        start = index + 1
    return "\n".join(found) + "\n"


def put(page: str, name: str, words: str) -> str:
    """The page with `words` in its block between `<!-- demo NAME -->` and `<!-- end -->`. ValueError without one."""
    pattern = rf"(<!-- demo {name} -->\n.*?```\w*\n).*?(```\n<!-- end -->)"
    page, count = re.subn(pattern, lambda match: match[1] + words + match[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} places called `demo {name}`, not one")
    return page


if __name__ == "__main__":
    main()
