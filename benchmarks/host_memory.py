# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""How much host memory a process takes while it does something."""
import threading


class HostMemory(threading.Thread):
    """The most bytes that this process has more than at the start, looked at every few milliseconds.

    Args:
        with_files: whether pages of mapped files count, which the kernel takes back when it needs memory.
    """

    def __init__(self, with_files=True):
        import psutil

        super().__init__(daemon=True)
        self._process, self._over, self._with_files = psutil.Process(), threading.Event(), with_files
        self._before, self.growth = self._bytes(), 0

    def _bytes(self):
        found = self._process.memory_info()
        return found.rss if self._with_files else found.rss - found.shared

    def run(self):
        while not self._over.wait(0.005):
            self.growth = max(self.growth, self._bytes() - self._before)

    def stop(self):
        self._over.set()
        self.join()
