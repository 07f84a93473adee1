"""A profile as one HTML page: facts, two charts in inline SVG, the table. No script, no reference to another file."""

from html import escape

from .output import HEADER, cells, duration, facts

CHARTED = 15  # calls in each chart
STOCK, OURS, REST = "#9aa7b3", "#2f6f9f", "#e4e8ec"
WIDTH, LEFT, BAR = 960, 430, 11  # of a chart, of its labels, height of a bar, in pixels

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1d2730; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: 8rem 1fr; } dt { color: #5c6b78; } dd { margin: 0; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #1d2730; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 12px; }
th, td { text-align: left; padding: 4px 10px; border-bottom: 1px solid #e4e8ec; vertical-align: top; }
th { color: #5c6b78; white-space: nowrap; }
"""


def page(rows, summary, title):
    """The whole document as text."""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(summary))
    body = [f"<h1>{escape(title)}</h1>", f"<dl>{listed}</dl>"]
    timed = [row for row in rows if "seconds" in row]
    if timed:
        body += [_section("Where the time goes", _shares(timed, summary)), _section("Time of one call", _pairs(timed))]
    if rows:
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>" for row in rows)
        table = f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'
        body.append(_section("Every distinct call", table))
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
    return f'<!DOCTYPE html>\n<html lang="en">{head}<body>{"".join(body)}</body></html>\n'


def _section(title, content):
    return f"<h2>{title}</h2>{content}"


def _svg(height, shapes):
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(shapes)}</svg>'


def _rect(x, y, width, height, colour, tip):
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}"><title>{escape(tip)}</title></rect>'


def _text(x, y, text, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _label(row):
    """The call in a few words; the table has all of it."""
    query, key, _ = row["shapes"]
    shapes = f"{query}" if query == key else f"{query} x {key}"
    mask = row["mask"].partition(",")[0]
    flags = [row["dtype"], "" if mask == "none" else mask, "grad" if row["needs_grad"] else ""]
    return ", ".join(filter(None, [shapes, *flags]))


def _shares(timed, summary):
    """One bar of the program's time: stock's attention, ours, the rest."""
    parts = [("stock attention", STOCK, sum(r["share"] for r in timed if r["kernel"] == "stock")),
             ("our attention", OURS, sum(r["share"] for r in timed if r["kernel"] != "stock"))]  # fmt: skip
    parts.append(("everything else", REST, max(1 - summary["share"], 0.0)))
    total, x, shapes = sum(share for *_, share in parts), 0.0, []
    for index, (name, colour, share) in enumerate(parts):
        width = WIDTH * share / total
        shapes += [_rect(x, 0, width, 26, colour, f"{name} {share:.1%}")] if share else []
        shapes += [_rect(index * 240, 38, 11, 11, colour, name), _text(index * 240 + 17, 48, f"{name} {share:.1%}")]
        x += width
    return _svg(56, shapes)


def _pairs(timed):
    """Stock and ours, one pair of bars for each of the dearest calls, on one scale."""
    shown = timed[:CHARTED]
    longest = max(max(row["stock_ms"], row["ours_ms"] or 0.0) for row in shown)
    shapes = [_rect(LEFT, 0, 11, 11, STOCK, "stock"), _text(LEFT + 17, 10, "stock"),
              _rect(LEFT + 70, 0, 11, 11, OURS, "ours"), _text(LEFT + 87, 10, "ours")]  # fmt: skip
    room = WIDTH - LEFT - 140
    for index, row in enumerate(shown):
        top = 26 + index * (2 * BAR + 12)
        shapes.append(_text(LEFT - 10, top + BAR + 4, _label(row), "end"))
        for offset, name, colour in ((0, "stock_ms", STOCK), (BAR + 1, "ours_ms", OURS)):
            if row[name] is None:
                shapes.append(_text(LEFT, top + offset + 9, "refused"))
                continue
            width = room * row[name] / longest
            speedup = f", {row['speedup']:.2f}x" if name == "ours_ms" else ""
            shapes.append(_rect(LEFT, top + offset, width, BAR, colour, f"{row['call']}: {duration(row[name])}"))
            shapes.append(_text(LEFT + width + 6, top + offset + 9, duration(row[name]) + speedup))
    return _svg(26 + len(shown) * (2 * BAR + 12), shapes)
