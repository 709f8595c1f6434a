"""The command `contbatch`: export a model and its GPU kernels, or look at what this machine can run."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from contbatch.errors import ContbatchError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 0, or 1 after an error, which is printed to standard error."""
    logging.basicConfig(level=logging.INFO, format="contbatch: %(message)s")
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ContbatchError as error:
        print(f"contbatch: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="contbatch", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser(
        "export", help="write a model as ONNX, with --ptx its GPU kernels too; print the folder"
    )
    export.set_defaults(run=_export)
    export.add_argument("model", help="smollm2-135m, a GGUF file, a Hugging Face directory or hub id")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32; with --ptx float16")
    export.add_argument("--w8a8", action="store_true", help="linear layers in 8 bits, calibrated on the CPU")
    export.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="in place of engines/ or the user's cache")
    about = "compute capabilities without their dot, such as 90; none named: all there are. Needs Triton, no GPU"
    export.add_argument("--ptx", nargs="*", type=int, metavar="SM", help=about)
    export.add_argument("--page-size", type=int, default=16, metavar="N", help="of --ptx: positions per page (16)")
    export.add_argument("--num-splits", type=int, default=1, metavar="N", help="of --ptx: programs per sequence (1)")
    doctor = commands.add_parser("doctor", help="what is installed, which GPU is there, which backend would run")
    doctor.set_defaults(run=_doctor)
    return parser


def _export(options: argparse.Namespace) -> int:
    from contbatch.build import build
    from contbatch.catalog import fetch

    dtype = options.dtype or ("float32" if options.ptx is None else "float16")
    folder = build(fetch(options.model), dtype, options.cache_dir, "w8a8" if options.w8a8 else None)
    print(folder)
    if options.ptx is not None:
        from contbatch.gpu_kernels import SMS, export_ptx

        print(export_ptx(folder / "model.onnx", options.ptx or SMS, options.page_size, options.num_splits))
    return 0


def _doctor(_options: argparse.Namespace) -> int:
    from contbatch.doctor import diagnose, report

    diagnosis = diagnose()
    print(report(diagnosis))
    return 0 if diagnosis.backend else 1
