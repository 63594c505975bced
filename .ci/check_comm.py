# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Keeps collectives on ``deepspeed.comm``, which times them, logs them and serves every accelerator.

Takes files; exits with 1 and names each line that reaches for ``torch.distributed`` itself.
"""
import ast
import sys


def direct_uses(tree):
    """Yield the line of every import or attribute access of ``torch.distributed``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any((name + ".").startswith("torch.distributed.") for name in names):
            yield node.lineno


def main(paths):
    found = []
    for path in paths:
        with open(path) as file:
            found += [
                f"{path}:{line}: use deepspeed.comm" for line in sorted(set(direct_uses(ast.parse(file.read()))))
            ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
