"""python -m torch_flashsdpa profile SCRIPT [ARGS]: run a program as Python would, then report its attention."""

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from .. import _loader, selection


def add_arguments(parser):
    parser.add_argument("--backend", choices=selection.NAMES, default="auto",
                        help="what serves the program's attention (default auto, as enable() has it)")  # fmt: skip
    parser.add_argument("--json", metavar="PATH", help="also write the report as JSON")
    parser.add_argument("--html", metavar="PATH", help="also write the report as one HTML page with charts")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long calls may be run again (default 20)")
    parser.add_argument("--flops", action="store_true", help="also count the program's FLOP, which slows it down")
    parser.add_argument("script", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run_script(path, arguments):
    """Run a Python file as `python path arguments` does, in this process; returns its exit code. An exception is printed."""
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
        return 0
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[0] = before


def run(options):
    """Returns the program's exit code, whatever the report says; 2 where there is nothing to run, 1 without our kernels."""
    from . import profile

    library = _loader.load()
    if library.module is None:
        print(f"profile needs our kernels: {library.problem}", file=sys.stderr)
        return 1
    if not Path(options.script).is_file():
        print(f"profile: there is no file {options.script}", file=sys.stderr)
        return 2
    undo = selection.restore_point()
    selection.enable(options.backend)
    try:
        with profile(replay_seconds=options.seconds, flops=options.flops) as result:
            code = run_script(options.script, options.arguments)
    finally:
        undo()
    sys.stdout.flush()
    ended = "" if code == 0 else f" (ended with exit code {code})"
    print(f"\nprofile      {options.script}{ended}\n{result}")
    for path, write in ((options.json, result.write_json), (options.html, result.write_html)):
        if path:
            print(f"written      {write(path)}")
    return code
