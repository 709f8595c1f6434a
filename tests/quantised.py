"""Random models in 8 bits, exported."""

import numpy as np

from contbatch.calibrate import calibrate
from contbatch.export import export_onnx
from contbatch.quantize import Quantized

MODELS = {
    "grouped": {},
    "biased, own head": {"attention_bias": True, "num_heads": 4, "kv_num_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "heads normed": {"qk_norm": True},
}
TOKENS = np.random.default_rng(1).integers(0, 256, (12, 40)).tolist()


def export_w8a8(model, folder, dtype, keep=()):
    """Calibrate a model on random tokens, and write `model.onnx`: values named in `keep` stay in floats."""
    floats = export_onnx(model, folder / "floats" / "model.onnx")
    prompts = np.random.default_rng(1).integers(0, model.config.vocab_size, (6, 40)).tolist()
    found = Quantized.of(model, calibrate(floats, prompts), keep)
    return export_onnx(found.model, folder / "model.onnx", dtype, steps=found.steps)
