"""Where a greedy token is found sooner: in OpenVINO's graph (TopK), or on the host from all logits.

    python benchmarks/top_logits.py

A head of 576 × 49,152 weights, as SmolLM2-135M has, in 8 bits with inputs of 8 bits. Every kind
includes the head; they take turns, in a new order each time.
"""

from statistics import median
from time import perf_counter

import numpy as np
import openvino as ov
from openvino.opset13 import constant, convert, fake_quantize, matmul, multiply, parameter, topk

WIDTH, VOCAB, REPEATS = 576, 49152, 21
LARGEST = 4.0
"""Of the head's inputs; standard normal numbers rarely exceed it."""


def head(k: int | None) -> ov.Model:
    """Make the head's graph: all logits, or the k largest of each row with their ids."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (VOCAB, WIDTH)).astype(np.int8)
    steps = constant(np.full((VOCAB, 1), 1 / (127 * WIDTH**0.5), np.float32))
    low, high = (constant(np.float32(code * LARGEST / 127)) for code in (-128, 127))
    hidden = parameter([-1, WIDTH], np.float32)
    inputs = fake_quantize(hidden, low, high, low, high, 256)
    logits = matmul(inputs, multiply(convert(constant(codes), "f32"), steps), False, True)
    found = [logits] if k is None else topk(logits, constant(k), 1, "max", "value").outputs()
    return ov.Model(found, [hidden])


def main() -> None:
    core, options = ov.Core(), {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
    kinds = {"all logits, np.argmax": None, "top 1 in the graph": 1, "top 20": 20, "top 64": 64}
    requests = {name: core.compile_model(head(k), "CPU", options).create_infer_request() for name, k in kinds.items()}
    print(f"{'ms, medians':14}" + "".join(f"{name:>24}" for name in kinds))
    shuffled = np.random.default_rng(0)
    for rows in (1, 16, 64):
        hidden = np.random.default_rng(rows).standard_normal((rows, WIDTH), dtype=np.float32)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(REPEATS):
            for name in shuffled.permutation(list(requests)):
                request, began = requests[name], perf_counter()
                request.infer([hidden], share_inputs=True)
                if kinds[name] is None:
                    np.argmax(request.get_output_tensor(0).data, axis=1)
                seconds[name].append(perf_counter() - began)
        print(f"{rows:3} rows{'':6}", *(f"{1e3 * median(found):23.2f}" for found in seconds.values()), flush=True)


if __name__ == "__main__":
    main()
