"""Closed forms: bytes that autograd saves for the backward of a call, and bytes a parameter of ZeRO.

In: shapes and the size of an element. Out: bytes. Each is a row of `docs/activations.md`, which
says why; `test_closed_forms.py` compares them with the page, with a trace and with real tensors.
Weights and buffers are not counted: they are there anyway. What a call saves of its arguments is
counted, whether or not another call saves the same storage.

Letters are those of the page: `e` bytes of an element, `b` batch, `s` sequence, `h` width, `a`
heads, `d` width of a head, `t` ranks, `p` parameters, `n` elements or ranks.
"""

from __future__ import annotations

# -- one call ------------------------------------------------------------------------------------


def convolution(e: int, b: int, channels: int, places: int) -> int:
    """Saves its input: the gradient of the kernel is the input correlated with the output's."""
    return e * b * channels * places


def linear(e: int, rows: int, inputs: int) -> int:
    """Saves its input x: the gradient of the weight is g^T x."""
    return e * rows * inputs


def product(e: int, b: int, rows: int, inner: int, columns: int) -> int:
    """Saves both factors of A B: the gradients are g B^T and A^T g."""
    return e * b * (rows * inner + inner * columns)


def plain_attention(e: int, b: int, a: int, s: int, d: int) -> int:
    """Saves Q, K, V and the probabilities P, which softmax and the second product share."""
    return 3 * e * b * a * s * d + e * b * a * s**2


def plain_attention_with_dropout(e: int, b: int, a: int, s: int, d: int, mask: int) -> int:
    """Saves Q, K, V, P, the mask of `mask` bytes an element, and what is left of P under it."""
    return 3 * e * b * a * s * d + (2 * e + mask) * b * a * s**2


def tiled_attention(e: int, b: int, a: int, s: int, d: int) -> int:
    """Saves Q, K, V, the output, and the logarithm of each row's sum in fp32."""
    return 4 * e * b * a * s * d + 4 * b * a * s


def fallen_back_attention(b: int, a: int, s: int, d: int) -> int:
    """Saves what plain attention with dropout does, all in fp32, Q and K scaled."""
    return 3 * 4 * b * a * s * d + 3 * 4 * b * a * s**2


def layer_norm(e: int, rows: int, features: int) -> int:
    """Saves its input and each row's mean and inverse deviation."""
    return e * rows * (features + 2)


def rms_norm(rows: int, features: int) -> int:
    """Saves, in fp32, its input, the normalized input, and each row's inverse root."""
    return 4 * rows * (2 * features + 1)


def batch_norm(e: int, b: int, channels: int, places: int) -> int:
    """Saves its input and each channel's mean and inverse deviation."""
    return e * channels * (b * places + 2)


def batch_norm_in_evaluation(e: int, b: int, channels: int, places: int) -> int:
    """Saves its input: the statistics are buffers."""
    return e * b * channels * places


def group_norm(e: int, b: int, channels: int, places: int, groups: int) -> int:
    """Saves its input and each group's mean and inverse deviation."""
    return e * b * (channels * places + 2 * groups)


def relu(e: int, n: int) -> int:
    """Saves its output y: the derivative is 1 where y > 0. So do tanh (1 - y^2), sigmoid (y - y^2).

    So does softmax: y (g - sum(g y)).
    """
    return e * n


def gelu(e: int, n: int) -> int:
    """Saves its input: the derivative cannot be told from the output. So do silu and leaky relu."""
    return e * n


def dropout(e: int, n: int) -> int:
    """Saves the mask, on a CPU as factors 0 and 1/(1-p) in the input's dtype."""
    return e * n


def fused_dropout(n: int) -> int:
    """Saves the mask as a bool an element, as accelerators make it."""
    return n


def embedding(tokens: int) -> int:
    """Saves the ids, 8 bytes each."""
    return 8 * tokens


def cross_entropy(e: int, tokens: int, words: int) -> int:
    """Saves the logarithms of all probabilities, the labels, and the number of tokens."""
    return e * tokens * words + 8 * tokens + e


# -- a transformer layer -------------------------------------------------------------------------
# Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
# section 4, table 2. Two bytes an element, dropout, plain attention, four-fold MLP.


def transformer_layer(s: int, b: int, h: int, a: int) -> float:
    """Saves all that the backward of a layer needs."""
    return s * b * h * (34 + 5 * a * s / h)


def transformer_layer_on_ranks(s: int, b: int, h: int, a: int, t: int) -> float:
    """Tensor parallel: norms, residual dropouts and inputs of the products stay whole."""
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def transformer_layer_on_ranks_by_sequence(s: int, b: int, h: int, a: int, t: int) -> float:
    """Tensor and sequence parallel: everything is cut."""
    return s * b * h / t * (34 + 5 * a * s / h)


def transformer_layer_selective(s: int, b: int, h: int) -> int:
    """Recomputes what lies between Q, K, V and the output of attention."""
    return 34 * s * b * h


def transformer_layer_recomputed(s: int, b: int, h: int) -> int:
    """Recomputes the whole layer from its input."""
    return 2 * s * b * h


# -- states of the model -------------------------------------------------------------------------
# Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
# Models", figure 1 and section 5, with K = 12 for Adam: master and two moments in fp32.


def data_parallel(p: int) -> int:
    """Holds weights 2, gradients 2, master 4 and moments 8."""
    return 16 * p


def zero_1(p: int, n: int) -> float:
    """Cuts the states over n ranks."""
    return 4 * p + 12 * p / n


def zero_2(p: int, n: int) -> float:
    """Cuts the gradients too."""
    return 2 * p + 14 * p / n


def zero_3(p: int, n: int) -> float:
    """Cuts the weights too."""
    return 16 * p / n
