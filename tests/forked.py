"""Run a script in a forked process: what it needs of torch is there already, which a new process imports for a second.

    done = run_script(path)
    assert done.returncode == 0, done.stderr

Only for scripts whose imports are not what a test is about: modules of the parent are imported in the child too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from ranks import fork_from_threads


def run_script(path: Path, *arguments: str, deadline: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a script as `python path *arguments` does; a script that runs for longer than the deadline is killed."""
    with tempfile.TemporaryDirectory(prefix="script") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = multiprocessing.get_context("fork").Process(target=_run, args=(path, arguments, out, err))
        with fork_from_threads():
            process.start()
        process.join(deadline)
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode or 0
        return subprocess.CompletedProcess([str(path), *arguments], code, out.read_text(), err.read_text())


def _run(path: Path, arguments: tuple[str, ...], out: Path, err: Path) -> None:
    sys.argv = [str(path), *arguments]
    with out.open("w") as said, err.open("w") as failed, contextlib.redirect_stdout(said):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc(file=failed)
            failed.flush()
            sys.exit(1)
