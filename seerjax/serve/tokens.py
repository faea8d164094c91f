"""Implements /tokenize and /detokenize, which convert between text and token ids.

Request and response formats follow vLLM:
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from seerjax.serve import protocol, served as served_lib
from seerjax.serve.refusals import refuse, shown
from seerjax.serve.served import Served

Find = Callable[[str], Served]


def tokenize(body: Mapping[str, Any], find: Find) -> dict[str, Any]:
  """Returns the token ids of a prompt or chat, exactly as a request for a response encodes it.

  Raises:
    Refusal: if the body, the model or the text is invalid.
  """
  sent = dict(body)
  wants_texts = sent.pop("return_token_strs", None) or False
  if not isinstance(wants_texts, bool):
    refuse("return_token_strs", shown(wants_texts), "true or false", "write one of them")
  read = protocol.chat if "messages" in sent else protocol.completion
  asked = read(sent)
  if asked.context:
    refuse("context", shown(asked.context), "none, since sleep-time compute changes the text",
           "send a request; the usage of the response has the counts")  # fmt: skip
  served = find(asked.model)
  prompts, _ = served_lib.prompts_of(asked, served)
  if len(prompts) != 1:
    refuse("prompt", f"{len(prompts)} prompts", "one", "send one request for each")
  (ids,) = prompts
  texts = [served.vocabulary.text_of(token) for token in ids] if wants_texts else None
  return {
    "count": len(ids), "max_model_len": served.context, "tokens": list(ids), "token_strs": texts,
  }  # fmt: skip


def detokenize(body: Mapping[str, Any], find: Find) -> dict[str, Any]:
  """Returns the text of token ids, special tokens included.

  Raises:
    Refusal: if the body, the model or a token id is invalid.
  """
  for name in body:
    if name not in ("model", "tokens"):
      refuse(name[:80], "a field that is not supported", "model or tokens", "leave it out",
             code="unsupported_parameter")  # fmt: skip
  name, tokens = body.get("model") or "", body.get("tokens")
  if not isinstance(name, str):
    refuse("model", shown(name), "text", "write it in quotes")
  served = find(name)
  most = served.engine.model.vocab_size
  if not isinstance(tokens, list):
    refuse("tokens", shown(tokens), "a list of token ids", "write [...]")
  for token in tokens:
    if type(token) is not int or not 0 <= token < most:
      refuse(
        "tokens", shown(token), f"ids from 0 to {most - 1}", "encode with the model's tokenizer"
      )
  return {"prompt": served.tokenizer.decode(tokens, skip_special_tokens=False)}
