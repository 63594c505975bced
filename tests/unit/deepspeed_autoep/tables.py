# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Reads back the tables that the command line prints."""


def table_rows(printed):
    """The rows of a printed table, with what was folded over several lines put together again."""
    rows = []
    for line in printed.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[0]:
                rows.append(cells)
            else:  # names break anywhere, sentences between words
                rows[-1] = [
                    first + (" " if " " in first and rest else "") + rest for first, rest in zip(rows[-1], cells)
                ]
    return rows
