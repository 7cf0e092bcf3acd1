# SPDX-License-Identifier: MIT
"""Prints size and error of the low tier of models whose rows 256 does not divide, beside q4_0 for all.

    python tests/convert/low_type_errors.py

Weights are Gaussian, in the real row widths. The error is the relative root mean square of a product of the
experts' weights with a Gaussian input, which is that of the weights; KL is of the softmax over 256 such
products with a variance of 1, from the high tier's to the low tier's, in nats.
"""

from pathlib import Path

import numpy as np

from pyhobbit.model.gguf_file import TensorInfo
from pyhobbit.model.quantize import GgmlType, dequantize, quantize, type_by_name
from pyhobbit.model.tiers import default_low_types

# Name, type of the high tier, row lengths of gate and up, and of down.
SHAPES = (
    ("gpt-oss", "mxfp4", 2880, 2880),
    ("Qwen1.5-MoE, DeepSeek-V2-Lite", "q4_0", 2048, 1408),
    ("Qwen1.5-MoE, DeepSeek-V2-Lite", "q5_0", 2048, 1408),
    ("Qwen1.5-MoE, DeepSeek-V2-Lite", "q8_0", 2048, 1408),
    ("Nemotron 3 Nano", "q4_0", 2688, 1856),
)
N_ROWS, N_INPUTS = 256, 64


def rounded(ggml_type: GgmlType, rows: np.ndarray) -> np.ndarray:
    return dequantize(ggml_type, quantize(ggml_type, rows, None), rows.shape[1])


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def figures(high: np.ndarray, low: np.ndarray, inputs: np.ndarray) -> tuple[float, float]:
    """Relative error and KL divergence of the products."""
    p, q = (softmax(inputs @ weights.T / np.linalg.norm(high, axis=1)) for weights in (high, low))
    return np.linalg.norm(low - high) / np.linalg.norm(high), float((p * np.log(p / q)).sum(axis=1).mean())


def main() -> None:
    rng = np.random.default_rng(1)
    print(
        f"{'model':<31}{'high':<7}{'row':>5}  {'low':<6}{'share':>6}{'error':>7}{'KL':>8}   {'of q4_0':>14}"
    )
    for name, high_name, *lengths in SHAPES:
        high, q4_0 = type_by_name(high_name), type_by_name("q4_0")
        names = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        rows = dict(zip(names, (lengths[0], *lengths), strict=True))
        tensors = [TensorInfo(each, high, (rows[each], N_ROWS, 1), Path(), 0) for each in names]
        low = default_low_types(tensors)
        sizes = [
            sum(types[each.name].nbytes(each.ne[0]) * N_ROWS for each in tensors)
            for types in (low, dict.fromkeys(names, high))
        ]
        for part in names[1:]:
            weights = rounded(high, rng.standard_normal((N_ROWS, rows[part]), np.float32) * np.float32(0.02))
            inputs = rng.standard_normal((N_INPUTS, rows[part]), np.float32)
            error, kl = figures(weights, rounded(low[part], weights), inputs)
            plain = figures(weights, rounded(q4_0, weights), inputs)
            share = low[part].bits_per_weight / high.bits_per_weight
            print(
                f"{name:<31}{high_name:<7}{rows[part]:>5}  {low[part].name:<6}{share:>6.0%}"
                f"{error:>7.3f}{kl:>8.4f}   {plain[0]:>6.3f}{plain[1]:>8.4f}"
            )
        print(f"{'':<43}  all: {sizes[0] / sizes[1]:.0%} of the high tier")


if __name__ == "__main__":
    main()
