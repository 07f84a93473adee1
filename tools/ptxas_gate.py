#!/usr/bin/env python3
"""Compiles every CUDA source and holds its kernels to the recorded budget (src/cuda/kernel_budget.json).

    tools/ptxas_gate.py [SOURCE.cu ...]     check (default: all of src/cuda); exit 1 if anything is out of budget
    tools/ptxas_gate.py --write             check, then record what was found

Checked for each file: compile seconds (user + system) and peak memory against "limits", and that ptxas did not report a
"Potential Performance Loss". For each kernel: stack and spilled bytes against "spills_allowed" (0 where not named; LDL and
STL in the SASS go with that); registers and static shared memory against the table; and the instructions that "sass" requires
or forbids. With another nvcc than the recorded one a kernel may differ from the table by itself, so then only an increase
fails. Needs nvcc, no GPU. SASS is read where a cuobjdump is found (CUDA's, or the one inside triton); else that check is
reported as skipped.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "cuda"
TABLE = SOURCES / "kernel_budget.json"
NVCC_FLAGS = ["--options-file", str(SOURCES / "nvcc_options.txt"), "-Xptxas", "-v"]
MEASURED = ("registers", "smem", "stack", "spill")  # bytes but for registers, which are per thread


def find_tool(name):
    """A CUDA tool: on PATH, beside nvcc's toolkit, or among those triton carries. None if there is none."""
    nvcc = shutil.which("nvcc")
    folders = [os.environ.get("CUDA_HOME", "") + "/bin", "/usr/local/cuda/bin"]
    if nvcc:
        folders.append(str(Path(nvcc).resolve().parent))
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def demangle(names):
    """Short readable names: no return type, no parameters, no project namespace."""
    tool = shutil.which("c++filt") or find_tool("cu++filt")
    if not tool or not names:
        return dict(zip(names, names))
    done = subprocess.run([tool], input="\n".join(names), text=True, capture_output=True, check=True)
    return {name: shorten(line) for name, line in zip(names, done.stdout.splitlines())}


def shorten(line):
    line = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", r"\1=\2", line)  # (flashsdpa::DType)4 -> DType=4
    return re.sub(r"\w+::", "", re.sub(r"\(.*", "", line)).removeprefix("static ").removeprefix("void ").strip()


def parse_ptxas(log):
    """{mangled kernel: {registers, smem, stack, spill}} of a `-Xptxas -v` log."""
    kernels, current = {}, None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            current = kernels.setdefault(found[1], dict.fromkeys(MEASURED, 0))
        elif "Function properties for" in line:
            name = line.split("Function properties for", 1)[1].strip()
            current = kernels.get(name, current)
        elif current is not None:
            if found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
                current["stack"] = max(current["stack"], int(found[1]))
                current["spill"] = max(current["spill"], int(found[2]), int(found[3]))
            if found := re.search(r"Used (\d+) registers", line):
                current["registers"] = int(found[1])
                smem = re.search(r"(\d+) bytes smem", line)
                current["smem"] = int(smem[1]) if smem else 0
    return kernels


def compile_source(source, out):
    """Compiles one file; returns (log, seconds, peak GB). Ends the run if nvcc fails."""
    started = time.monotonic()
    command = ["nvcc", *NVCC_FLAGS, "-c", str(source), "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{log}\nnvcc failed on {source} after {time.monotonic() - started:.0f} s")
    return log, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def read_sass(tool, binary):
    """{mangled kernel: set of opcodes with modifiers}."""
    text = subprocess.run([tool, "-sass", str(binary)], capture_output=True, text=True, check=True).stdout
    kernels, current = {}, set()
    for line in text.splitlines():
        if found := re.search(r"Function : (\S+)", line):
            current = kernels.setdefault(found[1], set())
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            current.add(found[1])
    return kernels


def has_opcode(opcodes, wanted):
    """LDG.E.128 is in LDG.E.128.CONSTANT: `wanted` matches whole dotted parts from the start."""
    return any(opcode == wanted or opcode.startswith(wanted + ".") for opcode in opcodes)


def check_sass(name, opcodes, rules, may_spill):
    for rule in rules:
        if fnmatch.fnmatchcase(name, rule["kernel"]):
            forbidden = set(rule.get("forbid", [])) - ({"LDL", "STL"} if may_spill else set())
            yield from (f"{name}: no {op} in its SASS" for op in rule.get("require", []) if not has_opcode(opcodes, op))
            yield from (f"{name}: {op} in its SASS" for op in sorted(forbidden) if has_opcode(opcodes, op))


def check_spills(name, measured, allowed):
    for key in ("stack", "spill"):
        limit = allowed.get(name, {}).get(key, 0)
        if measured[key] > limit:
            yield f"{name}: {measured[key]} bytes of {key}, allowed {limit}"


