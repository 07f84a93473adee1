#!/usr/bin/env python3
"""Writes src/ptx/wgmma_shapes.cuh: one wrapper for each width N of wgmma.m64nNk16, whose operands nobody should type.

    tools/generate_wgmma.py            write the file
    tools/generate_wgmma.py --check    fail if the file is not what this script writes
"""

import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "src" / "ptx" / "wgmma_shapes.cuh"
WIDTHS = (32, 40, 64, 80, 96, 112, 128, 192, 256)

HEADER = """\
// Written by tools/generate_wgmma.py: wgmma.m64nNk16 for each width N in use.
//
//   ss   A and B in shared memory, both described as in wgmma.cuh
//   rs   A in registers: those of an accumulator of the same rows, rounded and packed in pairs
// kTransA, kTransB: A, B is MN-major. `accumulate`: 0 takes D as zero. Elements are bfloat16 or float16, by kBFloat16.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

template <int kN>
struct Wgmma;
"""


def wrap(items, indent, width=118):
    lines, line = [], ""
    for number, item in enumerate(items):
        text = item + (", " if number + 1 < len(items) else "")
        if len(indent) + len(line) + len(text) > width:
            lines.append(line.rstrip())
            line = ""
        line += text
    return [*lines, line]


def define(name, lines):
    return f"#define {name} \\\n" + " \\\n".join(f"  {line}" for line in lines)


def call(n, kind, element, a_registers):
    first = n // 2  # the number of the operand after the accumulators
    a_text = f"%{first}" if kind == "ss" else "{" + ", ".join(f"%{first + i}" for i in range(4)) + "}"
    b, flag, trans = (first + a_registers + i for i in range(3))
    majors = f"%{trans}, %{trans + 1}" if kind == "ss" else f"%{trans}"  # A in registers has no major-ness
    major_operands = '"n"(kTransA), "n"(kTransB)' if kind == "ss" else '"n"(kTransB)'
    a_operands = '"l"(a)' if kind == "ss" else ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""\
      asm volatile("{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, %{flag}, 0;\\n"
                   "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {{" FLASHSDPA_D_TEXT "}}, "
                   "{a_text}, %{b}, accumulate, 1, 1, {majors};\\n}}"
                   : FLASHSDPA_D_OPERANDS
                   : {a_operands}, "l"(b), "r"(accumulate), {major_operands}
                   : "memory");"""


def function(n, kind):
    a_parameter, a_registers = ("uint64_t a", 1) if kind == "ss" else ("const uint32_t (&a)[4]", 4)
    trans = "int kTransB, int kTransA = 0" if kind == "ss" else "int kTransB"
    return f"""\
  template <bool kBFloat16, {trans}>
  __device__ static void {kind}(float (&d)[{n // 2}], {a_parameter}, uint64_t b, int accumulate) {{
    if constexpr (kBFloat16) {{
{call(n, kind, "bf16", a_registers)}
    }} else {{
{call(n, kind, "f16", a_registers)}
    }}
  }}"""


def shape(n):
    registers = range(n // 2)
    texts = [f'"{line} "' for line in wrap([f"%{i}" for i in registers], '    ""')]
    operands = wrap([f'"+f"(d[{i}])' for i in registers], "    ")
    return "\n".join([
        "", define("FLASHSDPA_D_TEXT", texts), define("FLASHSDPA_D_OPERANDS", operands),
        "template <>", f"struct Wgmma<{n}> {{", function(n, "ss"), function(n, "rs"), "};",
        "#undef FLASHSDPA_D_TEXT", "#undef FLASHSDPA_D_OPERANDS", ""])


def main():
    text = HEADER + "".join(shape(n) for n in WIDTHS) + "\n}  // namespace flashsdpa::ptx\n"
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text() != text:
            sys.exit(f"{TARGET} is not what {Path(__file__).name} writes: run it")
    else:
        TARGET.write_text(text)


if __name__ == "__main__":
    main()
