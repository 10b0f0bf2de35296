"""Makes one HTML file of a run's reports: advice, picture and table, without anything from the network."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron_datastates.reports.advice import Advice
from megatron_datastates.reports.reading import Reports
from megatron_datastates.reports.table import COLUMNS, LEGEND, LEGEND_OF_REST, row

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; }
body { margin: 2em auto; max-width: 1250px; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 1.6em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px; }
th, td { padding: 2px 8px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { position: sticky; top: 0; background: #fff; } tr.failed td { color: #c0392b; }
.advice { border-left: 4px solid #b8b8b8; margin: .6em 0; padding: .2em .8em; }
.advice.failure { border-color: #c0392b; } .advice.slow { border-color: #e0a030; }
svg { width: 100%; height: auto; } .small { color: #666; font-size: 12px; }
"""


def make_page(
    title: str, reports: Reports, advice: Sequence[Advice], svg: str, without_picture: str = ""
) -> str:
    """Returns the text of the page.

    Args:
        svg: the picture; empty if there is none.
        without_picture: why there is none.
    """
    name = html.escape(title)
    blocks = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        "<h2>Advice</h2>",
        *(_advice(one) for one in advice),
        "<h2>Picture</h2>",
        svg or f"<p>{html.escape(without_picture)}</p>",
        "<h2>Saves</h2>",
        f'<p class="small">{html.escape(f"{LEGEND}; {LEGEND_OF_REST}")}</p>',
        _table(reports),
        *(f'<p class="small">{html.escape(note)}</p>' for note in reports.notes),
        "</body></html>",
    ]
    return "\n".join(blocks) + "\n"


def _advice(one: Advice) -> str:
    return f'<div class="advice {one.level}"><b>{html.escape(one.title)}</b><br>{html.escape(one.text)}</div>'


def _table(reports: Reports) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = []
    for save in reports.saves:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row(save))
        title = f' title="{html.escape(save.error)}"' if save.error else ""
        rows.append(f'<tr class="{"failed" if save.failed else ""}"{title}>{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
