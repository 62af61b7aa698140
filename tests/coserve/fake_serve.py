"""`rose-hpc serve` with a server without vLLM: `fake_serve.py SPEC.json FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mps_place import SmallServer

from rose_hpc.config import read_spec
from rose_hpc.coserve.serve import serve_and_lend
from rose_hpc.coserve.specs import ServeSpec

if __name__ == "__main__":
    sys.exit(asyncio.run(serve_and_lend(read_spec(Path(sys.argv[1]), ServeSpec), Path(sys.argv[2]), SmallServer)))
