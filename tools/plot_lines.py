#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws lines from a JSON file as SVG, with the standard library alone (the pictures of docs/).

Input: {"title": T, "x": LABEL, "y": LABEL, "log_x": bool, "series": [{"name": N, "points": [[x, y], ...]}]}
Usage: plot_lines.py IN.json OUT.svg
"""
import json
import math
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
# Colours that colour-blind readers tell apart (Okabe and Ito), and dashes to repeat them.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
DASHES = ["", "6 3", "2 3"]


def nice_ticks(low, high, count=6):
    """Round values that cover [low, high]."""
    if high <= low:
        high = low + 1
    step = 10 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count:
            step *= factor
            break
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(values):
    return sorted(set(values))


def label(value):
    return f"{value:g}"


class Chart:
    def __init__(self, spec):
        self.spec = spec
        self.log_x = spec.get("log_x", False)
        xs = [p[0] for s in spec["series"] for p in s["points"]]
        ys = [p[1] for s in spec["series"] for p in s["points"]]
        self.x_ticks = log_ticks(xs) if self.log_x else nice_ticks(min(xs), max(xs))
        low = spec.get("y_min", min(ys))
        high = spec.get("y_max", max(ys))
        self.y_ticks = nice_ticks(low, high)
        self.y_range = (self.y_ticks[0], self.y_ticks[-1])
        self.x_range = (self.x_ticks[0], self.x_ticks[-1])

    def x(self, value):
        low, high = self.x_range
        if self.log_x:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = 0.5 if high == low else (value - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        low, high = self.y_range
        share = (min(max(value, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def draw(self):
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="14">{escape(self.spec["title"])}</text>',
        ]
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        for tick in self.y_ticks:
            y = self.y(tick)
            out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(tick)}</text>')
        for tick in self.x_ticks:
            x = self.x(tick)
            out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>')
            out.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label(tick)}</text>')
        middle = (LEFT + right) / 2
        out.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(self.spec["x"])}</text>')
        up = (TOP + bottom) / 2
        out.append(f'<text x="16" y="{up}" text-anchor="middle" transform="rotate(-90 16 {up})">'
                   f'{escape(self.spec["y"])}</text>')
        for i, series in enumerate(self.spec["series"]):
            out += self.line(i, series, right)
        out.append("</svg>")
        return "\n".join(out) + "\n"

    def line(self, i, series, right):
        colour = COLOURS[i % len(COLOURS)]
        dash = DASHES[i // len(COLOURS) % len(DASHES)]
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in series["points"])
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        out = [f'<polyline fill="none" {style} points="{points}"/>']
        out += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="2.5" fill="{colour}"/>'
                for x, y in series["points"]]
        y = TOP + 8 + 18 * i
        out.append(f'<line x1="{right + 12}" y1="{y}" x2="{right + 36}" y2="{y}" {style}/>')
        out.append(f'<text x="{right + 42}" y="{y + 4}">{escape(series["name"])}</text>')
        return out


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(Chart(spec).draw())


if __name__ == "__main__":
    main()
