"""The models, by name."""

from __future__ import annotations

from zoo import choosing, images, sequences
from zoo.model import WORDS, Model, digits, sentences, series, variables_of

WIDE = {"first": (64, 257), "first_bias": (257,), "second": (257, 257), "second_bias": (257,), "last": (257, 10)}
ATTENTION = {"given": (8, 64), "query": (64, 64), "key": (64, 64), "value": (64, 64), "last": (64, 10)}
BLOCK = {"scale": (64,), "qkv": (64, 192), "out": (64, 64), "inner_scale": (64,), "up": (64, 192), "down": (192, 64)}


def _mlp(**options: object) -> Model:
    return Model(images.mlp_loss, lambda: variables_of(**WIDE), digits, 8, options)


def _attention(**options: object) -> Model:
    return Model(sequences.attention_loss, lambda: variables_of(**ATTENTION), series, 32, options)


MODELS = {
    "transformer": Model(
        sequences.transformer_loss,
        lambda: {
            "embedding": variables_of(table=(64, WORDS))["table"].T.copy(),
            "position": variables_of(position=(16, 64))["position"],
            "blocks": [variables_of(**BLOCK), variables_of(**BLOCK)],
            "scale": variables_of(scale=(64,))["scale"],
        },
        sentences,
    ),
    "mlp": _mlp(),
    "cnn": Model(
        images.cnn_loss, lambda: variables_of(first=(3, 3, 1, 24), second=(3, 3, 24, 24), last=(96, 10)), digits, 8
    ),
    "batch_norm": Model(
        images.batch_norm_loss,
        lambda: variables_of(
            first=(64, 257),
            scale=(257,),
            offset=(257,),
            second=(257, 129),
            second_scale=(129,),
            second_offset=(129,),
            last=(129, 10),
        ),
        digits,
        16,
    ),
    "patches": Model(images.patches_loss, lambda: variables_of(first=(9, 24), second=(216, 24), last=(96, 10)), digits),
    "norms": Model(
        images.norms_loss,
        lambda: variables_of(
            first=(3, 3, 1, 24), scale=(24,), offset=(24,), second=(1536, 43), second_scale=(43,), last=(43, 10)
        ),
        digits,
    ),
    "lstm": Model(
        sequences.lstm_loss,
        lambda: variables_of(given=(8, 4 * 33), before=(33, 4 * 33), bias=(4 * 33,), last=(33, 10)),
        series,
    ),
    "attention": _attention(),
    "experts": Model(
        choosing.experts_loss,
        lambda: variables_of(first=(64, 48), router=(48, 5), up=(5, 48, 65), down=(5, 65, 48), last=(48, 10)),
        digits,
        8,
    ),
    "embedding": Model(
        choosing.embedding_loss,
        lambda: variables_of(table=(WORDS, 64), hidden=(64, 33), weight=(33, 1), bag=(WORDS, 10), last=(33, 10)),
        sentences,
    ),
    "cumsum": Model(
        sequences.cumsum_loss, lambda: variables_of(given=(8, 64), gate=(8, 64), scale=(64,), last=(64, 10)), series
    ),
    "fft": Model(
        sequences.fft_loss,
        lambda: variables_of(given=(8, 33), real=(25, 33), imaginary=(25, 33), last=(33, 10)),
        series,
    ),
    "loops": Model(
        choosing.loops_loss, lambda: variables_of(first=(64, 40), again=(40, 40), other=(40, 40), last=(40, 10)), digits
    ),
    "sorting": Model(
        choosing.sorting_loss, lambda: variables_of(first=(64, 129), weight=(129, 33), last=(33, 10)), digits
    ),
    "bfloat16": _attention(compute_dtype="bfloat16"),
    "float16": _mlp(compute_dtype="float16", loss_scaling="dynamic"),
    "weighted": Model(
        sequences.weighted_loss, lambda: variables_of(table=(WORDS, 64), hidden=(64, 33), last=(33, 40)), sentences
    ),
}

FOR_OPTIMIZERS = Model(images.wide_loss, lambda: variables_of(matrix=(257, 257), bias=(257,)), digits, 8)
"""A model that compiles quickly; the sizes of its matrix's and vector's parts share no divisors."""
