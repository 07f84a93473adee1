"""A profile as text for a terminal."""

SHOWN = 30  # rows; JSON and HTML have all


def duration(ms):
    """Milliseconds as text, three digits."""
    return "-" if ms is None else f"{ms * 1e3:.1f} us" if ms < 0.1 else f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def rate(flops):
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def why(row):
    """Why this kernel: the reasons of a refusal, or the selection that took ours."""
    if row["reasons"]:
        return "; ".join(row["reasons"])
    return "our op, called by a compiled function or directly" if row["source"] == "graph" else f"selection {row['backend']}"


def facts(summary):
    """[(name, text)], what stands above the table."""
    calls, distinct, threads = summary["calls"], summary["distinct"], summary["threads"]
    lines = [("program", f"{summary['seconds']:.3g} s")]
    if not distinct:
        return lines + [("attention", "no call of scaled_dot_product_attention was seen")]
    lines[0] = ("program", f"{lines[0][1]}; {calls} calls, {distinct} distinct, on {threads} thread{'s' * (threads != 1)}")
    if summary["timed"]:
        of = "" if summary["timed"] == distinct else f", of the {summary['timed']} distinct calls that were run again"
        lines.append(("attention", f"{summary['attention_seconds']:.3g} s, about {summary['share']:.1%} of the program{of} "
                                   "(count x time alone)"))  # fmt: skip
        peaks = ", ".join(f"{name} {rate(peak)}" for name, peak in summary["peaks"].items())
        reached = f"attention {rate(summary['flop_rate'])}, {summary['utilisation']:.1%} of the peak"
        lines.append(("utilisation", f"{reached}; peak measured by a matrix product: {peaks}"))
    if summary["busy"] and summary["timed"]:
        lines.append(("busy", "the processor had more work than this: times of CPU calls may be far off"))
    if summary["program_utilisation"]:
        reached = f"program {rate(summary['program_flop'] / summary['seconds'])}, {summary['program_utilisation']:.1%} of the peak"
        lines.append(("", f"{reached} (model FLOP utilisation)"))
    return lines


def cells(row):
    """The table's cells of one row."""
    error = lambda name: "-" if row.get(name) is None else f"{row[name]:.1e}"  # noqa: E731
    return (
        str(row["count"]), row["call"], row["mask"], row["kernel"], duration(row.get("stock_ms")), duration(row.get("ours_ms")),
        "-" if row.get("speedup") is None else f"{row['speedup']:.2f}x", error("stock_error"), error("our_error"),
        f"{row['share']:.1%}" if "share" in row else "-", "; ".join(filter(None, (why(row), row.get("note")))),
    )  # fmt: skip


HEADER = ("count", "call", "mask", "served by", "stock", "ours", "speedup", "stock error", "our error", "share", "why")


def text(rows, summary):
    """The report: facts, then one line for each distinct call."""
    lines = [f"{name:<12} {value}" for name, value in facts(summary)]
    if rows:
        table = [HEADER, *map(cells, rows[:SHOWN])]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        lines += ["", *("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in table)]
    if len(rows) > SHOWN:
        lines.append(f"and {len(rows) - SHOWN} more")
    return "\n".join(lines)
