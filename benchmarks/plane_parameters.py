"""Which zstd parameters suit the exponents of a model: `.venv/bin/python -I benchmarks/plane_parameters.py --pair PREFIX`.

PREFIX.base.safetensors as for `anabranch bench codec`. The first row is what kernels/delta_dense.py uses.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import zstandard

from anabranch.deploy.codec_pair import load_pair
from anabranch.kernels.byte_planes import to_planes
from anabranch.kernels.delta_dense import _LEVEL_1, _PLANE, _frame
from anabranch.kernels.delta_dtypes import FORMS

PARAMETERS = {
    "fast, 7 bytes, 64 slots": _PLANE,
    "fast, 7 bytes, 1024 slots": _frame(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=10,
        chain_log=6,
        search_log=1,
        target_length=0,
        window_log=17,
    ),
    "level 1": _LEVEL_1,
    "level 3": _frame(compression_level=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True, metavar="PREFIX", help="the pair's files without their two endings")
    pair = load_pair(parser.parse_args().pair)
    names = [t.name for t in pair.layout.tensors if t.dtype == "bf16"]
    bits = np.concatenate([pair.base[name] for name in names])
    planes = np.empty((2, bits.size), np.uint8)
    to_planes(bits, FORMS["bf16"], planes)
    exponents = planes[0]
    share = np.bincount(exponents) / bits.size
    share = share[share > 0]
    print(f"{bits.size:,} exponents, entropy {-(share * np.log2(share)).sum():.3f} bits each")
    for name, parameters in PARAMETERS.items():
        packed, pack_s = timed(
            lambda p=parameters: zstandard.ZstdCompressor(compression_params=p).compress(exponents.data)
        )
        unpack = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        _, unpack_s = timed(lambda u=unpack, p=packed: u.decompress(p, max_output_size=bits.size))
        print(
            f"{name:<26} {8 * len(packed) / bits.size:.3f} bits, "
            f"{bits.size / 1e6 / pack_s:,.0f} MB/s in, {bits.size / 1e6 / unpack_s:,.0f} MB/s out"
        )


def timed(call):  # type: ignore[no-untyped-def]
    call()
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return result, statistics.median(seconds)


if __name__ == "__main__":
    main()
