"""One start of an engine, as `quire worker` makes it, for `tests.bench.start`: prints a `Start` as JSON."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace

from service.config.settings import BENCH
from service.config.sources import add_flags, read_settings
from service.cuda_contexts import create_contexts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--enable-lora", action="store_true")
    add_flags(parser, BENCH)
    flags = parser.parse_args()
    settings = replace(read_settings(BENCH, flags, os.environ), enable_lora=flags.enable_lora)
    if settings.device != "cpu":
        create_contexts(settings.tensor_parallel_size)
    from tests.bench.start import start_here

    print(json.dumps(asdict(start_here(settings))))


if __name__ == "__main__":
    main()
