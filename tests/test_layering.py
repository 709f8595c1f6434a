"""What may import what: the scheduler's heart is pure Python, and nothing heavy is loaded before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "contbatch"
POLICIES = sorted(f"policies.{path.stem}" for path in (PACKAGE / "policies").glob("*.py") if path.stem != "__init__")
# fmt: off
HEART = [
    "checks", "contiguous", "decoders", "errors", "intake", "logprob", "lost_step", "pages", "planner", "policies",
    *POLICIES, "prefix_cache", "queue", "request", "runnable", "samples", "sampling_params", "scheduler",
    "shared_context", "start", "step", "step_shape", "swap_space", "token_ids",
]
HEAVY = {
    "numpy", "pandas", "matplotlib", "IPython", "ipywidgets", "tqdm", "numba", "llvmlite", "onnx", "onnx_ir",
    "onnxruntime", "openvino", "tokenizers", "gguf", "safetensors", "jinja2", "tensorrt", "pycuda", "cuda", "triton",
    "torch", "scipy", "pyarrow",
}
# fmt: on


def file_of(name):
    path = PACKAGE / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(path):
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            yield node.module


def loaded_by(code):
    """Names of the top-level packages loaded in a new interpreter after `code`."""
    shown = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", shown], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("name", HEART)
def test_the_heart_imports_the_standard_library_and_itself(name):
    allowed = {f"contbatch.{other}" for other in HEART}
    foreign = {
        module
        for module in imports(file_of(name))
        if module not in allowed and module.partition(".")[0] not in sys.stdlib_module_names
    }
    assert foreign == set()


@pytest.mark.parametrize("name", HEART)
def test_the_heart_sees_no_clock(name):
    assert {"time", "datetime", "threading", "asyncio"}.isdisjoint(imports(file_of(name)))


def test_what_each_part_of_the_heart_may_see():
    within = {
        "errors": set(),
        "checks": {"errors"},
        "sampling_params": {"checks"},
        "logprob": set(),
        "request": {"checks", "errors", "logprob", "sampling_params", "token_ids"},
        "token_ids": {"checks"},
        "pages": {"checks", "errors"},
        "contiguous": {"checks", "errors", "pages"},
        "step": {"errors", "request", "step_shape"},
        "step_shape": {"step"},  # for its types only
        "shared_context": {"pages", "step"},
        "queue": {"request"},
        "policies": set(POLICIES),
        **{name: {"checks", "errors", "request", *POLICIES} for name in POLICIES},
        "prefix_cache": {"checks", "pages", "request", "step"},
        "samples": {"request"},
        "start": {"prefix_cache", "request"},
        "swap_space": {"checks", "errors", "pages"},
    }
    for name, allowed in within.items():
        seen = {module.removeprefix("contbatch.") for module in imports(file_of(name)) if "contbatch." in module}
        assert seen <= allowed, name


@pytest.mark.parametrize("code", ["import contbatch", "import contbatch.scheduler", "import contbatch; dir(contbatch)"])
def test_nothing_heavy_is_loaded_before_it_is_used(code):
    assert loaded_by(code) & HEAVY == set()


def test_names_of_the_heart_load_nothing_heavy_either():
    code = "import contbatch as cb; cb.Scheduler(cb.ContinuousBatching(), num_pages=4).add(cb.Request(0, [1]))"
    assert loaded_by(code) & HEAVY == set()


def test_the_simulating_engine_needs_no_model_runtime():
    code = "import contbatch as cb; cb.Engine, cb.Result, cb.simulate, cb.Measured; cb.traces"
    loaded = loaded_by(f"{code}; cb.simulate(cb.Poisson(rate=4, num_requests=2))")
    # pandas loads pyarrow, if it is there, for itself.
    assert loaded & (HEAVY - {"numpy", "pandas", "pyarrow", "tqdm"}) == set()


def test_who_only_answers_holds_neither_tables_nor_the_writer_of_graphs_in_memory():
    """pandas with pyarrow takes 57 MB, onnx_ir with sympy 38."""
    loaded = loaded_by("import contbatch.llm, contbatch.runners.cpu")
    assert loaded & {"pandas", "pyarrow", "onnx_ir", "sympy", "matplotlib"} == set()


def test_every_public_name_exists():
    code = "import contbatch as cb; [getattr(cb, n) for n in cb.__all__]; assert set(cb.__all__) <= set(dir(cb))"
    subprocess.run([sys.executable, "-c", code], check=True)
