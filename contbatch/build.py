"""Export a model once and keep the result in a cache, where its manifest says what it is made of."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contbatch.cached_folder import TEMPORARY, code_hash, made_anew, problem_with, sha256_of, write_manifest
from contbatch.checks import is_one_of, require
from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.export import export_onnx, read_config, read_metadata, require_dtype, versions
from contbatch.garbage import give_back_memory

logger = logging.getLogger("contbatch")

MODEL, DATA = "model.onnx", "model.onnx.data"
# Modules whose code shapes the exported file. Their hash is in the manifest: nobody has to remember to raise a number.
_EXPORTER = (
    "export",
    "fit",
    "gguf_file",
    "gguf_model",
    "graph",
    "huggingface",
    "linear_layers",
    "model",
    "observed",
    "packed_weight",
    "quantize",
    "text_file",
    "weights",
)
_HASHES = "sha256.json"


def build(
    source: str | os.PathLike[str],
    dtype: str = "float32",
    cache_dir: str | os.PathLike[str] | None = None,
    quantization: str | None = None,
) -> Path:
    """Return the folder of the exported model, made now unless the cache has it.

    A folder that is stale (other versions or code of the exporter), incomplete or damaged is made anew, with a
    one-line message to the "contbatch" logger. Processes may build the same model at once: each works in a folder of
    its own, and the first to finish wins.

    Parameters
    ----------
    source : path
        A GGUF file or a Hugging Face directory. It is hashed once and again when its size or time of change differ.
    dtype : {"float32", "bfloat16", "float16"}
    cache_dir : path, optional
        In place of `contbatch.catalog.cache_dir()`.
    quantization : {"w8a8"}, optional
        Linear layers in 8 bits, see `contbatch.quantize`. The float32 export is made first and reads and writes texts
        (on the CPU, a quarter of a minute).

    Returns
    -------
    Path
        `<cache>/<name>-<dtype>[-w8a8]-<hash of the source>/` with model.onnx, model.onnx.data and manifest.json.

    Raises
    ------
    ModelFileError
        The source is missing or malformed.
    UnsupportedModelError
        An unknown dtype or quantization, or a model that can't be exported.
    """
    require_dtype(dtype)
    known = quantization is None or is_one_of(quantization, ("w8a8",))
    require(known, "quantization", quantization, "None or 'w8a8'", UnsupportedModelError)
    source = Path(source).expanduser().resolve()  # "." has a name, and one file one entry among the hashes
    cache = _cache(cache_dir)
    hashed = {"name": source.name, "sha256": _source_sha256(source, cache)}
    identity = {"source": hashed, "dtype": dtype, "versions": versions(), "exporter": _exporter_hash(quantization)}
    kind = f"{dtype}-{quantization}" if quantization else dtype
    folder = cache / f"{source.name.removesuffix('.gguf')}-{kind}-{hashed['sha256'][:12]}"
    if not folder.exists():
        logger.info("exporting %s to %s", source.name, folder)
    elif problem := problem_with(folder, identity):
        logger.warning("exporting %s again: %s %s", source.name, folder, problem)
    else:
        return folder
    floats = build(source, "float32", cache) / MODEL if quantization else None
    with made_anew(folder, identity) as new:
        _export(source, dtype, new, identity, floats)
    give_back_memory()
    return folder


def _cache(folder: str | os.PathLike[str] | None) -> Path:
    if folder is None:
        from contbatch import catalog

        folder = catalog.cache_dir()
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _export(source: Path, dtype: str, folder: Path, identity: Mapping[str, Any], floats: Path | None) -> None:
    from contbatch.model import load_model

    model, more = load_model(source), dict[str, Any]()
    if floats is None:
        path = export_onnx(model, folder / MODEL, dtype)
    else:
        from contbatch.calibrate import NUM_NEW, calibrate, calibration_prompts
        from contbatch.quantize import Quantized
        from contbatch.tokenizer import load_tokenizer

        prompts = calibration_prompts(load_tokenizer(source), model.config.bos_token_id)
        found = Quantized.of(model, calibrate(floats, prompts, NUM_NEW, "bf16"))
        path = export_onnx(found.model, folder / MODEL, dtype, steps=found.steps)
        more = {"errors": found.errors, "kept": sorted(found.errors.keys() - found.steps)}
    config, weights_sha256 = asdict(read_config(path)), read_metadata(path)["weights_sha256"]
    write_manifest(folder, identity, (MODEL,), (DATA,), config=config, weights_sha256=weights_sha256, **more)


def _source_sha256(source: Path, cache: Path) -> str:
    """Hash a file, or the JSON and safetensors files of a folder; hashes are remembered by path, size and time."""
    files = [source] if source.is_file() else sorted([*source.glob("*.json"), *source.glob("*.safetensors")])
    if not files:
        raise ModelFileError(f"{source}: neither a file nor a folder with config.json and safetensors")
    known = _read_hashes(cache / _HASHES)
    found: dict[str, list[Any]] = {}
    for file in files:
        size, mtime = file.stat().st_size, file.stat().st_mtime_ns
        entry = known.get(str(file))
        found[str(file)] = entry if entry and entry[:2] == [size, mtime] else [size, mtime, sha256_of(file)]
    if any(known.get(file) != entry for file, entry in found.items()):
        with TemporaryDirectory(prefix=TEMPORARY, dir=cache) as temporary:
            part = Path(temporary) / _HASHES
            part.write_text(json.dumps(known | found, indent=2) + "\n", encoding="utf-8")
            os.replace(part, cache / _HASHES)
    hashes = {file.name: found[str(file)][2] for file in files}
    if source.is_file():
        return str(hashes[source.name])
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _read_hashes(path: Path) -> dict[str, list[Any]]:
    """Remembered hashes; a missing or damaged file only costs hashing again."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).items()
        return {file: [int(size), int(mtime), str(sha256)] for file, (size, mtime, sha256) in entries}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _exporter_hash(quantization: str | None) -> str:
    files = [f"{module}.py" for module in _EXPORTER]
    files += ["calibrate.py", "texts/calibration.txt"] if quantization else []
    return code_hash(*(Path(__file__).parent / file for file in files))
