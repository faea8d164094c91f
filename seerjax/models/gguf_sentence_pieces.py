"""Converts a SentencePiece vocabulary with scores, as in GGUF files of Gemma, to merges.

    tokens, scores  -->  byte-pair encoding of "▁"-escaped text, with byte fallback

llama.cpp (tokenizer.ggml.model "llama") joins two neighbours into the token with the highest score,
the leftmost first, until no two form a token; other characters become their bytes. Merges in the
order of scores, of every token from any two tokens, do the same.

Source: SentencePiece, https://arxiv.org/abs/1808.06226; `LlamaConverter` of transformers has the
same merges.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers

SPACE = "▁"


def merges(tokens: Mapping[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
  """Returns the pairs that form each of the tokens, best first.

  Args:
    tokens: ids by text, of normal tokens.
    scores: f32[v], score of every id.
  """
  ranks = sorted(tokens, key=lambda text: (-float(scores[tokens[text]]), tokens[text]))
  return [
    (text[:cut], text[cut:])
    for text in ranks
    for cut in range(1, len(text))
    if text[:cut] in tokens and text[cut:] in tokens
  ]


def backend(
  vocab: Mapping[str, int], normal: Mapping[str, int], scores: np.ndarray, unknown: str | None
) -> tokenizers.Tokenizer:
  """Returns a tokenizer without added tokens.

  Args:
    vocab: ids by text, of all tokens that text is encoded as.
    normal: ids by text, of tokens that are formed by merging.
    scores: f32[v], score of every id.
    unknown: text of the unknown token.
  """
  found = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab=dict(vocab),
      merges=merges(normal, scores),
      unk_token=unknown,
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  found.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
  found.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace(SPACE, " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  return found
