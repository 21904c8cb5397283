"""A console program: an unexpected error is one paragraph, and its traceback is in a file, or shown with `--debug`."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

DEBUG = "--debug"


def run(name: str, app: Callable[[], object]) -> None:
    """Run the program `name` by its command line. `--debug` may stand anywhere before a `--`."""
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    debug = DEBUG in own
    if debug:
        rest = [*(word for word in own if word != DEBUG), *sys.argv[len(own) + 1 :]]
        sys.argv[1:] = [DEBUG, *rest]
    try:
        app()
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename is not None:
            sys.stderr.write(f"{error.filename}: {error.strerror}\n")
            sys.exit(2)
        sys.stderr.write(f"{_paragraph(name, error)}\n")
        sys.exit(1)


def _paragraph(name: str, error: Exception) -> str:
    """Describe an error in one paragraph: the error, its place, and the file with the traceback, which this writes."""
    with tempfile.NamedTemporaryFile("w", prefix=f"headgate-{name}-", suffix=".log", delete=False) as file:
        traceback.print_exception(error, file=file)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({'/'.join(Path(frames[-1].filename).parts[-3:])}, line {frames[-1].lineno})" if frames else ""
    traced = f"The traceback is in {file.name}; {DEBUG} shows it here."
    return f"{name} ended with an error that it does not know: {what}{place}. {traced}"
