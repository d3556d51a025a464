"""Compare two heads files of one model: overlap of the top four heads of every layer, and Kendall's tau.

python tools/compare_heads.py A/srh/heads-target.json B/srh/heads-target.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dustin_profile.srh.ranking import agreement
from dustin_runtime.files import read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    arguments = parser.parse_args()
    tables = [read_json(path) for path in (arguments.first, arguments.second)]
    found = agreement(*(np.asarray(table["scores"]) for table in tables))
    for path, table in zip((arguments.first, arguments.second), tables, strict=True):
        mode, accepted, samples = table["inputs"]["mode"], table["accepted"], table["samples"]
        print(f"{path}: {mode}, {accepted} of {samples} needles accepted")
    for layer, overlap in enumerate(found.per_layer):
        tops = [sorted(table["ranking"][layer][:4]) for table in tables]
        print(f"layer {layer:3}: {overlap:4.0%}  {tops[0]}  {tops[1]}")
    print(f"mean overlap {found.top:.1%}, Kendall's tau {found.kendall:.3f}")


if __name__ == "__main__":
    main()
