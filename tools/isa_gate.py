"""Build gate: objects compiled for one instruction set must not leak code into the others.

The linker keeps one copy of every weak (inline, template) function. If kernels_isa.cpp compiled for AVX-512 emitted one
outside its own namespace, that copy could serve the portable kernels too, and an old processor would die of it.

    python tools/isa_gate.py BUILD_DIR...
"""

import re
import subprocess
import sys
from pathlib import Path

OBJECT = re.compile(r"flashsdpa_cpu_(\w+)\.dir")


def leaks(obj: Path, isa: str) -> list[str]:
    """Weak symbols of `obj` outside ``flashsdpa::<isa>``."""
    table = subprocess.run(["nm", "--demangle", obj], check=True, capture_output=True, text=True).stdout
    weak = (line.split(maxsplit=2)[-1] for line in table.splitlines() if re.search(r"\s[WVu]\s", line))
    return [name for name in weak if f"flashsdpa::{isa}::" not in name and "__gxx_personality" not in name]


def main() -> int:
    objects = sorted(o for d in sys.argv[1:] for o in Path(d).rglob("*.o") if OBJECT.search(str(o)))
    if not objects:
        print(f"isa_gate: no flashsdpa_cpu_* object below {sys.argv[1:]}; build first", file=sys.stderr)
        return 1
    failed = 0
    for obj in objects:
        isa = OBJECT.search(str(obj)).group(1)
        names = leaks(obj, isa)
        failed += bool(names)
        print(f"isa_gate: {isa:9} {obj.name}: {'leaks ' + ', '.join(names[:5]) if names else 'ok'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
