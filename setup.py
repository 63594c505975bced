# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Build of the wheel: the package, the overlay inside it, and the start-up line that switches the overlay on."""
import os

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

STARTUP_LINE = "deepspeed_autoep.pth"


class BuildWithStartupLine(build_py):
    """Puts the start-up line at the root of site-packages, where Python reads ``.pth`` files."""

    def run(self):
        super().run()
        self.copy_file(STARTUP_LINE, os.path.join(self.build_lib, STARTUP_LINE))


def requirements(name):
    with open(os.path.join("requirements", name)) as file:
        return [line.strip() for line in file if line.strip() and not line.startswith(("#", "-"))]


overlay = find_namespace_packages(include=["accelerate*", "deepspeed*", "transformers*"],
                                  exclude=["deepspeed_autoep*"])
setup(
    packages=["deepspeed_autoep"] + [f"deepspeed_autoep.{name}" for name in overlay],
    package_dir={
        "deepspeed_autoep": "deepspeed_autoep",
        "deepspeed_autoep.deepspeed": "deepspeed",
        "deepspeed_autoep.transformers": "transformers",
        "deepspeed_autoep.accelerate": "accelerate",
    },
    package_data={"deepspeed_autoep": ["families.json"]},
    name="deepspeed-autoep",
    version="0.1.0",
    description="Expert parallelism x ZeRO-3 for every Hugging Face MoE model, as an overlay on DeepSpeed",
    long_description=open("README.md").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "THIRD_PARTY_NOTICES.md"],
    python_requires=">=3.10,<3.13",
    install_requires=requirements("requirements.txt"),
    entry_points={"console_scripts": ["ds_autoep = deepspeed_autoep.cli:main"]},
    cmdclass={"build_py": BuildWithStartupLine},
)
