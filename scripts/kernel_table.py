"""Compile the GPU kernel in its default tactics for every architecture and print what ptxas says it takes.

    python scripts/kernel_table.py

Needs Triton (the extra `ptx`), no GPU, and about four minutes. The table is in docs/tensorrt.md.
"""

from importlib.metadata import version

from tqdm import tqdm

from contbatch.plugins.paged_attention.ptx import PTX_VERSIONS, compile_attention
from contbatch.plugins.paged_attention.ptxas import assemble
from contbatch.plugins.paged_attention.ptxas import version as ptxas_version
from contbatch.plugins.paged_attention.variant import DTYPES, HEAD_SIZES, Variant, default_tactics


def main() -> None:
    rows = [(size, number) for size in HEAD_SIZES for number in default_tactics(size)]
    used = {}
    for size, number in tqdm(rows):
        tactic = default_tactics(size)[number]
        for sm in PTX_VERSIONS:
            kernels = [compile_attention(Variant(t, 32, 8, size, 16, tactic, rotary_dim=size), sm) for t in DTYPES]
            used[size, number, sm] = [(assemble(k.ptx), k.shared_memory) for k in kernels]
    print(f"Triton {version('triton')}, ptxas {' and '.join(sorted({ptxas_version(sm) for sm in PTX_VERSIONS}))}")
    print(
        "| head size | tactic | rows × keys, warps, stages |", *(f"SM {sm} |" for sm in PTX_VERSIONS), "shared memory |"
    )
    print("|---" * (4 + len(PTX_VERSIONS)) + "|")
    for size, number in rows:
        t = default_tactics(size)[number]
        tiles = f"{t.block_rows} × {t.block_keys}, {t.num_warps}, {t.num_stages}"
        registers = [" / ".join(str(u.registers) for u, _ in used[size, number, sm]) for sm in PTX_VERSIONS]
        shared = max(bytes_ for sm in PTX_VERSIONS for _, bytes_ in used[size, number, sm])
        print("|", size, "|", number, "|", tiles, "|", *(f"{r} |" for r in registers), f"{shared:,} |")
    print("Spilled bytes in all of them:", sum(u.spilled_bytes for cell in used.values() for u, _ in cell))


if __name__ == "__main__":
    main()
