# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed takes signed-off commits only (Developer Certificate of Origin). Takes the file of a commit message."""
import re
import sys

SIGNED = re.compile(r"^Signed-off-by: \S.* <\S+@\S+>$", re.MULTILINE)


def main(path):
    with open(path) as file:
        if SIGNED.search(file.read()):
            return 0
    print("The commit message has no 'Signed-off-by: Name <address>' line: commit with `git commit --signoff`.")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
