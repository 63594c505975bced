# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Each file says whose it is and under which licence. Takes files; exits with 1 and names those that do not."""
import sys

HEADER = ["# Copyright (c) DeepSpeed Team.", "# SPDX-License-Identifier: Apache-2.0"]


def has_header(text):
    """Whether ``text`` begins with the header, after a ``#!`` line if there is one."""
    lines = text.splitlines()
    if text.startswith("#!"):
        lines = lines[1:]
    return lines[:2] == HEADER


def main(paths):
    missing = []
    for path in paths:
        with open(path) as file:
            if not has_header(file.read()):
                missing.append(path)
    for path in missing:
        print(f"{path}:1: must begin with\n  " + "\n  ".join(HEADER))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