def check_table(name, measured, recorded, same_nvcc):
    if recorded is None:
        yield f"{name}: not in the table (run with --write)"
        return
    for key in MEASURED:
        worse, differs = measured[key] > recorded[key], measured[key] != recorded[key]
        if worse or (differs and same_nvcc):
            yield f"{name}: {key} {measured[key]}, recorded {recorded[key]} (if intended, run with --write)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="record what was measured in the table")
    args = parser.parse_args()

    if not shutil.which("nvcc"):
        sys.exit("ptxas_gate: no nvcc on PATH; install the CUDA toolkit (13.0) to check the kernels")
    table = json.loads(TABLE.read_text())
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    nvcc = re.search(r"V(\d+\.\d+\.\d+)", version)[1]
    cuobjdump = find_tool("cuobjdump")
    sources = [path.resolve() for path in args.sources] or sorted(SOURCES.rglob("*.cu"))
    limits, problems, outdated = table["limits"], [], []
    files, kernels = {}, {}

    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            relative, binary = str(source.relative_to(ROOT)), Path(folder) / "kernel.o"
            log, seconds, gigabytes = compile_source(source, binary)
            if seconds > limits["compile_seconds"]:  # a busy machine lengthens processor seconds too: once more, the less counts
                seconds = min(seconds, compile_source(source, binary)[1])
            files[relative] = {"seconds": round(seconds, 1), "gb": round(gigabytes, 2)}
            if seconds > limits["compile_seconds"]:
                problems.append(f"{relative}: compiled in {seconds:.1f} s, limit {limits['compile_seconds']}")
            if gigabytes > limits["compile_gb"]:
                problems.append(f"{relative}: compiled with {gigabytes:.2f} GB, limit {limits['compile_gb']}")
            if "Potential Performance Loss" in log:
                problems += [f"{relative}: {line}" for line in log.splitlines() if "Potential Performance Loss" in line]
            found = parse_ptxas(log)
            sass = read_sass(cuobjdump, binary) if cuobjdump else {}
            short = demangle(list(found))
            for mangled, measured in found.items():
                name = short[mangled]
                kernels[name] = {"file": relative, **measured}
                problems += check_spills(name, measured, table["spills_allowed"])
                problems += check_sass(name, sass[mangled], table["sass"], name in table["spills_allowed"]) if sass else []
                outdated += check_table(name, measured, table["kernels"].get(name), nvcc == table["nvcc"])

    if not args.sources:
        gone = sorted(set(table["kernels"]) - set(kernels))
        outdated += [f"{name}: in the table but no longer compiled (run with --write)" for name in gone]
    show(nvcc, table, cuobjdump, files, kernels)
    if args.write:
        names = set(files)
        kept = {} if not args.sources else {n: k for n, k in table["kernels"].items() if k["file"] not in names}
        table["nvcc"], table["kernels"] = nvcc, dict(sorted({**kept, **kernels}.items()))
        table["files"] = dict(sorted({**(table["files"] if args.sources else {}), **files}.items()))
        TABLE.write_text(dump(table))
        print(f"recorded in {TABLE.relative_to(ROOT)}")
        outdated = []
    for problem in problems + outdated:
        print("FAIL", problem)
    sys.exit(1 if problems or outdated else 0)


def dump(table):
    """JSON with one line for each file, kernel and rule, so that a diff shows what moved."""

    def block(value):
        if isinstance(value, dict):
            rows, ends = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()], "{}"
        else:
            rows, ends = [json.dumps(item) for item in value], "[]"
        return ends[0] + ",".join(f"\n    {row}" for row in rows) + ("\n  " if rows else "") + ends[1]

    lines = [
        f"  {json.dumps(key)}: {block(value) if isinstance(value, (dict, list)) else json.dumps(value)}"
        for key, value in table.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def show(nvcc, table, cuobjdump, files, kernels):
    for name, cost in files.items():
        recorded = table["files"].get(name)
        before = f" (recorded {recorded['seconds']} s, {recorded['gb']} GB)" if recorded else ""
        print(f"{name}: {cost['seconds']} s, {cost['gb']} GB{before}")
    width = max(map(len, kernels), default=6)
    print(f"{'kernel':{width}}  regs   smem  stack  spill")
    for name, k in sorted(kernels.items()):
        print(f"{name:{width}}  {k['registers']:4}  {k['smem']:5}  {k['stack']:5}  {k['spill']:5}")
    note = "" if nvcc == table["nvcc"] else f" (table recorded with {table['nvcc']}: only increases fail)"
    print(f"nvcc {nvcc}{note}; SASS {'read with ' + cuobjdump if cuobjdump else 'check skipped: no cuobjdump found'}")


if __name__ == "__main__":
    main()
