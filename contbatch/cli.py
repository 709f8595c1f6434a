"""The command `contbatch`: export a model, build its engine, play a decision log, see what this machine can run."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contbatch.errors import ContbatchError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 0, or 1 after an error, which is printed to standard error."""
    logging.basicConfig(level=logging.INFO, format="contbatch: %(message)s")
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ContbatchError, OSError) as error:  # such as a page for a folder that there is not
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
    _add_build(commands)
    replay = commands.add_parser("replay", help="make a page of a decision log on which it plays; print its path")
    replay.set_defaults(run=_replay)
    replay.add_argument("log", type=Path, help="a file that DecisionLog.save wrote: *.jsonl or *.parquet")
    replay.add_argument("-o", "--output", type=Path, metavar="PAGE", help="beside the log, *.html, if not given")
    verify = commands.add_parser(
        "verify", help="run the experiment of a saved result again and compare; status 1: it differs"
    )
    verify.set_defaults(run=_verify)
    verify.add_argument("result", type=Path, help="the folder that Result.save wrote")
    verify.add_argument("--model", help="of a measured result, where it lies, if it is none of the catalogue")
    notebooks = commands.add_parser("notebooks", help="copy the notebooks that come with the package")
    copy = notebooks.add_subparsers(required=True, metavar="COMMAND").add_parser("copy", help="into a folder of yours")
    copy.set_defaults(run=_copy_notebooks)
    copy.add_argument("folder", type=Path, metavar="DIR", help="is made if it is not there")
    copy.add_argument("--force", action="store_true", help="replace files of the same names")
    doctor = commands.add_parser("doctor", help="what is installed, which GPU is there, which backend would run")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_build(commands: Any) -> None:
    build = commands.add_parser(
        "build", help="build a model's TensorRT engine on this machine's GPU, as LLM would; print the folder"
    )
    build.set_defaults(run=_build)
    build.add_argument("model", help="smollm2-135m, a GGUF file, a Hugging Face directory or hub id")
    precision = build.add_mutually_exclusive_group()
    precision.add_argument("--precision", choices=["f16", "bf16", "w8a8"], default="f16", help="f16")
    precision.add_argument("--w8a8", dest="precision", action="store_const", const="w8a8", help="--precision w8a8")
    build.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="in place of engines/ or the user's cache")
    numbers = {"max-num-seqs": (64, "seats"), "max-num-batched-tokens": (512, "tokens of a step")}
    numbers |= {"page-size": (16, "positions per page"), "num-splits": (1, "programs per sequence")}
    numbers |= {"top-k": (64, "logits of a row that come back by themselves")}
    for name, (default, about) in numbers.items():
        build.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{about} ({default})")
    build.add_argument(
        "--num-pages",
        type=_pages,
        default=1024,
        metavar="N",
        help="most (1024), or a fraction: what the GPU holds",
    )
    build.add_argument("--attention", choices=["paged", "gather"], default="paged", help="gather: no plugin")
    build.add_argument("--workspace-mib", type=int, default=1024, metavar="N", help="scratch memory of a kernel (1024)")
    build.add_argument("--gpu", type=int, default=0, metavar="N", help="which, as CUDA counts them (0)")


def _pages(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _build(options: argparse.Namespace) -> int:
    from contbatch.backends import engine_of
    from contbatch.catalog import fetch
    from contbatch.tensorrt_build import BuildOptions

    names = "max_num_seqs", "max_num_batched_tokens", "num_pages", "page_size"
    limits = {name: getattr(options, name) for name in names}
    forms = {name: getattr(options, name) for name in ("num_splits", "attention", "top_k")}
    chosen = BuildOptions(workspace_bytes=options.workspace_mib << 20, **forms)
    where = {"cache_dir": options.cache_dir, "ordinal": options.gpu}
    print(engine_of(fetch(options.model), limits, options.precision, chosen, **where))
    return 0


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


def _replay(options: argparse.Namespace) -> int:
    from contbatch.player import replay

    print(replay(options.log).save(options.output or options.log.with_suffix(".html")))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from contbatch.verification import verify

    verification = verify(options.result, model=options.model)
    print(verification)
    return 0 if verification.is_same else 1


def _copy_notebooks(options: argparse.Namespace) -> int:
    from contbatch.notebook_files import copy_notebooks

    copies = copy_notebooks(options.folder, force=options.force)
    print(f"{len(copies)} files; begin with: jupyter lab {options.folder / 'index.ipynb'}")
    return 0


def _doctor(_options: argparse.Namespace) -> int:
    from contbatch.doctor import diagnose, report

    diagnosis = diagnose()
    print(report(diagnosis))
    return 0 if diagnosis.backend else 1
