"""Charts of this package as an SVG file that stands alone: styles, margins, a key of colors."""

from __future__ import annotations

from collections.abc import Sequence

from underpar.report import charts

# The styles of the report's page that charts need, in its light colors.
STYLE = """
text { fill: #6a675f; font: 12px system-ui, sans-serif; }
.chart { overflow: visible; }
.y-tick, .x-label { text-anchor: end; }
.x-tick { text-anchor: middle; }
.grid { stroke: #e3e0d8; }
.bold, .faint { fill: none; stroke: currentColor; vector-effect: non-scaling-stroke; }
.bold, .faint { stroke-linecap: round; stroke-linejoin: round; }
.bold { stroke-width: 2px; }
.faint { stroke-width: 1px; stroke-opacity: 0.45; }
.key, .dot { fill: currentColor; }
.ring { fill: none; stroke: currentColor; stroke-width: 1.5px; }
.strip { fill: none; }
.tip { display: none; }
.mark { stroke: #6a675f; stroke-dasharray: 4 3; }
.c0 { color: #2457a6; } .c1 { color: #c05a16; } .c2 { color: #2f7d4f; }
.c3 { color: #85499e; } .c4 { color: #a37d12; } .c5 { color: #66707a; }
"""
# Pixels: the chart, and the space for labels around it.
WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 800, 240, 64, 24, 56, 56
# Pixels of a letter in the key, and of what stands beside its name.
LETTER, KEY = 7, 40


def stack_panels(panels: Sequence[str], keys: Sequence[str]) -> str:
    """Charts of `HEIGHT` pixels one below the other, under a key of colors, as an SVG file."""
    inner = WIDTH - LEFT - RIGHT
    row = ABOVE + HEIGHT + BELOW
    height = len(panels) * row
    size = f'width="{WIDTH}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height}">']
    parts += [f"<style>{STYLE}</style>", f'<rect {size} fill="#fdfcfa"/>']
    x = LEFT
    for place, key in enumerate(keys):
        name = f"c{place % charts.NUM_COLORS}"
        parts.append(f'<rect class="key {name}" x="{x}" y="8" width="9" height="9"/>')
        parts.append(f'<text x="{x + 15}" y="17">{key}</text>')
        x += LETTER * len(key) + KEY
    for place, panel in enumerate(panels):
        where = f'x="{LEFT}" y="{place * row + ABOVE}" width="{inner}" height="{HEIGHT}"'
        parts.append(f'<svg {where} overflow="visible">{panel}</svg>')
    return "\n".join([*parts, "</svg>\n"])
